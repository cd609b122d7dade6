"""The control server in the driver's process, and its clients: the tasks of a scan, in other processes and hosts.

The server grants tasks permission to query the cluster (:mod:`ringsync.cluster.limits`), and calls functions of the
driver for them. Both sides first prove that they know the key. A message is a JSON object, sent as one block of bytes
over TCP. It is never a pickle, so that clients can call the server's handlers and nothing else. It is not encrypted and
must not contain secrets. Each thread of a client has its own connection, so that a waiting thread delays no other;
the server has one thread per connection.

The limits are an object in the object store. Operators can put it at any time (:func:`put_limits`), and every server
reads it once a second. The servers of all runs share the limits: see :class:`LimitsWatch`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ringsync.cluster.limits import Account, ClosedError, Limiter, Limits
from ringsync.storage.port import NotFoundError, ObjectStore, check_key, list_named

Handler = Callable[[dict[str, Any]], dict[str, Any]]

LIMITS_KEY = "limits.json"
"""Object with the limits of all runs together."""
RUNS_PREFIX = "limits/runs/"
"""Folder where each run renews its object ``<run>.json``."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at the limits and the other runs."""
BEAT_INTERVAL_S = 2.0
"""Seconds between two renewals of a server's object (GCS allows one put of the same object per second)."""
DEAD_AFTER_S = 10.0
"""Seconds without a renewal, by our own clock, before a run counts as dead."""
FORGOTTEN_AFTER_S = 300.0
"""Seconds without a renewal before the object of a dead run is removed."""

_CONNECT_TIMEOUT_S = 30.0
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Socket options that detect a vanished host within half a minute (s, s, count, ms: tcp(7))."""

_log = logging.getLogger(__name__)


class ControlError(Exception):
    """A request failed in the driver; the message is the driver's."""


class DriverGoneError(Exception):
    """The driver's process has ended or is out of reach, so the task must end, too."""


@dataclass(frozen=True)
class ControlAddress:
    """The address and the key of a server. Pass it only in the closures that Spark sends to its tasks.

    :ivar authkey: key that both sides must know; not shown by ``repr``
    """

    host: str
    port: int
    authkey: bytes = field(repr=False)


