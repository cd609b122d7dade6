"""Names of topics (DESIGN §10)."""

from __future__ import annotations

import hashlib

from ringsync.cql.identifiers import portable_names
from ringsync.schema.table import TableSchema


def data_topic(server_name: str, table: TableSchema) -> str:
    """``<server>.<keyspace>.<table>``: the topic of a table's changes.

    Names that a topic cannot hold are made portable and get a digest of the name itself, so that two tables
    never share a topic.
    """
    return ".".join([server_name, _part(table.keyspace), _part(table.name)])


def bootstrap_topic(topic: str) -> str:
    """``bootstrap.<server>.<keyspace>.<table>``: where a table's changes wait while it is copied.

    :param topic: of the table's changes
    """
    return f"bootstrap.{topic}"


def _part(name: str) -> str:
    portable = portable_names([name])[0]
    return portable if portable == name else f"{portable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
