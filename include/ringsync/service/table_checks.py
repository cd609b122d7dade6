"""Checks of the tables before ``cdcservice start`` starts anything: which are followed, and can they be read?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ringsync.cluster.generations import Streams, has_tablets, read_generation, read_times, vnode_streams
from ringsync.cluster.scylla import CdcOptions, options_in
from ringsync.config import Config
from ringsync.config.sections import Scylla
from ringsync.config.sync import Sync
from ringsync.cql.identifiers import parse_table_name, portable_name, printable, quote
from ringsync.scylla.log_schema import LOG_SUFFIX
from ringsync.sources.cdc_log import grouped

SHORT_TTL_S = 3600
"""A log that forgets changes sooner than this leaves little time for repairs of the sync."""

_OPTION = "cdc = {'enabled': true}"


class CheckError(Exception):
    """Something that the sync needs is missing or does not work; the message says what to do."""


def check_cdc_logs(session: Any, config: Config) -> list[str]:
    """Check that we may read the tables of a ScyllaDB that capture changes, and their logs. The remarks say how often
    the cluster is asked, and how far that puts changes behind.

    :raises CheckError: the log of a table that is followed does not have what changed
    :raises Unauthorized: we may not select from a table
    """
    rows = session.execute("SELECT keyspace_name, table_name, extensions FROM system_schema.tables")
    found = {(row.keyspace_name, row.table_name): options_in(row) for row in rows}
    cdc = {name: options for name, options in sorted(found.items()) if options is not None and options.enabled}
    tables = {f"{printable(keyspace)}.{printable(table)}": (keyspace, table) for keyspace, table in cdc}
    remarks, sync = [], config.sync
    followed = [name for table, name in tables.items() if sync.follows(table)]
    for table, (keyspace, name) in tables.items():
        if sync.follows(table):
            remarks += _judge_log(table, cdc[keyspace, name])
            check_readable(session, keyspace, name)
            check_readable(session, keyspace, name + LOG_SUFFIX)
    check_topics(filter(sync.follows, tables), config)
    told = tell_tables([*tables], sync, _OPTION)
    load = tell_load(requests_of_a_round(session, followed), len(followed), config.scylla)
    return [*told, f"ScyllaDB: changes come from the logs (*{LOG_SUFFIX}), by CQL", *load, *remarks]


def requests_of_a_round(session: Any, tables: Sequence[tuple[str, str]]) -> int:
    """Return how many requests it takes to ask all present streams of some tables' logs once.

    :param tables: keyspace and name of each
    """
    total, counts = 0, dict[Streams, int]()
    for keyspace, name in tables:
        streams = Streams((keyspace, name)) if has_tablets(session, keyspace) else vnode_streams(session)
        if streams not in counts:
            times = read_times(session, streams)
            counts[streams] = len(grouped(read_generation(session, streams, times[-1]), None)) if times else 0
        total += counts[streams]
    return total


def tell_load(requests: int, tables: int, scylla: Scylla) -> list[str]:
    """Return remarks on how often a ScyllaDB is asked.

    :param requests: those that ask all streams of all followed tables once
    """
    if not requests:
        return []
    round_s, window_s = requests / scylla.queries_per_s, scylla.window_ms / 1000
    said = f"{requests:,} requests ask the streams of {tables:,} tables once: {round_s:,.0f} s at scylla.queries_per_s"
    if round_s <= window_s:
        return [f"{said} ({scylla.queries_per_s:,})"]
    wanted = math.ceil(requests / window_s)
    return [
        f"warning: {said} ({scylla.queries_per_s:,}), so changes come that much later. For windows of scylla.window_ms "
        f"set it to {wanted:,} if the cluster bears that, or leave tables out (sync.exclude)"
    ]


def _judge_log(table: str, options: CdcOptions) -> list[str]:
    """Return remarks on a table's log.

    :raises CheckError: it does not have what changed
    """
    if options.delta != "full":
        raise CheckError(
            f"the cdc of {table} has delta = keys: its log does not say what was written. ALTER TABLE {table} WITH "
            "cdc = {'enabled': true}, or leave the table out (sync.exclude)"
        )
    if options.ttl_s == 0:
        return [f"warning: the log of {table} has ttl = 0: nothing ever removes its rows"]
    if options.ttl_s < SHORT_TTL_S:
        return [
            f"warning: the log of {table} keeps its rows for {options.ttl_s:,} s only (ttl): what was not read until "
            "then is lost"
        ]
    return []


def check_topics(tables: Iterable[str], config: Config) -> list[str]:
    """Check that Kafka does not take the topics of two tables for one: it knows no difference between ``.`` and ``_``
    (C: Topic.hasCollision), and would refuse the second.

    :param tables: names of the tables that are followed, ``keyspace.table`` as in CQL
    :raises CheckError: it does
    """
    owners: dict[str, tuple[str, str]] = {}
    for table in sorted(tables) if config.kafka else ():
        topic = config.kafka_topic(f"{config.server_name}.{portable_name(*parse_table_name(table))}")
        first, before = owners.setdefault(topic.replace(".", "_"), (table, topic))
        if first != table:
            raise CheckError(
                f"{first} and {table} would have the topics {before} and {topic}, which Kafka takes for one: choose "
                f"another name for one of them, e.g. kafka.topic_name: {{{table}: {topic.replace('.', '-')}}}"
            )
    return []


def tell_tables(tables: Sequence[str], sync: Sync, option: str = "cdc = true") -> list[str]:
    """Return remarks on which tables are followed and which are not.

    :param tables: names of the tables that capture changes, ``keyspace.table`` as in CQL
    :param option: the table option that makes a table capture changes
    """
    if not tables:
        return [f"no table has {option} yet: ALTER TABLE … WITH {option}, or cdcservice bootstrap"]
    followed = [table for table in tables if sync.follows(table)]
    left_out = [table for table in tables if table not in followed]
    remarks = [f"tables that are followed: {', '.join(_with_settings(table, sync) for table in followed)}"]
    if not followed:
        remarks = [f"warning: no table is followed: sync.include and sync.exclude leave out all that have {option}"]
    if left_out:
        remarks.append(f"tables with {option} that sync.include or sync.exclude leaves out: {', '.join(left_out)}")
    useless = sync.useless_patterns(tables)
    return [*remarks, *(f"warning: {pattern} names no table that has {option}" for pattern in useless)]


def _with_settings(table: str, sync: Sync) -> str:
    settings = [
        *([f"after_image: {image}"] if (image := sync.after_image_of(table)) != sync.after_image else []),
        *(["bucket_by: arrival"] if sync.bucket_by_of(table) == "arrival" else []),
        *(
            [f"expand_deletions: {str(own).lower()}"]
            if (own := sync.expand_deletions_of(table)) != sync.expand_deletions
            else []
        ),
    ]
    return f"{table} ({', '.join(settings)})" if settings else table


def check_readable(session: Any, keyspace: str, table: str) -> None:
    """Check that we may select from a table; one row at most is read.

    :raises Unauthorized: we may not select from it
    """
    rows = session.execute(
        "SELECT column_name, kind, position FROM system_schema.columns WHERE keyspace_name = %s AND table_name = %s",
        (keyspace, table),
    )
    key = [row.column_name for row in sorted(rows, key=lambda row: row.position) if row.kind == "partition_key"]
    columns = ", ".join(map(quote, key))
    name = f"{quote(keyspace)}.{quote(table)}"
    session.execute(f"SELECT {columns} FROM {name} WHERE token({columns}) = 0 LIMIT 1")
