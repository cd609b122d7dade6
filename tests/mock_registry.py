"""Servers in this process: a schema registry with Confluent's REST API, and a server of OAuth tokens."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, Any]
"""Status, and what is answered: a document, or the bytes of something that is none."""

NO_SUBJECT = (404, {"error_code": 40401, "message": "Subject not found."})
NO_SETTING = (404, {"error_code": 40408, "message": "Subject does not have a compatibility setting of its own."})
WRONG_LOGIN = (401, {"error_code": 401, "message": "Unauthorized"})


class _Server(ABC):
    """A server that can be stopped, and started again at its port.

    :ivar asked: the requests so far, e.g. ``GET /subjects``
    :ivar first: answers to the next requests, before the usual ones
    :ivar connections: number of open connections
    :ivar headers: the headers of the last request
    :ivar is_silent: whether it answers only after a second
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        self.first: list[Answer] = []
        self.connections = 0
        self.headers: dict[str, str] = {}
        self.is_silent = False
        self._context = context
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._context else ''}://127.0.0.1:{self._port}"

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server.connections += 1

            def finish(self) -> None:
                super().finish()
                server.connections -= 1

            def do_GET(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
                server.asked.append(f"{self.command} {urlsplit(self.path).path}")
                server.headers = {name.lower(): value for name, value in self.headers.items()}
                time.sleep(server.is_silent)
                path = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
                status, told = server.first.pop(0) if server.first else server.answer(self.command, path, content)
                body = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if isinstance(told, bytes) else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        if self._context:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @abstractmethod
    def answer(self, method: str, path: list[str], content: str) -> Answer:
        """Answer a request.

        :param path: the parts of the path, without quotes
        """


class MockRegistry(_Server):
    """A schema registry.

    :ivar schemas: the schemas of each subject, in order
    :ivar compatibility: the compatibility that each subject was given
    :ivar refused: the answer, by subject, to every request to register a schema
    :ivar authorization: what the header of this name must be; None: anybody may ask
    :ivar only_known: whether settings are only taken for subjects that have a schema, as Apicurio does it
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.schemas: dict[str, list[str]] = {}
        self.compatibility: dict[str, str] = {}
        self.refused: dict[str, Answer] = {}
        self.authorization: str | None = None
        self.only_known = False
        super().__init__(context)

    def answer(self, method: str, path: list[str], content: str) -> Answer:
        if self.authorization not in (None, self.headers.get("authorization")):
            return WRONG_LOGIN
        match method, path:
            case "GET", ["subjects"]:
                return 200, sorted(self.schemas)
            case "GET", ["subjects", subject, "versions"]:
                known = self.schemas.get(subject)
                return (200, [*range(1, len(known) + 1)]) if known else NO_SUBJECT
            case "POST", ["subjects", subject, "versions"] if subject in self.refused:
                return self.refused[subject]
            case "POST", ["subjects", subject, "versions"]:
                known = self.schemas.setdefault(subject, [])
                schema = json.loads(content)["schema"]
                if schema not in known:
                    known.append(schema)
                return 200, {"id": 100 * [*self.schemas].index(subject) + known.index(schema) + 1}
            case "GET", ["config", subject]:
                level = self.compatibility.get(subject)
                return (200, {"compatibilityLevel": level}) if level else NO_SETTING
            case "PUT", ["config", subject] if self.schemas.get(subject) or not self.only_known:
                self.compatibility[subject] = json.loads(content)["compatibility"]
                return 200, json.loads(content)
        return NO_SUBJECT


class MockTokens(_Server):
    """A server of tokens for a client's credentials.

    :ivar secret: the secret of the client ``ringsync``
    :ivar given: the tokens so far
    :ivar asked_for: the form of the last request
    """

    def __init__(self) -> None:
        self.secret = "hush"
        self.given: list[str] = []
        self.asked_for: dict[str, list[str]] = {}
        super().__init__()

    @property
    def url(self) -> str:
        return f"{super().url}/token"

    def answer(self, method: str, path: list[str], content: str) -> Answer:
        self.asked_for = parse_qs(content)
        if self.headers.get("authorization") != basic("ringsync", self.secret):
            return 401, {"error": "invalid_client", "error_description": "Unknown client or secret"}
        self.given.append(unsigned_token(len(self.given)))
        return 200, {"access_token": self.given[-1], "token_type": "Bearer", "expires_in": 3600}


def basic(username: str, password: str) -> str:
    """The header ``Authorization`` of a login with a password."""
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()


def unsigned_token(number: int) -> str:
    """A token in JWT's form, valid for an hour, as librdkafka wants it."""
    now = int(time.time())
    claims = {"sub": "ringsync", "scope": "kafka", "jti": str(number), "iat": now - 60, "exp": now + 3600}
    parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


@contextmanager
def mock_registry(context: ssl.SSLContext | None = None) -> Iterator[MockRegistry]:
    """A registry without schemas."""
    registry = MockRegistry(context)
    yield registry
    registry.stop()


@contextmanager
def mock_tokens() -> Iterator[MockTokens]:
    """A server of tokens."""
    tokens = MockTokens()
    yield tokens
    tokens.stop()
