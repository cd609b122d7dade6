"""URLs of object stores, and the Spark settings that go with them."""

import subprocess
import sys

import pytest

from ringsync.storage import delta_options, open_store

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
