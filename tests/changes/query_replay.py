"""Execution of ``source.query`` with the TTLs of the second in which the change was made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.inspect.replaying import execute

_BEGIN, _END = "BEGIN UNLOGGED BATCH ", "; APPLY BATCH"
_PART = re.compile(r"""((?:'(?:[^']|'')*'|"(?:[^"]|"")*"|[^;'"])+)(?:; |$)""")
_TTL = re.compile(r" USING TIMESTAMP -?\d+ AND TTL (\d+) /\* expires_at (\d+) \*/")


def statements(query: str) -> Iterator[tuple[str, int | None]]:
    """Return the query if nothing in it expires; otherwise its parts, each with the second in which its TTL began."""
    if not _TTL.search(query):
        yield query, None
        return
    parts = [query]
    if query.startswith(_BEGIN):
        parts = _PART.findall(query.removeprefix(_BEGIN).removesuffix(_END))
    for part in parts:
        found = _TTL.search(part)
        yield part, int(found[2]) - int(found[1]) if found else None


def replay_queries(session: Any, queries: Iterable[str | None]) -> int:
    """Execute queries. Return the number of statements.

    :param session: of the driver, for this only
    """
    return execute(session, (one for query in queries if query for one in statements(query)))
