"""``cdcservice leave``: cdc off, the logs emptied, the DAGs off; what is left to remove is named (docs/sync.md)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rich.console import Console

from ringsync.cluster.cluster import read_hosts
from ringsync.cluster.node import ask_one, one_node
from ringsync.cluster.schema import tables_of
from ringsync.cluster.scylla import cdc_column, has_cdc, is_scylla
from ringsync.cluster.session import connect
from ringsync.cluster.shared import Shared
from ringsync.config import Config, load_config
from ringsync.ring.ring import Host
from ringsync.service.checks import longest_sync_period_ms
from ringsync.service.command import wait_until_idle
from ringsync.service.expected import ARCHIVE, archives, expected_in
from ringsync.service.look import client_of
from ringsync.service.parsers import STOP_TIMEOUT_S
from ringsync.service.published import wait_until_published
from ringsync.status import BOOTSTRAPS, LEFT_KEY, STOP_KEY, cycle_ms, look_at_statuses, read_statuses
from ringsync.steps.application import ExitCode, StepError
from ringsync.steps.bootstrap.emptied import asked_nodes
from ringsync.steps.bootstrap.enable_cdc import Named, disable_cdc, record_key
from ringsync.storage.port import ObjectStore
from ringsync.terminal import say, say_error
from ringsync.wiring import cluster_settings, store_of


def leave(arguments: argparse.Namespace, console: Console) -> ExitCode:
    """Run the command. Without ``--yes`` it only says what it would do.

    :raises StepError: the cluster is ScyllaDB, a bootstrap is not finished, or nobody has said what is to become of
        tables that are not followed
    """
    config = load_config(arguments.conf)
    store, session = store_of(config), connect(cluster_settings(config))
    tables, others = tables_with_cdc(session, store, config)
    if is_scylla(session):
        statements = " ".join(f"ALTER TABLE {table.full_name} WITH cdc = {{'enabled': false}};" for table in tables)
        raise StepError(
            "this cluster is ScyllaDB, whose CDC logs expire by themselves and refuse no write. Nothing was changed. "
            "To leave, run cdcservice wait, then cdcservice stop, then in cqlsh: "
            f"{statements or 'nothing, since no followed table has cdc'} See docs/scylla.md#leaving"
        )
    _check(others, arguments.others, [] if arguments.no_wait else _unfinished(store))
    if arguments.others == "disable":
        tables, others = (*tables, *others), ()
    for table in others:
        say(console, f"{table.full_name} keeps cdc: somebody else has to empty cdc_raw, or its writes are refused")
    if not arguments.yes:
        for table in tables:
            say(console, f"would switch cdc off on {table.full_name}")
        say(console, f"nothing was changed: {len(tables)} tables; --yes does it")
        return ExitCode.OK
    began_ms = int(time.time() * 1000)
    store.put(LEFT_KEY, json.dumps({"at_ms": began_ms}).encode())
    left = "; ".join(_switch_off(Shared(session), store, tables, console, at_once=arguments.no_wait))
    if not left and not arguments.no_wait:
        left = _wait(config, store, read_hosts(session), began_ms, arguments.timeout, console)
    left = left or _with_cdc(session, store, config, {table.table_id for table in others})
    if not left and not arguments.no_wait:
        left = "; ".join(f"the bootstrap of {table} is not finished" for table in _unfinished(store))
    if left:
        say_error(f"{left}. The DAGs stay on, so that cdc_raw is emptied: run this again; --no-wait waits for no log")
        return ExitCode.COMPLETED_WITH_ERRORS
    _stop(config, store, console)
    for line in what_remains(config, store):
        say(console, line)
    return ExitCode.OK


def tables_with_cdc(session: Any, store: ObjectStore, config: Config) -> tuple[tuple[Named, ...], tuple[Named, ...]]:
    """Return the tables with cdc that are followed, and all others; and those on which switching it was cut off."""

    def read(node: Any) -> tuple[Sequence[Named], set[tuple[str, str]]]:
        schema = tables_of(node)
        rows = node.execute(f"SELECT keyspace_name, table_name, {cdc_column(node)} FROM system_schema.tables")
        with_cdc = {(row.keyspace_name, row.table_name) for row in rows if has_cdc(row)}
        return (*schema.tables, *schema.unreadable), with_cdc

    tables, with_cdc = ask_one(session, read)
    cut_off = {stat.key for stat in store.list(record_key("").removesuffix(".json"))}
    wanted = [
        table for table in tables if (table.keyspace, table.name) in with_cdc or record_key(table.table_id) in cut_off
    ]
    followed = tuple(table for table in wanted if config.sync.follows(table.full_name))
    return followed, tuple(table for table in wanted if table not in followed)


def _check(others: Sequence[Named], what_of_others: str | None, unfinished: Sequence[str]) -> None:
    if others and what_of_others is None:
        raise StepError(
            f"these tables have cdc, and are not followed: {', '.join(table.full_name for table in others)}. Once "
            "nobody empties cdc_raw, Cassandra refuses their writes, too: say --others disable, or --others keep if "
            "somebody else empties it. Nothing was changed"
        )
    if unfinished:
        raise StepError(
            f"bootstraps are not finished: {', '.join(unfinished)}. Let them end, or run cdcservice bootstrap "
            "--cancel; --no-wait gives them up. Nothing was changed"
        )


def _unfinished(store: ObjectStore) -> list[str]:
    """Name the tables whose bootstraps are not finished."""
    statuses = look_at_statuses(store)
    unfinished = [status["table"] for loop, status in statuses.understood.items() if loop.startswith(BOOTSTRAPS)]
    damaged = [loop for loop in statuses.damaged if loop.startswith(BOOTSTRAPS)]
    return unfinished + [f"status/{loop}.json, which is damaged" for loop in damaged]


def _with_cdc(session: Any, store: ObjectStore, config: Config, kept: Collection[str]) -> str:
    """Tell which tables have cdc, whoever has switched it on since; empty: none has.

    :param kept: ids of tables that keep cdc
    """
    followed, others = tables_with_cdc(session, store, config)
    return "; ".join(f"{table.full_name} has cdc" for table in (*followed, *others) if table.table_id not in kept)


def _switch_off(
    shared: Shared, store: ObjectStore, tables: Sequence[Named], console: Console, *, at_once: bool
) -> Iterator[str]:
    """Switch cdc off.

    :param at_once: whether to do it while nodes are down, or disagree about the schema: production comes first
    :returns: why that failed for some tables, or is not sure
    """
    missed = set[str]() if at_once else None
    for table, done in zip(tables, disable_cdc(shared, store, tables, missed) if tables else (), strict=True):
        if isinstance(done, Exception):
            yield str(done)
        else:
            say(console, f"{table.full_name}: cdc {done}")
    if missed is not None and (missed := missed | one_node(shared.session).down | shared.behind(float("-inf"))):
        yield (
            f"nodes are down or do not know of it ({', '.join(sorted(missed))}): they may go on to capture the writes "
            "of statements that were prepared on them before. Once they are up and the nodes agree on the schema, "
            "restart them once more"
        )


def _wait(
    config: Config, store: ObjectStore, hosts: Sequence[Host], began_ms: int, timeout_s: float, console: Console
) -> str:
    """Wait until what was logged is published, and finished segments have left their nodes.

    :returns: what is left; empty: nothing
    """
    end_s, synced_ms = time.time() + timeout_s, began_ms + longest_sync_period_ms(config)
    say(console, "waiting until all that was logged is published, and the logs are empty")
    kafka = config.kafka_topic if config.kafka else None
    waited = wait_until_published(store, config.sync, synced_ms, timeout_s, kafka)
    if waited.left:
        return f"not all is published: {waited.left}"
    with asked_nodes(config) as captures:
        while left := segments_left(config, store, hosts, captures, began_ms):
            if time.time() >= end_s:
                return left
            time.sleep(1.0)
    return ""


def segments_left(
    config: Config, store: ObjectStore, hosts: Sequence[Host], captures: Callable[[Host], bool], since_ms: int
) -> str:
    """Tell which nodes still have finished segments, or could not be looked at, by what the archive has said since a
    moment; empty: none. If nobody archives, nobody knows.

    :param captures: function that asks a node whether it captures changes
    """
    if not archives(config):
        return ""
    sync, statuses, left = config.sync, read_statuses(store), []
    looked_at: set[str] = set()
    for queue in sync.queues:
        status = statuses.get(f"{ARCHIVE}{queue}", {"at_ms": 0})
        if cycle_ms(status) <= since_ms:
            left.append(f"queue {queue}: its archive has not looked yet")
            looked_at |= {host.id for host in hosts if sync.queue_of(host.address, host.id) == queue}
        for host, node in status.get("nodes", {}).items():
            looked_at.add(host)
            if error := node.get("error"):
                left.append(f"{node['endpoint']}: {error}")
            elif node.get("waiting"):
                left.append(f"{node['waiting']} finished segments are in {node['folder']}")
    for host in hosts:
        if sync.datacenters and host.datacenter not in sync.datacenters:
            continue
        if host.id not in looked_at and captures(host):
            left.append(f"{host.endpoint}: its archive has not looked at it yet")
    return ", ".join(left)


def _stop(config: Config, store: ObjectStore, console: Console) -> None:
    client, expected = client_of(config), expected_in(config, store)
    store.put(STOP_KEY, json.dumps({"at_ms": int(time.time() * 1000)}).encode())
    for dag in expected.all_dags:
        client.set_paused(dag, True)
    wait_until_idle(client, expected.dags, STOP_TIMEOUT_S, console)
    # Last: from now on nobody is missed, and a DAG that could not be switched off would run unseen.
    store.put(LEFT_KEY, json.dumps({"at_ms": int(time.time() * 1000), "has_ended": True}).encode())
    say(console, f"stopped: {', '.join(expected.all_dags)}")


def what_remains(config: Config, store: ObjectStore) -> list[str]:
    """Return what is left to remove by hand."""
    role = config.cassandra.username
    return [
        "ringsync has left this cluster, which captures nothing for it any more. What you may remove by hand:",
        f"  DROP KEYSPACE IF EXISTS {config.state.keyspace};",
        *([f'  DROP ROLE IF EXISTS "{role}";'] if role else []),
        "  on each node: ringsync-claim.* and finished segments in cdc_raw, snapshots ringsync_*; cdc_enabled: true in "
        "cassandra.yaml",
        f"  in {store.url}: all but replica/, current/ and streams/, which you may want to keep",
        "  in Airflow: ringsync's DAGs, connections and $AIRFLOW_HOME/ringsync; in Kafka: its topics and subjects",
    ]
