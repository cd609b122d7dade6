"""Executes what ``inspect --format cql`` prints, as of the second in which the changes were made."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from cassandra.protocol import QueryMessage, _ProtocolHandler

_TTL = re.compile(r" USING TIMESTAMP -?\d+ AND TTL (\d+) /\* expires_at (\d+) \*/")
_NOW_IN_SECONDS = 0x100
"""Flag of a QUERY (native_protocol_v5.spec, section 4.1.4)."""


def statements(text: str) -> Iterator[tuple[str, int | None]]:
    """Each line that is no comment, and the second in which its TTL began, if it has one."""
    for line in text.splitlines():
        if not line.startswith("-- "):
            ttl = _TTL.search(line)
            yield line, int(ttl[2]) - int(ttl[1]) if ttl else None


class _WithNow:
    """A QUERY message with ``now_in_seconds``: an expiring cell then gets the TTL and the expiry that it had."""

    def __init__(self, message: QueryMessage, now: int) -> None:
        self._message, self._now = message, now
        self.opcode, self.custom_payload, self.tracing = message.opcode, message.custom_payload, message.tracing

    def send_body(self, f: Any, protocol_version: int) -> None:
        buffer = io.BytesIO()
        self._message.send_body(buffer, protocol_version)
        body = bytearray(buffer.getvalue())
        flags_at = 4 + len(self._message.query.encode()) + 2
        (flags,) = struct.unpack_from(">I", body, flags_at)
        struct.pack_into(">I", body, flags_at, flags | _NOW_IN_SECONDS)
        f.write(bytes(body) + struct.pack(">i", self._now))


def replay(session: Any, text: str) -> int:
    """Execute each line of a text as it is; the number of those that are no comments.

    :param session: of the driver, for this only
    """
    return execute(session, statements(text))


def execute(session: Any, found: Iterable[tuple[str, int | None]]) -> int:
    """Execute statements, each as of the second beside it, if there is one; their number.

    :param session: of the driver, for this only
    """
    moment: list[int | None] = [None]

    class Replaying(_ProtocolHandler):
        @classmethod
        def encode_message(cls, msg: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(msg, QueryMessage) and moment[0] is not None:
                msg = _WithNow(msg, moment[0])
            return super().encode_message(msg, *args, **kwargs)

    session.client_protocol_handler = Replaying
    count = 0
    for statement, now in found:
        moment[0] = now
        try:
            session.execute(statement)
        except Exception as error:
            raise AssertionError(f"the server refuses: {statement[:3000]}") from error
        count += 1
    return count
