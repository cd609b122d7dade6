"""Fixtures that several test modules share: a real Cassandra node, a session, a keyspace of one's own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import fetch


@pytest.fixture(scope="session")
def cache() -> Path:
    """The folder that keeps fetched jars between test sessions."""
    return Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session")
def cassandra(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    """One Cassandra 5.0 node for the whole test session."""
    with CassandraNode(tmp_path_factory.mktemp("cassandra"), NodeSettings().on_free_ports(), cache) as node:
        yield node


@pytest.fixture(scope="session")
def session(cassandra: CassandraNode) -> Iterator[Any]:
    """A session of the Python driver (protocol 5) on the shared node."""
    cluster = cassandra.cluster()
    try:
        yield cluster.connect()
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def keyspace(session: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an empty keyspace (one replica) that belongs to this test module and is dropped after it."""
    name = re.sub(r"\W", "_", f"t_{Path(request.node.name).stem}").lower()[:40]
    session.execute(f"DROP KEYSPACE IF EXISTS {name}")
    session.execute(f"CREATE KEYSPACE {name} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 1}}")
    yield name
    session.execute(f"DROP KEYSPACE {name}")


@pytest.fixture(scope="session")
def spark(cache: Path) -> Iterator[Any]:
    """One Spark session with Delta for the whole test session, on two threads; workers find the package's source."""
    from ringsync.replica.session import spark_session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent / "include")
    jars = [str(j) for j in fetch("delta", cache).glob("*.jar") if j.name.startswith(("delta-", "unitycatalog-"))]
    found = spark_session("tests", jars=jars, master="local[2]", lean=True, conf={"spark.sql.shuffle.partitions": "2"})
    yield found
    found.stop()
