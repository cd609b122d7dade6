"""The GCS emulator: it starts, keeps, stops; which preconditions this version honours."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from servers import ServerError
from servers.gcs import GcsEmulator

pytestmark = pytest.mark.server


def upload(emulator: GcsEmulator, kind: str, body: bytes, condition: str, content_type: str) -> int:
    """POST an upload of an object ``a``; the HTTP status."""
    url = f"{emulator.endpoint}/upload/storage/v1/b/{emulator.bucket}/o?uploadType={kind}&name=a{condition}"
    return status(urllib.request.Request(url, body, {"Content-Type": content_type}))


def status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def multipart(metadata: bytes, data: bytes) -> bytes:
    return (
        b"--B\r\nContent-Type: application/json\r\n\r\n%s\r\n"
        b"--B\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n--B--" % (metadata, data)
    )


def test_which_preconditions_are_honoured() -> None:
    """If this fails after an update of the emulator, mend the docstring of servers/gcs.py too."""
    related = "multipart/related; boundary=B"
    with GcsEmulator() as emulator:
        assert upload(emulator, "multipart", multipart(b'{"name": "a"}', b"1"), "&ifGenerationMatch=0", related) == 200
        assert upload(emulator, "multipart", multipart(b'{"name": "a"}', b"2"), "&ifGenerationMatch=0", related) == 412
        assert upload(emulator, "multipart", multipart(b'{"name": "a"}', b"2"), "&ifGenerationMatch=7", related) == 412
        wrong = b'{"name": "a", "crc32c": "AAAAAA=="}'
        assert upload(emulator, "multipart", multipart(wrong, b"2"), "", related) == 200, "it is not compared"
        unconditional = upload(emulator, "resumable", b'{"name": "a"}', "&ifGenerationMatch=0", "application/json")
        assert unconditional == 200, "a resumable upload's condition is not looked at when it starts"
        url = f"{emulator.endpoint}/storage/v1/b/{emulator.bucket}/o/a?ifGenerationMatch=7"
        assert status(urllib.request.Request(url, method="DELETE")) == 200


def test_objects_survive_a_restart_in_a_folder(tmp_path: Path) -> None:
    body = multipart(b'{"name": "a"}', b"kept")
    for attempt in range(2):
        with GcsEmulator(folder=tmp_path / "gcs") as emulator:
            if attempt == 0:
                assert upload(emulator, "multipart", body, "", "multipart/related; boundary=B") == 200
            url = f"{emulator.endpoint}/storage/v1/b/{emulator.bucket}/o/a?alt=media"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.read() == b"kept"


def test_it_stops_when_the_test_fails() -> None:
    emulator = GcsEmulator()
    processes = []

    def failing_test() -> None:
        with emulator:
            processes.append(emulator._process)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_test()
    (process,) = processes
    assert process is not None
    assert process.returncode is not None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{emulator.endpoint}/_internal/healthcheck", timeout=2)


def test_a_port_in_use_is_an_error() -> None:
    with GcsEmulator() as first, pytest.raises(ServerError, match="already in use"), GcsEmulator(port=first.port):
        pytest.fail("two servers on one port")
