"""Fixtures that several test modules share: a real Cassandra node, a session, a keyspace of one's own."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import fetch
from servers.spark import lean_java_options

MOST_BYTES = 6 * 2**30
"""Memory that tests may have in one process; they need 2 GiB."""

# How fast examples are made says how busy the machine is.
settings.register_profile("ringsync", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("ringsync")


@pytest.fixture(scope="session", autouse=True)
def _no_power_cut() -> Iterator[None]:
    """Tests kill processes, which loses nothing that was written: nobody waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def pytest_configure() -> None:
    """End this process, and show where it is, before it takes the memory of all: the system's killer says nothing."""
    stderr = os.fdopen(os.dup(2), "w")  # the own one is captured while tests run
    threading.Thread(target=_watch_memory, args=(stderr,), name="watch memory", daemon=True).start()


def _watch_memory(stderr: TextIO) -> None:
    # Tests replace time.sleep, Path.open and os.open, and count who calls them: this thread calls none of them.
    never, read = threading.Event(), os.pread
    pages, page_bytes = os.open("/proc/self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    while int(read(pages, 200, 0).split()[1]) * page_bytes < MOST_BYTES:
        never.wait(1)
    print(f"more than {MOST_BYTES} bytes: {os.environ.get('PYTEST_CURRENT_TEST')}", file=stderr, flush=True)
    faulthandler.dump_traceback(stderr)
    os._exit(70)


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


SPARK_CONF = {
    "spark.sql.shuffle.partitions": "2",
    # Spark compiles each query to Java; for tables of some rows that takes longer than the query. The tests that start
    # applications do not have this.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
}


@pytest.fixture(scope="session")
def spark(cache: Path) -> Iterator[Any]:
    """One Spark session with Delta for the whole test session, on two threads; workers find the package's source."""
    from ringsync.replica.session import spark_session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent / "include")
    delta = sorted(fetch("delta", cache).glob("*.jar"))
    jars = [str(jar) for jar in delta if jar.name.startswith(("delta-", "unitycatalog-"))]
    with pytest.MonkeyPatch.context() as patch:
        # For this JVM only: a server has other classes.
        patch.setenv("JDK_JAVA_OPTIONS", lean_java_options(cache, delta))
        found = spark_session("tests", jars=jars, master="local[2]", conf=SPARK_CONF)
    yield found
    found.stop()


FIRST = ("e2e", "sync", "steps", "replica", "sources", "service", "servers", "changes", "chaos", "spark_apps")
"""Folders of tests that take longest: of two processes none shall begin them when the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("/")[1], len(FIRST)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """The tests of a folder stay together, in one process: they share servers."""
    return ByFolder(config, log)


class ByFolder(LoadScopeScheduling):
    """Gives whole folders of tests to processes."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0].split("/")[1]
