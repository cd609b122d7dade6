"""Masked columns, for whom the configuration names no user: the role may come from the client's certificate.

``C: auth/MutualTlsAuthenticator``; with a real node: tests/spark_apps/test_guarded.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import InvalidRequest, Unauthorized, Unavailable

from ringsync.cluster.masks import check_pages, check_unmasked, wait_until_unmasked
from ringsync.cluster.session import ClusterError, UnreachableError
from ringsync.cql.types import Native
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.pages import RETRY_DELAYS_S

TABLE = TableSchema(
    "k", "t", "0" * 32, (Column("id", "partition_key", Native("int")), Column("v", "regular", Native("text")))
)
EVERYONE = Unauthorized("You are not authorized to view everyone's permissions")
NOT_SUPPORTED = InvalidRequest("LIST PERMISSIONS operation is not supported by AllowAllAuthorizer")


class Cluster:
    """A session with a node that masks columns, and answers LIST UNMASK PERMISSION with an error."""

    def __init__(self, *masked: str, error: Exception) -> None:
        self._masked, self._error = masked, error

    def execute_async(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(result=lambda: [SimpleNamespace(column_name=name) for name in self._masked])

    def execute(self, *_: Any, **__: Any) -> None:
        raise self._error


def check(cluster: Cluster) -> None:
    check_unmasked(cluster, TABLE, None)


def check_session(cluster: Cluster, of_session: Any) -> None:
    of_session(SimpleNamespace(plain=cluster, facts={}, coordinators={None}), TABLE, None)


CHECKS = [check, partial(check_session, of_session=check_pages), partial(check_session, of_session=wait_until_unmasked)]


@pytest.mark.parametrize("check", CHECKS)
def test_a_role_of_a_certificate_may_lack_unmask(check: Callable[[Cluster], None]) -> None:
    with pytest.raises(ClusterError, match=r"v are masked.*everyone's permissions.*cassandra\.username"):
        check(Cluster("v", error=EVERYONE))
    check(Cluster(error=EVERYONE))


def test_where_nobody_logs_in_nothing_is_hidden() -> None:
    check(Cluster("v", error=NOT_SUPPORTED))


@pytest.mark.parametrize("failures", [0, 1, 4, 5])
def test_nodes_are_asked_about_masks_as_often_as_for_pages(failures: int) -> None:
    """A driver's error went to the task after two, and the table was given up for the run."""
    left, pauses = [Unavailable("u") for _ in range(failures)], list[float]()

    def answer(*_: Any, **__: Any) -> Any:
        if left:
            raise left.pop()
        return []

    plain = SimpleNamespace(execute=answer, execute_async=lambda *_, **__: SimpleNamespace(result=answer))
    session: Any = SimpleNamespace(plain=plain, facts={}, coordinators={None})
    with pytest.raises(UnreachableError, match=r"k\.t: no node says.*Unavailable") if failures > 4 else nullcontext():
        check_pages(session, TABLE, None, pauses.append)
    assert pauses == [0.0, *RETRY_DELAYS_S][:failures]
