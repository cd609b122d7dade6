"""Cdc is enabled on tables before they are copied, so that their changes are captured from then on; and disabled when
ringsync is left (docs/sync.md).

A prepared statement keeps the old table options: its writes would not be captured, or go on to be. Only a change of
``gc_grace_seconds`` or ``default_time_to_live`` makes Cassandra prepare statements anew
(TableMetadata.changeAffectsPreparedStatements, 4.0 to 5.0). So the former is one second longer for a moment.
``cdc_enabling/<table id>.json`` says what it was: after a kill in this moment the next run restores it. It serves both
directions.

Each node must see that moment: one that learns of both changes at once sees none, and keeps its statements. So all
nodes agree on the schema before it ends. This takes long compared with an ALTER, and is done once for several tables.
The ALTERs themselves go one after another to one node: before Cassandra 5.1 nodes that alter at once race.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cassandra import InvalidRequest, Unauthorized
from cassandra.protocol import ConfigurationException

from ringsync.cluster.guardrails import explained, guardrail_of
from ringsync.cluster.node import NO_ANSWER, Node, one_node
from ringsync.cluster.shared import Shared
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.steps.application import StepError
from ringsync.storage.port import ChecksumError, ObjectStore, get_json

OPTIONS = "SELECT cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"


Named = TableSchema | UnreadableTable
"""A table; its columns do not matter."""


@dataclass(frozen=True)
class Enabling:
    """What a table has, and what is to be done with it.

    :ivar grace: its ``gc_grace_seconds`` in the end, s
    :ivar has_cdc: whether it has cdc already, also for statements that were prepared before
    :ivar is_in_moment: whether it has other ``gc_grace_seconds`` since a run that was killed
    """

    table: Named
    grace: int
    has_cdc: bool
    is_in_moment: bool

    @property
    def for_a_moment(self) -> int:
        """Other ``gc_grace_seconds``, s."""
        return self.grace + 1 if self.grace < 2**31 - 1 else self.grace - 1

    @property
    def key(self) -> str:
        """Key of the record of what is restored after a kill."""
        return record_key(self.table.table_id)


def record_key(table_id: str) -> str:
    """Return the key of what is restored of a table; if there is such an object, a run has been killed."""
    return f"cdc_enabling/{table_id}.json"


def enable_cdc(
    shared: Shared, store: ObjectStore, tables: Sequence[Named], why_not: Callable[[], str] = str
) -> list[str | Exception]:
    """Enable cdc on tables, also for statements that were prepared before; then wait until all nodes know of it. This
    wait is also for a table that has cdc already: a run that was killed may have altered it a moment ago.

    One thread of a run does this at a time (:class:`ringsync.cluster.shared.Together`).

    :param why_not: function that tells why no table may get cdc now; empty: each may. It is asked again at the end: if
        ``cdcservice leave`` was run meanwhile, nobody empties ``cdc_raw`` any more, and cdc is disabled again
    :returns: for each table what was done, or why that failed: a ``StepError`` if the nodes refuse it or one of them
        is down, else the driver's error
    :raises ClusterError: the nodes do not agree on the schema
    """
    done = dict(zip(tables, _switch_cdc(shared, store, tables, "enabled", why_not), strict=True))
    new = [table for table, outcome in done.items() if outcome == "enabled now"]
    if new and (reason := why_not()):
        for table, outcome in zip(new, disable_cdc(shared, store, new), strict=True):
            error = StepError(f"cdc is not enabled on {table.full_name}: {reason}")
            done[table] = outcome if isinstance(outcome, Exception) else error
    return [done[table] for table in tables]


def disable_cdc(
    shared: Shared, store: ObjectStore, tables: Sequence[Named], missed: set[str] | None = None
) -> list[str | Exception]:
    """Disable cdc on tables, also for statements that were prepared before. All else is as with :func:`enable_cdc`.

    :param missed: gets the addresses of nodes that are down, or do not agree on the schema: there, statements may go on
        to be captured. Production refuses writes now, so nothing waits before cdc is off; None: they are an error
    """
    return _switch_cdc(shared, store, tables, "disabled", str, missed)


def _switch_cdc(
    shared: Shared,
    store: ObjectStore,
    tables: Sequence[Named],
    what: str,
    why_not: Callable[[], str],
    missed: set[str] | None = None,
) -> list[str | Exception]:
    cdc = what == "enabled"
    if missed is None:
        shared.wait_for_agreement(time.monotonic())
    node = one_node(shared.session)
    found = {table: _look(node, store, table, cdc) for table in tables}
    work = [one for one in found.values() if one is not None]
    new = [one for one in work if one.has_cdc != cdc]
    failed: dict[Named, Exception] = _without_all_nodes(shared, new, what) if missed is None else {}
    begun = [one for one in new if one.table not in failed]
    if begun and (reason := why_not()):
        failed |= {one.table: StepError(f"cdc is not {what} on {one.table.full_name}: {reason}") for one in begun}
        begun = []
    failed |= _alter(node, ((one.table, _begin(store, one, cdc)) for one in begun), what)
    halves = [one for one in begun if isinstance(failed.get(one.table), IgnoredError)]
    left = _alter(node, ((one.table, f"cdc = {str(not cdc).lower()}") for one in halves), what)
    left |= _alter(node, ((one.table, f"gc_grace_seconds = {one.grace}") for one in halves), what)
    refused = [one for one in begun if isinstance(failed.get(one.table), RefusedError)]
    unchanged = [one for one in refused if isinstance(left.get(one.table, failed[one.table]), RefusedError)]
    ends = [one for one in work if one.table not in failed and (one.is_in_moment or one.has_cdc != cdc)]
    if ends:
        # Also a moment that was found may have begun just now, by another run.
        _agree(shared, missed)
        failed |= _without_all_nodes(shared, ends, what) if missed is None else {}
        ends = [one for one in ends if one.table not in failed]
    failed |= _alter(node, ((one.table, f"gc_grace_seconds = {one.grace}") for one in ends), what)
    if ends:
        _agree(shared, missed)
    for one in begun:
        if one.table in failed:
            continue
        options = one_node(shared.session).execute(OPTIONS, _name(one.table)).one()
        if options is None:
            failed[one.table] = gone_error(one.table)
        elif bool(options.cdc) != cdc:
            failed[one.table] = StepError(
                f"a node does not know of the cdc of {one.table.full_name}, which another has just {what}: run again "
                "once all nodes are up"
            )
    for one in work:
        # After an answer that was lost the record stays: nobody knows what the node has done.
        if one.table not in failed or one in unchanged:
            store.delete(one.key)
    done = {one.table: f"was {what}" if one.has_cdc == cdc else f"{what} now" for one in work}
    gone = {table: gone_error(table) for table in found.keys() - done.keys()}
    return [failed.get(table) or gone.get(table) or done[table] for table in tables]


def _begin(store: ObjectStore, one: Enabling, cdc: bool) -> str:
    """Record what is restored after a kill, and return what begins the moment."""
    record = {"gc_grace_seconds": one.grace, "for_a_moment": one.for_a_moment}
    store.put(one.key, json.dumps(record).encode())
    return f"cdc = {str(cdc).lower()} AND gc_grace_seconds = {one.for_a_moment}"


def _agree(shared: Shared, missed: set[str] | None) -> None:
    if missed is None:
        shared.wait_for_agreement(time.monotonic())
    else:
        missed |= shared.behind(time.monotonic())


def _without_all_nodes(shared: Shared, tables: Sequence[Enabling], what: str) -> dict[Named, Exception]:
    """Return why tables cannot go on, if nodes are down; empty: none is.

    A node that starts later learns of both changes at once: it would never capture what was prepared on it before, or
    always.
    """
    down = one_node(shared.session).down if tables else frozenset()
    if not down:
        return {}
    return {
        one.table: StepError(
            f"cdc is not {what} on {one.table.full_name} while nodes are down ({', '.join(sorted(down))}): they would "
            f"{'never capture' if what == 'enabled' else 'go on to capture'} the writes of statements that were "
            "prepared on them before. Start them, or remove them from the ring, and run again"
        )
        for one in tables
    }


def gone_error(table: Named) -> StepError:
    """Return the error of a table that is not there any more."""
    return StepError(f"{table.full_name} is gone: it was dropped")


class RefusedError(StepError):
    """The cluster refuses to switch cdc, and has changed nothing."""


class IgnoredError(RefusedError):
    """The cluster ignores one of the properties, and may have changed the other."""


def _ignored(table: Named, reason: str, what: str) -> str:
    return (
        f"cdc cannot be {what} on {table.full_name}: {reason}. Take cdc and gc_grace_seconds out of "
        "table_properties_ignored of cassandra.yaml, or let a superuser alter the table (docs/sync.md#the-cluster)"
    )


def _name(table: Named) -> tuple[str, str]:
    return table.keyspace, table.name


def _look(node: Node, store: ObjectStore, table: Named, cdc: bool) -> Enabling | None:
    options = node.execute(OPTIONS, _name(table)).one()
    if options is None:
        return None
    found = Enabling(table, int(options.gc_grace_seconds), bool(options.cdc), is_in_moment=False)
    try:
        if (record := get_json(store, found.key)) is None:
            return found
        grace, for_a_moment = int(record["gc_grace_seconds"]), int(record["for_a_moment"])
    except (ChecksumError, ValueError, TypeError, KeyError) as error:
        print(
            f"ringsync: warning: {store.uri(found.key)} cannot be read ({type(error).__name__}): gc_grace_seconds of "
            f"{table.full_name} may be one second too long, and stays {found.grace}",
            flush=True,
        )
        grace = for_a_moment = -1
    if for_a_moment != found.grace:
        # A killed run may not have come to the moment: once more does no harm.
        return replace(found, has_cdc=found.has_cdc and not cdc)
    return replace(found, grace=grace, is_in_moment=True)


def _alter(node: Node, alterations: Iterable[tuple[Named, str]], what: str) -> dict[Named, Exception]:
    """Alter tables, one after another, on one node: another may not know of cdc yet, and each ALTER writes all options
    of the table again.

    :returns: why that failed, by table; once the node does not answer, for all that are left
    """
    failed: dict[Named, Exception] = {}
    nodes_need = "Every node needs cdc_enabled: true in cassandra.yaml. " * (what == "enabled")
    silent: Exception | None = None
    for table, alteration in alterations:
        if silent is not None:
            failed[table] = silent
            continue
        try:
            answer = node.execute(f"ALTER TABLE {table.full_name} WITH {alteration}")
        except (InvalidRequest, ConfigurationException, Unauthorized) as error:
            needs = f"{error}. {nodes_need}This user needs the right to ALTER the table (docs/sync.md)"
            reason = explained(error) if guardrail_of(str(error)) else needs
            failed[table] = RefusedError(f"cdc cannot be {what} on {table.full_name}: {reason}")
        except NO_ANSWER as error:
            # The driver tells an error of the server like a node that does not answer.
            failed[table], silent = error, None if _answers(node) else error
            if "ConcurrentModificationException" in str(error):  # of one of several properties (C: guardrails/Values)
                failed[table] = RefusedError(_ignored(table, "one of cdc and gc_grace_seconds is ignored", what))
        else:
            warnings = answer.response_future.warnings or ()
            if any(guardrail_of(warning) and "Ignoring" in warning for warning in warnings):
                failed[table] = IgnoredError(_ignored(table, explained(" ".join(warnings)), what))
    return failed


def _answers(node: Node) -> bool:
    try:
        node.execute("SELECT key FROM system.local")
    except NO_ANSWER:
        return False
    return True
