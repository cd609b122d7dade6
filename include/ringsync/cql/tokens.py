"""The words of a CQL text, with their places in it: of types, conditions and schemas alike."""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple, NoReturn

_TOKEN = re.compile(
    r"""
    (?P<space> [\s\ufeff]++ )
  # Cassandra hides tables of COMPACT STORAGE in a comment; what it says about them is read, as far as it goes.
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
    """The tokens of a text of one line, to be taken one after another. Comments do not belong into such a text.

    :param text: the CQL
    :param what: its name in messages, e.g. ``CQL type``
    :param error: the class of the errors that are raised
    """

    skipped: ClassVar[tuple[str, ...]] = ("space",)
    """Kinds that are no tokens."""

    def __init__(self, text: str, what: str, error: type[ValueError]) -> None:
        self.text = text
        self._what = what
        self._error = error
        self._tokens = [_token(found) for found in _TOKEN.finditer(text) if found.lastgroup not in self.skipped]
        self._tokens.append(Token("end", "", "", len(text)))
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
        end = self._position + len(words)
        for token, word in zip(self._tokens[self._position : end], words, strict=False):
            if token.value != word or token.kind not in ("name", "sign"):
                return False
        self._position = end
        return True

    def expect(self, *words: str) -> None:
        """Take these keywords or signs.

        :raises ValueError: of the text's class, when something else comes next; so do :meth:`name` and :meth:`fail`
        """
        for word in words:
            if not self.accept(word):
                self.fail(word.upper())

    def name(self, expected: str) -> str:
        """Take an identifier.

        :param expected: what it names, for the message
        """
        if not self.next.is_name:
            self.fail(expected)
        return self.take().value

    def fail(self, expected: str) -> NoReturn:
        """Say what was expected instead of the next token."""
        place = self.next.offset
        rest = self.text[place:].rstrip()
        shown = repr(rest if len(rest) <= _LONGEST_SHOWN else rest[:_LONGEST_SHOWN] + "…") if rest else "the end"
        self.error(f"expected {expected} at character {place + 1}, found {shown}", self.next)

    def error(self, problem: str, _token: Token) -> NoReturn:
        """Say what is wrong with a token."""
        raise self._error(f"{self._what} {self.text!r}: {problem}")


def _token(found: re.Match[str]) -> Token:
    kind, text = found.lastgroup or "", found.group()
    value = text
    if kind == "name":
        value = text.lower()
    elif kind == "quoted":
        value = text[1:-1].replace('""', '"')
    elif kind == "string":
        value = text[2:-2] if text[0] == "$" else text[1:-1].replace("''", "'")
    return Token(kind, text, value, found.start())
