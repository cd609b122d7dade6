"""The words of a CQL text, with their places in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from ringsync.schema.table import SchemaError

_TOKEN = re.compile(
    r"""
    (?P<space> [\s\ufeff]++ | (?:--|//)[^\r\n]*+ )
  # Cassandra hides tables of COMPACT STORAGE in a comment; what it says about them is read, as far as it goes.
  | (?P<hidden>
      /\*\s*+Warning:\ Table\ [^\r\n]*\ omitted\ because\ (?:(?!\*/|CREATE\ TABLE).)*+ (?=CREATE\ TABLE)
      | \*/
    )
  | (?P<comment> /\*.*?\*/ )
  | (?P<quoted> "(?:[^"]|"")*+" )
  | (?P<string> '(?:[^']|'')*+' | \$\$.*?\$\$ )
  | (?P<uuid> [0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b )
  | (?P<number> [0-9]++ )
  | (?P<name> [A-Za-z][A-Za-z0-9_]*+ )
  | (?P<sign> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_SKIPPED = ("space", "hidden", "comment")
_UNFINISHED = {'"': "quoted name", "'": "string", "$$": "string", "/*": "comment"}


class SchemaTextError(SchemaError):
    """A text is not the CQL that was expected; the message says where: ``file:line:column: …``."""


class Token(NamedTuple):
    """One word, string, number or sign.

    :ivar kind: ``name``, ``quoted``, ``string``, ``uuid``, ``number``, ``sign``; ``end`` after the last one
    :ivar text: as it is written
    :ivar value: what it means: a name in its exact case, a string without its quotes
    :ivar offset: characters before it
    """

    kind: str
    text: str
    value: str
    offset: int

    @property
    def is_name(self) -> bool:
        return self.kind in ("name", "quoted")


class Tokens:
    """The tokens of a text, to be taken one after another.

    :param text: CQL statements and comments
    :param source_name: the file, for messages
    :raises SchemaTextError: for a string, quoted name or comment without its end
    """

    def __init__(self, text: str, source_name: str) -> None:
        self._text = text
        self._source_name = source_name
        self._tokens = list(self._scan())
        self._position = 0

    @property
    def next(self) -> Token:
        """The token that comes next; of kind ``end`` for ever after the last one."""
        return self._tokens[self._position]

    def take(self) -> Token:
        """Go on by one token and return it."""
        token = self.next
        if token.kind != "end":
            self._position += 1
        return token

    def accept(self, *words: str) -> bool:
        """Take these keywords or signs if all of them come next, in this order.

        :param words: keywords in lower case, signs as they are
        """
        following = self._tokens[self._position : self._position + len(words)]
        if tuple(token.value if token.kind in ("name", "sign") else None for token in following) != words:
            return False
        self._position += len(words)
        return True

    def expect(self, *words: str) -> None:
        """Take these keywords or signs.

        :raises SchemaTextError: when something else comes next
        """
        for word in words:
            if not self.accept(word):
                self.fail(word.upper())

    def name(self, what: str) -> str:
        """Take an identifier.

        :param what: what it names, for the message
        :raises SchemaTextError: when something else comes next
        """
        if not self.next.is_name:
            self.fail(what)
        return self.take().value

    def skip_until(self, *words: str) -> None:
        """Take everything before the first of these keywords or signs that is in no bracket, or before the end.

        :raises SchemaTextError: for a bracket that is not closed
        """
        opened: list[Token] = []
        while opened or not (self.next.kind in ("name", "sign") and self.next.value in words):
            token = self.take()
            if token.kind == "end":
                if opened:
                    self.error(f"this {opened[-1].text} is never closed", opened[-1])
                return
            if token.kind == "sign" and token.text in "([{":
                opened.append(token)
            elif token.kind == "sign" and token.text in ")]}" and opened:
                opened.pop()

    def fail(self, expected: str) -> NoReturn:
        """Say what was expected instead of the next token.

        :raises SchemaTextError: always
        """
        token = self.next
        found = "the end" if token.kind == "end" else token.text if len(token.text) < 60 else token.text[:60] + "…"
        self.error(f"expected {expected}, found {found}", token)

    def error(self, problem: str, token: Token) -> NoReturn:
        """Say what is wrong with a token.

        :raises SchemaTextError: always
        """
        before = self._text[: token.offset]
        line, column = before.count("\n") + 1, token.offset - (before.rfind("\n") + 1) + 1
        raise SchemaTextError(f"{self._source_name}:{line}:{column}: {problem}")

    def _scan(self) -> Iterator[Token]:
        for found in _TOKEN.finditer(self._text):
            kind = found.lastgroup or ""
            token = Token(kind, found.group(), _value(kind, found.group()), found.start())
            if kind == "sign":
                for opening, what in _UNFINISHED.items():
                    if self._text.startswith(opening, token.offset):
                        self.error(f"this {what} never ends", token)
            if kind not in _SKIPPED:
                yield token
        yield Token("end", "", "", len(self._text))


def _value(kind: str, text: str) -> str:
    match kind:
        case "name":
            return text.lower()
        case "quoted":
            return text[1:-1].replace('""', '"')
        case "string" if text.startswith("$"):
            return text[2:-2]
        case "string":
            return text[1:-1].replace("''", "'")
    return text
