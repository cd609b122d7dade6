"""Ports for the servers of tests."""

import socket

import pytest

from servers import ServerError, ports


def test_no_port_is_given_twice_nor_where_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ports of one server were the same once: it could not listen on the second."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = listening.getsockname()[1]
        candidates = range(taken - 5, taken + 5)
        monkeypatch.setattr(ports, "CANDIDATES", candidates)
        found: list[int] = []
        with pytest.raises(ServerError, match="No free port found"):
            found.extend(iter(ports.free_port, 0))
    assert len(set(found)) == len(found) > 0
    assert set(found) <= set(candidates) - {taken}
