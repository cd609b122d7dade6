"""The end of a bootstrap that will not be finished: the stream goes on, and the replica stays what it was before.

First a conditional write sets the state to cancelled: from then on no run of the bootstrap publishes anything. All
later steps may be repeated after a kill.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from ringsync.cluster.schema import read_tables
from ringsync.cluster.shared import TableName
from ringsync.config import Config
from ringsync.ledger.passes import mark
from ringsync.ledger.topic_owners import take_topic
from ringsync.schema.table import Schema, TableSchema
from ringsync.state.bootstrap import COMPLETED, Bootstrap, BootstrapState
from ringsync.status import BOOTSTRAPS, forget, read_status
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.copied_gap import abandoned_bootstraps, forget_abandoned
from ringsync.steps.bootstrap.leftovers import remove_leftovers
from ringsync.steps.bootstrap.old_snapshots import clear_finished
from ringsync.steps.passes.follow_ups import publish_passes
from ringsync.steps.sync_plan import sync_table
from ringsync.steps.tables import Outcome, attempts, text_of
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import data_topic


def cancel(
    config: Config, store: ObjectStore, state: BootstrapState, tables: Sequence[TableName], outcome: Outcome
) -> Iterator[tuple[TableName, Bootstrap]]:
    """Cancel the unfinished bootstraps of tables, some at once. Running it again is safe.

    :param outcome: gets the failures; those of a table that is alone are raised, as :func:`cancel_one` does
    :returns: each table with its cancelled bootstrap
    """
    known, abandoned = read_tables(state.session), abandoned_bootstraps(store, [*map(text_of, tables)])

    def cancel_table(name: TableName) -> Bootstrap:
        return cancel_one(config, store, state, known, *name, abandoned[text_of(name)])

    yield from attempts("", tables, cancel_table, outcome)
    clear_finished(config, store, state)


def cancel_one(
    config: Config,
    store: ObjectStore,
    state: BootstrapState,
    known: Schema,
    keyspace: str,
    name: str,
    abandoned: Collection[str],
) -> Bootstrap:
    """Cancel the unfinished bootstrap of a table.

    :param known: all tables, as they were a moment ago
    :param abandoned: statuses of the table's bootstraps on which nobody works, whose alarm names this command
    :returns: the cancelled bootstrap
    :raises StepError: there is none; the table cannot be read; all of it is copied, and the table is there; another has
        begun meanwhile
    """
    latest = state.find(keyspace, name)
    if latest is None or latest.state == COMPLETED:
        forget_abandoned(store, abandoned)
        raise StepError(f"{keyspace}.{name} has no unfinished bootstrap")
    table_id = str(json.loads(latest.specification)["table_id"])
    # One that is not known was dropped, or has been created since.
    schema = known if table_id in known.by_id() else read_tables(state.session)
    table = schema.by_id().get(table_id)
    for unreadable in schema.unreadable:
        if unreadable.table_id == table_id:
            raise StepError(f"{keyspace}.{name}: its schema cannot be read: {unreadable.reason}")
    if not state.cancel(latest, gone=table is None):
        raise StepError(
            f"bootstrap {latest.id} of {keyspace}.{name} has copied everything and is being published, or another has "
            "just begun: run cdcservice bootstrap with the same options, which finishes it and reads nothing anew"
        )
    # A run that still works on it can commit no more ranges, and stops.
    state.take_over(latest.id, f"cancelled on {socket.gethostname()}, {secrets.token_hex(8)}")
    if table is not None:

        def check() -> None:
            newest = state.find(keyspace, name)
            if newest is None or newest.id != latest.id:
                raise StepError(
                    f"bootstrap {latest.id} of {keyspace}.{name} is cancelled, and another has begun meanwhile: its "
                    "end lets the stream go on"
                )

        end(config, store, table, latest.id, check)
    said = read_status(store, key := f"{BOOTSTRAPS}{table_id}")
    # Ids begin with their time: what a later one says, or another run that prepares it now, stays.
    if said is None or said["bootstrap"] <= latest.id or said.get("run") == latest.run:
        forget(store, key)
    forget_abandoned(store, abandoned)
    return latest


def end(config: Config, store: ObjectStore, table: TableSchema, bootstrap_id: str, check: Callable[[], None]) -> None:
    """Let the stream go on with the changes that have waited, and remove the copied rows.

    :param check: raises when another bootstrap of the table has begun, which must not be ended
    """
    topic = data_topic(config.server_name, table)
    # The mark is put even if the bootstrap has not begun: a `prepare` that is about to begin it is then refused.
    now_ms = int(time.time() * 1000)
    take_topic(store, topic, table.table_id, now_ms)
    number = mark(store, table.table_id, "cutover", bootstrap_id, now_ms, check=check)
    remove_leftovers(store, table, topic, number)
    publish_passes(store, config, sync_table(store, config, table))
