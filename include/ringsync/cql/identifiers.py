"""CQL identifiers: quoting on the way out, reading what users type on the way in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_PLAIN = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_WORDS = """
add allow alter and apply asc authorize batch begin by columnfamily create default delete desc describe drop entries
execute from full grant if in index infinity insert into is keyspace limit materialized mbean mbeans modify nan
norecursive not null of on or order primary rename replace revoke schema select set table to token truncate unlogged
unset update use using view where with
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())
"""Words that name nothing unless they are in quotes (C: cql3/reserved_keywords.txt)."""
_NAME = re.compile(r'\s*("(?:[^"]|"")+"|[A-Za-z]\w*)\s*')


def quote(identifier: str) -> str:
    """Quote an identifier so that CQL reads exactly this name, whatever it contains or is reserved for."""
    return '"' + identifier.replace('"', '""') + '"'


def parse_table_name(text: str) -> tuple[str, str]:
    """Read ``keyspace.table`` as a user types it; double quotes keep case and odd characters, as in CQL.

    :raises ValueError: when it is not two identifiers joined by a dot
    """
    first = _NAME.match(text)
    if first and text[first.end() : first.end() + 1] == ".":
        second = _NAME.fullmatch(text, first.end() + 1)
        if second:
            return _unquote(first.group(1)), _unquote(second.group(1))
    raise ValueError(f"{text!r} is not a table name: write keyspace.table, e.g. shop.orders")


def parse_column_names(text: str) -> tuple[str, ...]:
    """Read ``name, name, …`` as a user types it, with double quotes as in CQL.

    :raises ValueError: when it is not identifiers joined by commas
    """
    names = []
    position = 0
    while match := _NAME.match(text, position):
        names.append(_unquote(match.group(1)))
        position = match.end()
        if position == len(text):
            return tuple(names)
        if text[position] != ",":
            break
        position += 1
    raise ValueError(f"{text!r} is not a list of columns: write name, name, …")


def _unquote(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def printable(identifier: str) -> str:
    """The identifier as CQL's own tools print it: quoted only where CQL needs it."""
    return identifier if _PLAIN.fullmatch(identifier) and identifier not in _RESERVED else quote(identifier)


def portable_names(names: Iterable[str], reserved: Collection[str] = ()) -> tuple[str, ...]:
    """Names for a lake and for Avro that stand for these identifiers, in order, each different from all others.

    Delta, Spark and Avro know neither spaces nor most signs in names, and Delta takes ``a`` and ``A`` for the
    same. A name that they can hold stays as it is; other characters become ``_``; what collides (also with
    ``reserved``) gets underscores appended.
    """
    taken = {name.lower() for name in reserved}
    found = []
    for name in names:
        portable = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if portable[:1].isdigit():
            portable = "_" + portable
        while portable.lower() in taken:
            portable += "_"
        taken.add(portable.lower())
        found.append(portable)
    return tuple(found)
