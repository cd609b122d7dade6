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


def _folder(url: str) -> str | None:
    path = url.removeprefix("file://")
    return path if path.startswith("/") else None


def _bucket(url: str) -> tuple[str, str]:
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise ValueError(f"object store {url!r}: give gs://bucket/prefix, file:///absolute/path or /absolute/path")
    prefix = (match[2] or "").rstrip("/")
    return match[1], check_key(prefix) if prefix else ""
