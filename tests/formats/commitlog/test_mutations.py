"""Tests of mutations that servers seldom write: they decode to what the tests' writer wrote, and as in the model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.compiled.memory import padded
from ringsync.formats.commitlog.reader import Changes, read_changes
from ringsync.formats.commitlog.records import Records
from ringsync.formats.rows.state import Capacity
from tests.commitlog_model.mutation import partition_updates
from tests.commitlog_model.write import UpdateWriter, empty_update, mutation, uvint
from tests.formats.commitlog.comparable import Change, of_model, of_package
from tests.formats.commitlog.synthetic import package_tables, tables, updates

TABLES = package_tables()
MODEL_BY_NAME = tables()
MODEL_TABLES = {table.id: table for table in MODEL_BY_NAME.values()}
SMALL = Capacity(rows=2, cells=2, complex=1, bytes=64)


def decode(mutations: list[bytes], capacity: Capacity | None = None) -> list[Changes]:
    """Decode mutations with the positions 1, 2, 3 … to batches."""
    sizes = np.array([len(one) for one in mutations], np.int64)
    ends = np.cumsum(sizes)
    count = np.arange(1, len(mutations) + 1)
    records = Records(ends - sizes, sizes, count, np.ones(len(mutations), np.bool_))
    return list(read_changes(padded(b"".join(mutations)), records, TABLES, "made.log", capacity))


def placed(changes: list[Change], position: int) -> list[Change]:
    return [change | {"position": position} for change in changes]


def by_model(content: bytes) -> list[Change]:
    found = [change for changes in partition_updates(content, MODEL_TABLES) for change in changes]
    return [of_model(change | {"source": {"position": 1}}) for change in found]


@settings(max_examples=100, deadline=None)
@given(st.lists(updates(), min_size=1, max_size=3))
def test_random_mutations_decode_to_what_was_written(written: list[tuple[list[Change], bytes]]) -> None:
    content = mutation([data for _, data in written])
    expected = placed([change for changes, _ in written for change in changes], 1)
    batches = decode([content])
    assert [batch.undecoded.num_rows for batch in batches] == [0]
    assert of_package(batches, TABLES) == expected
    assert by_model(content) == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(updates(), min_size=1, max_size=12))
def test_small_batches_hold_the_same(written: list[tuple[list[Change], bytes]]) -> None:
    mutations = [mutation([data]) for _, data in written]
    expected = [one for i, (changes, _) in enumerate(written, 1) for one in placed(changes, i)]
    batches = decode(mutations, SMALL)
    assert of_package(batches, TABLES) == expected
    assert sum(batch.records for batch in batches) == len(mutations)


def of(name: str, key: bytes = b"k", seed: int = 1) -> Callable[..., bytes]:
    """Return a function from changes to an update of the table."""
    return lambda *changes: UpdateWriter(MODEL_BY_NAME[name], Random(seed)).write(key, changes)


def rows(content: bytes) -> list[Change]:
    """Return the change rows of one mutation, and check that they equal the model's."""
    batches = decode([content])
    assert [batch.undecoded.num_rows for batch in batches] == [0]
    found = of_package(batches, TABLES)
    assert found == by_model(content)
    return found


def outcome(content: bytes) -> str:
    """Return the reason why a mutation is not decoded."""
    (batch,) = decode([content])
    assert batch.rows.num_rows == 0
    (undecoded,) = batch.undecoded.to_pylist()
    assert undecoded["raw"] == content
    return str(undecoded["reason"])


CLUSTERING = ["00000001", "ff", "00" * 16]
DELETION = {"timestamp": 5, "local_deletion_time": 6}


def a_range(start: list[str], end: list[str], deletion: Change, ends: tuple[bool, bool] = (True, True)) -> Change:
    bounds = {
        side: {"raw_clustering": values, "inclusive": inclusive}
        for side, values, inclusive in zip(("start", "end"), (start, end), ends, strict=True)
    }
    return {"kind": "range_deletion", "deletion": deletion, "range": bounds}


