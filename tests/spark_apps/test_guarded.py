"""What a cluster forbids or hides: guardrails and masked columns of a real Cassandra 5.0, for whom they are made.

``C: db/guardrails/Guardrails``, CEP-20.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.guardrails import LEVELS
from ringsync.cluster.levels import at_permitted
from ringsync.cluster.masks import check_unmasked
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterError, GuardrailError, close_all, connect
from ringsync.cluster.shared import Shared
from ringsync.config import Config, load_config
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.schema.table import TableSchema
from ringsync.service.checks import check_cluster
from ringsync.sources.lookup.read import IN_FLIGHT, RowsRead, read_rows
from ringsync.sources.scan.images import ImagePages, read_images
from ringsync.sources.scan.plan import Selection
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.sources.scan.scan import scan_session
from ringsync.state.session import StateError
from ringsync.steps.bootstrap.enable_cdc import enable_cdc
from ringsync.storage.local import LocalStore
from ringsync.wiring import cluster_settings
from servers.cassandra import CassandraNode
from tests.chaos.applications import finished_here
from tests.chaos.bootstraps import prepare
from tests.oracle import source_rows
from tests.sources.clusters import settings_of
from tests.sources.row_key_batches import batch_of, keys_of
from tests.sources.scans import UNLIMITED

pytestmark = pytest.mark.server

ROWS = 300
DISALLOWED = "ReadConsistencyLevelsDisallowedCSV"


@pytest.fixture(scope="module")
def root(guarded: CassandraNode) -> Iterator[Any]:
    """A superuser's session, and two tables with rows."""
    cluster = guarded.cluster()
    session = cluster.connect()
    session.execute("CREATE TABLE shop.people (id int PRIMARY KEY, name text, ssn text)")
    session.execute("CREATE TABLE shop.lines (id int, n int, v text, PRIMARY KEY (id, n))")
    for name in ("people", "lines"):
        session.execute(f"GRANT SELECT ON shop.{name} TO reader")
    session.execute("GRANT SELECT ON system_views.settings TO reader")
    person = session.prepare("INSERT INTO shop.people (id, name, ssn) VALUES (?, 'Pauline', '123')")
    line = session.prepare("INSERT INTO shop.lines (id, n, v) VALUES (?, ?, 'v')")
    writes = [session.execute_async(person, (number,)) for number in range(ROWS)]
    writes += [session.execute_async(line, (number // 30, number)) for number in range(ROWS)]
    for write in writes:
        write.result()
    yield session
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many requests for rows were sent, and how many were refused."""
    found: Counter[str] = Counter()
    execute = SessionAt.execute_async

    def counted(self: SessionAt, *arguments: Any, **options: Any) -> Any:
        found["sent"] += 1
        response = execute(self, *arguments, **options)
        response.add_errback(lambda error: found.update(refused=1))
        return response

    monkeypatch.setattr(SessionAt, "execute_async", counted)
    return found


@pytest.fixture
def config(guarded: CassandraNode, tmp_path: Path) -> Callable[..., Config]:
    def made(user: str = "reader", **cassandra: Any) -> Config:
        (tmp_path / "password").write_text(f"sesame-{user}")
        login = {"username": user, "password": {"file": "password"}, **cassandra}
        address = {"contact_points": [guarded.contact_point], "port": guarded.port}
        document = {"server_name": "demo", "cassandra": {**address, **login}, "store": {"url": "lake"}}
        (tmp_path / "ringsync.yaml").write_text(yaml.safe_dump(document))
        return load_config(str(tmp_path / "ringsync.yaml"))

    return made


class Reading:
    """Rows of a table by their keys, read as ``reader``."""

    def __init__(self, node: CassandraNode, root: Any, table: str) -> None:
        self.settings = settings_of(node, username="reader", password="sesame-reader")
        self.table: TableSchema = read_table(root, "shop", table)
        self.keys = batch_of(keys_of(root, self.table, source_rows(root, self.table, int(time.time()))))
        self.ring: RankedRing = ranked(read_ring(root, "shop"))

    def session(self) -> SessionAt:
        return scan_session(self.settings, int(time.time()))

    def rows(self, level: str = "LOCAL_ONE", session: SessionAt | None = None) -> RowsRead:
        settings = replace(self.settings, consistency_level=level)
        return read_rows(
            session or self.session(),
            *(self.table, self.keys, self.ring, settings, UNLIMITED),
            element_times=True,
            misfits="raw",
        )

    def names(self) -> set[str]:
        return set(self.rows().images["name"].to_pylist())


def planned(config: Config, table: str) -> Any:
    return make_scan_plan(connect_as(config), config, "shop", table, now=int(time.time()))


def connect_as(config: Config) -> Any:
    return connect(cluster_settings(config))


def scanned(config: Config, plan: Any) -> Iterator[ImagePages]:
    for split in plan.splits:
        for _, pages in read_images(config, plan, split, UNLIMITED):
            for page in pages:
                assert isinstance(page, ImagePages)
                yield page


@pytest.fixture
def masked(root: Any) -> Iterator[None]:
    root.execute("ALTER TABLE shop.people ALTER name MASKED WITH mask_inner(1, 0)")
    yield
    root.execute("ALTER TABLE shop.people ALTER name DROP MASKED")
    for permission in ("UNMASK", "SELECT_MASKED"):
        root.execute(f"REVOKE {permission} ON TABLE shop.people FROM reader")


@pytest.mark.usefixtures("masked")
def test_who_may_not_unmask_a_column_reads_nothing(
    guarded: CassandraNode, root: Any, config: Callable[..., Config]
) -> None:
    grant = r'name are masked, and user reader .*GRANT UNMASK ON TABLE "shop"."people" TO "reader";'
    lookups = Reading(guarded, root, "people")
    root.execute("GRANT SELECT_MASKED ON TABLE shop.people TO reader")
    with pytest.raises(ClusterError, match=grant):
        planned(config(), "people")
    with pytest.raises(ClusterError, match=grant):
        lookups.rows()
    root.execute("ALTER TABLE shop.people WITH cdc = true")
    with pytest.raises(ClusterError, match=grant):
        check_cluster(config())
    root.execute("ALTER TABLE shop.people WITH cdc = false")
    without = make_scan_plan(
        *(connect_as(config()), config(), "shop", "people"),
        now=int(time.time()),
        selection=Selection(columns=("ssn",)),
    )
    assert sum(page.rows.num_rows for page in scanned(config(), without)) == ROWS


@pytest.mark.usefixtures("masked")
def test_what_a_role_or_a_keyspace_gives_counts(guarded: CassandraNode, root: Any) -> None:
    lookups = Reading(guarded, root, "people")
    root.execute("CREATE ROLE team")
    root.execute("GRANT UNMASK ON KEYSPACE shop TO team")
    root.execute("GRANT team TO reader")
    assert lookups.names() == {"Pauline"}
    root.execute("REVOKE UNMASK ON KEYSPACE shop FROM team")
    with pytest.raises(ClusterError, match="GRANT UNMASK"):
        lookups.rows()
    root.execute("ALTER ROLE team WITH SUPERUSER = true")
    close_all()  # another process
    assert lookups.names() == {"Pauline"}
    root.execute("DROP ROLE team")


@pytest.mark.usefixtures("masked")
def test_a_role_that_the_configuration_does_not_name(root: Any, config: Callable[..., Config]) -> None:
    """Whoever logs in by certificate has no name in the configuration. Only a superuser certainly sees everything."""
    table = read_table(root, "shop", "people")
    with pytest.raises(ClusterError, match=r"masked.*everyone.*cassandra\.username"):
        check_unmasked(connect_as(config()), table, None)
    check_unmasked(root, table, None)


@pytest.mark.usefixtures("masked")
def test_a_node_that_does_not_know_of_the_right_yet_shows_nothing_wrong(guarded: CassandraNode, root: Any) -> None:
    """Nodes remember rights. Whoever reads a moment after the GRANT is shown masks all the same."""
    lookups = Reading(guarded, root, "people")
    for _ in range(3):
        with pytest.raises(ClusterError, match="GRANT UNMASK"):
            lookups.rows()
    root.execute("GRANT UNMASK ON TABLE shop.people TO reader")
    assert lookups.names() == {"Pauline"}


def test_a_mask_that_comes_while_rows_are_read(
    guarded: CassandraNode, root: Any, config: Callable[..., Config], request: pytest.FixtureRequest
) -> None:
    plan = planned(config(page_size=10), "people")
    pages = scanned(config(page_size=10), plan)
    seen = {*next(pages).rows["name"].to_pylist()}
    lookups = Reading(guarded, root, "people")
    assert lookups.names() == {"Pauline"}
    request.getfixturevalue("masked")

    def rest() -> None:
        for page in pages:
            seen.update(page.rows["name"].to_pylist())

    with pytest.raises(ClusterError, match="GRANT UNMASK"):
        rest()
    assert seen == {"Pauline"}
    with pytest.raises(ClusterError, match="GRANT UNMASK"):
        lookups.rows()
    # The session has not known of the right for as long as a node may not know of it.
    root.execute("GRANT UNMASK ON TABLE shop.people TO reader")
    with pytest.raises(ClusterError, match="read again"):
        lookups.rows()
    time.sleep(1.1)
    assert lookups.names() == {"Pauline"}


@pytest.mark.spark
def test_verification_and_repair_compare_nothing_masked(
    spark: Any, root: Any, config: Callable[..., Config], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config()
    conf, table = tmp_path / "ringsync.yaml", "shop.people"
    prepare(conf, table, "people", splits=1)
    assert [finished_here(name, conf, table, "people") for name in ("bootstrap_scan", "bootstrap_drain")] == [0, 0]
    request.getfixturevalue("masked")
    for run, *options in (("verify",), ("repair", "--repair")):
        assert finished_here("replica_verify", conf, table, run, *options) != 0
        report = json.loads((tmp_path / f"lake/reports/replica_verify/{run}.json").read_text())
        assert "GRANT UNMASK ON TABLE" in report["error"]
    root.execute("GRANT UNMASK ON TABLE shop.people TO reader")
    # Spark's workers here have read the table before it was masked: what they read first, they read again.
    assert 0 in (finished_here("replica_verify", conf, table, f"unmasked-{number}") for number in range(2))


@pytest.fixture
def levels(guarded: CassandraNode) -> Iterator[Callable[[str], None]]:
    yield lambda values: guarded.forbid(DISALLOWED, values)
    guarded.forbid(DISALLOWED, "")


def test_a_forbidden_level_is_told_at_once(
    guarded: CassandraNode,
    root: Any,
    config: Callable[..., Config],
    requests: Counter[str],
    levels: Callable[[str], None],
) -> None:
    """300 keys, one refusal for each of those that were on their way. In place of a level one is asked that is as good:
    with one replica any."""
    lookups = Reading(guarded, root, "people")
    levels("ALL,LOCAL_ONE,LOCAL_QUORUM")
    with pytest.raises(GuardrailError, match="read_consistency_levels_disallowed") as caught:
        lookups.rows("ALL")
    assert caught.value.name == LEVELS
    assert requests["refused"] <= IN_FLIGHT
    session = lookups.session()

    def read(level: str) -> RowsRead:
        return lookups.rows(level, session)

    found = at_permitted(session, lookups.table, "ALL", lookups.ring, read)
    assert len(found.images) == ROWS
    requests.clear()
    assert len(at_permitted(session, lookups.table, "ALL", lookups.ring, read).images) == ROWS
    assert not requests["refused"]
    with pytest.raises(GuardrailError, match=r"cassandra.consistency_level of ringsync"):
        planned(config(), "people")
    planned(config(consistency_level="QUORUM"), "people")


def test_keys_are_asked_for_as_permitted(guarded: CassandraNode, root: Any, requests: Counter[str]) -> None:
    for name in ("people", "lines"):
        assert len(Reading(guarded, root, name).rows().images) == ROWS
    assert 0 < requests["refused"] <= 8 * IN_FLIGHT
    requests.clear()
    assert len(Reading(guarded, root, "people").rows().images) == ROWS  # what was learnt is remembered
    assert not requests["refused"]


def test_page_sizes(config: Callable[..., Config]) -> None:
    """The threshold is for all that is read: the schema and our own tables, too."""
    with pytest.raises(GuardrailError, match=r"5001 exceeds.*page_size_fail_threshold.*cassandra\.page_size"):
        planned(config(page_size=5001), "people")
    plan = planned(config(), "people")
    assert sum(page.rows.num_rows for page in scanned(config(), plan)) == ROWS
    assert connect_as(config(page_size=100)).default_fetch_size == 100
    assert connect_as(config()).default_fetch_size == 5000


def test_cdc_is_enabled_as_a_whole_or_not_at_all(guarded: CassandraNode, root: Any, tmp_path: Path) -> None:
    """An ignored property is worse than a forbidden one: prepared statements would go on without cdc."""
    settings = settings_of(guarded, username="reader", password="sesame-reader")
    root.execute("GRANT ALTER ON shop.lines TO reader")
    table = read_table(root, "shop", "lines")
    before = root.execute("SELECT cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = 'shop'").all()
    for properties in ("gc_grace_seconds", "cdc"):
        guarded.forbid("TablePropertiesIgnoredCSV", properties)
        (told,) = enable_cdc(Shared(connect(settings)), LocalStore(tmp_path), [table])
        assert isinstance(told, Exception)
        assert "table_properties_ignored" in str(told)
        assert properties in str(told)
        after = root.execute("SELECT cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = 'shop'")
        assert after.all() == before
    guarded.forbid("TablePropertiesIgnoredCSV", "")
    assert enable_cdc(Shared(connect(settings)), LocalStore(tmp_path), [table]) == ["enabled now"]
    root.execute("ALTER TABLE shop.lines WITH cdc = false")


def test_start_says_what_is_forbidden(
    guarded: CassandraNode, root: Any, config: Callable[..., Config], levels: Callable[[str], None]
) -> None:
    root.execute("ALTER TABLE shop.lines WITH cdc = true")
    try:
        told = check_cluster(config())
        assert any("nodes that capture changes" in one for one in told)
        levels("TWO,THREE,QUORUM,ALL,EACH_QUORUM,LOCAL_QUORUM")
        check_cluster(config(consistency_level="ONE"))  # with one replica, others are as good as ALL
        with pytest.raises(GuardrailError, match=r"LOCAL_QUORUM.*cassandra.consistency_level"):
            check_cluster(config())
        guarded.forbid("WriteConsistencyLevelsDisallowedCSV", "QUORUM")
        with pytest.raises(StateError, match="write_consistency_levels_disallowed"):
            check_cluster(config(consistency_level="ONE"))
    finally:
        guarded.forbid("WriteConsistencyLevelsDisallowedCSV", "")
        root.execute("ALTER TABLE shop.lines WITH cdc = false")


def test_rights_in_our_own_keyspace_are_checked_before_the_start(root: Any, config: Callable[..., Config]) -> None:
    root.execute("ALTER TABLE shop.orders WITH cdc = true")
    root.execute("GRANT SELECT ON system_views.settings TO stateless")
    try:
        with pytest.raises(StateError, match='GRANT SELECT, MODIFY ON KEYSPACE "cdc"'):
            check_cluster(config("stateless"))
    finally:
        root.execute("ALTER TABLE shop.orders WITH cdc = false")
