"""Verification of a table that is written all the time: nothing that is only late is a difference, and what is one is
found, whatever its write time says."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.schema import read_table
from ringsync.replica.folders import base_folder
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.status import read_statuses
from servers.cassandra import CassandraNode
from tests.chaos.applications import finished_here
from tests.sync.pipeline import pipeline, wait_until_drained, write_conf
from tests.sync.scenario import bootstrap, start_loops

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.chaos]

ROWS, UNTOUCHED = 60, 900
AHEAD_US = 4_000_000_000_000_000


def change(session: Any, name: str, rng: random.Random) -> None:
    """Change a row, or a partition, in one of many ways."""
    key = f"id = {rng.randrange(ROWS // 3)} AND c = {rng.randrange(3)}"
    partition, number = key.partition(" AND")[0], rng.randrange(1000)
    session.execute(
        rng.choice(
            (
                f"UPDATE {name} SET v = {number} WHERE {key}",
                f"UPDATE {name} SET n = {number}, m['{number % 5}'] = {number} WHERE {key}",
                f"UPDATE {name} USING TTL 3 SET v = {number} WHERE {key}",
                f"UPDATE {name} SET m = {{'a': {number}}}, l = l + [{number}] WHERE {key}",
                f"UPDATE {name} SET l = [{number}] WHERE {key}",
                f"UPDATE {name} SET s = {number} WHERE {partition}",
                f"DELETE n, m['{number % 5}'] FROM {name} WHERE {key}",
                f"DELETE FROM {name} WHERE {key}",
                f"INSERT INTO {name} (id, c) VALUES ({key.partition(' AND')[0][5:]}, {key[-1]})",
                f"INSERT INTO {name} (id, c) VALUES ({500 + number}, 1) USING TTL 4",
            )
        )
    )


@contextmanager
def writing(session: Any, name: str) -> Iterator[None]:
    """Write all the time: changes of many rows, and one row about fifty times a second."""
    over, rng = threading.Event(), random.Random(5)

    def write() -> None:
        while not over.is_set():
            change(session, name, rng)
            session.execute(f"UPDATE {name} SET n = {rng.randrange(1000)} WHERE id = 800 AND c = 1")
            time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def test_a_table_that_is_written_all_the_time(
    session: Any, keyspace: str, cassandra: CassandraNode, spark: Any, cache: Path, tmp_path: Path
) -> None:
    name = f"{keyspace}.busy"
    columns = "id int, c int, s int static, v int, n int, m map<text, int>, l list<int>, PRIMARY KEY (id, c)"
    session.execute(f"CREATE TABLE {name} ({columns}) WITH cdc = true")
    for number in range(ROWS):
        session.execute(f"INSERT INTO {name} (id, c, v) VALUES ({number // 3}, {number % 3}, {number})")
    session.execute(f"INSERT INTO {name} (id, c, v) VALUES ({UNTOUCHED}, 1, 1) USING TIMESTAMP {AHEAD_US}")
    session.execute(f"UPDATE {name} SET v = 1 WHERE id = 800 AND c = 1")
    conf = write_conf(tmp_path, [cassandra], sync={"include": [name]}, verify={"ranges": 8, "wait_s": 90})
    with pipeline(conf, tmp_path, cache) as running:
        start_loops(running)
        bootstrap(conf, name, "copied")
        wait_until_drained(running.store, 120, running.check)

        def verified(run: str, *options: str) -> tuple[int, dict[str, Any]]:
            code = finished_here("replica_verify", conf, name, run, *options)
            return code, json.loads(running.store.get(f"reports/replica_verify/{run}.json"))

        with writing(session, name):
            time.sleep(5)
            for number in range(3):
                code, report = verified(f"busy-{number}")
                rows = report["rows_of_differing_ranges"]
                assert (report["differences"], report["listed"]) == (0, []), report
                assert (code, rows["not_judged"]) == (0, 0), report
                assert report["ranges_differing"] > 0, "it is busy"
            table = read_table(session, *name.split("."))
            uri = running.store.uri(base_folder(table.keyspace, table.name))
            spark.sql(f"DELETE FROM delta.`{uri}` WHERE id = {UNTOUCHED}")
            code, report = verified("wrong")
            assert (code, report["differences_by_kind"]) == (1, {"missing": 1}), report
            assert report["listed"][0]["key"] == {"id": UNTOUCHED, "c": 1}
            assert Kind.REPLICA_DIFFERS in raised(running.store)
            code, report = verified("mended", "--repair")
            assert (code, report["differences"]) == (0, 0), report
            assert Kind.REPLICA_DIFFERS not in raised(running.store)
        running.check()


def raised(store: Any) -> set[Kind]:
    nothing = Expected((), (), (), (), (), (), "")
    return {one.kind for one in problems(read_statuses(store), {}, nothing, False, time.time())}
