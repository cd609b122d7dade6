"""A proxy before the emulator of Google Cloud Storage that does to clients what networks and busy services do.

By chance it refuses requests (429, 503), loses the answer to a request that the emulator has executed, breaks off an
upload half-way, and cuts an answer. It counts what it has done.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer

from servers.gcs import GcsEmulator

KINDS = ("429", "503", "lost", "torn", "cut")
"""Refused twice; the answer to a change lost; an upload broken off; the content of a download cut."""

OWN = "412 for what was done already"
"""Counted, too: a request whose answer was lost was repeated, and its condition did not hold any more."""

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, content."""

_HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding", "expect", "keep-alive")


class FaultyProxy(ThreadingHTTPServer):
    """The proxy; it serves while :func:`faulty` lasts.

    :param share: of the requests that meet each kind of fault that is possible for them; may be changed
    :ivar cuts_refusals: whether the reason why there is no content may be cut, too
    :ivar counts: faults by kind, and all ``requests``
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, emulator: GcsEmulator, seed: int, share: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.emulator = emulator
        self.share = share
        self.cuts_refusals = False
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._lost: set[bytes] = set()
        self._uploads: dict[str, tuple[int, Answer | None]] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, command: str, size: int, is_content: bool) -> str | None:
        """What happens to a request; mostly nothing.

        :param size: of what it brings
        :param is_content: whether it asks for the content of an object
        """
        if command in ("GET", "HEAD"):
            possible = ["429", "503", *(["cut"] if command == "GET" and is_content else [])]
        else:
            possible = ["429", "503", "lost", *(["torn"] if size > 1 else [])]
        with self._lock:
            self.counts["requests"] += 1
            place = int(self._chance.random() / self.share) if self.share else len(possible)
        return possible[place] if place < len(possible) else None

    def told(self, path: str, content_range: str) -> Answer | None:
        """What the service knows of a resumable upload when it is asked, or gets a part again; None: ask the emulator.

        The emulator takes the question for the end of the upload, and forgets an upload that has ended.
        """
        with self._lock:
            done, answer = self._uploads.get(path, (0, None))
        if answer is None and content_range.startswith("bytes */") and content_range != "bytes */0":
            return 308, [("Range", f"bytes=0-{done - 1}")] if done else [], b""
        return answer

    def took(self, path: str, content_range: str, answer: Answer) -> None:
        """Note that the emulator has got a part of a resumable upload."""
        end = re.match(r"bytes \d+-(\d+)/", content_range)
        with self._lock:
            if answer[0] in (200, 201):
                self._uploads[path] = 0, answer
            elif answer[0] == 308 and end:
                self._uploads[path] = int(end[1]) + 1, None

    def count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1

    def lost(self, request: bytes) -> None:
        """Note that the answer to a request was lost."""
        with self._lock:
            self.counts["lost"] += 1
            self._lost.add(request)

    def answered(self, request: bytes, status: int) -> None:
        """Note an answer that does arrive."""
        with self._lock:
            if status == 412 and request in self._lost:
                self.counts[OWN] += 1

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyProxy  # type: ignore[assignment]

    def _serve(self) -> None:
        proxy = self.server
        size = int(self.headers.get("Content-Length") or 0)
        is_chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "")
        is_content = "alt=media" in self.path or not self.path.startswith(("/storage/", "/batch/"))
        fault = proxy.fault(self.command, 2 if is_chunked else size, is_content)
        if fault == "torn":
            body = b"".join(self._chunks()) if is_chunked else self.rfile.read(size // 2)
            if not self.headers.get("Content-Range"):  # the service keeps nothing of a part of a resumable upload
                self._tear(body[: len(body) // 2] if is_chunked else body, len(body) if is_chunked else size)
            proxy.count("torn")
            return self._hang_up()
        body = b"".join(self._chunks()) if is_chunked else self.rfile.read(size)
        if fault in ("429", "503"):
            proxy.count(fault)
            refusal = json.dumps({"error": {"code": int(fault), "message": "by chance"}}).encode()
            return self._answer(int(fault), [("Content-Type", "application/json")], refusal)
        content_range = self.headers.get("Content-Range") if self.command == "PUT" else None
        if content_range is not None and (known := proxy.told(self.path, content_range)):
            return self._answer(*known)
        request = hashlib.sha256(f"{self.command} {self.path} ".encode() + body).digest()
        status, headers, content = self._ask(body)
        if content_range is not None:
            proxy.took(self.path, content_range, (status, headers, content))
        if fault == "lost":
            proxy.lost(request)
            return self._hang_up()
        proxy.answered(request, status)
        if fault == "cut" and (status < 300 or self.server.cuts_refusals) and len(content) > 1:
            proxy.count("cut")
            self._answer(status, headers, content, len(content) // 2)
            return self._hang_up()
        self._answer(status, headers, content)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _forwarded(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}

    def _ask(self, body: bytes) -> Answer:
        """Ask the emulator; its answers name the proxy where they name the emulator."""
        proxy = self.server
        connection = http.client.HTTPConnection("127.0.0.1", proxy.emulator.port, timeout=60)
        try:
            length = {} if self.command in ("GET", "HEAD") and not body else {"Content-Length": str(len(body))}
            connection.request(self.command, self.path, body or None, {**self._forwarded(), **length})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        old, new = proxy.emulator.endpoint, proxy.endpoint
        dropped = ("connection", "transfer-encoding", "date", *(() if self.command == "HEAD" else ("content-length",)))
        headers = [
            (name, value.replace(old, new)) for name, value in answer.getheaders() if name.lower() not in dropped
        ]
        if "json" in (answer.getheader("Content-Type") or "") and "alt=media" not in self.path:
            content = content.replace(old.encode(), new.encode())
        return answer.status, headers, content

    def _tear(self, half: bytes, size: int) -> None:
        """Send the emulator half of a request."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.emulator.port)) as upstream:
            headers = {**self._forwarded(), "Host": f"127.0.0.1:{self.server.emulator.port}", "Content-Length": size}
            lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            upstream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + half)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, size: int | None = None) -> None:
        """Answer; with a size, by so many bytes of what the answer promises."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        elif not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:size])

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def faulty(emulator: GcsEmulator, seed: int, share: float) -> Iterator[FaultyProxy]:
    """A proxy before an emulator, on a free port of loopback."""
    with FaultyProxy(emulator, seed, share) as proxy:
        thread = threading.Thread(target=BaseServer.serve_forever, args=(proxy, 0.05), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
