"""A stand-in for a ScyllaDB node: a proxy before a real Cassandra node, for clients that speak native protocol v4.

It looks at requests only. Each result is what Cassandra answers, as it came. What it cannot show is in
``tests/scylla_server/README.md``.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cassandra.cluster import Session

from servers.cassandra import CassandraNode
from servers.ports import free_port
from tests.scylla_server import frames
from tests.scylla_server.ddl import comment_with, comment_without, keyspace_statement, table_statement
from tests.scylla_server.frames import Frame, Refusal
from tests.scylla_server.rewrite import SCHEMA, Rules, reads_schema, rewrite
from tests.scylla_server.schema import StandInSchema
from tests.scylla_server.tokens import without_literals

After = Callable[[Frame], None]


@dataclass
class Requests:
    """What clients have asked for since :meth:`clear`.

    :ivar by_kind: number of requests by kind: ``QUERY``, ``EXECUTE``, …
    :ivar by_statement: number of executions by statement as the client wrote it, with ``?`` for literals
    :ivar refused: statements that were refused, with the reason
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    by_statement: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        """Count from zero."""
        with self._lock:
            self.by_kind.clear()
            self.by_statement.clear()
            self.refused.clear()

    def note(self, kind: str, statements: Sequence[str] = ()) -> None:
        """Count a request."""
        with self._lock:
            self.by_kind[kind] += 1
            self.by_statement.update(without_literals(text) for text in statements)

    def note_refusal(self, statement: str, reason: str) -> None:
        """Note a statement that was refused."""
        with self._lock:
            self.refused.append((statement, reason))


class StandIn:
    """A running stand-in. Use :func:`scylla_stand_in`.

    :ivar host: address for clients
    :ivar port: port for clients
    :ivar requests: what they asked for
    :ivar schema: the stand-in's keyspaces
    """

    def __init__(
        self, node: CassandraNode, port: int, session: Session, schema: StandInSchema, options: StandInOptions
    ) -> None:
        self.host, self.port, self.node = node.contact_point, port, node
        self.requests, self.schema, self.options = Requests(), schema, options
        self._session = session
        self.rules = Rules(
            schema.keyspace,
            options.element_times,
            options.lwt_with_tablets,
            schema.column_type,
            schema.has_tablets,
        )
        self.prepared: dict[bytes, str] = {}
        self._sockets: set[socket.socket] = set()
        self._server = socket.create_server((self.host, port), backlog=256)
        self._accepting = threading.Thread(target=self._accept, name=f"scylla-{port}", daemon=True)
        self._accepting.start()

    def session(self) -> Session:
        """Return a session on the Cassandra node itself; the stand-in shuts it down at its end."""
        return self._session

    def close(self) -> None:
        """End all connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End the connections of all clients, as a node does that is restarted."""
        for one in list(self._sockets):
            _shut(one)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((self.host, self.node.port))
            except OSError:
                _shut(client)  # the node is down: so is the stand-in
                client.close()
                continue
            self._sockets |= {client, server}
            connection = _Connection(self, client, server)
            for name, work in (("requests", connection.requests), ("answers", connection.answers)):
                threading.Thread(target=work, name=f"scylla-{name}", daemon=True).start()

    def forget(self, one: socket.socket) -> None:
        """Forget a socket that was closed."""
        self._sockets.discard(one)


