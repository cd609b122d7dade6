"""What dividing and opening large SSTables costs, without files of that size: ``python bench/sstable_plan.py 3``.

Terabytes (uncompressed) of a table are divided over tasks by what workers have remembered of the indexes: SSTables of
100 GB, of three replicas, and of 160 MB, as with leveled compaction. Then a part of 6 MB of an SSTable of 100 GB is
read as far as it says where its chunks are. A line of JSON has seconds of CPU, and what the process keeps in memory.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import numpy as np

from ringsync.formats.sstable.compression import read_chunks
from ringsync.formats.sstable.names import COMPRESSION, DATA, Descriptor
from ringsync.formats.sstable.partitions import STEP_BYTES, Partitions, from_arrow, to_arrow
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.sstable_files import OutlinedSSTable, split_groups

CHUNK, STORED = 16384, 8000


def resident_mb() -> float:
    """Return the process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def outline(length: int, number: int, width: int) -> Partitions:
    """Return what is remembered of an SSTable of so many bytes; they lie in a part of the ring, by its number."""
    step = max(min(STEP_BYTES, length // 512), 1)
    positions = np.arange(0, length, step, dtype=np.int64)
    first = -(2**63) + number * width % 2**64 // width * width
    last = min(first + width, 2**63 - 1)
    tokens = np.sort(np.random.default_rng(number).integers(first, last, len(positions), np.int64))
    return Partitions(tokens, tokens, positions, int(tokens[-1]), length, is_within=True)


def divided(total: float, size: float, ways: int) -> dict[str, Any]:
    """Divide SSTables of a size, together of a total; each token is in one of so many ``ways``."""
    before, count = resident_mb(), int(total / size)
    batch = to_arrow([outline(int(size), number, 2**64 // ways) for number in range(count)])
    stored_mb = batch.nbytes / 1e6
    kept = [
        OutlinedSSTable("", Descriptor("nb", str(number), "big"), one) for number, one in enumerate(from_arrow(batch))
    ]
    driver_mb, began = resident_mb() - before, time.process_time()
    tasks = split_groups([(kept, WHOLE_RING.unwrap())], WHOLE_RING.unwrap(), 1, 4096)
    read = sum(part.end - part.first for task in tasks for split in task for *_, part in split.parts)
    return {
        "sstables": count,
        "remembered_mb": round(stored_mb),
        "driver_mb": round(driver_mb),
        "cpu_s": round(time.process_time() - began, 2),
        "tasks": len(tasks),
        "parts": sum(len(split.parts) for task in tasks for split in task),
        "read_more_percent": round(100 * (read / total - 1), 1),
    }


class Sparse:
    """A compressed SSTable of many bytes, of which only the places of chunks exist."""

    descriptor = Descriptor("nb", "1", "big")

    def __init__(self, length: int) -> None:
        self._count, self.read_bytes = -(-length // CHUNK), 0
        head = b"\x00\x0dLZ4Compressor" + struct.pack(">iii", 0, CHUNK, 2**31 - 1)
        self._head = head + struct.pack(">qi", length, self._count)

    def size(self, component: str) -> int | None:
        """Return the size of a file."""
        return {DATA: STORED * self._count, COMPRESSION: len(self._head) + 8 * self._count}.get(component)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        """Make some bytes of CompressionInfo.db."""
        self.read_bytes += length
        first = max((start - len(self._head)) // 8, 0)
        places = np.arange(first, min(first + length // 8 + 2, self._count), dtype=np.int64) * STORED
        behind = places.astype(">i8").tobytes()
        head = self._head[start:] if start < len(self._head) else b""
        skipped = 0 if head else (start - len(self._head)) % 8
        return (head + behind[skipped:])[:length]


def opened() -> dict[str, Any]:
    """Look up the chunks of a part of 6 MB."""
    source: Any = Sparse(100 * 10**9)
    before, began = resident_mb(), time.process_time()
    chunks = read_chunks(source)
    known = chunks.places(3_000_000)
    assert int(known.starts[0]) == known.first * STORED
    assert known.end >= 3_000_391
    return {
        "chunks": chunks.count,
        "read_kb": round(source.read_bytes / 1e3),
        "kept_mb": round(resident_mb() - before, 1),
        "cpu_s": round(time.process_time() - began, 3),
    }


if __name__ == "__main__":
    total = float(sys.argv[1] if len(sys.argv) > 1 else 3) * 1e12
    for size, ways in ((100e9, 1), (160e6, 1000)):
        print(json.dumps(divided(total, size, ways)))
    print(json.dumps(opened()))
