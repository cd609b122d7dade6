"""What SELECT shows of the images of SSTables of real servers, whatever pieces they come in."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from ringsync.formats.sstable.sstables import merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.images.keys import binary_digests
from ringsync.images.live import live_schema, selected_rows, shown_rows
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
