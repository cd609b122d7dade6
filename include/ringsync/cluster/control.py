"""A small server in the driver's process; the tasks of a scan are its clients, in other processes and on other hosts.

It lends the tasks leave to ask the cluster (:mod:`ringsync.cluster.limits`), and calls functions of the driver for
them. A message is a JSON object, sent as one block of bytes over TCP (never a pickle: who speaks to the server can
call its handlers and no more), after both sides have proved that they know the key; it is not encrypted, so no secret
may be in it. Each thread of a client has a connection of its own, so that one that waits for leave holds up nobody;
the server has a thread for each.

How hard the cluster may be asked is an object of the object store, which anybody may put at any time
(:func:`put_limits`) and every server looks at once a second. Servers know of each other by objects that they renew
there, and share: see :class:`LimitsWatch`.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ringsync.cluster.limits import Account, ClosedError, Limiter, Limits
from ringsync.storage.port import NotFoundError, ObjectStore, check_key

Handler = Callable[[dict[str, Any]], dict[str, Any]]

LIMITS_KEY = "limits.json"
"""The object that says how hard the cluster may be asked, by all runs together."""
RUNS_PREFIX = "limits/runs/"
"""Each run renews an object ``<run>.json`` there."""
LOOK_INTERVAL_S = 1.0
"""How often a server looks at the limits and at the other runs."""
BEAT_INTERVAL_S = 2.0
"""How often a server renews its object (GCS allows one put a second of the same object)."""
DEAD_AFTER_S = 10.0
"""A run whose object has not changed for so long, by our own clock, has ended without saying so."""
FORGOTTEN_AFTER_S = 300.0
"""The object of such a run is removed after so long."""

_CONNECT_TIMEOUT_S = 30.0
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""A host that vanished without closing its connections is noticed within half a minute (s, s, count, ms: tcp(7))."""

_log = logging.getLogger(__name__)


class ControlError(Exception):
    """The driver could not do what a task asked; the message is the driver's."""


class DriverGoneError(Exception):
    """The driver's process has ended or cannot be reached: the task must end, too."""


@dataclass(frozen=True)
class ControlAddress:
    """Where a server is and the key to it, for the closures that Spark sends to its tasks, and nowhere else.

    :ivar authkey: not shown by ``repr``
    """

    host: str
    port: int
    authkey: bytes = field(repr=False)


