"""A protocol handler for scans: result pages stay bytes, and all pages are read as of one moment.

The driver's public hook is ``Session.client_protocol_handler``. The classes here extend the pure Python handler, since
the compiled one decodes every cell and breaks on TTLs of collections.
"""

from __future__ import annotations

import io
import struct
from threading import Lock
from typing import Any, BinaryIO

from cassandra.cluster import Session
from cassandra.protocol import ExecuteMessage, ResultMessage, _ProtocolHandler

from ringsync.cluster.page_size import PageSize, PageSizes

NOW_SINCE = 5
"""First protocol version with ``now_in_seconds``."""

_NOW_IN_SECONDS = 0x100
"""Flag of a QUERY or EXECUTE: an int32 of seconds since the epoch follows (native_protocol_v5.spec, section 4.1.4)."""


class RawPage(ResultMessage):  # type: ignore[misc]
    """A result whose rows are not decoded: ``parsed_rows`` is the one-element list of the page's bytes.

    The bytes are ``<rows_count><rows_content>`` (native_protocol_v5.spec, section 4.2.5.2): an int32, then the cells
    row by row, each an int32 length (-1: null) and that many bytes.
    """

    def recv_results_rows(
        self,
        f: io.BytesIO,
        protocol_version: int,
        user_type_map: Any,
        result_metadata: Any,
        column_encryption_policy: Any,
    ) -> None:
        """Read the metadata (paging state) and keep the rows as bytes."""
        self.recv_results_metadata(f, user_type_map)
        columns = self.column_metadata or result_metadata
        self.column_names = [column[2] for column in columns]
        self.column_types = [column[3] for column in columns]
        # The driver reads from a BytesIO over the message: getvalue() is the message itself, not a copy.
        self.parsed_rows = [memoryview(f.getvalue())[f.tell() :]]


class _WithNow:
    """An EXECUTE message with ``now_in_seconds``, which the driver itself cannot send."""

    def __init__(self, message: ExecuteMessage, now: int) -> None:
        self._message = message
        self._now = now
        self.opcode = message.opcode
        self.custom_payload = message.custom_payload
        self.tracing = message.tracing

    def send_body(self, f: BinaryIO, protocol_version: int) -> None:
        """Write the driver's body with the flag set and the moment appended, as the last optional field."""
        buffer = io.BytesIO()
        self._message.send_body(buffer, protocol_version)
        body = bytearray(buffer.getvalue())
        flags_at = 2 + len(self._message.query_id) + 2 + len(self._message.result_metadata_id) + 2
        (flags,) = struct.unpack_from(">I", body, flags_at)
        struct.pack_into(">I", body, flags_at, flags | _NOW_IN_SECONDS)
        f.write(bytes(body) + struct.pack(">i", self._now))


def scan_protocol(now: int | None) -> type[_ProtocolHandler]:
    """Make a protocol handler class for ``Session.client_protocol_handler`` that gives pages as bytes.

    :param now: moment as of which prepared SELECTs see expiry and compute ``TTL()``, seconds since the epoch. So
        ``now + TTL(c)`` is the exact expiry, however long a scan takes. Needs protocol v5. None: the server's clock
    """

    class ScanProtocol(_ProtocolHandler):  # type: ignore[misc]
        message_types_by_opcode = {  # noqa: RUF012
            **_ProtocolHandler.message_types_by_opcode,
            RawPage.opcode: RawPage,
        }

        @classmethod
        def encode_message(cls, msg: Any, *args: Any, **kwargs: Any) -> Any:
            if now is not None and msg.opcode == ExecuteMessage.opcode:
                msg = _WithNow(msg, now)
            return super().encode_message(msg, *args, **kwargs)

    return ScanProtocol


class RawSession:
    """A session whose pages are bytes, for reads as of any moment (:class:`SessionAt`).

    :param session: session of the driver, for exclusive use
    :param plain: another one of the same cluster, whose rows are decoded
    """

    def __init__(self, session: Session, plain: Session) -> None:
        self.session, self.plain = session, plain
        self.lock = Lock()
        self.statements: dict[str, Any] = {}
        self.facts: dict[Any, Any] = {}
        self.sizes = PageSizes(PageSize)


class SessionAt:
    """The part of a driver's session that scans use; it reads as of one moment.

    Several instances may share connections, in several threads.

    :ivar now: moment of the reads, s since the epoch; None: the server's clock at each read
    :ivar reads_as_of: whether the server reads as of this moment. With protocol v4 (Scylla) it goes by its clock: then
        ``now`` is only what the caller makes of it
    :ivar statements: cache of statements prepared on these connections, by CQL
    :ivar facts: cache of what the server can do, and does not permit
    :ivar sizes: how large pages may be
    :ivar plain: session of the same cluster, whose rows are decoded
    :ivar coordinators: the driver's hosts that have answered with pages since somebody looked
    """

    def __init__(self, raw: RawSession, now: int | None) -> None:
        self.now = now
        self.reads_as_of = now is not None and raw.session.cluster.protocol_version >= NOW_SINCE
        self._raw = raw
        self._protocol = scan_protocol(now if self.reads_as_of else None)
        self.statements = raw.statements
        self.facts = raw.facts
        self.sizes = raw.sizes
        self.plain = raw.plain
        self.coordinators: set[Any] = set()

    def prepare(self, cql: str) -> Any:
        """Do the driver's ``prepare``."""
        return self._raw.session.prepare(cql)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        """Do the driver's ``execute``."""
        return self.execute_async(*arguments, **options).result()

    def execute_async(self, *arguments: Any, **options: Any) -> Any:
        """Do the driver's ``execute_async``."""
        # The driver takes the handler from the session once, when it makes the request.
        with self._raw.lock:
            self._raw.session.client_protocol_handler = self._protocol
            return self._raw.session.execute_async(*arguments, **options)
