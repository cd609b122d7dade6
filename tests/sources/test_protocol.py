"""Pages as bytes, and reads as of one moment, against a real server."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringsync.cluster.session import SCAN_PROFILE, close_all, connect
from servers.cassandra import CassandraNode
from tests.sources.clusters import settings_of

pytestmark = pytest.mark.server


@pytest.fixture
def table(session: Any, keyspace: str) -> str:
    session.execute(f"CREATE TABLE IF NOT EXISTS {keyspace}.t (id int PRIMARY KEY, v int)")
    return f"{keyspace}.t"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


def test_pages_and_their_moment(cassandra: CassandraNode, session: Any, table: str) -> None:
    from ringsync.sources.scan.scan import scan_session

    settings = settings_of(cassandra)
    written = int(time.time())
    session.execute(f"INSERT INTO {table} (id, v) VALUES (1, 7) USING TTL 1000")
    ttls = []
    for later in (0, 500, 990, 1100):
        scan = scan_session(settings, written + later)
        prepared = scan.prepare(f"SELECT v, ttl(v) FROM {table} WHERE id = ?")
        page = scan.execute(prepared, (1,), execution_profile=SCAN_PROFILE).current_rows[0]
        assert isinstance(page, memoryview)
        rows = int.from_bytes(page[:4], "big")
        assert rows == (1 if later < 1000 else 0)
        if rows:
            assert page[4:12] == b"\0\0\0\4\0\0\0\7"
            ttls.append(int.from_bytes(page[16:20], "big") + written + later)
    # The expiry does not depend on the moment of reading; the server's clock may have ticked once before the write.
    assert len(set(ttls)) == 1
    assert written + 1000 <= ttls[0] <= written + 1002


def test_the_ordinary_session_is_not_touched(cassandra: CassandraNode, table: str) -> None:
    from ringsync.sources.scan.scan import scan_session

    settings = settings_of(cassandra)
    scan_session(settings, 2**31 - 2)
    assert connect(settings).execute(f"SELECT v, ttl(v) FROM {table} WHERE id = 1").one() == (
        7,
        pytest.approx(950, abs=50),
    )
