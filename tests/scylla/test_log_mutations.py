"""The log rows of random mutations say as change rows what the mutations say."""

from __future__ import annotations

import itertools
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from ringsync.compiled.memory import padded
from ringsync.formats.commitlog.reader import read_changes
from ringsync.formats.commitlog.records import Records
from ringsync.scylla.log_rows import LogRows
from tests.commitlog_model.digest import digest
from tests.commitlog_model.murmur3 import token
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.write import UpdateWriter
from tests.commitlog_model.write import mutation as written
from tests.formats.commitlog.comparable import of_package
from tests.reconciled import merged_batch
from tests.scylla.log_tables import Tables
from tests.scylla.mutation_changes import Change, changes_of, facts
from tests.scylla.random_mutations import CLUSTERED, PLAIN, Maker
from tests.scylla_model.log_rows import log_rows
from tests.scylla_model.mutation import Mutation

TABLES = {"clustered": CLUSTERED, "plain": PLAIN}
MANY = 4000
EPOCH = 0x01B21DD213814000


class Times:
    """Gives each group a timeuuid with its timestamp and random other bits, as Scylla does."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance

    def __call__(self, timestamp: int) -> UUID:
        ticks, node = timestamp * 10 + EPOCH + self.chance.randrange(10), self.chance.randbytes(8)
        fields = ticks & 0xFFFFFFFF, ticks >> 32 & 0xFFFF, 0x1000 | ticks >> 48
        return UUID(fields=(*fields, node[0], node[1], int.from_bytes(node[2:], "big")))


@cache
def logged(name: str) -> tuple[list[Mutation], list[dict[str, Any]]]:
    """Some mutations, and their log rows."""
    maker, times = Maker(TABLES[name], 7), Times(Random(8))
    mutations = [maker.mutation() for _ in range(MANY)]
    return mutations, [row for mutation in mutations for row in log_rows(mutation, times)]


def cut(rows: list[Any], chance: Random) -> list[list[Any]]:
    """Cut rows into pages, some of which are empty."""
    places = sorted(chance.choices(range(len(rows) + 1), k=30))
    return [rows[first:end] for first, end in itertools.pairwise([0, *places, len(rows)])]


def decoded(tables: Tables, rows: list[dict[str, Any]]) -> tuple[list[Change], LogRows]:
    """Decode log rows, all of which can be used."""
    found = tables.decode(*(tables.page(part) for part in cut(rows, Random(9))))
    assert found.errors.num_rows == found.counts.held == found.counts.images == 0
    batch = SimpleNamespace(rows=found.rows)
    return of_package([batch], tables.logged), found  # type: ignore[list-item]


@pytest.mark.parametrize("name", TABLES)
def test_log_rows_say_what_the_mutations_say(name: str) -> None:
    tables, (mutations, rows) = TABLES[name], logged(name)
    changes, _ = decoded(tables, rows)
    expected = facts(one for mutation in mutations for one in changes_of(mutation, tables))
    assert facts(changes) == expected
    assert len(expected) > 2 * MANY
    assert {change["kind"] for change in changes} == (
        {"row", "static", "range_deletion", "partition_deletion"}
        if tables.base.clustering
        else {"row", "partition_deletion"}
    )


@pytest.mark.parametrize("name", TABLES)
def test_tokens_digests_and_positions(name: str) -> None:
    tables = TABLES[name]
    changes, found = decoded(tables, logged(name)[1])
    batch, times = found.rows, found.groups.time[found.group]
    for change, time in zip(changes, times, strict=True):
        assert change["token"] == token(bytes.fromhex(change["raw_partition_key"]))
        assert change["digest"] == digest(change, time.tobytes() if has_ttl(change) else b"")
        # No part of a log row is later than its time; a deletion of a collection alone is 1 µs earlier.
        assert 0 <= change["position"] - newest(change) <= 1
    assert [newest(change) for change in changes] == batch["write_time"].to_pylist()
    assert set(batch["file"].to_pylist()) == {"ks.t_scylla_cdc_log"}
    assert set(batch["schema_version"].to_pylist()) == {0}


def has_ttl(change: Change) -> bool:
    """Whether a part of a change row expires."""
    return any("ttl" in one for one in [change.get("liveness", {}), *change.get("cells", [])])


def newest(change: Change) -> int:
    """The greatest timestamp in a change row."""
    single = [change[part] for part in ("liveness", "deletion") if part in change]
    return int(
        max(one["timestamp"] for one in [*single, *change.get("cells", []), *change.get("complex_deletions", [])])
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_commit_log_with_the_same_change_gives_the_same_digest(name: str) -> None:
    tables, writer = TABLES[name], UpdateWriter(TABLES[name].commitlog, Random(3))
    changes, _ = decoded(tables, logged(name)[1])
    mutations = [written([writer.write(bytes.fromhex(one["raw_partition_key"]), [one])]) for one in changes]
    sizes = np.array([len(one) for one in mutations], np.int64)
    ends = np.cumsum(sizes)
    records = Records(ends - sizes, sizes, ends, np.ones(len(sizes), np.bool_))
    batches = list(read_changes(padded(b"".join(mutations)), records, tables.logged, "made.log"))
    assert all(batch.undecoded.num_rows == 0 for batch in batches)
    by_commit_log = of_package(batches, tables.logged)
    expiring = {"position": 0, "digest": ""}  # that of a CDC log has cdc$time
    assert [one | (expiring if has_ttl(one) else {"position": 0}) for one in by_commit_log] == [
        one | (expiring if has_ttl(one) else {"position": 0}) for one in changes
    ]


@pytest.mark.parametrize("name", TABLES)
def test_the_merge_in_any_order_shows_what_the_mutations_write(name: str) -> None:
    tables, chance = TABLES[name], Random(11)
    shown = 0
    for seed in range(60):
        maker, times = Maker(tables, seed), Times(Random(seed))
        mutations = [maker.mutation() for _ in range(chance.randint(1, 25))]
        log = [row for mutation in mutations for row in log_rows(mutation, times)]
        batch = decoded(tables, log)[1].rows
        order = [*range(len(batch)), *chance.choices(range(len(batch)), k=3)]
        chance.shuffle(order)
        merged = merged_batch(batch.take(pa.array(order, pa.int32())), tables.base)
        changes = of_package([SimpleNamespace(rows=merged)], tables.logged)  # type: ignore[list-item]
        expected = [one for mutation in mutations for one in changes_of(mutation, tables)]
        for now in (0, 2_606_390_226, 2**31 + 10**9):
            ours, theirs = (
                sorted(rows(replay(found), tables.commitlog, now), key=repr) for found in (changes, expected)
            )
            assert ours == theirs
            shown += len(theirs)
    assert shown > 200