@dataclass(frozen=True)
class StandInOptions:
    """What kind of ScyllaDB this is.

    :ivar shards: shards of the node
    :ivar ignore_msb: its sharding_ignore_msb
    :ivar element_times: whether WRITETIME and TTL of collections are allowed (2026.2)
    :ivar lwt_with_tablets: whether conditional writes are allowed in keyspaces with tablets (2025.4)
    :ivar tablets_by_default: whether a new keyspace with NetworkTopologyStrategy has tablets unless it says otherwise
    """

    shards: int = 2
    ignore_msb: int = 12
    element_times: bool = False
    lwt_with_tablets: bool = False
    tablets_by_default: bool = True

    def supported(self, shard: int) -> dict[str, list[str]]:
        """Return the options of SUPPORTED, for a connection to a shard."""
        return {
            "CQL_VERSION": ["3.3.1"],
            "COMPRESSION": [],
            "SCYLLA_SHARD": [str(shard)],
            "SCYLLA_NR_SHARDS": [str(self.shards)],
            "SCYLLA_SHARDING_ALGORITHM": ["biased-token-round-robin"],
            "SCYLLA_SHARDING_IGNORE_MSB": [str(self.ignore_msb)],
            "SCYLLA_PARTITIONER": ["org.apache.cassandra.dht.Murmur3Partitioner"],
        }


class _Connection:
    """One client's connection, and ours to Cassandra on its behalf."""

    _shards = itertools.count()

    def __init__(self, owner: StandIn, client: socket.socket, server: socket.socket) -> None:
        self._owner, self._client, self._server = owner, client, server
        self._shard = next(self._shards) % owner.options.shards
        self._lock = threading.Lock()
        self._after: dict[int, After] = {}

    def requests(self) -> None:
        """Pass on the client's requests, until it goes."""
        while (frame := frames.read_frame(self._client)) is not None:
            if frame.version > frames.VERSION:
                message = f"Invalid or unsupported protocol version: {frame.version}"
                self._tell(frame.answer(frames.ERROR, Refusal(message, frames.PROTOCOL_ERROR).body()))
                break
            try:
                changed = self._changed(frame)
            except Refusal as refusal:
                self._tell(frame.answer(frames.ERROR, refusal.body()))
                continue
            except Exception as error:
                message = f"the stand-in failed: {type(error).__name__}: {error}"
                self._tell(frame.answer(frames.ERROR, Refusal(message, frames.SERVER_ERROR).body()))
                continue
            if changed is not None and not _send(self._server, changed.encode()):
                break
        self._end()

    def answers(self) -> None:
        """Pass on Cassandra's answers, until it goes."""
        while (frame := frames.read_frame(self._server)) is not None:
            if frame.opcode == frames.EVENT:
                frame = frames.event_from_port(frame, self._owner.port)
            elif (after := self._after.pop(frame.stream, None)) and frame.opcode == frames.RESULT:
                try:
                    after(frame)
                except Exception as error:
                    message = f"the stand-in failed after the statement: {type(error).__name__}: {error}"
                    body = Refusal(message, frames.SERVER_ERROR).body()
                    frame = Frame(frame.version, 0, frame.stream, frames.ERROR, body)
            if not self._tell(frame):
                break
        self._end()

    def _end(self) -> None:
        for one in (self._client, self._server):
            _shut(one)
            self._owner.forget(one)

    def _tell(self, frame: Frame) -> bool:
        with self._lock:
            return _send(self._client, frame.encode())

    def _changed(self, frame: Frame) -> Frame | None:
        """Return the request for Cassandra; None: it is answered already."""
        requests, kind = self._owner.requests, frames.KINDS.get(frame.opcode, str(frame.opcode))
        if frame.opcode == frames.OPTIONS:
            requests.note(kind)
            self._tell(frame.answer(frames.SUPPORTED, frames.multimap(self._owner.options.supported(self._shard))))
            return None
        if frame.opcode in (frames.QUERY, frames.PREPARE):
            text, rest = frames.split_text(frame.body)
            requests.note(kind, [text] if frame.opcode == frames.QUERY else [])
            new = self._rewritten(text, frame.stream)
            if frame.opcode == frames.PREPARE:
                self._after[frame.stream] = lambda answer: self._keep(answer, text)
            return frame.with_body(frames.join_text(new, rest))
        if frame.opcode == frames.EXECUTE:
            text = self._owner.prepared.get(frames.short_bytes(frame.body), "unknown")
            requests.note(kind, [text])
            if reads_schema(text):
                self._owner.schema.refresh()
            return frame
        if frame.opcode == frames.BATCH:
            return self._batch(frame)
        requests.note(kind)
        return frame

    def _batch(self, frame: Frame) -> Frame:
        kind, parts, rest = frames.split_batch(frame.body)
        texts = [
            self._owner.prepared.get(part.prepared, "unknown") if part.text is None else part.text for part in parts
        ]
        self._owner.requests.note("BATCH", texts)
        new = [
            part if part.text is None else frames.BatchPart(self._rewritten(part.text, frame.stream), b"", part.values)
            for part in parts
        ]
        return frame.with_body(frames.join_batch(kind, new, rest))

    def _keep(self, answer: Frame, text: str) -> None:
        if (prepared := frames.prepared_id(answer)) is not None:
            self._owner.prepared[prepared] = text

    def _rewritten(self, text: str, stream: int) -> str:
        """Rewrite a statement, and do what must be done before it."""
        try:
            new = rewrite(text, self._owner.rules)
            new = self._keyspace_ddl(self._table_ddl(new, stream), stream)
        except Refusal as refusal:
            self._owner.requests.note_refusal(text, str(refusal))
            raise
        if reads_schema(text):
            self._owner.schema.refresh()
        return new

    def _table_ddl(self, text: str, stream: int) -> str:
        if (statement := table_statement(text)) is None:
            return text
        schema, name = self._owner.schema, (statement.keyspace, statement.table)
        known = schema.cdc_options(*name)
        if statement.verb == "drop":
            if known is not None:
                self._after[stream] = lambda _: schema.drop_log(*name)
            return text
        self._after[stream] = lambda _: schema.follow(*name)
        if statement.cdc is not None:
            own, _ = comment_without(schema.comment(*name) or "")
            # ALTER TABLE begins with the defaults again: it does not keep what it does not name.
            return statement.with_comment(comment_with(statement.cdc, own))
        if statement.has_comment and known is not None:
            raise Refusal("the stand-in keeps cdc options in the comment: it cannot change", frames.SYNTAX_ERROR)
        return statement.cql

    def _keyspace_ddl(self, text: str, stream: int) -> str:
        if (statement := keyspace_statement(text)) is None:
            return text
        options, schema = self._owner.options, self._owner.schema
        if statement.verb != "create":
            return statement.cql
        wanted = statement.tablets
        if wanted is None:
            wanted = options.tablets_by_default and statement.is_network_topology
        self._after[stream] = lambda _: schema.set_tablets(statement.keyspace, wanted)
        return statement.cql


