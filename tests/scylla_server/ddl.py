"""DDL of ScyllaDB: ``cdc`` of tables, ``tablets`` of keyspaces, and what Cassandra executes instead.

The comment of the real table keeps the cdc options, so all proxies of a cluster know them, and each change of them is a
change of the table, with a new schema version. Clients of the stand-in see the comment without them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.scylla_server.frames import CONFIG_ERROR, SYNTAX_ERROR, Refusal
from tests.scylla_server.tokens import Token, place_of, replaced, says, table_after, tokens

MARK = "[cdc]"
LOG_SUFFIX = "_scylla_cdc_log"
DEFAULTS = {"enabled": "false", "preimage": "false", "postimage": "false", "delta": "full", "ttl": "86400"}
_ALLOWED = {
    "enabled": ("true", "false"),
    "preimage": ("true", "false", "full"),
    "postimage": ("true", "false"),
    "delta": ("full", "keys"),
}


@dataclass(frozen=True)
class TableStatement:
    """A CREATE, ALTER or DROP TABLE.

    :ivar cql: what Cassandra executes, with the place for a comment (``with_comment``) if ``cdc`` is given
    :ivar cdc: options of ``cdc``, as written; None: it does not speak of them
    """

    verb: str
    keyspace: str
    table: str
    cql: str
    cdc: Mapping[str, str] | None
    has_comment: bool

    def with_comment(self, comment: str) -> str:
        """Return the statement that also sets the comment."""
        escaped = comment.replace("'", "''")
        joint = " AND " if place_of(tokens(self.cql), "with") > 0 else " WITH "
        return f"{self.cql.rstrip().rstrip(';')}{joint}comment = '{escaped}'"


def table_statement(cql: str) -> TableStatement | None:
    """Read a statement that creates, alters or drops a table; None: it is another one, or names no keyspace.

    :raises Refusal: its cdc options are wrong
    """
    found = tokens(cql)
    if len(found) < 5 or not found[0].says("create", "alter", "drop") or not found[1].says("table", "columnfamily"):
        return None
    at = 2
    for words in (("if", "not", "exists"), ("if", "exists")):
        if says(found, at, *words):
            at += len(words)
    if (table := table_after(found, at)) is None:
        return None
    text, properties = _take_property(cql, found, "cdc")
    cdc = None if properties is None else _cdc_options(properties)
    begin = place_of(found, "with")
    has_comment = begin > 0 and any(token.says("comment") for token in found[begin:])
    if cdc is not None and has_comment:
        raise Refusal("the stand-in takes no comment together with cdc", SYNTAX_ERROR)
    return TableStatement(found[0].name, table[0], table[1], text, cdc, has_comment)


@dataclass(frozen=True)
class KeyspaceStatement:
    """A CREATE, ALTER or DROP KEYSPACE.

    :ivar tablets: whether it wants tablets; None: it does not say
    """

    verb: str
    keyspace: str
    cql: str
    tablets: bool | None
    is_network_topology: bool


def keyspace_statement(cql: str) -> KeyspaceStatement | None:
    """Read a statement that creates, alters or drops a keyspace; None: it is another one."""
    found = tokens(cql)
    if len(found) < 3 or not found[0].says("create", "alter", "drop") or not found[1].says("keyspace", "schema"):
        return None
    at = 2 + 3 * says(found, 2, "if", "not", "exists") + 2 * says(found, 2, "if", "exists")
    text, properties = _take_property(cql, found, "tablets")
    tablets = None
    if properties is not None:
        options = _map(properties)
        if not options.keys() <= {"enabled", "initial"}:
            raise Refusal(f"Unrecognized tablets options {sorted(options)}", CONFIG_ERROR)
        tablets = options.get("enabled", "true") == "true"
    is_network = any("NetworkTopologyStrategy" in token.text for token in found)
    return KeyspaceStatement(found[0].name, found[at].name, text, tablets, is_network)


def _take_property(cql: str, found: Sequence[Token], name: str) -> tuple[str, Sequence[Token] | None]:
    """Take one property out of those after WITH.

    :returns: the statement without it, and the tokens of its value; None: it is not there
    """
    begin = place_of(found, "with")
    if begin < 0:
        return cql, None
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in found[begin + 1 :]:
        depth += token.says("(", "{", "[") - token.says(")", "}", "]")
        if token.says(";"):
            continue
        if depth == 0 and token.says("and"):
            parts.append([])
        else:
            parts[-1].append(token)
    taken = [part for part in parts if part and part[0].says(name)]
    if not taken:
        return cql, None
    kept = [cql[part[0].at : part[-1].end] for part in parts if part and part is not taken[0]]
    rest = f"WITH {' AND '.join(kept)}" if kept else ""
    return replaced(cql, [(found[begin].at, len(cql), rest)]), taken[0][2:]


def _map(value: Sequence[Token]) -> dict[str, str]:
    """Read a map of texts, numbers and booleans."""
    if len(value) < 2 or not value[0].says("{") or not value[-1].says("}"):
        raise Refusal("Invalid value: a map is wanted", SYNTAX_ERROR)
    inner = value[1:-1]
    pairs = [inner[at : at + 3] for at in range(0, len(inner), 4)]
    if any(len(pair) != 3 or not pair[1].says(":") for pair in pairs):
        raise Refusal("Invalid map", SYNTAX_ERROR)
    return {_plain(pair[0]): _plain(pair[2]) for pair in pairs}


def _plain(token: Token) -> str:
    return token.text[1:-1].replace("''", "'") if token.kind == "text" else token.name


def _cdc_options(value: Sequence[Token]) -> dict[str, str]:
    options = {key: text.lower() for key, text in _map(value).items()}
    for key, text in options.items():
        if key == "ttl":
            if not text.isdecimal():
                raise Refusal("Invalid CDC option: ttl must be greater than or equal to 0", CONFIG_ERROR)
        elif key not in _ALLOWED:
            raise Refusal(f"Invalid CDC option: {key}", CONFIG_ERROR)
        elif text not in _ALLOWED[key]:
            raise Refusal(f"Invalid value for CDC option {key}: {text}", CONFIG_ERROR)
    return options


def comment_with(options: Mapping[str, str], comment: str = "") -> str:
    """Return the comment of the real table: its own, and the cdc options."""
    return f"{comment}{MARK}{json.dumps({**DEFAULTS, **options}, sort_keys=True)}"


def comment_without(comment: str) -> tuple[str, dict[str, str] | None]:
    """Undo :func:`comment_with`: the table's own comment, and its cdc options; None: it never had any."""
    own, mark, options = comment.partition(MARK)
    return own, json.loads(options) if mark else None


def extension(options: Mapping[str, str]) -> bytes:
    """Encode cdc options as ``extensions['cdc']``: a count, then lengths and texts; integers: int32, little endian."""
    out = [struct.pack("<i", len(options))]
    for text in (text for pair in options.items() for text in pair):
        out += [struct.pack("<i", len(text.encode())), text.encode()]
    return b"".join(out)
