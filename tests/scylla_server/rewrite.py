"""What a statement for ScyllaDB becomes on the Cassandra behind the stand-in, and what ScyllaDB refuses.

The keyspaces of the stand-in hold the tables that only ScyllaDB has, and copies of those that look different there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.scylla_server.frames import Refusal
from tests.scylla_server.tokens import Token, place_of, replaced, says, table_after, tokens

DISTRIBUTED, SYSTEM, SCHEMA = "sim_distributed", "sim_system", "sim_schema"

MOVED_SCHEMA = frozenset(("keyspaces", "tables", "columns", "dropped_columns", "scylla_keyspaces", "scylla_tables"))
"""Tables of ``system_schema`` of which the stand-in has its own."""

LOCAL_COLUMNS = (
    "key, bootstrapped, broadcast_address, cluster_name, cql_version, data_center, gossip_generation, host_id, "
    "listen_address, native_protocol_version, partitioner, rack, release_version, rpc_address, schema_version, tokens, "
    "truncated_at"
)
PEERS_COLUMNS = "peer, data_center, host_id, preferred_ip, rack, release_version, rpc_address, schema_version, tokens"
VERSION = "(text)'3.0.8' AS release_version"
"""ScyllaDB says this for clients of Cassandra."""

ColumnType = Callable[[str, str, str], str | None]
"""Gives the type of a column of a table, as ``system_schema`` spells it; None: there is none."""


@dataclass(frozen=True)
class Rules:
    """How a stand-in differs from its Cassandra.

    :ivar schema: keyspace of its copies of ``system_schema``
    :ivar element_times: whether WRITETIME and TTL of collections are allowed (ScyllaDB 2026.2)
    :ivar lwt_with_tablets: whether conditional writes are allowed in keyspaces with tablets (ScyllaDB 2025.4)
    :ivar column_type: type of a column
    :ivar has_tablets: whether a keyspace has tablets
    """

    schema: str
    element_times: bool
    lwt_with_tablets: bool
    column_type: ColumnType
    has_tablets: Callable[[str], bool]


def rewrite(cql: str, rules: Rules) -> str:
    """Write a statement for Cassandra; DDL is not changed here.

    :raises Refusal: ScyllaDB refuses it
    """
    found = tokens(cql)
    _refuse(found, rules)
    changes = [*_moved_names(found, rules), *_clauses(found)]
    if (table := _table_of(found)) and table[0] == "system" and table[1] in ("local", "peers"):
        changes += _versions(found, table[1])
    return replaced(cql, changes)


def reads_schema(cql: str) -> bool:
    """Tell whether a statement reads a table of which the stand-in has a copy."""
    table = _table_of(tokens(cql))
    return table is not None and table[0] == "system_schema" and table[1] in MOVED_SCHEMA


def _table_of(found: Sequence[Token]) -> tuple[str, str] | None:
    """Return the table that a SELECT reads."""
    if not says(found, 0, "select") or (at := place_of(found, "from")) < 0:
        return None
    table = table_after(found, at + 1)
    return table and (table[0], table[1])


def _moved_names(found: Sequence[Token], rules: Rules) -> list[tuple[int, int, str]]:
    changes = []
    for at, token in enumerate(found):
        if (table := table_after(found, at)) is None:
            continue
        keyspace, name, _ = table
        is_cdc = name.startswith("cdc_")
        moved = {
            "system_distributed": DISTRIBUTED if is_cdc else None,
            "system": SYSTEM if is_cdc or name == "scylla_local" else None,
            "system_schema": rules.schema if name in MOVED_SCHEMA else None,
        }.get(keyspace)
        if moved:
            changes.append((token.at, token.end, moved))
    return changes


def _clauses(found: Sequence[Token]) -> list[tuple[int, int, str]]:
    """Strip BYPASS CACHE, and TIMEOUT from USING."""
    changes = []
    for at, token in enumerate(found):
        if says(found, at, "bypass", "cache"):
            changes.append((token.at, found[at + 1].end, ""))
        if token.says("timeout") and at and found[at - 1].says("using", "and") and at + 1 < len(found):
            is_first = found[at - 1].says("using")
            if is_first and says(found, at + 2, "and"):
                changes.append((token.at, found[at + 2].end, ""))
            else:
                changes.append((found[at - 1].at, found[at + 1].end, ""))
    return changes


def _versions(found: Sequence[Token], table: str) -> list[tuple[int, int, str]]:
    columns = LOCAL_COLUMNS if table == "local" else PEERS_COLUMNS
    star = found[1]
    if star.says("*"):
        return [(star.at, star.end, columns.replace("release_version", VERSION))]
    selected = found[: place_of(found, "from")]
    return [(token.at, token.end, VERSION) for token in selected if token.is_name and token.name == "release_version"]


def _refuse(found: Sequence[Token], rules: Rules) -> None:
    for at in range(len(found)):
        if (table := table_after(found, at)) is None:
            continue
        if table[:2] == ("system", "peers_v2"):
            raise Refusal("unconfigured table peers_v2")
        if table[0] in ("system_views", "system_virtual_schema"):
            raise Refusal(f"Keyspace {table[0]} does not exist")
    table_read = _table_of(found)
    if table_read == ("system_schema", "tables") and any(token.is_name and token.name == "cdc" for token in found):
        raise Refusal("Unrecognized name cdc")
    if table_read is not None and not rules.element_times:
        _refuse_element_times(found, table_read, rules.column_type)
    if not rules.lwt_with_tablets:
        _refuse_conditions(found, rules.has_tablets)


def _refuse_element_times(found: Sequence[Token], table: tuple[str, str], column_type: ColumnType) -> None:
    for at, token in enumerate(found):
        if token.says("writetime", "ttl") and says(found, at + 1, "(") and at + 2 < len(found):
            kind = column_type(*table, found[at + 2].name) or ""
            if kind.startswith(("list<", "set<", "map<")) or kind.startswith("udt:"):
                raise Refusal(f"Cannot use selection function {token.name} on non-frozen collections")


def _refuse_conditions(found: Sequence[Token], has_tablets: Callable[[str], bool]) -> None:
    if not found or not found[0].says("insert", "update", "delete"):
        return
    at = 1 if found[0].says("update") else place_of(found, "into" if found[0].says("insert") else "from") + 1
    table = table_after(found, at)
    if table and place_of(found, "if") > 0 and has_tablets(table[0]):
        name = f"{table[0]}.{table[1]}"
        raise Refusal(f"Cannot use LightWeight Transactions for table {name}: LWT is not yet supported with tablets")
