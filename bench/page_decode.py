"""Compare the decoding of result pages to Arrow: our decoder and the driver's own, on the same bytes, on one core.

``python bench/page_decode.py`` prints one BENCHMARK_RESULT line. The driver decodes to Python rows, as its users get
them; the time to turn these into Arrow is not counted. Several pages are decoded together, as in a scan.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from cassandra.protocol import ProtocolHandler, ResultMessage, _ProtocolHandler, write_int, write_short, write_string

from ringsync.cql.types import Native
from ringsync.formats.page_columns import decode_pages
from ringsync.sources.scan.images import PAGES_AT_ONCE

ROWS, PAGE_ROWS = 1_000_000, 5_000
REPEATS = 3
ROWS_RESULT, PROTOCOL_VERSION = 2, 4

COLUMNS: dict[str, tuple[str, int, Callable[[int], bytes]]] = {
    "id": ("text", 0x0D, lambda i: b"customer-%d" % (i // 5)),
    "seq": ("int", 0x09, lambda i: struct.pack(">i", i % 5)),
    "n": ("int", 0x09, lambda i: struct.pack(">i", i * 7 % 2**31)),
    "amount": ("bigint", 0x02, lambda i: struct.pack(">q", i * 1_000_003)),
    "name": ("text", 0x0D, lambda i: b"name number %d" % (i % 1000)),
    "ts": ("timestamp", 0x0B, lambda i: struct.pack(">q", 1_700_000_000_000 + i)),
    "score": ("double", 0x07, lambda i: struct.pack(">d", i / 3)),
    "ref": ("uuid", 0x0C, lambda i: struct.pack(">QQ", i * 0x9E3779B97F4A7C15 % 2**64, i * 0xC2B2AE3D27D4EB4F % 2**64)),
}
"""Column: CQL type, type code of the native protocol (native_protocol_v5.spec, section 4.2.5.2), value of row i."""


def page(first_row: int) -> bytes:
    """Make the body of one page: row count, then length and bytes of each cell."""
    parts = [struct.pack(">i", PAGE_ROWS)]
    for row in range(first_row, first_row + PAGE_ROWS):
        for _, _, value in COLUMNS.values():
            raw = value(row)
            parts += (struct.pack(">i", len(raw)), raw)
    return b"".join(parts)


def message_start() -> bytes:
    """Make the beginning of a RESULT message, before the page: its kind and the columns' metadata."""
    start = io.BytesIO()
    write_int(start, ROWS_RESULT)
    write_int(start, 1)  # one table for all columns
    write_int(start, len(COLUMNS))
    write_string(start, "shop")
    write_string(start, "orders")
    for name, (_, code, _) in COLUMNS.items():
        write_string(start, name)
        write_short(start, code)
    return start.getvalue()


def ours(pages: list[bytes]) -> int:
    types = [Native(name) for name, _, _ in COLUMNS.values()]
    rows = 0
    for first in range(0, len(pages), PAGES_AT_ONCE):
        found = decode_pages(pages[first : first + PAGES_AT_ONCE], types)
        rows += min(found.rows, *(len(column.values) for column in found.decoded))
    return rows


def drivers(handler: Any, pages: list[bytes]) -> int:
    start = message_start()
    rows = 0
    for body in pages:
        message = handler.decode_message(PROTOCOL_VERSION, {}, 0, 0, ResultMessage.opcode, start + body, None, None)
        rows += len(message.parsed_rows)
    return rows


def fastest(decoder: Callable[[], int], expected_rows: int) -> float:
    """Measure rows per second of processor time, in the fastest of some runs."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        rows = decoder()
        times.append(time.process_time() - begin)
        if rows != expected_rows:
            raise SystemExit(f"decoded {rows} rows of {expected_rows}")
    return expected_rows / min(times)


def check(body: bytes) -> None:
    """Check that both decoders give the same values."""
    message = _ProtocolHandler.decode_message(
        PROTOCOL_VERSION, {}, 0, 0, ResultMessage.opcode, message_start() + body, None, None
    )
    decoded = decode_pages([body], [Native(kind) for kind, _, _ in COLUMNS.values()]).decoded
    for place, (kind, _, _) in enumerate(COLUMNS.values()):
        values = decoded[place].values
        theirs = [row[place] for row in message.parsed_rows]
        if kind == "timestamp":
            values = values.cast("timestamp[us]")
        if [str(value) for value in values.to_pylist()] != [str(value) for value in theirs]:
            raise SystemExit(f"the driver decodes {kind} differently")


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pages = [page(first) for first in range(0, ROWS, PAGE_ROWS)]
    check(pages[0])
    some = pages[: len(pages) // 5]
    our_rate = fastest(lambda: ours(pages), ROWS)
    driver_rate = fastest(lambda: drivers(ProtocolHandler, some), len(some) * PAGE_ROWS)
    size = sum(map(len, pages))
    print(
        f"BENCHMARK_RESULT | scenario=page_decode rows={ROWS} columns={len(COLUMNS)} bytes={size} "
        f"rowsPerSec={our_rate:.0f} megabytesPerSec={our_rate / ROWS * size / 1e6:.0f} "
        f"driverRowsPerSec={driver_rate:.0f} ratio={our_rate / driver_rate:.1f} "
        f"driver=cassandra-driver/{'cython' if ProtocolHandler is not _ProtocolHandler else 'python'} "
        f"types={','.join(kind for kind, _, _ in COLUMNS.values())}"
    )


if __name__ == "__main__":
    main()
