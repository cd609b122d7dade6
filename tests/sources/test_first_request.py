"""A node that accepts a connection and cannot serve what is asked first: it is in a pause of its garbage collector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import OperationTimedOut, ReadTimeout
from cassandra.cluster import NoHostAvailable
from cassandra.protocol import OverloadedErrorMessage

import ringsync.cluster.session as sessions
from ringsync.cluster.session import ClusterSettings, UnreachableError, connect

ERRORS = (
    (OperationTimedOut({"10.0.0.1:9042": "Client request timeout"}, "10.0.0.1:9042"), "10.0.0.1:9042 (Client request"),
    (ReadTimeout("Operation timed out - received only 0 responses."), "10.0.0.1:9042 (Operation timed out"),
    (OverloadedErrorMessage(code=0x1001, message="too busy", info=None), "too busy"),
    (NoHostAvailable("none", {"10.0.0.1:9042": OSError(111, "Connection refused")}), "(Connection refused)"),
    (KeyboardInterrupt(), ""),
)


@pytest.mark.parametrize(("error", "told"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_it_is_told_and_its_connections_are_closed(
    error: BaseException, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[bool]()

    def execute(*_: Any) -> None:
        raise error

    cluster = SimpleNamespace(
        connect=lambda: SimpleNamespace(default_fetch_size=5000, execute=execute),
        shutdown=lambda: closed.append(True),
        metadata=SimpleNamespace(all_hosts=lambda: []),
    )
    monkeypatch.setattr(sessions, "_cluster", lambda *_: cluster)
    with pytest.raises(UnreachableError if told else KeyboardInterrupt) as raised:
        connect(ClusterSettings(("10.0.0.1",)))
    assert told in str(raised.value)
    assert closed == [True]
