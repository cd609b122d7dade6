"""Measure the cost of a running pipeline: memory and CPU of its processes, requests and bytes on its connections."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.measure import cpu_seconds

from servers import ServerError
from servers.cassandra import CassandraNode
from servers.process import ServerProcess, session_members

LATENCIES = ("coordinator_read_latency", "coordinator_scan_latency")

Connection = tuple[str, int]
"""Address of the node, port of the client."""


@dataclass(frozen=True)
class Cost:
    """Resources used up to a moment.

    :ivar cpu: user and system time, s, by name of the process
    :ivar server_cpu: CPU time of all nodes, s
    :ivar requests: requests on the native protocol connections that the processes have opened
    :ivar received: bytes that came on these connections
    :ivar sent: bytes that were sent on them
    :ivar reads: partitions and ranges of the keyspaces' tables that coordinators have read, for any client
    """

    cpu: Mapping[str, float]
    server_cpu: float
    requests: int
    received: int
    sent: int
    reads: int

    def since(self, before: Cost) -> Cost:
        """Return the resources used between two moments."""
        return Cost(
            {name: used - before.cpu[name] for name, used in self.cpu.items()},
            self.server_cpu - before.server_cpu,
            self.requests - before.requests,
            self.received - before.received,
            self.sent - before.sent,
            self.reads - before.reads,
        )


@dataclass
class _Counters:
    """Counters of one connection.

    :ivar ours: whether a watched process has it open
    """

    requests: int = 0
    received: int = 0
    sent: int = 0
    ours: bool = False


@dataclass
class Watch:
    """Observe processes at intervals until the block ends; connections that live between two looks are missed.

    :ivar processes: the processes, by name
    :ivar nodes: nodes whose connections are counted; empty: only memory and CPU are measured
    :ivar keyspaces: keyspaces whose reads are counted
    :ivar interval_s: seconds between two looks; each look takes some 0.1 s of CPU
    :ivar peak_mb: the largest memory (proportional set size) of a process and its children together, by name
    """

    processes: Mapping[str, ServerProcess]
    nodes: Sequence[CassandraNode] = ()
    keyspaces: frozenset[str] = frozenset()
    interval_s: float = 2.0
    peak_mb: dict[str, float] = field(default_factory=dict)
    _connections: dict[Connection, _Counters] = field(default_factory=dict)
    _clusters: list[Any] = field(default_factory=list)
    _sessions: dict[str, Any] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        for node in self.nodes:
            cluster = node.cluster(connect_timeout=60)
            self._clusters.append(cluster)
            self._sessions[node.contact_point] = cluster.connect()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for cluster in self._clusters:
            cluster.shutdown()

    def cost(self) -> Cost:
        """Return the resources used until now."""
        self._look()
        ours = [counters for counters in self._connections.values() if counters.ours]
        return Cost(
            {name: cpu_seconds(process.pid) for name, process in self.processes.items()},
            sum(cpu_seconds(node.pid) for node in self.nodes),
            sum(counters.requests for counters in ours),
            sum(counters.received for counters in ours),
            sum(counters.sent for counters in ours),
            self._reads(),
        )

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            self._look()

    def _look(self) -> None:
        with self._lock:
            pids = {name: session_members(process.pid) for name, process in self.processes.items()}
            for name, members in pids.items():
                self.peak_mb[name] = max(self.peak_mb.get(name, 0.0), sum(map(memory_mb, members)))
            if self.nodes:
                self._look_at_connections({pid for members in pids.values() for pid in members})

    def _look_at_connections(self, ours: set[int]) -> None:
        for connection, pids, received, sent in open_connections(self.nodes[0].port):
            counters = self._connections.setdefault(connection, _Counters())
            counters.received, counters.sent = max(counters.received, received), max(counters.sent, sent)
            counters.ours = counters.ours or not pids.isdisjoint(ours)
        for address, session in self._sessions.items():
            try:
                clients = list(session.execute("SELECT port, request_count FROM system_views.clients"))
            except Exception as error:  # a busy node; the next look finds its counts
                print(f"clients of {address}: {error}", flush=True)
                continue
            for row in clients:
                counters = self._connections.setdefault((address, row.port), _Counters())
                counters.requests = max(counters.requests, row.request_count)

    def _reads(self) -> int:
        total = 0
        for session in self._sessions.values():
            for view in LATENCIES:
                rows = session.execute(f"SELECT * FROM system_views.{view}")
                total += sum(row.count for row in rows if row.keyspace_name in self.keyspaces)
        return total


def open_connections(port: int) -> list[tuple[Connection, set[int], int, int]]:
    """List the open connections of clients on this machine to a port: node and client's port, pids, bytes in and out.

    :returns: empty if there is no ``ss`` (iproute2)
    """
    try:
        printed = subprocess.run(
            ["ss", "-HtinpO", "state", "established", "dport", "=", f":{port}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        ).stdout
    except FileNotFoundError:
        return []
    found = []
    for line in printed.splitlines():
        fields = line.split()
        local, peer = fields[2].rpartition(":"), fields[3].rpartition(":")
        pids = {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
        counts = {key: int(value) for key, value in re.findall(r"(bytes_received|bytes_sent):(\d+)", line)}
        connection = (peer[0].removeprefix("[::ffff:").strip("[]"), int(local[2]))
        found.append((connection, pids, counts.get("bytes_received", 0), counts.get("bytes_sent", 0)))
    return found


def memory_mb(pid: int) -> float:
    """Return the memory of a process; memory that it shares with others counts in equal parts. 0: it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Ask every second until a condition holds.

    :param what: the condition in words, for the message
    :param done: function that tells whether it holds
    :raises ServerError: it does not hold in time
    """
    if not is_in_time(done, seconds):
        raise ServerError(f"{what}: not after {seconds:.0f} s")


def is_in_time(done: Callable[[], bool], seconds: float) -> bool:
    """Ask every second until a condition holds or the time is over; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True
