"""The steps, run in this process against the shared node: the same calls that the Spark applications make."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.flights.load import load
from ringsync.config import load_config
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.bootstrap import drain as bootstrap_drain
from ringsync.steps.bootstrap import prepare as bootstrap_prepare
from ringsync.steps.bootstrap import scan as bootstrap_scan
from ringsync.steps.replica import merge as replica_merge
from ringsync.steps.replica import verify as replica_verify
from ringsync.storage.local import LocalStore
from ringsync.streams.kafka.client import KafkaTopics
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from tests.mock_kafka import MockKafka, mock_kafka

STEPS = {
    "bootstrap_prepare": bootstrap_prepare,
    "bootstrap_scan": bootstrap_scan,
    "bootstrap_drain": bootstrap_drain,
    "replica_merge": replica_merge,
    "replica_verify": replica_verify,
}

DEFAULTS = {
    **dict.fromkeys(("mode", "splits", "columns", "token_range", "where")),
    **dict.fromkeys(("dry_run", "restart", "repair", "enable_cdc", "last"), False),
}

Step = Callable[..., tuple[Report, ExitCode]]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A node's ``cdc_raw``, which is not there yet."""
    return tmp_path / "cdc_raw"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty object store."""
    return LocalStore(tmp_path / "lake")


@pytest.fixture(scope="package")
def flights(session: Any) -> dict[str, int]:
    """The keyspace ``flights`` with two percent of the data: rows by table."""
    return load(session, sample=0.02)


@pytest.fixture(scope="package")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the configuration and the store."""
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="package")
def step(cassandra: CassandraNode, spark: Any, lake: Path) -> Step:
    """Run a step: ``step("replica_verify", "shop.orders", "run-1", repair=True)``."""
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "."},
        "scan": {"min_splits": 3},
        "verify": {"ranges": 16, "wait_s": 60},
    }
    path = lake / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))

    def run(name: str, table: str, run_id: str, **options: Any) -> tuple[Report, ExitCode]:
        keyspace, _, table_name = table.partition(".")
        config = load_config(path)
        given = argparse.Namespace(**{**DEFAULTS, "table": table or None, **options})
        application = Application(name, str(path), config, store_of(config), (keyspace, table_name), run_id, given)
        return STEPS[name].run(application)

    return run


@pytest.fixture(scope="package")
def bootstrap(step: Step) -> Callable[[str, str], Report]:
    """All steps but the verification; gives the scan's report."""

    def run(table: str, run_id: str) -> Report:
        assert step("bootstrap_prepare", table, run_id)[1] == ExitCode.OK
        report, code = step("bootstrap_scan", table, run_id)
        assert code == ExitCode.OK
        assert step("bootstrap_drain", table, run_id)[1] == ExitCode.OK
        return report

    return run


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockKafka]:
    """A Kafka in this process."""
    monkeypatch.setattr(KafkaTopics, "_make", lambda *_: None)  # the mock makes none for an admin client
    with mock_kafka() as found:
        yield found
