"""Damage indexes at random and read them, in a process of its own: a crash, a hang or another error ends it.

``python -m tests.formats.sstable.fuzz_indexes SEED COUNT``
"""

from __future__ import annotations

import faulthandler
import math
import sys
from collections import Counter
from random import Random
from typing import Any

import numpy as np

from ringsync.formats.sstable import index, tries
from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.partitions import read_partitions
from ringsync.formats.sstable.source import Source
from tests.formats.commitlog import guarded
from tests.formats.sstable.files import Changed, sources_of
from tests.formats.sstable.trie_writer import random_trie

SECONDS = 20
"""Most time for a file of some kilobytes on a busy machine."""


class Guarded:
    """NumPy, but new arrays lie in guarded memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: int | tuple[int, ...], kind: type[np.generic]) -> Any:
        size = shape if isinstance(shape, int) else math.prod(shape)
        return guarded.array(size, kind).reshape(shape) if size else np.empty(shape, kind)


def damaged(random: Random, content: bytes) -> bytes:
    """Some bytes changed, often near the end, where a trie begins; sometimes cut off."""
    made = bytearray(content[: random.choice((len(content), len(content), random.randrange(1, len(content))))])
    for _ in range(random.randrange(1, 4)):
        near = len(made) - min(random.randrange(1, 30), len(made))
        place = random.choice((random.randrange(len(made)), near))
        made[place] = random.choice((0, 1, 0x40, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(made)


def inputs(random: Random) -> list[tuple[str, str, Source, bytes]]:
    """Name, component, its SSTable, and its sound bytes."""
    found: list[tuple[str, str, Source, bytes]] = []
    for fixture, component in (("4.1-nb", "Index.db"), ("5.0-da", "Partitions.db"), ("5.0-da", "Rows.db")):
        for table in ("files.narrow", "files.plain", "workload.natives"):
            for source in sources_of(fixture, table, "flushed"):
                if content := source.read(component):
                    found.append((component, component, source, content))
    (source,) = sources_of("5.0-da", "files.narrow", "compacted")
    for count in (1, 40, 300):
        found.append(("all_types_of_nodes", "Partitions.db", source, random_trie(random, count).content))
    return found


def main() -> int:
    """Damage and read files; print how many of each were refused."""
    random, count = Random(int(sys.argv[1])), int(sys.argv[2])
    for module in (index, tries):
        module.np, module.padded = Guarded(), guarded.padded  # type: ignore[attr-defined]
    every, refused = inputs(random), Counter[str]()
    names = sorted({name for name, *_ in every})
    for number in range(count):
        name, component, source, content = random.choice([one for one in every if one[0] == names[number % len(names)]])
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        changed = damaged(random, content)
        try:
            found = read_partitions(Changed(source, {component: changed}), DataFile(source).length, step_bytes=1)
        except SSTableError:
            refused[name] += 1
        else:
            assert found.positions[0] == 0
            assert (np.diff(found.positions) > 0).all()
        faulthandler.cancel_dump_traceback_later()
    for name in names:
        print(name, refused[name])
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
