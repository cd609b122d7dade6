"""The committed commit logs, unpacked once, with their schemas in both readers' forms."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.formats.keystores.lookup import key_lookup
from ringsync.schema.from_cql import parse_schema
from tests.commitlog_model import cql_schema
from tests.commitlog_model.segment import Segment, read_segment
from tests.commitlog_model.types import Table
from tests.commitlogs.fixtures import Fixture, Keystore, fixture_named
from tests.formats.commitlog.comparable import Change, of_model


@dataclass(frozen=True)
class Source:
    """A segment file.

    :param name: of the file
    :param data: the whole file
    :param index: of its ``_cdc.idx``
    :param fixture: where it comes from
    """

    name: str
    data: bytes
    index: bytes
    fixture: Fixture

    @property
    def key_of(self) -> Callable[[str], bytes] | None:
        """The lookup of keys for an encrypted segment."""
        return _opened(self.fixture.keystore) if self.fixture.keystore else None


@cache
def _opened(keystore: Keystore) -> Callable[[str], bytes]:
    content = keystore.path.read_bytes()
    return key_lookup(content, keystore.path.name, keystore.store_password, keystore.key_password)


@cache
def sources(fixture_name: str) -> tuple[Source, ...]:
    """Return all segments of a fixture, oldest first."""
    fixture = fixture_named(fixture_name)
    found = []
    for path in sorted(fixture.folder.glob("*.log.xz")):
        name = path.name.removesuffix(".xz")
        index = (fixture.folder / name.replace(".log", "_cdc.idx")).read_bytes()
        found.append(Source(name, lzma.decompress(path.read_bytes()), index, fixture))
    return tuple(found)


@cache
def tables_of(fixture_name: str) -> LoggedTables:
    """Return the package's tables of a fixture."""
    fixture = fixture_named(fixture_name)
    return logged_tables(parse_schema(fixture.schema + fixture.dropped, "schema.cql").tables)


@cache
def model_tables_of(fixture_name: str) -> dict[str, Table]:
    """Return the model's tables of a fixture."""
    fixture = fixture_named(fixture_name)
    return cql_schema.parse_schema(fixture.schema + fixture.dropped)


@cache
def modelled(source: Source) -> Segment:
    """Return everything that the model reads in a segment."""
    keystore = source.fixture.keystore
    key = bytes.fromhex(keystore.key_file.read_text()) if keystore else None
    return read_segment(source.data, model_tables_of(source.fixture.name), source.name, key=key)


@cache
def expected(source: Source) -> list[Change]:
    """Return the model's change rows in the common form."""
    return [of_model(change) for change in modelled(source).changes]
