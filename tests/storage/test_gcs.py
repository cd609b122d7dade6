"""The GCS store when the network, the bucket or the credentials fail; the contract is in test_contract.py."""

import base64
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import google_crc32c
import pytest

from ringsync.storage import gcs
from ringsync.storage.gcs import GcsStore
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    ObjectStore,
    UnavailableError,
    VersionMismatchError,
)
from servers.gcs import GcsEmulator
from tests.gcs_faults import faulty

pytestmark = pytest.mark.server

DATA = b"some bytes that must arrive as they are"


class Proxy(ThreadingHTTPServer):
    """Stands between client and emulator and spoils what it is told to spoil."""

    daemon_threads = True

    def __init__(self, emulator: GcsEmulator) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.emulator = emulator
        self.spoil_request: Callable[[bytes], bytes] = lambda body: body
        self.spoil_answer: Callable[[bytes], bytes] = lambda body: body
        self.statuses: list[int] = []
        self.uploads_to_lose = 0
        self.refuse_with: int | None = None
        self.refuse_because = "no"
        self.after_lost_answer: Callable[[], object] = lambda: None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _forward(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.refuse_with is not None:
            self._answer(
                proxy.refuse_with,
                [("Content-Type", "application/json")],
                json.dumps({"error": {"message": proxy.refuse_because}}).encode(),
            )
            return
        connection = http.client.HTTPConnection("127.0.0.1", proxy.emulator.port)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        connection.request(self.command, self.path, proxy.spoil_request(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if self.command == "POST" and proxy.uploads_to_lose:
            proxy.uploads_to_lose -= 1
            proxy.after_lost_answer()
            self.close_connection = True
            return
        kept = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date")
        ]
        self._answer(answer.status, kept, proxy.spoil_answer(content))

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.server.statuses.append(status)
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _forward

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture(scope="module")
def emulator() -> Iterator[GcsEmulator]:
    with GcsEmulator() as emulator:
        yield emulator


@pytest.fixture
def proxy(emulator: GcsEmulator) -> Iterator[Proxy]:
    with Proxy(emulator) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@pytest.fixture
def direct(emulator: GcsEmulator, request: pytest.FixtureRequest) -> ObjectStore:
    return GcsStore(emulator.bucket, request.node.name, endpoint=emulator.endpoint, retry_seconds=5, rewrite_seconds=0)


@pytest.fixture
def store(proxy: Proxy, request: pytest.FixtureRequest) -> ObjectStore:
    return GcsStore(
        proxy.emulator.bucket, request.node.name, endpoint=proxy.endpoint, retry_seconds=5, rewrite_seconds=0
    )


def test_a_put_whose_answer_was_lost_has_won(proxy: Proxy, store: ObjectStore) -> None:
    proxy.uploads_to_lose = 1
    stat = store.put("plan", DATA, if_absent=True)
    assert proxy.uploads_to_lose == 0
    assert 412 in proxy.statuses, "the client repeated the upload, and that was refused"
    assert store.stat("plan") == stat
    proxy.uploads_to_lose = 1
    proxy.statuses.clear()
    second = store.put("plan", b"2", if_version=stat.version)
    assert 412 in proxy.statuses
    assert store.stat("plan") == second
    assert store.get("plan") == b"2"


def test_an_equal_object_of_another_is_no_victory(proxy: Proxy, store: ObjectStore, direct: ObjectStore) -> None:
    direct.put("plan", DATA, if_absent=True)
    proxy.uploads_to_lose = 1
    with pytest.raises(AlreadyExistsError):
        store.put("plan", DATA, if_absent=True)


def test_a_lost_answer_and_then_another_writer(proxy: Proxy, store: ObjectStore, direct: ObjectStore) -> None:
    version = direct.put("state", b"0").version
    proxy.uploads_to_lose = 1
    proxy.after_lost_answer = lambda: direct.put("state", b"other")
    with pytest.raises(VersionMismatchError, match=f"{version} was expected"):
        store.put("state", b"1", if_version=version)
    assert direct.get("state") == b"other"


def test_damage_on_the_way_to_the_service_is_refused(proxy: Proxy, store: ObjectStore, direct: ObjectStore) -> None:
    """The emulator stores what arrives and tells its checksum; the real service compares and answers 400."""
    bodies: list[bytes] = []

    def spoil(body: bytes) -> bytes:
        bodies.append(body)
        return body.replace(b"arrive", b"derive")

    proxy.spoil_request = spoil
    with pytest.raises(ChecksumError, match="damaged on the way"):
        store.put("a", DATA)
    checksum = base64.b64encode(google_crc32c.value(DATA).to_bytes(4, "big"))
    assert b'"crc32c": "%s"' % checksum in b"".join(bodies), "the service is told what it must receive"
    assert direct.stat("a") is None, "the damaged object does not stay"
    proxy.refuse_with, proxy.refuse_because = 400, 'Provided CRC32C "AAAA" doesn\'t match calculated CRC32C "BBBB".'
    with pytest.raises(ChecksumError, match="damaged on the way"):
        store.put("a", DATA)


def test_damage_on_the_way_back_is_found(proxy: Proxy, store: ObjectStore) -> None:
    store.put("a", DATA)
    proxy.spoil_answer = lambda body: body.replace(b"arrive", b"derive")
    with pytest.raises(ChecksumError, match="read again"):
        store.get("a")


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "GOOGLE_APPLICATION_CREDENTIALS"), (403, "roles/storage.objectAdmin"), (400, "no")]
)
def test_refusals_say_what_to_do(proxy: Proxy, store: ObjectStore, status: int, remedy: str) -> None:
    proxy.refuse_with = status
    calls = every_call(store)
    for call in calls:
        with pytest.raises(UnavailableError, match=rf"gs://ringsync/.*{remedy}"):
            call()


