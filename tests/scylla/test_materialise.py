"""What the simulator writes into a real Cassandra is what its models say."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest
from cassandra.cluster import EXEC_PROFILE_DEFAULT
from cassandra.protocol import _ProtocolHandler
from cassandra.query import dict_factory

from tests.scylla_model.log_rows import LogRow
from tests.scylla_model.mutation import Key
from tests.scylla_sim.base_model import STATIC, Rows, replay
from tests.scylla_sim.clock import SECOND, FakeClock, SystemClock
from tests.scylla_sim.cluster import ROUGH, Cluster, Written
from tests.scylla_sim.load import Load
from tests.scylla_sim.log import DAY_S, log_order
from tests.scylla_sim.materialise import Materialiser, create_system_tables, create_tables
from tests.scylla_sim.tables import BaseTable, CqlColumn, all_tables, wide_table
from tests.scylla_sim.workload import Habits

pytestmark = pytest.mark.server
HABITS = Habits(ttls_s=(1, 40_000, 10 * 365 * 86_400))
Shown = dict[tuple[Key, Key], dict[str, Any]]
"""Columns by row: atomic ones as (value, writetime, whether it expires), others as the same by element."""


@pytest.fixture(scope="module", autouse=True)
def system_tables(session: Any) -> Iterator[None]:
    create_system_tables(session)
    yield
    for keyspace in ("sim_distributed", "sim_system"):
        session.execute(f"DROP KEYSPACE {keyspace}")


def selected(session: Any, text: str) -> list[dict[str, Any]]:
    """The rows of a SELECT, with the columns' own names."""
    profile = session.execution_profile_clone_update(EXEC_PROFILE_DEFAULT, row_factory=dict_factory)
    before, session.client_protocol_handler = session.client_protocol_handler, _ProtocolHandler
    try:  # The driver's compiled decoder knows no null in a list, as the TTLs of a collection have.
        return list(session.execute(text, execution_profile=profile))
    finally:
        session.client_protocol_handler = before


def shown_by_server(session: Any, table: BaseTable) -> Shown:
    names = [name for name, _ in (*table.partition_key, *table.clustering_key)]
    for column in table.columns:
        names += [
            column.name,
            f'writetime({column.name}) AS "w${column.name}"',
            f'ttl({column.name}) AS "x${column.name}"',
        ]
    found: Shown = {}
    for row in selected(session, f"SELECT {', '.join(names)} FROM {table.full_name}"):
        key = tuple(row[name] for name, _ in table.partition_key)
        values = [row[name] for name, _ in table.clustering_key]
        static = {one.name: read(one, row) for one in table.columns if one.static}
        if any(static.values()):
            found[key, STATIC] = {name: value for name, value in static.items() if value}
        if None not in values:
            cells = {one.name: read(one, row) for one in table.columns if not one.static}
            found[key, table.clustering(*values)] = {name: value for name, value in cells.items() if value}
    return found


def read(column: CqlColumn, row: dict[str, Any]) -> Any:
    """A column of a row of a SELECT; None: it has nothing."""
    value, times, ttls = (row[prefix + column.name] for prefix in ("", "w$", "x$"))
    if value is None:
        return None
    if column.kind == "atomic":
        return value, times, ttls is not None
    if column.kind == "udt":
        elements = [(place, one) for place, one in enumerate(value)]
    elif column.kind == "set":
        elements = [(one, True) for one in value]
    else:
        elements = list(value.items() if column.kind == "map" else enumerate(value))
    cells = zip(elements, times, ttls, strict=True)
    return {path: (one, when, ttl is not None) for (path, one), when, ttl in cells if one is not None}


def shown_by_model(rows: Rows) -> Shown:
    """What the server is to show once the short TTLs are over."""
    found: Shown = {}
    for key, living in rows.living().items():
        cells: dict[str, Any] = {}
        alive = {place: one for place, one in living.items() if one.ttl != 1}
        for (column, path), one in alive.items():
            cell = one.value, one.timestamp, one.ttl is not None
            if column and path is None:
                cells[column] = cell
            elif column:
                cells.setdefault(column, {})[path] = cell
        for spec in rows.table.columns:
            if spec.kind == "list" and spec.name in cells:
                # Ids are the server's own; elements are in the order of the model's.
                ordered = sorted(cells[spec.name].items(), key=lambda one: one[0].time)
                cells[spec.name] = {place: cell for place, (_, cell) in enumerate(ordered)}
        if alive:
            found[key] = cells
    return found


def known_log(written: list[Written], table: BaseTable) -> list[LogRow]:
    rows = [row for one in written if one.table == table for delivery in one.deliveries for row in delivery.rows]
    return sorted(rows, key=log_order)


def as_model(table: BaseTable, row: dict[str, Any]) -> LogRow:
    """A log row that the driver read, as the model has it."""
    result = dict(row)
    for name, value in row.items():
        found = [one for one in table.columns if name in (one.name, f"cdc$deleted_elements_{one.name}")]
        if value is None or not found or found[0].kind == "atomic":
            continue
        column = found[0]
        if name != column.name or column.kind == "set":
            result[name] = frozenset(value)
        elif column.kind == "udt":
            result[name] = dict(zip((field for field, _ in column.fields), value, strict=True))
        else:
            result[name] = dict(value)
    return result


