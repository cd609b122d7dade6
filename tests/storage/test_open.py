"""URLs of object stores, and the Spark settings that go with them."""

import subprocess
import sys

import pytest

from ringsync.storage import open_store, spark_conf

ENDPOINT = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("file:///data/lake", "file:///data/lake"),
        ("/data/lake", "file:///data/lake"),
        ("/data/my lake/", "file:///data/my lake"),
        ("file:///data//x/../lake", "file:///data/lake"),
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://my.bucket-1/a/b/", "gs://my.bucket-1/a/b"),
    ],
)
def test_accepted_forms(url: str, canonical: str) -> None:
    store = open_store(url, gcs_endpoint=ENDPOINT)
    assert store.url == canonical
    assert open_store(store.url, gcs_endpoint=ENDPOINT).url == canonical
    assert store.uri("a/b") == f"{canonical}/a/b"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data/lake",
        "file://",
        "file://host/data",
        "file:data",
        "s3://bucket/x",
        "gs://",
        "gs:///x",
        "gs://B_/x",
        "gs://bucket//x",
        "gs://bucket/../x",
        "GS://bucket",
        "/",
        "file:///",
    ],
)
def test_other_forms_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="object"):
        open_store(url, gcs_endpoint=ENDPOINT)


def test_a_local_store_needs_no_settings_and_no_google_library() -> None:
    assert spark_conf("/data/lake") == spark_conf("file:///data/lake", gcs_endpoint=ENDPOINT) == {}
    code = "import sys, ringsync.storage as s; s.open_store('/x'); sys.exit('google.cloud.storage' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_spark_settings_of_the_emulator_and_of_the_service() -> None:
    emulator = spark_conf("gs://bucket/x", gcs_endpoint=ENDPOINT)
    assert emulator["spark.hadoop.fs.gs.storage.root.url"] == f"{ENDPOINT}/"
    assert emulator["spark.hadoop.fs.gs.auth.type"] == "UNAUTHENTICATED"
    assert emulator["spark.delta.logStore.gs.impl"] == "io.delta.storage.GCSLogStore"
    ambient = spark_conf("gs://bucket/x", gcs_project="p")
    assert ambient["spark.hadoop.fs.gs.auth.type"] == "APPLICATION_DEFAULT"
    assert ambient["spark.hadoop.fs.gs.project.id"] == "p"
    by_file = spark_conf("gs://bucket/x", gcs_credentials_file="/etc/key.json")
    assert by_file["spark.hadoop.fs.gs.auth.service.account.json.keyfile"] == "/etc/key.json"
    for service in (ambient, by_file):
        assert "spark.hadoop.fs.gs.storage.root.url" not in service
        assert "spark.hadoop.fs.gs.auth.null.enable" not in service
    with pytest.raises(ValueError, match="gs://bucket/prefix"):
        spark_conf("s3://bucket")
