"""Checks before ``cdcservice start``: does the cluster permit what the sync asks for (rights, guardrails, masks)?

Each node decides for itself what it permits, so each is asked. The questions read no row and change none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cassandra.query import SimpleStatement

from ringsync.cluster.cluster import read_hosts, read_replications
from ringsync.cluster.levels import check_level, permitted_level
from ringsync.cluster.masks import check_unmasked
from ringsync.cluster.node import NO_ANSWER
from ringsync.cluster.session import GuardrailError, endpoint_of, explained_errors
from ringsync.config import Config
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, RingSnapshot
from ringsync.schema.table import TableSchema
from ringsync.state.session import TABLES, StateSession

LEVELS = {
    "LOCAL_ONE": "reads rows on which all replicas agree (after_image: source)",
    "LOCAL_QUORUM": "reads rows on which replicas disagreed while one is down, and what deletions have spared",
    "ALL": "reads rows on which replicas disagree, late rows, counters, and what a repair writes",
}
"""Levels of the sync's reads, with what is read at them."""


def check_permitted(session: Any, config: Config, tables: Collection[TableSchema]) -> list[str]:
    """Check that each node permits the reads of the sync, and that ringsync's own keyspace may be written.

    :param tables: the tables that are followed
    :raises GuardrailError: a guardrail forbids them; the message names node, guardrail and remedy
    :raises ClusterError: a column is masked for us, or a right is missing
    :raises StateError: our own keyspace cannot be used
    """
    for table in tables:
        check_unmasked(session, table, config.cassandra.username)
    hosts = [host for host in session.get_pool_state() if host.is_up]
    of_keyspaces = {table.keyspace: table for table in tables}
    sets = _replica_sets(session, of_keyspaces)
    for host in hosts:
        try:
            _check_host(session, config, of_keyspaces.values(), sets, host)
        except GuardrailError as error:
            raise GuardrailError(f"{endpoint_of(host)} forbids what the sync does: {error}", error.name) from error
        except NO_ANSWER:
            continue  # who does not answer is named already
    return _check_state(session, config)


def _replica_sets(session: Any, keyspaces: Iterable[str]) -> dict[str, Sequence[Sequence[Host]]]:
    """Return the replicas of each token range, by keyspace."""
    hosts = read_hosts(session)
    replications = read_replications(session, keyspaces)
    return {name: ranked(RingSnapshot(hosts, one)).hosts for name, one in replications.items()}


def _check_host(
    session: Any,
    config: Config,
    tables: Iterable[TableSchema],
    sets: Mapping[str, Sequence[Sequence[Host]]],
    host: Any,
) -> None:
    """Check one node, by a table of each keyspace.

    :raises GuardrailError: it forbids something
    """
    with explained_errors(config.cassandra.username):
        session.execute(
            SimpleStatement("SELECT key FROM system.local", fetch_size=config.cassandra.page_size), host=host
        )
    for table in tables:
        check_level(session, table, config.cassandra.consistency_level, host)
        for level, purpose in LEVELS.items():
            try:
                permitted_level(session, table, level, sets[table.keyspace], host)
            except GuardrailError as error:
                raise GuardrailError(f"the sync {purpose}: {error}", error.name) from error


def _check_state(session: Any, config: Config) -> list[str]:
    """Check that our own keyspace may be read and written, if it is there.

    :raises StateError: it may not
    """
    state = StateSession(session, config.state.keyspace)
    if not state.has(TABLES):
        return [f"ringsync's own keyspace {config.state.keyspace} is not there yet: it will be created"]
    # No table has empty names.
    no_table = "WHERE keyspace_name = '' AND table_name = ''"
    state.execute(f"SELECT state FROM {state.keyspace}.bootstrap {no_table}", ())
    state.execute(f"DELETE FROM {state.keyspace}.bootstrap {no_table} IF EXISTS", ())
    return []