def test_base_tables_and_logs(session: Any, keyspace: str) -> None:
    rng, clock = random.Random(17), FakeClock(time.time_ns() // 1000 - 3600 * SECOND)
    cluster = Cluster.of(rng, clock, skews_s=(0, 1, -1), disturbances=ROUGH)
    create_tables(session, all_tables(keyspace), logs=True)
    materialiser = Materialiser(session, cluster, sleep=clock.advance)
    load = Load(cluster, all_tables(keyspace), rng, habits=HABITS, materialiser=materialiser)
    cluster.new_generation()
    clock.advance(20)
    for _ in range(10):
        load.write(120, per_second=1)
        assert materialiser.waiting
    seen = sum(session.execute(f"SELECT count(*) FROM {table.log_name}").one()[0] for table in load.tables.values())
    assert seen == materialiser.written < sum(len(known_log(load.written, table)) for table in load.tables.values())
    materialiser.settle()
    time.sleep(2.5)  # TTLs of 1 s are over
    check_tables(session, load)
    for table in load.tables.values():
        rows = [as_model(table, row) for row in selected(session, f"SELECT * FROM {table.log_name}")]
        assert sorted(rows, key=log_order) == known_log(load.written, table)
        ages = session.execute(f'SELECT TTL("cdc$operation") FROM {table.log_name}')
        assert {DAY_S - 3600 - 60 <= age <= DAY_S for (age,) in ages} == {True}


def check_tables(session: Any, load: Load) -> None:
    """The server's tables, and what its logs give, are as the model says."""
    for name, table in load.tables.items():
        expected = shown_by_model(load.base[name])
        assert shown_by_server(session, table) == expected
        assert len(expected) > 3
        found = Rows(table)
        replay(found, (as_model(table, row) for row in selected(session, f"SELECT * FROM {table.log_name}")))
        assert found.living() == load.expected(name)


def test_in_real_time_with_a_new_column(session: Any, keyspace: str) -> None:
    rng, tables = random.Random(5), [replace(wide_table(keyspace), name="altered")]
    cluster = Cluster.of(rng, SystemClock(), skews_s=(0, 1, -1), disturbances=ROUGH)
    create_tables(session, tables, logs=True)
    materialiser = Materialiser(session, cluster)
    load = Load(cluster, tables, rng, habits=HABITS, materialiser=materialiser)
    cluster.new_generation()
    time.sleep(1.5)
    load.run(2, 100)
    name, log_name = tables[0].full_name, tables[0].log_name
    session.execute(load.add_column(name, CqlColumn("x", "int")))
    session.execute(f'ALTER TABLE {log_name} ADD (x int, "cdc$deleted_x" boolean)')
    load.run(2, 100)
    assert materialiser.waiting
    assert len(load.written) > 200
    materialiser.settle()
    time.sleep(2.5)
    check_tables(session, load)


def test_metadata(session: Any, keyspace: str) -> None:
    clock = FakeClock(time.time_ns() // 1000)
    cluster = Cluster.of(random.Random(3), clock)
    materialiser = Materialiser(session, cluster)
    table = all_tables(keyspace)[0]
    for name in ("sim_distributed.cdc_generation_timestamps", "sim_distributed.cdc_streams_descriptions_v2"):
        session.execute(f"TRUNCATE {name}")
    first = cluster.new_generation()
    second = cluster.new_generation(publish=False)
    cluster.publish_streams(second, 5)
    materialiser.metadata()

    def times() -> list[int]:
        found = selected(session, "SELECT time FROM sim_distributed.cdc_generation_timestamps WHERE key = 'timestamps'")
        return [round(row["time"].replace(tzinfo=UTC).timestamp() * 1000) for row in found]

    def told(moment: int) -> list[dict[str, Any]]:
        text = f"SELECT * FROM sim_distributed.cdc_streams_descriptions_v2 WHERE time = {moment}"
        return selected(session, text)

    assert times() == [first.time_ms]
    assert [(row["range_end"], set(row["streams"])) for row in told(first.time_ms)] == [
        (entry.end, set(entry.streams)) for entry in first.entries
    ]
    assert len(told(second.time_ms)) == 5
    cluster.publish_streams(second)
    cluster.publish_time(second)
    materialiser.metadata()
    assert times() == [second.time_ms, first.time_ms]
    assert len(told(second.time_ms)) == len(second.entries)
    clock.advance(100)
    cluster.expire(clock.now_us() // 1000)
    materialiser.metadata()
    assert times() == [second.time_ms]
    assert not told(first.time_ms)
    old = cluster.tablets.create(table, 4, clock.now_us())
    new = cluster.tablets.split(table, clock.now_us())
    materialiser.metadata()
    streams = (
        "SELECT stream_id FROM sim_system.cdc_streams WHERE keyspace_name = '{}' AND table_name = 'wide' AND timestamp"
    )
    where = streams.format(keyspace)
    for one in (old, new):
        found = selected(session, f"{where} = {one.time_ms} AND stream_state = 0")
        assert {row["stream_id"] for row in found} == one.streams
    clock.advance(500)
    cluster.tablets.collect(table, clock.now_us(), 100)
    materialiser.metadata()
    assert not selected(session, f"{where} = {old.time_ms}")
    assert {
        row["stream_id"] for row in selected(session, f"{where} = {new.time_ms} AND stream_state = 2")
    } == new.streams