def _send(target: socket.socket, data: bytes) -> bool:
    try:
        target.sendall(data)
    except OSError:
        return False
    return True


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@contextmanager
def scylla_stand_in(node: CassandraNode, **options: Any) -> Iterator[StandIn]:
    """Run a stand-in before a node, during the block.

    :param options: fields of :class:`StandInOptions`
    """
    with scylla_stand_ins([node], **options) as (stand_in,):
        yield stand_in


@contextmanager
def scylla_stand_ins(nodes: Sequence[CassandraNode], **options: Any) -> Iterator[list[StandIn]]:
    """Run a stand-in before each node of a cluster, at the nodes' addresses and one port: a client finds all of them.

    :param nodes: nodes of one cluster that run
    :param options: fields of :class:`StandInOptions`
    """
    port = free_port(nodes[0].contact_point)
    with ExitStack() as stack:
        found = []
        for number, node in enumerate(nodes):
            cluster = node.cluster()
            stack.callback(cluster.shutdown)
            name = SCHEMA if number == 0 else f"{SCHEMA}_{number + 1}"
            session = cluster.connect()
            schema = StandInSchema(session, name, len(nodes))
            found.append(StandIn(node, port, session, schema, StandInOptions(**options)))
            stack.callback(found[-1].close)
        yield found


def statements_of(requests: Requests) -> Mapping[str, int]:
    """Return how often each statement was executed."""
    return dict(requests.by_statement)
