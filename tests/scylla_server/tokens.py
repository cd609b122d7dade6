"""The tokens of a CQL statement, so that what stands in literals and comments is never taken for a word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|//[^\n]*|/\*.*?\*/)
    |(?P<text>'[^']*(?:''[^']*)*'|\$\$.*?\$\$)
    |(?P<quoted>"(?:[^"]|"")*")
    |(?P<blob>0[xX][0-9a-fA-F]*(?!\w))
    |(?P<uuid>[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})
    |(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w))
    |(?P<word>\w+)
    |(?P<sign>[<>!]=|.)""",
    re.VERBOSE | re.DOTALL,
)
_LITERALS = {"text", "blob", "uuid", "number"}


@dataclass(frozen=True)
class Token:
    """A token.

    :ivar kind: name of a group of the pattern
    :ivar name: what it means as an identifier: without quotes, or in lower case; other tokens as they are
    :ivar at: position in the statement
    """

    kind: str
    text: str
    at: int

    @property
    def name(self) -> str:
        """The identifier or keyword that this is, else its text."""
        if self.kind == "quoted":
            return self.text[1:-1].replace('""', '"')
        return self.text.lower() if self.kind == "word" else self.text

    @property
    def is_name(self) -> bool:
        """Whether this may be an identifier."""
        return self.kind in ("word", "quoted")

    @property
    def end(self) -> int:
        """Position after it."""
        return self.at + len(self.text)

    def says(self, *words: str) -> bool:
        """Tell whether this is one of some keywords or signs (in lower case)."""
        return self.kind != "quoted" and self.name in words


@lru_cache(maxsize=64)
def tokens(cql: str) -> tuple[Token, ...]:
    """Split a statement into tokens, without white space and comments."""
    found = (Token(str(match.lastgroup), match[0], match.start()) for match in _TOKEN.finditer(cql))
    return tuple(token for token in found if token.kind != "space")


def says(found: Sequence[Token], at: int, *words: str) -> bool:
    """Tell whether keywords or signs stand at a place."""
    return len(found) >= at + len(words) and all(found[at + n].says(word) for n, word in enumerate(words))


def place_of(found: Sequence[Token], *words: str) -> int:
    """Return where keywords stand outside all brackets; -1: nowhere."""
    depth = 0
    for at, token in enumerate(found):
        if depth == 0 and says(found, at, *words):
            return at
        depth += token.says("(", "{", "[") - token.says(")", "}", "]")
    return -1


def replaced(cql: str, changes: Iterable[tuple[int, int, str]]) -> str:
    """Replace parts of a statement.

    :param changes: begin, end and new text of each
    """
    out, at = [], 0
    for begin, end, new in sorted(changes):
        out += [cql[at:begin], new]
        at = end
    return "".join([*out, cql[at:]])


def table_after(found: Sequence[Token], at: int) -> tuple[str, str, int] | None:
    """Read ``keyspace.table`` at a place: the names, and the place after them; None: no such name stands there."""
    if len(found) < at + 3 or not (found[at].is_name and found[at + 1].says(".") and found[at + 2].is_name):
        return None
    return found[at].name, found[at + 2].name, at + 3


def without_literals(cql: str) -> str:
    """Return a statement with ``?`` for each literal: statements that differ in values only become one."""
    return " ".join(replaced(cql, [(t.at, t.end, "?") for t in tokens(cql) if t.kind in _LITERALS]).split())