def test_a_missing_bucket_is_not_a_missing_object(emulator: GcsEmulator) -> None:
    for call in every_call(GcsStore("missing", "p", endpoint=emulator.endpoint)):
        with pytest.raises(UnavailableError, match=r"gs://missing/p.*create it or mend the URL"):
            call()


def test_an_unreachable_service_is_given_up_in_time(emulator: GcsEmulator) -> None:
    with GcsEmulator() as gone:
        pass
    for call in every_call(GcsStore("bucket", endpoint=gone.endpoint, retry_seconds=0.2)):
        with pytest.raises(UnavailableError, match=rf"gs://bucket.*{gone.endpoint} does not serve.*try again"):
            call()


def every_call(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.put("a", b""),
        lambda: store.put("a", b"", if_absent=True),
        lambda: store.put("a", b"", if_version="1"),
        lambda: store.get("a"),
        lambda: store.stat("a"),
        lambda: store.list(),
        lambda: store.delete("a"),
    ]


def test_an_overloaded_service_is_asked_again(proxy: Proxy, store: ObjectStore) -> None:
    proxy.refuse_with = 503
    timer = threading.Timer(0.3, lambda: setattr(proxy, "refuse_with", None))
    timer.start()
    store.put("a", DATA, if_absent=True)
    timer.join()
    assert 503 in proxy.statuses
    assert store.get("a") == DATA


def test_names_that_are_no_keys_are_not_listed(emulator: GcsEmulator, direct: GcsStore) -> None:
    direct.put("folder/a", b"1")
    bucket = direct._bucket
    for name in ("folder/", "folder//b", "folder/../c"):
        bucket.blob(f"{direct.url.removeprefix('gs://ringsync/')}/{name}").upload_from_string(b"")
    assert [stat.key for stat in direct.list()] == ["folder/a"]


def test_a_store_without_a_prefix(emulator: GcsEmulator) -> None:
    store = GcsStore(emulator.bucket, endpoint=emulator.endpoint, page_size=2)
    keys = [f"top{number}" for number in range(5)]
    for key in keys:
        store.put(key, b"")
    assert [stat.key for stat in store.list("top")] == keys
    assert store.uri("top0") == "gs://ringsync/top0"


def test_a_wrong_key_file_is_named_and_not_quoted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match=r"absent\.json: No such file.*gcs_credentials_file"):
        GcsStore("bucket", credentials_file=str(tmp_path / "absent.json")).stat("a")
    key = tmp_path / "key.json"
    for content in ("hunter2", json.dumps({"private_key": "hunter2"})):
        key.write_text(content)
        with pytest.raises(UnavailableError, match=r"key\.json is no service account's key file") as caught:
            GcsStore("bucket", credentials_file=str(key)).stat("a")
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(UnavailableError, match="no Google credentials found"):
        GcsStore("bucket").stat("a")


def test_a_refusal_that_breaks_off_is_asked_for_again(emulator: GcsEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty(emulator, 0, 0.2) as proxy:
        proxy.cuts_refusals = True
        monkeypatch.setattr(gcs, "DEFAULT_RETRY", gcs.DEFAULT_RETRY.with_delay(initial=0.01))
        store = GcsStore(emulator.bucket, endpoint=proxy.endpoint)
        for _ in range(20):
            with pytest.raises(NotFoundError):
                store.get("absent")
        assert proxy.counts["cut"] > 2
