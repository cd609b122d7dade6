"""The tokenizer of CQL texts: types, conditions and schemas."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple, NoReturn, TypeVar

Read = TypeVar("Read")

_TOKEN = re.compile(
    r"""
    (?P<space> [\s\ufeff]++ )
  # Cassandra hides tables of COMPACT STORAGE in a comment. Their statements are read as far as possible.
  | (?P<hidden>
      /\*\s*+Warning:\ Table\ [^\r\n]*\ omitted\ because\ (?:(?!\*/|CREATE\ TABLE).)*+ (?=CREATE\ TABLE)
      | \*/
    )
  | (?P<comment> (?:--|//)[^\r\n]*+ | /\*.*?\*/ )
  | (?P<quoted> "(?:[^"]|"")*+" )
  | (?P<string> '(?:[^']|'')*+' | \$\$.*?\$\$ )
  | (?P<uuid> [0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b )
  | (?P<blob> 0[xX](?:[0-9a-fA-F]{2})*+ )
  | (?P<number> -?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)? )
  | (?P<name> [A-Za-z][A-Za-z0-9_]*+ )
  | (?P<sign> <=|>=|. )
    """,
    re.VERBOSE | re.DOTALL,
)
_LONGEST_SHOWN = 30


class Token(NamedTuple):
    """One word, string, number or sign.

    :ivar kind: ``name``, ``quoted``, ``string``, ``uuid``, ``blob``, ``number``, ``sign``; ``end`` after the last one
    :ivar text: text of the token in the CQL
    :ivar value: meaning of the token: a name in its exact case, a string without its quotes
    :ivar offset: number of characters before the token
    """

    kind: str
    text: str
    value: str
    offset: int

    @property
    def is_name(self) -> bool:
        return self.kind in ("name", "quoted")


class Tokens:
    """A reader of the tokens of a text of one line, without comments.

    :param what: name of the text in messages, e.g. ``CQL type``
    :param error: class of the errors that are raised
    """

    skipped: ClassVar[tuple[str, ...]] = ("space",)
    """Kinds that are skipped."""

    def __init__(self, text: str, what: str, error: type[ValueError]) -> None:
        self.text = text
        self._what = what
        self._error = error
        self._tokens = [_token(match) for match in _TOKEN.finditer(text) if match.lastgroup not in self.skipped]
        self._tokens.append(Token("end", "", "", len(text)))
        self._position = 0

    @property
    def next(self) -> Token:
        """The next token; after the last one always a token of kind ``end``."""
        return self._tokens[self._position]

    def take(self) -> Token:
        """Take the next token and return it."""
        token = self.next
        if token.kind != "end":
            self._position += 1
        return token

    def accept(self, *words: str) -> bool:
        """Take these keywords or signs if all of them come next, in this order. Tell whether they did.

        :param words: keywords in lower case, and signs
        """
        end = self._position + len(words)
        for token, word in zip(self._tokens[self._position : end], words, strict=False):
            if token.value != word or token.kind not in ("name", "sign"):
                return False
        self._position = end
        return True

    def expect(self, *words: str) -> None:
        """Take these keywords or signs.

        :raises ValueError: something else comes next; the class is ``error``, also in :meth:`name` and :meth:`fail`
        """
        for word in words:
            if not self.accept(word):
                self.fail(word.upper())

    def name(self, expected: str) -> str:
        """Take an identifier.

        :param expected: description of the identifier, for the message
        """
        if not self.next.is_name:
            self.fail(expected)
        return self.take().value

    def listed(self, read: Callable[[], Read]) -> list[Read]:
        """Read one or more things, with commas between them."""
        things = [read()]
        while self.accept(","):
            things.append(read())
        return things

    def fail(self, expected: str) -> NoReturn:
        """Raise an error that says what was expected instead of the next token."""
        place = self.next.offset
        rest = self.text[place:].rstrip()
        shown = repr(rest if len(rest) <= _LONGEST_SHOWN else rest[:_LONGEST_SHOWN] + "…") if rest else "the end"
        self.error(f"expected {expected} at character {place + 1}, found {shown}", self.next)

    def error(self, problem: str, _token: Token) -> NoReturn:
        """Raise an error that says what is wrong with a token."""
        raise self._error(f"{self._what} {self.text!r}: {problem}")


def _token(match: re.Match[str]) -> Token:
    kind, text = match.lastgroup or "", match.group()
    value = text
    if kind == "name":
        value = text.lower()
    elif kind == "quoted":
        value = text[1:-1].replace('""', '"')
    elif kind == "string":
        value = text[2:-2] if text[0] == "$" else text[1:-1].replace("''", "'")
    return Token(kind, text, value, match.start())