class ControlServer:
    """A control server that runs during its ``with`` block. After the block all clients learn that the driver is gone.

    :param limits: limits of the queries that the tasks may send to the cluster
    :param handlers: functions for :meth:`ControlClient.call` by name: they take and return JSON objects, and run in
        several threads at once
    :param host: address or name of this host by which the tasks reach it; 127.0.0.1 for local masters
    :param requests_per_s: see :class:`ringsync.cluster.limits.Limiter`
    :raises ValueError: a handler has the name of a function of the server
    :raises ControlError: the block begins and the host is not this one
    """

    def __init__(
        self,
        limits: Limits | None = None,
        handlers: Mapping[str, Handler] | None = None,
        host: str = "127.0.0.1",
        requests_per_s: float | None = None,
    ) -> None:
        self.limiter = Limiter(limits, requests_per_s=requests_per_s)
        self._handlers = dict(handlers or {})
        if taken := sorted(self._handlers.keys() & _PERMITS.keys()):
            raise ValueError(f"a handler may not be called {', '.join(taken)}: the server itself uses this name")
        self._host = host
        self._authkey = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._connections: set[Connection] = set()
        self._ended = threading.Event()
        self._watches: list[threading.Thread] = []

    def __enter__(self) -> ControlServer:
        try:
            self._socket = socket.create_server((self._host, 0), backlog=1024)
        except OSError as error:
            raise ControlError(
                f"the driver cannot listen at {self._host}: {error}; give an address or name of this host"
            ) from error
        self._accepting = _start("control-accept", self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._socket.close()
        with self._lock:
            for connection in self._connections:
                _hang_up(connection)
            for client in self._clients.values():
                client.account.close()
        for thread in self._watches:
            thread.join()

    @property
    def address(self) -> ControlAddress:
        """Address for a :class:`ControlClient`."""
        return ControlAddress(self._host, self._socket.getsockname()[1], self._authkey)

    def watch_limits(self, store: ObjectStore, run: str, fallback: Limits) -> None:
        """Follow the limits of the object store from now on, shared with the other runs that follow them.

        :param run: unique name of the run, legal as part of an object's key
        :raises ValueError: the name is illegal; errors of the store are logged, never raised
        """
        watch = LimitsWatch(store, self.limiter, run, fallback)
        watch.look()
        self._watches.append(_start("control-limits", self._watch, watch))

    def _watch(self, watch: LimitsWatch) -> None:
        while not self._ended.wait(LOOK_INTERVAL_S):
            watch.look()
        watch.end()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                accepted, peer = self._socket.accept()
            except OSError as error:
                if not self._ended.is_set():
                    _log.warning("the control server could not accept a connection: %s", error)
                    self._ended.wait(0.1)
                continue
            _start("control-connection", self._serve, accepted, peer[0])

    def _serve(self, accepted: socket.socket, peer: str) -> None:
        with _connection(accepted) as connection:
            try:
                name = self._greet(connection)
            except (AuthenticationError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
                _log.warning(
                    "the control server refused a connection from %s: %s", peer, str(error) or "wrong greeting"
                )
                return
            # The client closes the connection, or dies, or the server is at its end.
            with self._joined(name, connection) as account, suppress(EOFError, OSError, ClosedError):
                while True:
                    connection.send_bytes(self._answer(account, connection.recv_bytes()))

    def _greet(self, connection: Connection) -> str:
        """Let both sides prove that they know the key, and return the client's name."""
        _patience(connection, _CONNECT_TIMEOUT_S)
        deliver_challenge(connection, self._authkey)
        answer_challenge(connection, self._authkey)
        name = str(json.loads(connection.recv_bytes())["client"])
        _patience(connection, None)
        return name

    @contextmanager
    def _joined(self, name: str, connection: Connection) -> Iterator[Account]:
        with self._lock:
            client = self._clients.setdefault(name, _Client(Account(self.limiter)))
            client.connections += 1
            self._connections.add(connection)
            if self._ended.is_set():
                _hang_up(connection)
        try:
            yield client.account
        finally:
            with self._lock:
                self._connections.discard(connection)
                client.connections -= 1
                if not client.connections:
                    del self._clients[name]
                    client.account.close()

    def _answer(self, account: Account, message: bytes) -> bytes:
        try:
            request = json.loads(message)
            name, content = request["call"], request["content"]
            if name in _PERMITS:
                result = _PERMITS[name](account, **content)
            elif name in self._handlers:
                result = self._handlers[name](content)
            else:
                known = ", ".join(sorted(self._handlers)) or "none"
                raise ControlError(f"the driver has no handler {name}; it has {known}")
            return json.dumps({"result": result}).encode()
        except ClosedError:
            raise
        except Exception as error:
            if not isinstance(error, ControlError):
                _log.warning("a task's call failed in the driver", exc_info=True)
            return json.dumps({"error": str(error) or type(error).__name__}).encode()


_PERMITS: dict[str, Callable[..., Any]] = {"ask": Account.ask, "answered": Account.answered, "failed": Account.failed}


@dataclass
class _Client:
    """A task: its account, and the number of its connected threads."""

    account: Account
    connections: int = 0


class ControlClient:
    """A task's client of the driver: it calls handlers, and is the task's :class:`ringsync.cluster.limits.Permits`.

    Several threads may use it; one may report the page that another asked for. When the client is closed or its process
    dies, the driver takes back all permission that it granted to the client. Permits raise the errors of :meth:`call`.

    :raises DriverGoneError: no process listens at the address
    :raises ControlError: the process at the address refuses the key
    """

    def __init__(self, address: ControlAddress) -> None:
        self._address = address
        self._name = uuid.uuid4().hex
        self._own = threading.local()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        # It is kept to the end: when its last connection ends, the driver takes the client for gone.
        self._first = self._own.connection = self._connect()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; waiting threads get a :class:`ControlError`."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                _hang_up(connection)

    def ask(self, rows: int, wait: bool = True) -> int | None:
        granted: int | None = self._request("ask", {"rows": rows, "wait": wait})
        return granted

    def answered(self, rows: int, size: int) -> None:
        self._request("answered", {"rows": rows, "size": size})

    def failed(self, overloaded: bool) -> None:
        self._request("failed", {"overloaded": overloaded})

    def call(self, name: str, /, **content: Any) -> dict[str, Any]:
        """Call one of the driver's handlers.

        :param content: arguments that JSON can hold
        :returns: result of the handler
        :raises ControlError: the handler failed, with the handler's message; or there is no such handler
        :raises DriverGoneError: the driver has ended; it may or may not have received the call
        """
        result: dict[str, Any] = self._request(name, content)
        return result

    def _request(self, name: str, content: dict[str, Any]) -> Any:
        message = json.dumps({"call": name, "content": content}).encode()
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect()
        try:
            connection.send_bytes(message)
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost(error) from error
        if "error" in answer:
            raise ControlError(answer["error"])
        return answer["result"]

    def _connect(self) -> Connection:
        address = self._address
        try:
            connection = _connection(socket.create_connection((address.host, address.port), _CONNECT_TIMEOUT_S))
            _patience(connection, _CONNECT_TIMEOUT_S)
            answer_challenge(connection, address.authkey)
            deliver_challenge(connection, address.authkey)
            connection.send_bytes(json.dumps({"client": self._name}).encode())
            _patience(connection, None)
        # answer_challenge raises AssertionError if the other side speaks another protocol.
        except (AuthenticationError, AssertionError) as error:
            raise ControlError(f"the server at {address.host}:{address.port} has another key than this task") from error
        except (EOFError, OSError) as error:
            raise self._lost(error) from error
        with self._lock:
            self._connections.add(connection)
            if self._closed:
                _hang_up(connection)
        return connection

    def _lost(self, error: Exception) -> ControlError | DriverGoneError:
        if self._closed:
            return ControlError("this client of the driver is closed")
        reason = str(error) or "it closed the connection"
        return DriverGoneError(f"the driver at {self._address.host}:{self._address.port} is gone: {reason}")


def put_limits(store: ObjectStore, limits: Limits | None) -> None:
    """Set the limits of all runs; running scans follow within seconds. None: the configuration's hold again."""
    if limits is None:
        store.delete(LIMITS_KEY)
    else:
        store.put(LIMITS_KEY, limits.to_json().encode())


def get_limits(store: ObjectStore) -> Limits | None:
    """Read the limits that were set; None: none were set, and the configuration's hold.

    :raises LimitsError: the object does not hold limits
    """
    try:
        return Limits.from_json(store.get(LIMITS_KEY))
    except NotFoundError:
        return None


@dataclass
class LimitsWatch:
    """A watch that sets a limiter to this run's share of the limits in the object store.

    Every run renews an object of its own there and counts the other runs' objects. A run lives if its object's version
    changes between two looks; the hosts' clocks do not matter. A new object counts until it proves dead. If the store
    fails, the watch logs it and the last known limits hold. While a run cannot renew its object, the others take it for
    dead.

    :ivar fallback: limits while the store has none
    :raises ValueError: the name cannot be part of an object's key
    """

    store: ObjectStore
    limiter: Limiter
    run: str
    fallback: Limits
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._key = check_key(f"{RUNS_PREFIX}{self.run}.json")
        self._limits = self.fallback
        self._runs = 1
        self._beat_at: float | None = None
        self._seen: dict[str, tuple[str, float]] = {}
        self._failing = False

    def look(self) -> None:
        """Renew this run's object if it is time, count the runs, read the limits, and set the limiter."""
        try:
            self._beat()
            self._runs = self._count()
            self._limits = get_limits(self.store) or self.fallback
            if self._failing:
                _log.info("the limits can be read again")
            self._failing = False
        except Exception as error:
            if not self._failing:
                _log.warning("the limits cannot be read, the last known ones hold: %s", error)
            self._failing = True
        share = self._limits.share(self._runs)
        if share != self.limiter.limits:
            _log.info("limits of this run, one of %d: %s", self._runs, share)
            self.limiter.limits = share

    def end(self) -> None:
        """Remove this run's object, so that the others need not wait until it proves dead."""
        try:
            self.store.delete(self._key)
        except Exception as error:
            _log.warning(
                "%s could not be removed, so other runs keep a share for this run for a while: %s", self._key, error
            )

    def _beat(self) -> None:
        now = self.clock()
        if self._beat_at is None or now - self._beat_at >= BEAT_INTERVAL_S:
            self.store.put(self._key, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            self._beat_at = now

    def _count(self) -> int:
        """Count the live runs, this run included."""
        now = self.clock()
        previous, self._seen = self._seen, {}
        for stat in list_named(self.store, RUNS_PREFIX, r"[^ ]+\.json"):
            version, changed_at = previous.get(stat.key, ("", now))
            self._seen[stat.key] = (stat.version, changed_at if version == stat.version else now)
            if now - changed_at >= FORGOTTEN_AFTER_S and version == stat.version:
                self.store.delete(stat.key)
        others = [at for key, (_, at) in self._seen.items() if key != self._key]
        return 1 + sum(now - changed_at < DEAD_AFTER_S for changed_at in others)


def _connection(connected: socket.socket) -> Connection:
    """Turn a socket into a connection of whole messages that detects when the other host vanishes."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _SILENCE.items():
        if hasattr(socket, option):  # Not every system has all of them.
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(connected.detach())


def _patience(connection: Connection, seconds: float | None) -> None:
    """Set how long to wait for the next bytes of the other side, in seconds; None: for ever."""
    timeout = struct.pack("ll", int(seconds or 0), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def _hang_up(connection: Connection) -> None:
    """End a connection that another thread may be reading from: that thread wakes up and closes it."""
    # An error here means that the other side was faster.
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _start(name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
