"""The sync on three nodes, in its default mode: whatever is written, altered and killed, stream and replica are what
SELECT gives. All of it happens in one run, which several tests judge."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cli import main
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.config.sync import Sync
from ringsync.storage.port import ObjectStore
from servers.cluster import connected, creating, three_nodes
from tests.sync import by_keys, scenario, under_way
from tests.sync.judge import judge, stream_messages
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import bootstrap, start_loops, statements, write

pytestmark = [pytest.mark.server, pytest.mark.spark]

BOOTSTRAPPED = ("workload.collections", "workload.single")
DRAINED_S = 300


@dataclass(frozen=True)
class Run:
    """What was written, once all is quiet.

    :ivar session: reads at ALL
    """

    turn: int
    conf: Path
    session: Any
    store: ObjectStore
    sync: Sync


@pytest.fixture(scope="module", params=[0, *(pytest.param(turn, marks=pytest.mark.chaos) for turn in (1, 2))])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, spark: Any
) -> Iterator[Run]:
    """All that happens. In three turns each table has each way to find the row after a change."""
    turn, folder = request.param, tmp_path_factory.mktemp("run")
    with three_nodes(folder / "nodes", cache, 71) as nodes:
        with creating(nodes[0]) as creator:
            for suite in (scenario, under_way, by_keys):
                suite.create_schema(creator)
        sync = {"tables": scenario.modes(turn) | under_way.modes(turn) | by_keys.modes(turn)}
        configure = partial(write_conf, folder, nodes, sync=sync)
        conf = configure(replica={"unrepresentable_values": "error"})
        with connected(nodes, ConsistencyLevel.ALL) as session, pipeline(conf, folder, cache) as running:
            writer = everything(running, session, turn, partial(configure, replica={"unrepresentable_values": "raw"}))
            wait_until_drained(running.store, DRAINED_S, running.check)
            under_way.antidote(session)
            by_keys.remove(session)
            wait_until_drained(running.store, DRAINED_S, running.check)
            writer.wait_until_all_has_ended()
            yield Run(turn, conf, session, running.store, load_config(conf).sync)


def everything(running: Pipeline, session: Any, turn: int, allow_poison: Callable[[], object]) -> under_way.Writer:
    """All types and kinds of statements; tables are copied in the middle, altered and dropped, loops are killed.

    :param allow_poison: changes the configuration for the loops that start from then on. The last start of
        ``bucket_close`` is in the middle: rows of a table that was dropped wait a minute from there
    """
    workload, writer, keys = statements(14, 600), under_way.Writer(session), random.Random(8)

    def write_keys(changes: int) -> None:
        for _ in range(changes):
            by_keys.change(session, keys)

    start_loops(running)
    write(session, workload, 250)
    write_keys(300)
    writer.write(3)
    for table in BOOTSTRAPPED:
        bootstrap(running.conf, table, table, [lambda: write(session, workload, 60)] * 2)
    bootstrap(running.conf, by_keys.TABLE, by_keys.TABLE, [lambda: write_keys(60)] * 2)
    for table in under_way.copied(turn):
        bootstrap(running.conf, table, table)
    under_way.poison(session)
    write(session, workload, 60)
    under_way.altered_while_rows_wait(running, session, writer)
    for _ in range(20):
        write_keys(20)
        writer.write(0.5, without=("gone",))
    under_way.wait_until_it_fails(running, under_way.POISONED)
    allow_poison()
    under_way.fallen_behind(running, writer)
    write(session, workload, 600)
    for _ in range(20):
        write_keys(20)
        writer.write(0.5, without=("gone",))
    by_keys.fill(session)
    for table in under_way.copied_again(turn):
        bootstrap(running.conf, table, f"{table}-again")
    return writer


def test_stream_and_replica_are_what_the_nodes_hold(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait", "--conf", str(run.conf), "--timeout", "120"]) == 0
    assert "workload.many has no replica: cdcservice bootstrap" in capsys.readouterr().out
    rows = judge(run.store, run.session, scenario.TABLES, BOOTSTRAPPED, run.sync)
    assert min(rows.values()) > 5


def test_tables_that_were_altered_and_failed_are_what_the_nodes_hold(run: Run) -> None:
    rows = judge(run.store, run.session, under_way.JUDGED, under_way.copied(run.turn), run.sync)
    assert min(rows.values()) > 5
    told = stream_messages(run.store, read_table(run.session, *under_way.AGAIN.split(".")))
    assert len({message["value"]["source"]["table_id"] for message in told}) == 2


def test_whoever_knows_only_keys_has_the_rows(run: Run) -> None:
    """Deletions of partitions and ranges are expanded, also those that came while the table was copied, and ``before``
    is what was told before."""
    judge(run.store, run.session, [by_keys.TABLE], [by_keys.TABLE], run.sync)
    table = read_table(run.session, *by_keys.TABLE.split("."))
    messages = stream_messages(run.store, table)
    by_replica = run.sync.after_image_of(by_keys.TABLE) == "replica"
    rows = {(row.id, row.seq): row.v for row in run.session.execute(by_keys.ROWS)}
    assert by_keys.held(messages, with_before=by_replica) == rows
    assert len(rows) > 10
    of_partition = [one["value"] for one in messages if one["key"]["id"] == by_keys.REMOVED]
    removed = [one for one in of_partition if one["op"] == "d" and one["source"]["query"] is None]
    assert Counter(one["before"]["v"] for one in removed) == {"v": 30}
    if by_replica:
        assert by_keys.retold(by_keys.messages_by_replica(run.store, table)) > 25
