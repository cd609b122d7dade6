"""Tables from a ``schema.cql``, as a snapshot or DESCRIBE WITH INTERNALS writes it; the model's own small parser."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from tests.commitlog_model.types import Table

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|[\w+-]+|[^\s\w]""")


def parse_schema(text: str) -> dict[str, Table]:
    """The tables that a text creates, by id; a table that comes more than once is the last one.

    :raises ValueError: a statement is not understood
    """
    tables: dict[tuple[str, str], Table] = {}
    found: dict[str, Table] = {}
    user_types: dict[str, dict[str, tuple[tuple[str, str], ...]]] = defaultdict(dict)
    for statement in _statements(text):
        head = " ".join(statement[:2]).upper()
        rest = statement[5:] if [word.upper() for word in statement[2:5]] == ["IF", "NOT", "EXISTS"] else statement[2:]
        if head in ("CREATE KEYSPACE", "CREATE INDEX", "CREATE CUSTOM"):
            continue
        name = _plain(rest[0]), _plain(rest[2])
        if head == "CREATE TYPE":
            fields = [(_plain(item[0]), _type(item[1:])) for item in _items(rest[3:])[0]]
            user_types[name[0]][name[1]] = tuple(fields)
        elif head == "CREATE TABLE":
            tables[name] = _table(*name, rest[3:], user_types[name[0]])
        elif head == "ALTER TABLE":
            tables[name] = _altered(tables[name], rest[3:])
        else:
            raise ValueError(f"{' '.join(statement[:8])} …: only types and tables are understood")
        if head != "CREATE TYPE":
            found[tables[name].id] = tables[name]
    return found


def _statements(text: str) -> Iterator[list[str]]:
    statement: list[str] = []
    for token in _TOKEN.findall(text):
        if token == ";":
            yield statement
            statement = []
        elif not token.startswith("--"):
            statement.append(token)


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def _type(tokens: list[str]) -> str:
    return "".join(tokens)


def _items(tokens: list[str]) -> tuple[list[list[str]], list[str]]:
    """What is between the parentheses at the front, split at its outermost commas, and the tokens after it."""
    items: list[list[str]] = [[]]
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token in "(<") - (token in ")>")
        if depth == 0:
            return items, tokens[i + 1 :]
        if token == "," and depth == 1:
            items.append([])
        elif i:
            items[-1].append(token)
    raise ValueError(f"{' '.join(tokens[:8])} …: a parenthesis is not closed")


def _table(keyspace: str, name: str, tokens: list[str], user_types: dict[str, tuple[tuple[str, str], ...]]) -> Table:
    items, options = _items(tokens)
    types, static, key = {}, set(), [[]]
    for item in items:
        words = [word.upper() for word in item]
        if words[:2] == ["PRIMARY", "KEY"]:
            key, _ = _items(item[2:])
            continue
        column = _plain(item[0])
        if words[-2:] == ["PRIMARY", "KEY"]:
            key, item = [[item[0]]], item[:-2]
        if words[-1] == "STATIC":
            static.add(column)
            item = item[:-1]
        types[column] = _type(item[1:])
    partition = _items(key[0])[0] if key[0][0] == "(" else key[:1]
    partition_names, clustering_names = [[_plain(one[0]) for one in part] for part in (partition, key[1:])]
    descending = _descending(options)
    values = {name: text for name, text in types.items() if name not in [*partition_names, *clustering_names]}
    return Table(
        keyspace=keyspace,
        name=name,
        id=options[[word.upper() for word in options].index("ID") + 2 :][0],
        partition_key=tuple((one, types[one]) for one in partition_names),
        clustering=tuple((one, types[one], one in descending) for one in clustering_names),
        static={name: text for name, text in values.items() if name in static},
        regular={name: text for name, text in values.items() if name not in static},
        dropped={},
        user_types=user_types,
    )


def _descending(options: list[str]) -> set[str]:
    words = [word.upper() for word in options]
    for i in range(len(words) - 2):
        if words[i : i + 3] == ["CLUSTERING", "ORDER", "BY"]:
            return {_plain(item[0]) for item in _items(options[i + 3 :])[0] if item[1].upper() == "DESC"}
    return set()


def _altered(table: Table, tokens: list[str]) -> Table:
    """``DROP c USING TIMESTAMP µs`` or ``ADD c type [static]``: a snapshot's way to tell of dropped columns."""
    action, column = tokens[0].upper(), _plain(tokens[1])
    if action == "DROP":
        text = {**table.static, **table.regular}[column]
        return replace(
            table,
            static={name: one for name, one in table.static.items() if name != column},
            regular={name: one for name, one in table.regular.items() if name != column},
            dropped={**table.dropped, column: (text, int(tokens[4]))},
        )
    if action == "ADD" and tokens[-1].upper() == "STATIC":
        return replace(table, static={**table.static, column: _type(tokens[2:-1])})
    if action == "ADD":
        return replace(table, regular={**table.regular, column: _type(tokens[2:])})
    raise ValueError(f"ALTER TABLE {table.keyspace}.{table.name} {' '.join(tokens)}: only DROP and ADD are understood")
