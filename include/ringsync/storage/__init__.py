"""The object store for plans, staging, streams, replicas and reports. See docs/storage.md."""

from __future__ import annotations

import re

from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore, check_key

_BUCKET_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?", re.DOTALL)


def open_store(
    url: str,
    *,
    gcs_endpoint: str | None = None,
    gcs_project: str | None = None,
    gcs_credentials_file: str | None = None,
) -> ObjectStore:
    """Open the object store at a URL. This reads and writes nothing: what is wrong with it is told by its first use.

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


def spark_conf(
    url: str,
    *,
    gcs_endpoint: str | None = None,
    gcs_project: str | None = None,
    gcs_credentials_file: str | None = None,
) -> dict[str, str]:
    """Return the settings for Spark and Delta to reach the store of ``open_store``; the GCS connector's jar is needed.

    They are for gcs-connector hadoop3-2.2.x shaded on Spark 4.2 and Hadoop 3.5; not all may be necessary. Parameters
    and errors are as for :func:`open_store`; a key file must lie at the same path on all hosts.
    """
    if _folder(url) is not None:
        return {}
    _bucket(url)
    hadoop = dict(_CONNECTOR)
    if gcs_project is not None or gcs_endpoint is not None:
        hadoop["fs.gs.project.id"] = gcs_project or "ringsync"
    if gcs_endpoint is not None:
        hadoop |= _WITHOUT_CREDENTIALS
        hadoop["fs.gs.storage.root.url"] = gcs_endpoint.rstrip("/") + "/"
    elif gcs_credentials_file is not None:
        hadoop["fs.gs.auth.type"] = "SERVICE_ACCOUNT_JSON_KEYFILE"
        hadoop["fs.gs.auth.service.account.json.keyfile"] = gcs_credentials_file
    else:
        hadoop["fs.gs.auth.type"] = "APPLICATION_DEFAULT"
    conf = {f"spark.hadoop.{name}": value for name, value in hadoop.items()}
    return conf | {"spark.delta.logStore.gs.impl": "io.delta.storage.GCSLogStore"}


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


_CONNECTOR = {
    "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
    "fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
    "fs.gs.implicit.dir.repair.enable": "false",
    # Hadoop 3.5's own defaults for these ("64m") are no numbers to the connector.
    "fs.gs.block.size": str(64 << 20),
    "fs.gs.inputstream.inplace.seek.limit": str(8 << 20),
    "fs.gs.inputstream.min.range.request.size": str(2 << 20),
    "fs.gs.outputstream.buffer.size": str(8 << 20),
    "fs.gs.outputstream.sync.min.interval": "0",
    "fs.gs.rewrite.max.chunk.size": str(512 << 20),
}

_WITHOUT_CREDENTIALS = {
    "fs.gs.auth.type": "UNAUTHENTICATED",
    "fs.gs.auth.null.enable": "true",
    "fs.gs.auth.service.account.enable": "false",
    # The emulator cannot move objects.
    "fs.gs.operation.move.enable": "false",
}


def _folder(url: str) -> str | None:
    path = url.removeprefix("file://")
    return path if path.startswith("/") else None


def _bucket(url: str) -> tuple[str, str]:
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise ValueError(f"object store {url!r}: give gs://bucket/prefix, file:///absolute/path or /absolute/path")
    prefix = (match[2] or "").rstrip("/")
    return match[1], check_key(prefix) if prefix else ""
