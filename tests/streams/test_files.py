"""The stream as files: what is published is exactly what a reader gets, and damage is never silent."""

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from ringsync.avro.container import ContainerWriter, read_container
from ringsync.avro.rows import encode_rows
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream, Part, StreamConflictError, StreamDamagedError, StreamError
from ringsync.streams.messages import Messages

TOPIC = "server.ks.t"
KEY: dict[str, Any] = {
    "type": "record",
    "name": "Key",
    "namespace": TOPIC,
    "fields": [{"name": "id", "type": ["null", "int"], "default": None}],
}
VALUE: dict[str, Any] = {
    "type": "record",
    "name": "Envelope",
    "namespace": TOPIC,
    "fields": [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
}
SYNC = bytes(range(16))


def messages(first: int, count: int) -> Messages:
    numbers = pa.array(range(first, first + count), pa.int32())
    keys = encode_rows(KEY, pa.StructArray.from_arrays([numbers], names=["id"]))
    values = encode_rows(VALUE, pa.StructArray.from_arrays([numbers.cast(pa.int64())], names=["at"]))
    event_ids = pa.array([number.to_bytes(16, "big") for number in range(first, first + count)], pa.binary(16))
    return Messages(keys, values, event_ids)


def container_file(schema: Any, rows: list[pa.Array], codec: Any, sync: bytes, rows_per_block: int) -> bytes:
    writer = ContainerWriter(schema, codec, sync, rows_per_block)
    for array in rows:
        writer.add(array)
    return writer.finish()


def write_part(stream: FileStream, folder: str, part: str, batches: list[Messages], schema_version: int) -> Part:
    writer = stream.open_part(folder, part, schema_version)
    for batch in batches:
        writer.add(batch)
    return writer.finish()


def expected(first: int, count: int) -> list[dict[str, Any]]:
    return [{"key": {"id": i}, "value": {"at": i}} for i in range(first, first + count)]


@pytest.fixture
def stream(tmp_path: Path) -> FileStream:
    found = FileStream(LocalStore(tmp_path), TOPIC)
    found.put_schemas(1, KEY, VALUE)
    return found


def part_file(stream: FileStream, tmp_path: Path, folder: str, part: Part) -> Path:
    return tmp_path / "streams" / stream.topic / folder / f"{part.name}.avro"


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_fastavro_reads_a_container_of_encoded_rows(codec: Any) -> None:
    rows = [messages(0, 10).keys, messages(10, 0).keys, messages(0, 30).keys[10:25]]
    data = container_file(KEY, rows, codec, SYNC, rows_per_block=4)
    expected_rows = [{"id": i} for i in range(25)]
    reader = fastavro.reader(io.BytesIO(data))
    assert list(reader) == expected_rows
    assert reader.metadata["avro.codec"] == codec
    assert [block.num_records for block in fastavro.block_reader(io.BytesIO(data))] == [4, 4, 2, 4, 4, 4, 3]
    assert list(read_container(data)) == expected_rows
    assert container_file(KEY, rows, codec, SYNC, rows_per_block=4) == data


def test_container_refuses_a_null_row_and_a_bad_sync_marker() -> None:
    with pytest.raises(ValueError, match="1 of 2 rows are null"):
        container_file(KEY, [pa.array([b"x", None])], "null", SYNC, 10)
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        container_file(KEY, [], "null", b"abc", 10)


def test_years_beyond_python_s_are_read() -> None:
    far = pa.StructArray.from_arrays([pa.array([2**62])], names=["at"])
    data = container_file(VALUE, [encode_rows(VALUE, far)], "deflate", SYNC, 10)
    assert list(read_container(data)) == [{"at": 2**62}]


def test_published_buckets_are_read_in_order(stream: FileStream) -> None:
    late = write_part(stream, "20260102T0000Z", "a", [messages(100, 5)], 1)
    first = write_part(stream, "20260101T0000Z", "a", [messages(0, 3), messages(3, 4)], 1)
    second = write_part(stream, "20260101T0000Z", "b", [messages(7, 2)], 1)
    assert stream.folders() == []
    stream.publish("20260102T0000Z", [late])
    stream.publish("20260101T0000Z", [first, second])
    assert stream.folders() == ["20260101T0000Z", "20260102T0000Z"]
    assert stream.folders("20260101") == stream.folders()
    assert stream.folders("20260101T0000Z") == ["20260102T0000Z"]
    assert list(stream.read("20260101T0000Z")) == expected(0, 9)
    assert stream.parts("20260101T0000Z") == [first, second]
    assert (first.records, second.records) == (7, 2)


def test_a_bucket_without_changes_is_published_empty(stream: FileStream) -> None:
    stream.publish("b", [])
    assert (stream.folders(), list(stream.read("b"))) == (["b"], [])


def test_unpublished_parts_are_invisible(stream: FileStream) -> None:
    write_part(stream, "b", "a", [messages(0, 3)], 1)
    assert stream.folders() == []
    with pytest.raises(StreamError, match=r"folder 'b' of server.ks.t is not published"):
        list(stream.read("b"))


def test_a_part_may_be_written_again_until_it_is_published(stream: FileStream, tmp_path: Path) -> None:
    abandoned = write_part(stream, "b", "a", [messages(0, 3)], 1)
    part = write_part(stream, "b", "a", [messages(50, 3)], 1)
    assert write_part(stream, "b", "a", [messages(50, 3)], 1) == part
    stream.publish("b", [part])
    stream.publish("b", [part])
    assert list(stream.read("b")) == expected(50, 3)
    assert write_part(stream, "b", "a", [messages(50, 3)], 1) == part
    assert not part_file(stream, tmp_path, "b", abandoned).exists()
    assert sorted(file.name for file in part_file(stream, tmp_path, "b", part).parent.iterdir()) == sorted(
        [f"{part.name}.avro", f"{part.name}.index", "manifest.json"]
    )
    with pytest.raises(StreamConflictError, match="published already"):
        write_part(stream, "b", "a", [messages(0, 3)], 1)
    assert list(stream.read("b")) == expected(50, 3)


def test_a_second_publish_with_other_content_names_both(stream: FileStream) -> None:
    one = write_part(stream, "b", "one", [messages(0, 3)], 1)
    two = write_part(stream, "b", "two", [messages(3, 3)], 1)
    path = f"streams/{TOPIC}/b/{two.name}.avro"
    written_by_the_other_attempt = stream.store.get(path)
    stream.publish("b", [one])
    stream.store.put(path, written_by_the_other_attempt)
    with pytest.raises(StreamConflictError, match=f"published with 1 parts .{one.name}.*with 1 parts .{two.name}"):
        stream.publish("b", [two])
    assert list(stream.read("b")) == expected(0, 3)


def test_publishing_a_part_that_is_not_there_fails(stream: FileStream) -> None:
    with pytest.raises(StreamDamagedError, match=r"ghost.avro is not there"):
        stream.publish("b", [Part("ghost", 1, 2, 3)])
    assert stream.folders() == []


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_a_damaged_part_is_an_error_before_its_first_message(stream: FileStream, tmp_path: Path, damage: str) -> None:
    part = write_part(stream, "b", "a", [messages(0, 3)], 1)
    stream.publish("b", [part])
    file = part_file(stream, tmp_path, "b", part)
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        data[-20] ^= 1
        file.write_bytes(data if damage == "flipped" else data[:-17])
    with pytest.raises(StreamDamagedError, match=part.name):
        next(stream.read("b"))


def test_a_replaced_part_is_noticed(stream: FileStream) -> None:
    """A well-formed object in the part's place, with a checksum of its own."""
    part = write_part(stream, "b", "a", [messages(0, 3)], 1)
    stream.publish("b", [part])
    other = write_part(stream, "c", "a", [messages(9, 3)], 1)
    stream.store.put(f"streams/{TOPIC}/b/{part.name}.avro", stream.store.get(f"streams/{TOPIC}/c/{other.name}.avro"))
    with pytest.raises(StreamDamagedError, match=f"{part.name}.avro is damaged: it has {other.bytes} bytes"):
        next(stream.read("b"))


def test_a_manifest_names_the_files_of_the_bucket(stream: FileStream, tmp_path: Path) -> None:
    """Whoever has no ringsync reads these files, with any reader of Avro."""
    part = write_part(stream, "b", "a", [messages(0, 3)], 1)
    stream.publish("b", [part])
    manifest = json.loads(stream.store.get(f"streams/{TOPIC}/b/manifest.json"))
    folder = part_file(stream, tmp_path, "b", part).parent
    read = [one for named in manifest["parts"] for one in fastavro.reader((folder / named["name"]).open("rb"))]
    assert [one["key"] for one in read] == [one["key"] for one in expected(0, 3)]


def test_a_manifest_of_before_is_read_and_published_again(stream: FileStream) -> None:
    """It named the parts without ``.avro``."""
    part = write_part(stream, "b", "a", [messages(0, 3)], 1)
    stream.publish("b", [part])
    key = f"streams/{TOPIC}/b/manifest.json"
    old = stream.store.get(key).replace(b".avro", b"")
    stream.store.put(key, old)
    assert stream.parts("b") == [part]
    stream.publish("b", [part])
    assert stream.store.get(key) == old
    assert list(stream.read("b")) == expected(0, 3)


def test_a_damaged_manifest_is_named(stream: FileStream) -> None:
    stream.store.put(f"streams/{TOPIC}/b/manifest.json", b'{"parts": 5}')
    with pytest.raises(StreamDamagedError, match=r"manifest.json is not a manifest"):
        next(stream.read("b"))


def test_schemas_never_change_under_a_version(stream: FileStream) -> None:
    stream.put_schemas(1, KEY, VALUE)
    with pytest.raises(StreamConflictError, match=r"value-1.avsc holds another schema"):
        stream.put_schemas(1, KEY, {**VALUE, "fields": []})
    with pytest.raises(StreamError, match="no key schema of version 2"):
        write_part(stream, "b", "a", [messages(0, 1)], 2)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\n", "ä", "-a", "a" * 201])
def test_names_cannot_leave_their_folder(stream: FileStream, name: str) -> None:
    with pytest.raises(ValueError, match="part name"):
        write_part(stream, "b", name, [], 1)
    with pytest.raises(ValueError, match="folder name"):
        write_part(stream, name, "a", [], 1)
    with pytest.raises(ValueError, match="folder name"):
        stream.publish(name, [])


def test_topics_are_kafka_s_and_schemas_is_no_bucket(stream: FileStream) -> None:
    for topic in ("", ".", "..", "a/b", "a" * 250, "a b"):
        with pytest.raises(ValueError, match="topic"):
            FileStream(stream.store, topic)
    with pytest.raises(ValueError, match="for the schemas"):
        stream.publish("schemas", [])
