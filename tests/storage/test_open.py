"""URLs of object stores, and the Spark settings that go with them."""

import subprocess
import sys

import pytest

from ringsync.storage import SPARK_FILE_SYSTEM, SPARK_JAR, delta_options, open_store, spark_options
from servers.jars import POMS

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
    assert delta_options("/data/lake") == delta_options("file:///data/lake", gcs_endpoint=ENDPOINT) == {}
    code = "import sys, ringsync.storage as s; s.open_store('/x'); sys.exit('google.cloud.storage' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_spark_gets_the_credentials_that_python_has() -> None:
    assert spark_options("/data/lake") == spark_options("file:///data/lake", gcs_endpoint=ENDPOINT) == {}
    hadoop = "spark.hadoop.fs.gs."
    ambient = spark_options("gs://bucket/x")
    assert ambient[f"{hadoop}auth.type"] == "APPLICATION_DEFAULT"
    assert f"{hadoop}project.id" not in ambient
    assert ambient[SPARK_FILE_SYSTEM].endswith(".GoogleHadoopFileSystem")
    assert ambient["spark.delta.logStore.gs.impl"] == "io.delta.storage.GCSLogStore"
    assert int(ambient[f"{hadoop}block.size"]) == 64 << 20
    with_key = spark_options("gs://bucket/x", gcs_project="mine", gcs_credentials_file="/etc/key.json")
    of_key = {
        f"{hadoop}auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
        f"{hadoop}auth.service.account.json.keyfile": "/etc/key.json",
        f"{hadoop}project.id": "mine",
    }
    assert with_key == ambient | of_key
    emulated = spark_options("gs://bucket", gcs_endpoint=f"{ENDPOINT}/", gcs_credentials_file="/etc/key.json")
    of_emulator = {
        f"{hadoop}auth.type": "UNAUTHENTICATED",
        f"{hadoop}storage.root.url": f"{ENDPOINT}/",
        f"{hadoop}project.id": "ringsync",
    }
    assert emulated == ambient | of_emulator
    with pytest.raises(ValueError, match="object"):
        spark_options("s3://bucket")


def test_the_jar_that_errors_name_is_the_one_that_is_fetched() -> None:
    pom = (POMS / "gcs.xml").read_text()
    group, artifact, version = SPARK_JAR.split(",")[0].split(":")
    for text in (group, artifact, version, SPARK_JAR.split()[-1]):
        assert f">{text}</" in pom