@pytest.mark.parametrize("inclusive", [True, False])
def test_a_boundary_ends_one_range_and_begins_the_next(inclusive: bool) -> None:
    other = {"timestamp": -7, "local_deletion_time": 0xFFFFFFFF}
    first = a_range([], CLUSTERING[:1], DELETION, (True, inclusive))
    second = a_range(CLUSTERING[:1], [], other, (not inclusive, True))
    data = of("wide", seed=3)(first, second)
    boundary = bytes([0x02, 5 if inclusive else 2, 0, 1])
    assert boundary in data
    assert [(row["deletion"], row["range"]) for row in rows(mutation([data]))] == [
        (DELETION, first["range"]),
        (other, second["range"]),
    ]


def test_bounds_without_values_cover_the_whole_partition() -> None:
    (row,) = rows(mutation([of("wide")(a_range([], [], DELETION))]))
    assert row["range"]["start"]["raw_clustering"] == row["range"]["end"]["raw_clustering"] == []


@pytest.mark.parametrize("timestamp", [-(2**63) + 1, -1, 0, 1442879999999999, 1442880000000000, 2**63 - 1])
@pytest.mark.parametrize("local_time", [0, 1442879999, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_times_before_2015_and_after_2038(timestamp: int, local_time: int) -> None:
    deletion = {"timestamp": timestamp, "local_deletion_time": local_time}
    liveness = {"timestamp": timestamp, "ttl": 2**31 - 1, "expires_at": local_time}
    row = {"kind": "row", "raw_clustering": [], "liveness": liveness, "deletion": deletion}
    cells = [{"column": "a", "deleted": True, **deletion}, {"column": "b", "raw": "", **liveness}]
    found = rows(mutation([of("flat")({"kind": "partition_deletion", "deletion": deletion}, row | {"cells": cells})]))
    assert found[0]["deletion"] == found[1]["deletion"] == deletion
    assert found[1]["liveness"] == liveness
    assert found[1]["cells"] == cells


@pytest.mark.parametrize("present", [0, 1, 34, 35, 36, 69, 70, 71])
def test_subsets_of_many_columns(present: int) -> None:
    names = [*(f"v{i:02}" for i in range(70)), "mm"]
    cells = [{"column": name, "raw": "00000000", "timestamp": 1} for name in names[:present]]
    cells = [cell | {"raw_path": "00000001"} if cell["column"] == "mm" else cell for cell in cells]
    full = {
        "kind": "row",
        "raw_clustering": ["00000001"],
        "cells": [{"column": name, "raw": "00000000", "timestamp": 1} for name in names[:-1]]
        + [{"column": "mm", "raw": "", "raw_path": "00000001", "timestamp": 1}],
    }
    row = {"kind": "row", "raw_clustering": ["00000002"], **({"cells": cells} if cells else {})}
    for seed in range(6):
        found = rows(mutation([of("many", seed=seed)(full, row)]))
        assert [cell["column"] for cell in found[1].get("cells", [])] == names[:present]


def test_complex_deletions_that_delete_nothing_are_none() -> None:
    """With HAS_COMPLEX_DELETION every complex column has a deletion, most of them LIVE."""
    cells = [{"column": name, "raw": "", "raw_path": "01", "timestamp": 1} for name in ("m", "t")]
    one = {"column": "m", **DELETION}
    row = {"kind": "row", "raw_clustering": [], "cells": cells, "complex_deletions": [one]}
    (found,) = rows(mutation([of("flat")(row)]))
    assert found["complex_deletions"] == [one]
    assert found["cells"] == cells
    for seed in range(20):
        (found,) = rows(mutation([of("flat", seed=seed)({k: v for k, v in row.items() if k != "complex_deletions"})]))
        assert "complex_deletions" not in found


def test_an_update_that_is_empty_and_several_tables() -> None:
    plain = {"kind": "row", "raw_clustering": [], "liveness": {"timestamp": 1}}
    wide = {"kind": "row", "raw_clustering": CLUSTERING, "liveness": {"timestamp": 2}}
    nothing = empty_update(MODEL_BY_NAME["flat"].id, b"key")
    found = rows(mutation([nothing, of("flat")(plain), of("wide")(wide), nothing]))
    assert [row["liveness"]["timestamp"] for row in found] == [1, 2]
    assert rows(mutation([nothing])) == []


def test_a_record_of_a_known_and_an_unknown_table_is_kept_whole() -> None:
    plain = of("flat")({"kind": "row", "raw_clustering": [], "liveness": {"timestamp": 1}})
    unknown = b"unknown table id" + plain[16:]
    good = mutation([plain])
    mixed = mutation([plain, unknown, plain])
    (batch,) = decode([good, mixed, good])
    assert [row["position"] for row in of_package([batch], TABLES)] == [1, 3]
    (undecoded,) = batch.undecoded.to_pylist()
    assert undecoded == {
        "position": 2,
        "length": len(mixed),
        "reason": "of a table that is not in the schema",
        "table_id": b"unknown table id",
        "raw": mixed,
    }


def test_a_column_that_is_not_known() -> None:
    data = of("flat")({"kind": "row", "raw_clustering": [], "cells": [{"column": "b", "raw": "", "timestamp": 1}]})
    assert data.count(b"\x01b") == 1
    assert outcome(mutation([data.replace(b"\x01b", b"\x01x")])) == (
        "names a column that its table does not have in the schema"
    )


def test_what_no_server_writes_is_malformed() -> None:
    row = {"kind": "row", "raw_clustering": CLUSTERING, "cells": [{"column": "a", "raw": "00000001", "timestamp": 1}]}
    data = of("wide")(row)
    flags = 16 + 2
    assert data[flags] == 0x10
    static = of("wide")({"kind": "static", "cells": [{"column": "s1", "raw": "01", "timestamp": 1}]})
    at = static.index(b"\x02s1\x00") + 4
    assert static[at] & 0x80
    assert static[at + 1] == 1
    wrong = [
        data[:flags] + b"\x12" + data[flags + 1 :],  # in reversed order
        static[: at + 1] + b"\0" + static[at + 2 :],  # the static row says that it is none
        static[:at] + bytes([static[at] & 0x7F]) + static[at + 1 :],
        data[:-1],
        data + b"\0",
        of("wide")(a_range([], [], DELETION))[:-20] + b"\x01",
    ]
    for one in wrong:
        assert "cannot be decoded by the schema" in outcome(mutation([one])), one.hex()
    for count in (b"", uvint(0), uvint(2), uvint(2**63), uvint(2**64 - 1)):
        assert "cannot be decoded" in outcome((count + data).ljust(10, b"\0"))


@settings(max_examples=6, deadline=None)
@given(updates("wide"), st.data())
def test_lengths_of_any_size_anywhere(written: tuple[list[Change], bytes], data: st.DataObject) -> None:
    """Each byte in turn becomes a number as large as can be, or is cut at: never a crash, never rows of nothing."""
    content = mutation([written[1]])
    number = data.draw(st.sampled_from([uvint(2**64 - 1), uvint(2**63), uvint(2**31), uvint(2**32 - 1), uvint(10**6)]))
    mutations = []
    for at in range(len(content)):
        mutations += [content[:at] + number + content[at + 1 :], content[:at]]
    batches = decode(mutations, SMALL if data.draw(st.booleans()) else None)
    assert sum(batch.records for batch in batches) == len(mutations)
    assert of_package(batches, TABLES) is not None


def test_change_rows_that_no_batch_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of 64 kB which a record of some kilobytes repeats for each of its rows."""
    monkeypatch.setattr(Capacity, "is_largest", property(lambda self: self.bytes >= 2**20))
    row = {"kind": "row", "raw_clustering": CLUSTERING, "liveness": {"timestamp": 1}}
    large = mutation([of("wide", key=b"k" * 65535)(*[row] * 100)])
    small = mutation([of("wide")(row)])
    batches = decode([small, large, small], Capacity(rows=1000, cells=10, complex=10, bytes=2**17))
    assert [one["position"] for one in of_package(batches, TABLES)] == [1, 3]
    (undecoded,) = [one for batch in batches for one in batch.undecoded.to_pylist()]
    assert undecoded["reason"] == "its change rows would need more memory than a batch may have"
    assert undecoded["raw"] == large
