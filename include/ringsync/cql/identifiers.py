"""CQL identifiers: quoting, reading of names that users type, and names for the lake and Avro."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

_PLAIN = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_WORDS = """
add allow alter and apply asc authorize batch begin by columnfamily create default delete desc describe drop entries
execute from full grant if in index infinity insert into is keyspace limit materialized mbean mbeans modify nan
norecursive not null of on or order primary rename replace revoke schema select set table to token truncate unlogged
unset update use using view where with
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())
"""Words that are names only in quotes (C: cql3/reserved_keywords.txt)."""
_NAME = re.compile(r'\s*("(?:[^"]|"")+"|[A-Za-z]\w*)\s*')
_TABLE_NAME = re.compile(rf"{_NAME.pattern}\.{_NAME.pattern}")
_NAMES = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*")
_PIECE = re.compile(r'"(?:[^"]|"")+"|\w+|\*|\?', re.ASCII)
_PATTERN = re.compile(rf"\s*((?:{_PIECE.pattern})+)\s*\.\s*((?:{_PIECE.pattern})+)\s*", re.ASCII)
_LISTED = re.compile(r'(?:"(?:[^"]|"")*"|[^\s,"]|"(?=[^"]*$))+')
"""One of several names or patterns: what stands between commas and white space outside double quotes."""


def quote(identifier: str) -> str:
    """Quote an identifier so that CQL reads exactly this name."""
    return '"' + identifier.replace('"', '""') + '"'


def parse_table_name(text: str) -> tuple[str, str]:
    """Read ``keyspace.table`` as a user types it; double quotes keep case and odd characters, as in CQL.

    :raises ValueError: the text is not two identifiers joined by a dot
    """
    if match := _TABLE_NAME.fullmatch(text):
        return _unquote(match[1]), _unquote(match[2])
    raise ValueError(f"{text!r} is not a table name: write keyspace.table, e.g. shop.orders")


class Wildcard(Enum):
    """A sign of a pattern for some characters of a name."""

    ANY = "*"
    ONE = "?"


Pieces = tuple[str | Wildcard, ...]

_REGEX = {Wildcard.ANY: ".*", Wildcard.ONE: "."}


@dataclass(frozen=True)
class TablePattern:
    """A pattern for names of tables: outside double quotes ``*`` stands for any characters, ``?`` for one.

    :ivar keyspace: pieces of the keyspace's name, each a text or a wildcard
    :ivar table: pieces of the table's name
    """

    keyspace: Pieces
    table: Pieces

    @property
    def is_name(self) -> bool:
        """Whether the pattern is one table's name: it has no wildcard."""
        return all(isinstance(piece, str) for piece in (*self.keyspace, *self.table))

    @property
    def name(self) -> tuple[str, str]:
        """Keyspace and table of a pattern that is a name.

        :raises ValueError: it has wildcards
        """
        if not self.is_name:
            raise ValueError(f"{self} is a pattern, and here one table's name is needed")
        return str(self.keyspace[0]), str(self.table[0])

    def matches(self, keyspace: str, table: str) -> bool:
        """Tell whether the pattern matches a table. Both names are without quotes."""
        return _matches(self.keyspace, keyspace) and _matches(self.table, table)

    def __str__(self) -> str:
        """Write the pattern, with quotes only where CQL needs them."""
        return ".".join(
            "".join(
                piece.value if isinstance(piece, Wildcard) else _printable_piece(piece, len(part) == 1)
                for piece in part
            )
            for part in (self.keyspace, self.table)
        )


def parse_table_pattern(text: str) -> TablePattern:
    """Read ``keyspace.table`` or a pattern, e.g. ``shop.*`` or ``*.tmp_?``; double quotes as in CQL.

    :raises ValueError: the text is neither
    """
    match = _PATTERN.fullmatch(text)
    if match:
        pattern = TablePattern(*(_pieces(part) for part in match.groups()))
        if not pattern.is_name:
            return pattern
    try:
        keyspace, table = parse_table_name(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a table name or pattern: write shop.orders or shop.*") from None
    return TablePattern((keyspace,), (table,))


def parse_table_patterns(text: str) -> tuple[TablePattern, ...]:
    """Read names and patterns of tables that commas or white space separate, each once, in their order.

    :raises ValueError: one of them is neither a name nor a pattern, or there is none
    """
    if _TABLE_NAME.fullmatch(text):
        return (parse_table_pattern(text),)
    listed = [found[0] for found in _LISTED.finditer(text)]
    if len(listed) <= 1 and not any(wildcard.value in text for wildcard in Wildcard):
        parse_table_name(text)  # raises
    return tuple(dict.fromkeys(map(parse_table_pattern, listed)))


def _pieces(part: str) -> Pieces:
    signs = {wildcard.value: wildcard for wildcard in Wildcard}
    return tuple(signs.get(piece) or _unquote(piece) for piece in _PIECE.findall(part))


def _matches(pieces: Pieces, name: str) -> bool:
    regex = "".join(_REGEX[piece] if isinstance(piece, Wildcard) else re.escape(piece) for piece in pieces)
    return re.fullmatch(regex, name, re.DOTALL) is not None


def _printable_piece(piece: str, whole: bool) -> str:
    if whole:
        return printable(piece)
    return piece if re.fullmatch("[a-z0-9_]+", piece) else quote(piece)


def parse_column_names(text: str) -> tuple[str, ...]:
    """Read ``name, name, …`` as a user types it, with double quotes as in CQL.

    :raises ValueError: the text is not identifiers joined by commas
    """
    if _NAMES.fullmatch(text):
        return tuple(map(_unquote, _NAME.findall(text)))
    raise ValueError(f"{text!r} is not a list of columns: write name, name, …")


def _unquote(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def printable(identifier: str) -> str:
    """Write an identifier as CQL's own tools print it: with quotes only if CQL needs them."""
    return identifier if _PLAIN.fullmatch(identifier) and identifier not in _RESERVED else quote(identifier)


def portable_names(names: Iterable[str], reserved: Collection[str] = ()) -> tuple[str, ...]:
    """Make distinct names for the lake and Avro from these identifiers, in their order.

    Delta, Spark and Avro allow neither spaces nor most signs in names. For Delta ``a`` and ``A`` are one name. A name
    that all of them allow stays. Other characters become ``_``. A name that is taken, or ``reserved``, gets underscores
    appended.
    """
    taken = {name.lower() for name in reserved}
    portables = []
    for name in names:
        portable = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if portable[:1].isdigit():
            portable = "_" + portable
        while portable.lower() in taken:
            portable += "_"
        taken.add(portable.lower())
        portables.append(portable)
    return tuple(portables)


def portable_name(keyspace: str, table: str) -> str:
    """Name a table with characters that a topic and a file may have. Two tables never share such a name."""
    return f"{_part(keyspace)}.{_part(table)}"


def _part(name: str) -> str:
    portable = portable_names([name])[0]
    return portable if portable == name else f"{portable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
