"""The object store for plans, staging, streams, replicas and reports. See docs/storage.md."""

from __future__ import annotations

import re

from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore, check_key

SPARK_FILE_SYSTEM = "spark.hadoop.fs.gs.impl"
"""Setting that names the class by which Spark reads and writes ``gs://``."""

SPARK_JAR = "com.google.cloud.bigdataoss:gcs-connector:4.0.4, classifier shaded"
"""Maven's coordinates of the jar with this class; servers/poms/gcs.xml has the same."""

_SPARK_OPTIONS = {
    "spark.delta.logStore.gs.impl": "io.delta.storage.GCSLogStore",
    SPARK_FILE_SYSTEM: "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
    "spark.hadoop.fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
    "spark.hadoop.fs.gs.client.type": "HTTP_API_CLIENT",
    "spark.hadoop.fs.gs.implicit.dir.repair.enable": "false",
    "spark.hadoop.fs.gs.operation.move.enable": "false",
    # Hadoop 3.5 has defaults of its own for these. They are like "64m", which the connector takes for no number.
    "spark.hadoop.fs.gs.block.size": "67108864",
    "spark.hadoop.fs.gs.inputstream.inplace.seek.limit": "8388608",
    "spark.hadoop.fs.gs.inputstream.min.range.request.size": "2097152",
    "spark.hadoop.fs.gs.outputstream.buffer.size": "8388608",
    "spark.hadoop.fs.gs.outputstream.sync.min.interval": "0",
    "spark.hadoop.fs.gs.rewrite.max.chunk.size": "536870912",
}

_BUCKET_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?", re.DOTALL)


def open_store(
    url: str,
    *,
    gcs_endpoint: str | None = None,
    gcs_project: str | None = None,
    gcs_credentials_file: str | None = None,
) -> ObjectStore:
    """Open the object store at a URL. This reads and writes nothing: if the store is not usable, its first use fails.

    :param url: ``gs://bucket/prefix``, ``file:///absolute/path`` (not escaped, as Hadoop reads it) or the path alone
    :param gcs_endpoint: address of an emulator, ``http://host:port``, used without credentials; None: the real service
    :param gcs_project: Google Cloud project; None: the credentials' own
    :param gcs_credentials_file: key file of a service account; None: the ambient credentials
    :raises ValueError: the URL has another form
    """
    folder = _folder(url)
    if folder is not None:
        return LocalStore(folder)
    bucket, prefix = _bucket(url)
    # Imported here: a local store needs none of Google's libraries.
    from ringsync.storage.gcs import GcsStore

    return GcsStore(bucket, prefix, project=gcs_project, endpoint=gcs_endpoint, credentials_file=gcs_credentials_file)


def check_url(url: str) -> str:
    """Return the URL if :func:`open_store` takes it.

    :raises ValueError: it has another form
    """
    folder = _folder(url)
    _ = _bucket(url) if folder is None else LocalStore(folder)
    return url


def delta_options(
    url: str,
    *,
    gcs_endpoint: str | None = None,
    gcs_project: str | None = None,
    gcs_credentials_file: str | None = None,
) -> dict[str, str]:
    """Return the ``storage_options`` for delta-rs to reach the store of ``open_store``, with the same parameters."""
    if _folder(url) is not None:
        return {}
    _bucket(url)
    if gcs_endpoint is not None:
        return {"google_base_url": gcs_endpoint.rstrip("/"), "google_skip_signature": "true", "allow_http": "true"}
    return {} if gcs_credentials_file is None else {"google_application_credentials": gcs_credentials_file}


def spark_options(
    url: str,
    *,
    gcs_endpoint: str | None = None,
    gcs_project: str | None = None,
    gcs_credentials_file: str | None = None,
) -> dict[str, str]:
    """Return the settings for Spark to reach the store of ``open_store``, with the same parameters.

    :returns: settings of Spark by name; none for a folder
    """
    if _folder(url) is not None:
        return {}
    _bucket(url)
    options = dict(_SPARK_OPTIONS)
    if gcs_endpoint is not None:
        options["spark.hadoop.fs.gs.storage.root.url"] = gcs_endpoint.rstrip("/") + "/"
        options["spark.hadoop.fs.gs.auth.type"] = "UNAUTHENTICATED"
    elif gcs_credentials_file is not None:
        options["spark.hadoop.fs.gs.auth.type"] = "SERVICE_ACCOUNT_JSON_KEYFILE"
        options["spark.hadoop.fs.gs.auth.service.account.json.keyfile"] = gcs_credentials_file
    else:
        options["spark.hadoop.fs.gs.auth.type"] = "APPLICATION_DEFAULT"
    project = gcs_project or (gcs_endpoint and "ringsync")
    return {**options, "spark.hadoop.fs.gs.project.id": project} if project else options


def _folder(url: str) -> str | None:
    path = url.removeprefix("file://")
    return path if path.startswith("/") else None


def _bucket(url: str) -> tuple[str, str]:
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise ValueError(f"object store {url!r}: give gs://bucket/prefix, file:///absolute/path or /absolute/path")
    prefix = (match[2] or "").rstrip("/")
    return match[1], check_key(prefix) if prefix else ""
