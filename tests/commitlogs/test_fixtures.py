"""The committed commit logs are what their names say, complete, and belong to their statements and SELECT results."""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.commitlogs.fixtures import COMPRESSORS, MODES, Fixture, fixture_named, fixtures, unpacked
from tests.commitlogs.make import BARRIER, FILLER, NAMES
from tests.commitlogs.statements import schema_statements, statements
from tests.commitlogs.workload import random_statements

FIXTURES = fixtures()
ENCRYPTED = [fixture for fixture in FIXTURES if fixture.keystore]


@pytest.fixture(params=FIXTURES, ids=lambda fixture: fixture.name)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


def descriptor(data: bytes) -> tuple[int, int, dict[str, str], int]:
    """Version, id, parameters and length of the descriptor; its CRC is right."""
    version, number, length = struct.unpack_from(">iqH", data)
    parameters = data[14 : 14 + length]
    low, high = number & 0xFFFFFFFF, number >> 32
    crc = zlib.crc32(struct.pack(">iIIi", version, low, high, length) + parameters)
    assert struct.unpack_from(">I", data, 14 + length) == (crc,)
    return version, number, json.loads(parameters), 18 + length


def sections(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each section's body, as far as markers are there; their CRCs are right."""
    _, number, _, position = descriptor(data)
    while position + 8 <= len(data):
        end, crc = struct.unpack_from(">iI", data, position)
        if end == crc == 0:
            return
        assert crc == zlib.crc32(struct.pack(">IIi", number & 0xFFFFFFFF, number >> 32, position))
        yield position + 8, end
        position = end


def logical_end(data: bytes, compressed: bool) -> int:
    """The logical position at which the last section ends."""
    position = descriptor(data)[3]
    for start, end in sections(data):
        position += 8 + (struct.unpack_from(">i", data, start)[0] if compressed else end - start)
    return position


def test_every_mode_and_codec_is_there() -> None:
    assert {fixture.name for fixture in FIXTURES} == set(NAMES)
    clean = {(fixture.mode, fixture.codec) for fixture in FIXTURES if not fixture.killed}
    assert clean >= set(itertools.product(MODES, [codec for codec in COMPRESSORS if codec != "pkcs12"]))
    assert {fixture.mode for fixture in FIXTURES if fixture.killed} == set(MODES)


def test_the_descriptor_says_what_the_name_says(fixture: Fixture, tmp_path: Path) -> None:
    for segment in unpacked(fixture, tmp_path):
        version, number, parameters, _ = descriptor(segment.read_bytes())
        assert version == fixture.log_version
        assert segment.name == f"CommitLog-{version}-{number}.log"
        assert parameters.get("compressionClass") == COMPRESSORS[fixture.codec]
        assert parameters.get("encKeyAlias") == (fixture.keystore.key_alias if fixture.keystore else None)


def test_markers_lead_to_what_the_idx_says(fixture: Fixture, tmp_path: Path) -> None:
    segments = unpacked(fixture, tmp_path)
    assert len(segments) >= 2
    for segment in segments:
        offset, *completed = Path(str(segment).replace(".log", "_cdc.idx")).read_text().split("\n")
        end = logical_end(segment.read_bytes(), fixture.codec != "plain")
        live = fixture.killed and segment == segments[-1]
        assert completed == ([] if live else ["COMPLETED"])
        if live and fixture.codec == "plain":
            assert int(offset) < end
        else:
            assert int(offset) == end


def test_the_rows_beyond_the_idx_are_there(tmp_path: Path) -> None:
    """Bytes, not records: what the idx covers lacks them, the rest of the file has them."""
    for fixture in FIXTURES:
        assert bool(fixture.beyond) == fixture.killed
        if fixture.killed and fixture.codec == "plain":
            last = unpacked(fixture, tmp_path)[-1]
            offset = int(Path(str(last).replace(".log", "_cdc.idx")).read_text())
            data = last.read_bytes()
            assert b"beyond the idx" not in data[:offset]
            assert data.count(b"beyond the idx", offset) == len(fixture.beyond)
            assert b"barrier" in data[:offset]


def test_statements_are_those_of_the_script(fixture: Fixture) -> None:
    barrier = [BARRIER] if fixture.killed else []
    assert fixture.statements == [
        *schema_statements(fixture.mode),
        FILLER,
        *statements(fixture.mode),
        *barrier,
    ]


def test_every_table_of_the_schema_has_rows(fixture: Fixture) -> None:
    created = re.findall(r'CREATE TABLE (?:IF NOT EXISTS )?("?\w+"?\."?\w+"?) \(', fixture.schema)
    assert len(created) == fixture.schema.count("WITH ID = ") == len(set(created))
    described = re.findall(r'CREATE TABLE ("?\w+"?\."?\w+"?) \(', fixture.described)
    assert sorted(described) == sorted(created)
    assert "CREATE TABLE shop.gone (" in fixture.dropped
    selected = fixture.selected["keyspaces"]
    names = {f"{keyspace}.{table}" for keyspace, tables in selected.items() for table in tables}
    assert names | {"shop.filler"} == {name.replace('"', "") for name in created}
    assert all(rows for tables in selected.values() for rows in tables.values())


def test_times_are_told_as_far_as_the_version_can(fixture: Fixture) -> None:
    shop = fixture.selected["keyspaces"]["shop"]
    row = next(row for row in shop["plain"] if row["id"]["json"] == "50")
    assert row["v"] == {"raw": b"new".hex(), "json": '"new"', "writetime": 1600000000000013}
    assert row.keys() == {"id", "v"}
    expiring = next(row for row in shop["expiring"] if row["id"]["json"] == "1" and row["c"]["json"] == "4")
    assert expiring["v"]["expires_at"] > fixture.selected["moment"] + 3 * 365 * 86400
    labels = next(row["labels"] for row in shop["orders"] if row["id"]["json"] == "1")
    assert ("writetime" in labels) == (fixture.server_version == "5.0")


@pytest.mark.parametrize("fixture", ENCRYPTED, ids=lambda fixture: fixture.name)
def test_the_key_beside_the_keystore_is_the_key(fixture: Fixture, tmp_path: Path) -> None:
    assert fixture.keystore is not None
    key = bytes.fromhex(fixture.keystore.key_file.read_text())
    data = unpacked(fixture, tmp_path)[0].read_bytes()
    iv = bytes.fromhex(descriptor(data)[2]["encIV"])
    start, end = next((start, end) for start, end in sections(data) if end - start > 4)
    total = 0
    position = start + 4
    while position < end:
        encrypted, plain = struct.unpack_from(">ii", data, position)
        position += 8
        decryptor = Cipher(algorithms.AES(key), modes.CBC(iv)).decryptor()
        block = decryptor.update(data[position : position + encrypted]) + decryptor.finalize()
        assert encrypted - plain == block[-1]  # PKCS5
        total += struct.unpack_from(">i", block)[0]
        position += encrypted
    assert struct.unpack_from(">i", data, start) == (total,)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'6\.0-plain' is no fixture"):
        fixture_named("6.0-plain")


def test_the_workload_is_the_same_for_a_seed() -> None:
    made = list(random_statements(7, 3000, "5.0"))
    assert len(made) == 3000
    assert made == list(random_statements(7, 3000, "5.0"))
    assert made != list(random_statements(8, 3000, "5.0"))
    assert not any("vector" in text or " vt" in text for text in random_statements(7, 500, "4.0"))
    for part in ("COUNTER BATCH", "UNLOGGED BATCH", "IF NOT EXISTS", "TTL ", "TIMESTAMP -", "l[1]", "DELETE FROM"):
        assert any(part in text for text in made), part
