"""The object store in a bucket of Google Cloud Storage, or of its emulator.

An object's generation is its version, and ``ifGenerationMatch`` is the condition of a put. The client repeats an upload
whose answer was lost. If that upload had succeeded, the service refuses the repetition (412). So each conditional put
writes a unique token into the object's metadata and looks for it before it reports failure. If another writer replaces
the object before that look, the put is reported as failed although it had succeeded for a moment.

A put without a condition and a delete are repeated as they are. So nobody is told whether a delete found something.

The service takes about one write of an object in a second, and answers 429 to more. So who writes an object again waits
for its turn (:mod:`ringsync.storage.pace`); objects that are written once never wait.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import google.auth.exceptions
import google_crc32c
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

import ringsync.storage.port as port
from ringsync.storage.pace import Pace

_TOKEN = "ringsync-put"
_TIMEOUT_SECONDS = (10, 60)
"""Time limits to connect, and between two bytes of an answer."""

_CREDENTIALS = (
    "name a service account's key file (gcs_credentials_file), or set up application default credentials "
    "(GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or the machine's service account)"
)


class GcsStore:
    """Objects below a prefix of a bucket; the methods are those of :class:`ringsync.storage.port.ObjectStore`.

    :param prefix: prefix of all objects' names, without slashes at its ends; may be empty
    :param project, endpoint, credentials_file: those of :func:`ringsync.storage.open_store`
    :param retry_seconds: seconds to repeat a request while the service cannot be reached or is overloaded
    :param rewrite_seconds: seconds between two writes of one object by this process
    :param page_size: objects that one request lists; None: the service's default (1,000)
    :raises ValueError: the prefix is not a legal key
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        project: str | None = None,
        endpoint: str | None = None,
        credentials_file: str | None = None,
        retry_seconds: float = 60.0,
        rewrite_seconds: float = 1.0,
        page_size: int | None = None,
    ) -> None:
        self.url = f"gs://{bucket}/{port.check_key(prefix)}" if prefix else f"gs://{bucket}"
        self._root = f"{prefix}/" if prefix else ""
        self._service = endpoint or "Google Cloud Storage"
        self._name = bucket
        self._account = project, endpoint, credentials_file
        self._bucket_was_seen = False
        self._page_size = page_size
        self._pace = Pace(rewrite_seconds)
        self._bounds: dict[str, Any] = {
            "timeout": _TIMEOUT_SECONDS,
            "retry": DEFAULT_RETRY.with_timeout(retry_seconds),
        }

    def __repr__(self) -> str:
        return f"GcsStore({self.url!r})"

    @cached_property
    def _bucket(self) -> Any:
        """The bucket; credentials are read when they are first needed, and again while there are none."""
        return _client(*self._account).bucket(self._name)

    def uri(self, key: str) -> str:
        return f"{self.url}/{port.check_key(key)}"

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None) -> port.Stat:
        blob = self._blob(key)
        port.check_conditions(if_absent, if_version)
        if if_version is not None and not (if_version.isascii() and if_version.isdigit() and int(if_version)):
            raise port.VersionMismatchError(f"{self.url}/{key}: no object here ever had the version {if_version!r}")
        generation = 0 if if_absent else int(if_version) if if_version is not None else None
        if generation is not None:
            blob.metadata = {_TOKEN: uuid.uuid4().hex}
        if not if_absent:
            self._pace.wait(key)
        with self._explained(key):
            try:
                blob.upload_from_string(
                    bytes(data),
                    content_type="application/octet-stream",
                    checksum="crc32c",
                    if_generation_match=generation,
                    **self._bounds,
                )
            except exceptions.PreconditionFailed:
                return self._own_put(key, blob.metadata, data, if_version)
            except exceptions.NotFound:
                # For an upload this means that the bucket is missing, or the generation to replace.
                self._check_bucket()
                raise port.VersionMismatchError(f"{self.url}/{key} is not there, {if_version} was expected") from None
            if if_absent:
                self._pace.wrote(key)
            stat = _stat(key, blob)
            if stat.crc32c != google_crc32c.value(data):
                # The real service refuses such an upload; an emulator may not.
                blob.delete(if_generation_match=int(stat.version), **self._bounds)
                raise port.ChecksumError(f"{self.url}/{key}: damaged on the way to the service; put it again")
            return stat

    def say(self, key: str, data: bytes) -> None:
        self.put(key, data)

    def get(self, key: str) -> bytes:
        return self._download(self._blob(key), key, checksum="crc32c")

    def get_range(self, key: str, start: int, size: int) -> bytes:
        blob = self._blob(key)
        return self._download(blob, key, start=start, end=start + size - 1, checksum=None) if size > 0 else b""

    def _download(self, blob: Any, key: str, **part: Any) -> bytes:
        with self._explained(key):
            try:
                # The client does not repeat a request whose refusal breaks off half-way: it fails to read the reason.
                again = self._bounds["retry"]
                data: bytes = again(partial(blob.download_as_bytes, raw_download=True, **part, **self._bounds))()
                return data
            except exceptions.RequestRangeNotSatisfiable:
                return b""
            except exceptions.NotFound:
                self._check_bucket()
                raise port.NotFoundError(f"{self.url}/{key} is not there") from None

    def stat(self, key: str) -> port.Stat | None:
        name = self._blob(key).name
        with self._explained(key):
            blob = self._bucket.get_blob(name, **self._bounds)
            if blob is None:
                self._check_bucket()
                return None
            return _stat(key, blob)

    def list(self, prefix: str = "", start: str = "") -> list[port.Stat]:
        names, first = self._root + port.check_prefix(prefix), self._root + port.check_prefix(start)
        with self._explained(prefix):
            blobs = self._bucket.client.list_blobs(
                self._bucket,
                prefix=names or None,
                start_offset=first or None,
                page_size=self._page_size,
                **self._bounds,
            )
            named = [(blob.name.removeprefix(self._root), blob) for blob in blobs]
        self._bucket_was_seen = True
        # Other programs put names here that are not keys: the Hadoop connector marks folders by "folder/".
        stats = (_stat(key, blob) for key, blob in named if port.is_legal_key(key))
        return sorted(stats, key=lambda stat: stat.key)

    def delete(self, key: str) -> None:
        blob = self._blob(key)
        with self._explained(key):
            try:
                blob.delete(**self._bounds)
            except exceptions.NotFound:
                self._check_bucket()

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(self._root + port.check_key(key))

    def _own_put(self, key: str, metadata: dict[str, str], data: bytes, if_version: str | None) -> port.Stat:
        """After a refused put, return the object if we wrote it with a request whose answer was lost."""
        blob = self._bucket.get_blob(self._root + key, **self._bounds)
        if blob is not None and (blob.metadata or {}).get(_TOKEN) == metadata[_TOKEN]:
            stat = _stat(key, blob)
            if stat.crc32c == google_crc32c.value(data):
                return stat
        if if_version is None:
            raise port.AlreadyExistsError(f"{self.url}/{key} is there already")
        there = "is not there" if blob is None else f"has version {blob.generation}"
        raise port.VersionMismatchError(f"{self.url}/{key} {there}, {if_version} was expected")

    def _check_bucket(self) -> None:
        """Distinguish a missing object from a missing bucket: list the bucket, which needs no further rights."""
        if not self._bucket_was_seen:
            next(iter(self._bucket.client.list_blobs(self._bucket, max_results=1, **self._bounds)), None)
            self._bucket_was_seen = True

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn errors of the service into errors that say where, why and what to do."""
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except DataCorruption as error:
            raise port.ChecksumError(
                f"{where}: the bytes received are not those that were written; read again"
            ) from error
        except exceptions.NotFound as error:
            raise port.UnavailableError(
                f"{where}: there is no bucket of this name; create it or mend the URL"
            ) from error
        except (exceptions.Unauthorized, google.auth.exceptions.GoogleAuthError) as error:
            raise port.UnavailableError(
                f"{where}: the service does not accept the credentials; {_CREDENTIALS}"
            ) from error
        except exceptions.Forbidden as error:
            remedy = "grant the account the role Storage Object Admin (roles/storage.objectAdmin) on the bucket"
            raise port.UnavailableError(f"{where}: the service refuses access (403); {remedy}") from error
        except exceptions.BadRequest as error:
            if "crc32c" in str(error).lower():
                raise port.ChecksumError(f"{where}: damaged on the way to the service; put it again") from error
            raise port.UnavailableError(f"{where}: the service refuses the request: {error.message}") from error
        except (exceptions.GoogleAPIError, requests.RequestException, OSError) as error:
            cause = getattr(error, "cause", None) or error
            remedy = "check the network and the address, then try again"
            raise port.UnavailableError(f"{where}: {self._service} does not serve: {cause}; {remedy}") from error


def _client(project: str | None, endpoint: str | None, credentials_file: str | None) -> Any:
    if endpoint is not None:
        return storage.Client(
            project=project or "ringsync",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": endpoint.rstrip("/")},
        )
    try:
        if credentials_file is not None:
            return storage.Client.from_service_account_json(credentials_file, project=project)
        return storage.Client(project=project)
    except OSError as error:
        raise port.UnavailableError(
            f"Google credentials {credentials_file}: {error.strerror}; {_CREDENTIALS}"
        ) from error
    except ValueError:
        # The cause is left out: it may quote the file.
        raise port.UnavailableError(f"{credentials_file} is no service account's key file; {_CREDENTIALS}") from None
    except google.auth.exceptions.GoogleAuthError as error:
        raise port.UnavailableError(f"no Google credentials found; {_CREDENTIALS}") from error


def _stat(key: str, blob: Any) -> port.Stat:
    crc32c, written = int.from_bytes(base64.b64decode(blob.crc32c), "big"), blob.time_created
    written_ms = int(written.timestamp() * 1000) if written else 0
    return port.Stat(key, int(blob.size), crc32c, str(blob.generation), written_ms)
