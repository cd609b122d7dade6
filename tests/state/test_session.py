"""ringsync's keyspace: created where it is missing, retried where an answer is lost, documented as it is."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import OperationTimedOut

from ringsync.state.session import RETRY_DELAYS_S, SCHEMA_DELAYS_S, TABLES, StateError, StateSession

REPLICATION = {"class": "NetworkTopologyStrategy", "datacenter1": "1"}


@pytest.fixture(scope="module")
def state(session: Any) -> Iterator[StateSession]:
    found = StateSession(session, "t_state_session")
    found.create(REPLICATION)
    yield found
    session.execute("DROP KEYSPACE t_state_session")


def test_the_statements_for_administrators_are_those_that_ringsync_runs() -> None:
    documented = " ".join((Path(__file__).parents[2] / "docs" / "state.md").read_text().split())
    for statement in TABLES.values():
        assert " ".join(statement.format(keyspace="cdc").split()) + ";" in documented


@pytest.mark.server
def test_a_table_that_is_missing_is_created(state: StateSession, session: Any) -> None:
    session.execute("DROP TABLE t_state_session.processor_error")
    assert not state.has(TABLES)
    state.create(REPLICATION)
    assert state.has(TABLES)


@pytest.mark.server
def test_what_another_application_is_creating_just_now_is_waited_for(state: StateSession, session: Any) -> None:
    """A node may not know yet what another node has told: the table to read, or the keyspace of a table to make."""
    session.execute("DROP TABLE t_state_session.bootstrap")
    waiting = StateSession(session, "t_state_session", lambda _: state.create(REPLICATION))
    select = "SELECT id FROM t_state_session.bootstrap WHERE keyspace_name = %s AND table_name = %s"
    assert waiting.execute(select, ("a", "b")).one() is None
    session.execute("DROP TABLE t_state_session.bootstrap")
    assert waiting.bind(select.replace("%s", "?"), ("a", "b"))

    class KnowsTooMuch:
        """The node that was asked has the keyspace, the next one has not."""

        def execute(self, statement: str, *parameters: Any) -> Any:
            if statement.startswith("SELECT table_name"):
                return [SimpleNamespace(table_name="other")]
            return session.execute(statement, *parameters)

    options = "{'class': 'NetworkTopologyStrategy', 'datacenter1': 1}"
    create = f"CREATE KEYSPACE IF NOT EXISTS t_state_late WITH replication = {options}"
    late = StateSession(KnowsTooMuch(), "t_state_late", lambda _: session.execute(create))
    try:
        late.create(REPLICATION)
        assert StateSession(session, "t_state_late").has(TABLES)
    finally:
        session.execute("DROP KEYSPACE IF EXISTS t_state_late")


@pytest.mark.server
def test_what_nobody_creates_is_missing_in_the_end(state: StateSession) -> None:
    slept: list[float] = []
    missing = StateSession(state._session, "t_state_session", slept.append)
    with pytest.raises(StateError, match=r"has other tables than this version of ringsync makes: .*no_such_table"):
        missing.execute("SELECT a FROM t_state_session.no_such_table", ())
    assert tuple(slept) == SCHEMA_DELAYS_S


@pytest.mark.server
def test_writes_whose_answers_are_lost_are_repeated(state: StateSession, session: Any) -> None:
    """Of many under way at once, each third loses its answer, and each ninth that of its repetition, too."""
    slept: list[float] = []

    class LosesAnswers:
        asked = 0

        def prepare(self, cql: str) -> Any:
            return session.prepare(cql)

        def execute(self, statement: Any) -> Any:
            answer = session.execute(statement)
            self._lose()
            return answer

        def execute_async(self, statement: Any) -> Any:
            future = session.execute_async(statement)
            losing = self

            class Future:
                def result(self) -> Any:
                    answer = future.result()
                    losing._lose()
                    return answer

            return Future()

        def _lose(self) -> None:
            self.asked += 1
            if self.asked % 3 == 0:
                raise OperationTimedOut("lost")

    losing = StateSession(LosesAnswers(), "t_state_session", slept.append)
    insert = "INSERT INTO t_state_session.processor_error (node, file, position) VALUES (?, ?, ?)"
    losing.write_all(losing.bind(insert, ("n", "f", number)) for number in range(200))
    select = state.bind("SELECT position FROM t_state_session.processor_error WHERE node = ? AND file = ?", ("n", "f"))
    assert [row.position for row in next(state.read_all([select]))] == list(range(200))
    assert len(slept) > 60


@pytest.mark.server
def test_what_is_refused_is_not_repeated(state: StateSession) -> None:
    with pytest.raises(StateError, match="has other tables than this version of ringsync makes"):
        state.bind("SELECT no_such_column FROM t_state_session.processor_error", ())


def test_it_gives_up_in_the_end() -> None:
    slept: list[float] = []

    class Dead:
        def execute(self, statement: Any, parameters: Any) -> Any:
            raise OperationTimedOut("nobody there")

    with pytest.raises(StateError, match="9 attempts: OperationTimedOut"):
        StateSession(Dead(), "cdc", slept.append).execute("SELECT", ())
    assert tuple(slept) == RETRY_DELAYS_S