class ControlServer:
    """Serves while its ``with`` block runs; at its end all clients are told that the driver is gone.

    :param limits: how hard the cluster may be asked
    :param handlers: functions for :meth:`ControlClient.call` by name: they get and give JSON objects, and run in
        several threads at once
    :param host: address or name of this host by which the tasks reach it; 127.0.0.1 for local masters
    :raises ValueError: a handler has the name of one of the server's own
    :raises ControlError: when the block begins and the host is not this one
    """

    def __init__(
        self, limits: Limits | None = None, handlers: Mapping[str, Handler] | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.limiter = Limiter(limits)
        self._handlers = dict(handlers or {})
        if taken := sorted(self._handlers.keys() & _PERMITS.keys()):
            raise ValueError(f"a handler may not be called {', '.join(taken)}: the server has its own")
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
        """What a :class:`ControlClient` needs."""
        return ControlAddress(self._host, self._socket.getsockname()[1], self._authkey)

    def watch_limits(self, store: ObjectStore, run: str, fallback: Limits) -> None:
        """Follow the limits of the object store from now on, shared with the other runs that do.

        :param run: a name that no other run has, and a legal part of an object's key
        :param fallback: the limits as long as the store has none
        :raises ValueError: for an illegal name; an error of the store is logged and never raised
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
        """One connection, from its first byte to its last."""
        with _connection(accepted) as connection:
            try:
                name = self._greet(connection)
            except (AuthenticationError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
                _log.warning(
                    "the control server refused a connection from %s: %s", peer, str(error) or "wrong greeting"
                )
                return
            client = self._join(name, connection)
            try:
                # The client closes the connection, or dies, or the server is at its end.
                with suppress(EOFError, OSError, ClosedError):
                    while True:
                        connection.send_bytes(self._answer(client.account, connection.recv_bytes()))
            finally:
                self._leave(name, connection)

    def _greet(self, connection: Connection) -> str:
        """Let both sides prove that they know the key; what the client calls itself."""
        _patience(connection, _CONNECT_TIMEOUT_S)
        deliver_challenge(connection, self._authkey)
        answer_challenge(connection, self._authkey)
        name = str(json.loads(connection.recv_bytes())["client"])
        _patience(connection, None)
        return name

    def _join(self, name: str, connection: Connection) -> _Client:
        with self._lock:
            client = self._clients.setdefault(name, _Client(self.limiter.account()))
            client.connections += 1
            self._connections.add(connection)
            if self._ended.is_set():
                _hang_up(connection)
            return client

    def _leave(self, name: str, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            client = self._clients[name]
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
    """A task: what it asked for, and how many of its threads are connected."""

    account: Account
    connections: int = 0


class ControlClient:
    """A task's side: leave to ask the cluster (:class:`~ringsync.cluster.limits.Permits`), and calls to the driver.

    May be used by several threads, and a page that one of them asked for be answered by another. When the client is
    closed or its process dies, the driver takes back what it had been granted.

    :raises DriverGoneError: nobody listens at the address
    :raises ControlError: who listens there refuses the key
    """

    def __init__(self, address: ControlAddress) -> None:
        self._address = address
        self._name = uuid.uuid4().hex
        self._own = threading.local()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        # Kept to the end: a client is gone for the driver when its last connection is.
        self._first = self._own.connection = self._connect()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; a thread that waits gets a :class:`ControlError`."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                _hang_up(connection)

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """See :meth:`ringsync.cluster.limits.Permits.ask`; raises as :meth:`call`."""
        granted: int | None = self._request("ask", {"rows": rows, "wait": wait})
        return granted

    def answered(self, rows: int, size: int) -> None:
        """See :meth:`ringsync.cluster.limits.Permits.answered`; raises as :meth:`call`."""
        self._request("answered", {"rows": rows, "size": size})

    def failed(self, overloaded: bool) -> None:
        """See :meth:`ringsync.cluster.limits.Permits.failed`; raises as :meth:`call`."""
        self._request("failed", {"overloaded": overloaded})

    def call(self, name: str, /, **content: Any) -> dict[str, Any]:
        """Call one of the driver's handlers.

        :param content: what JSON can hold
        :returns: what the handler gave
        :raises ControlError: the handler raised an error, whose message this has; or there is no such handler
        :raises DriverGoneError: the driver has ended; whether it had still heard the call is not known
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
        # AssertionError: what answer_challenge raises when the other side speaks something else.
        except (AuthenticationError, AssertionError) as error:
            raise ControlError(
                f"who listens at {address.host}:{address.port} has another key than this task"
            ) from error
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


def put_limits(store: ObjectStore, limits: Limits) -> None:
    """Set how hard the cluster may be asked; running scans follow within seconds.

    :raises StorageError: as the store
    """
    store.put(LIMITS_KEY, limits.to_json().encode())


def get_limits(store: ObjectStore) -> Limits | None:
    """The limits that were set; None when none were, and the configuration's hold.

    :raises StorageError: as the store
    :raises LimitsError: what is there are no limits
    """
    try:
        return Limits.from_json(store.get(LIMITS_KEY))
    except NotFoundError:
        return None


def reset_limits(store: ObjectStore) -> None:
    """Forget what was set: the configuration's limits hold again.

    :raises StorageError: as the store
    """
    store.delete(LIMITS_KEY)


class LimitsWatch:
    """Sets a limiter to this run's share of the limits in the object store.

    Every run renews an object of its own there and counts the others' that change: two looks at one object's version
    tell whether its run lives, whatever the hosts' clocks say. What is first seen counts until it has proved dead. An
    error of the store changes nothing but the log: what was known last holds. While a run cannot renew its object
    the others take it for dead.

    :param run: this run's name
    :param fallback: the limits as long as the store has none
    :param clock: seconds, monotonic
    :raises ValueError: the name cannot be part of an object's key
    """

    def __init__(
        self,
        store: ObjectStore,
        limiter: Limiter,
        run: str,
        fallback: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._limiter = limiter
        self._key = check_key(f"{RUNS_PREFIX}{run}.json")
        self._fallback = fallback
        self._clock = clock
        self._limits = fallback
        self._runs = 1
        self._beat_at: float | None = None
        self._seen: dict[str, tuple[str, float]] = {}
        self._failing = False

    def look(self) -> None:
        """Renew this run's object if it is time, count the runs, read the limits, and set the limiter."""
        try:
            self._beat()
            self._runs = self._count()
            self._limits = get_limits(self._store) or self._fallback
            if self._failing:
                _log.info("the limits can be read again")
            self._failing = False
        except Exception as error:
            if not self._failing:
                _log.warning("the limits cannot be read, those known last hold: %s", error)
            self._failing = True
        share = self._limits.share(self._runs)
        if share != self._limiter.limits:
            _log.info("limits of this run, one of %d: %s", self._runs, share)
            self._limiter.limits = share

    def end(self) -> None:
        """Remove this run's object, so that the others need not wait until it has proved dead."""
        try:
            self._store.delete(self._key)
        except Exception as error:
            _log.warning(
                "%s could not be removed, so the others keep a share for this run a while: %s", self._key, error
            )

    def _beat(self) -> None:
        now = self._clock()
        if self._beat_at is None or now - self._beat_at >= BEAT_INTERVAL_S:
            self._store.put(self._key, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            self._beat_at = now

    def _count(self) -> int:
        """Runs that live, this one among them."""
        now = self._clock()
        previous, self._seen = self._seen, {}
        for stat in self._store.list(RUNS_PREFIX):
            version, changed_at = previous.get(stat.key, ("", now))
            self._seen[stat.key] = (stat.version, changed_at if version == stat.version else now)
            if now - changed_at >= FORGOTTEN_AFTER_S and version == stat.version:
                self._store.delete(stat.key)
        others = [at for key, (_, at) in self._seen.items() if key != self._key]
        return 1 + sum(now - changed_at < DEAD_AFTER_S for changed_at in others)


def _connection(connected: socket.socket) -> Connection:
    """The socket as a connection of whole messages, which notices when the other host vanishes."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _SILENCE.items():
        if hasattr(socket, option):  # Not every system has all of them.
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(connected.detach())


def _patience(connection: Connection, seconds: float | None) -> None:
    """How long to wait for the next bytes of the other side; None: for ever."""
    timeout = struct.pack("ll", int(seconds or 0), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def _hang_up(connection: Connection) -> None:
    """End a connection that another thread may be reading from: that thread wakes up, and closes it."""
    # An error here says that the other side was faster.
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _start(name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
