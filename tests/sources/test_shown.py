"""What SELECT shows of the images of SSTables of real servers, whatever pieces they come in."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from ringsync.formats.sstable.sstables import merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.images.keys import binary_digests
from ringsync.images.live import live_rows, live_schema, selected_rows, shown_rows
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.scan.shown import Shown
from tests.formats.sstable.files import sources_of, table_of, unpacked
from tests.sstables.fixtures import FIXTURES

NAME = "5.0-oa"
MOMENT = int(FIXTURES[NAME].selected["moment"])


def names() -> list[str]:
    folders = unpacked(NAME).glob("*/*/snapshots/flushed")
    return sorted({f"{folder.parts[-4]}.{folder.parts[-3][:-33]}" for folder in folders})


def rows_of(batches: list[pa.RecordBatch]) -> list[bytes]:
    """Digests of the rows: Python has no name for some dates."""
    return sorted(digest for batch in batches for digest in binary_digests(batch).to_pylist())


@pytest.mark.parametrize("name", names())
def test_pieces_show_what_the_whole_shows(name: str) -> None:
    sources = sources_of(NAME, name, "flushed")
    table = table_of(sources[0].descriptor)
    sstables = [open_sstable(source, table) for source in sources]
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(WHOLE_RING)]
    images = [images_of_part(part, table, "raw") for part in merged_rows(parts, table, lambda loss: None)]
    (whole,) = pa.Table.from_batches(images).combine_chunks().to_batches()
    for moment in (MOMENT, MOMENT + 10**9):
        expected = rows_of([batch.cast(shown_schema(table)) for batch in shown_rows([whole], table, moment)])
        for seed in range(1):
            shown, pieces, chance = Shown(table, moment), [], random.Random(seed)
            start = 0
            while start < whole.num_rows:
                size = chance.choice([1, 2, 5, 1000])
                pieces.append(shown.of(whole.slice(start, size)))
                start += size
            pieces.append(shown.end())
            tokens = [token for piece in pieces for token in piece["token"].to_pylist()]
            assert tokens == sorted(tokens)
            found = [selected_rows(piece, table, moment) for piece in pieces if piece.num_rows]
            assert rows_of([batch.cast(shown_schema(table)) for batch in found]) == expected


def shown_schema(table: Any) -> pa.Schema:
    return pa.schema([field for field in live_schema(table) if not field.name.startswith("#")])


def test_a_partition_of_static_cells_and_dead_rows_is_shown_wherever_images_are_cut() -> None:
    sources = sources_of(NAME, "shop.orders", "flushed")
    table = table_of(sources[0].descriptor)
    sstables = [open_sstable(source, table) for source in sources]
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(WHOLE_RING)]
    images = [images_of_part(part, table, "raw") for part in merged_rows(parts, table, lambda loss: None)]
    (whole,) = pa.Table.from_batches(images).combine_chunks().to_batches()
    live, rows = live_rows(whole, table, MOMENT), whole.to_pylist()
    alive, static = live["#alive"].to_pylist(), live["#static"].to_pylist()
    key = [column.name for column in table.partition_key]
    shared = [*key, *(column.name for column in table.of_kind("static"))]
    partitions = [[row[name] for name in key] for row in rows]
    shows_rows = {repr(one) for one, shown in zip(partitions, alive, strict=True) if shown}
    place = next(at for at, one in enumerate(partitions) if static[at] and repr(one) not in shows_rows)
    dead = next(row for row, shown in zip(rows, alive, strict=True) if not shown and row[table.clustering[0].name])
    # No table of the servers has such a partition: a row that was deleted comes behind the static cells.
    placed = {**dead, **{name: rows[place][name] for name in ("token", *shared)}}
    placed["_x"] = {**(dead["_x"] or {}), **{name: (rows[place]["_x"] or {}).get(name) for name in shared}}
    made = pa.RecordBatch.from_pylist([*rows[: place + 1], placed, *rows[place + 1 :]], whole.schema)
    assert not live_rows(made, table, MOMENT)["#alive"][place + 1].as_py()
    expected = sum(batch.num_rows for batch in shown_rows([made], table, MOMENT))
    for cut in range(len(made) + 1):
        shown = Shown(table, MOMENT)
        found = [shown.of(made.slice(0, cut)), shown.of(made.slice(cut)), shown.end()]
        assert sum(piece.num_rows for piece in found) == expected, cut
