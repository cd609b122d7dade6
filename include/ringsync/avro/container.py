"""Avro object container files, written from encoded rows.

https://avro.apache.org/docs/1.12.0/specification/#object-container-files
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Literal

import pyarrow as pa
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.write import Writer
from isal import isal_zlib

from ringsync.avro.mapping import without_logical_types
from ringsync.cql.codec.encode import offsets_of
from ringsync.cql.natives import AvroSchema

Codec = Literal["null", "deflate"]
"""The codecs that all Avro readers have; fastavro needs another package for zstandard."""

_DEFLATE_LEVEL = 1
"""ISA-L's levels 2 and 3 take longer and do not make messages smaller."""

_SYNC_BYTES = 16
_HEADER = parse_schema(
    {
        "type": "record",
        "name": "Header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "Magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "Sync", "size": _SYNC_BYTES}},
        ],
    }
)
_LONG = parse_schema("long")


class ContainerWriter:
    """A writer of one container file in memory. The same calls give the same bytes.

    :param schema: Avro schema of a row
    :param sync: 16 bytes between blocks; different for each file
    :param rows_per_block: greatest number of rows in a block
    :raises ValueError: ``sync`` is not 16 bytes long
    """

    def __init__(self, schema: AvroSchema, codec: Codec, sync: bytes, rows_per_block: int) -> None:
        if len(sync) != _SYNC_BYTES:
            raise ValueError(f"an Avro sync marker has 16 bytes, not {len(sync)}")
        self._file = BytesIO()
        Writer(self._file, schema, codec=codec, sync_marker=sync).flush()  # the header: there are no rows yet
        self._compressed = _raw_deflate if codec == "deflate" else bytes
        self._sync = sync
        self._rows_per_block = rows_per_block
        self.rows = 0

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        return self._file.tell()

    def add(self, rows: pa.Array) -> None:
        """Append encoded rows.

        :param rows: binary array, one datum per element
        :raises ValueError: a row is null
        """
        for count, data in _blocks(rows, self._rows_per_block):
            block = self._compressed(data)
            for number in (count, len(block)):
                schemaless_writer(self._file, _LONG, number)
            self._file.write(block)
            self._file.write(self._sync)
        self.rows += len(rows)

    def finish(self) -> bytes:
        """Return the file."""
        return self._file.getvalue()


def read_container(data: bytes) -> Iterator[dict[str, Any]]:
    """Read the rows of a container file, with plain numbers and text: logical types are not applied.

    Python's date and datetime end at the year 9999; Cassandra's values do not.

    :raises ValueError: the data is no container file
    """
    schema, blocks = read_blocks(data)
    reader_schema = parse_schema(without_logical_types(schema))
    for rows, block in blocks:
        stream = BytesIO(block)
        for _ in range(rows):
            yield schemaless_reader(stream, reader_schema)


def read_blocks(data: bytes) -> tuple[AvroSchema, Iterator[tuple[int, bytes]]]:
    """Read a container file's schema, and for each block the number of rows and their decompressed bytes.

    :raises ValueError: the data is no container file, or has a codec other than null and deflate
    """
    stream = BytesIO(data)
    if not data.startswith(b"Obj\x01"):
        raise ValueError("it is not an Avro container file: it does not begin with 'Obj' and the byte 1")
    header: Any = schemaless_reader(stream, _HEADER)
    codec = header["meta"].get("avro.codec", b"null").decode()
    if codec not in ("null", "deflate"):
        raise ValueError(f"it has the Avro codec {codec!r}; only null and deflate can be read")
    return json.loads(header["meta"]["avro.schema"]), _decompressed(stream, len(data), codec, header["sync"])


def _decompressed(stream: BytesIO, end: int, codec: str, sync: bytes) -> Iterator[tuple[int, bytes]]:
    while stream.tell() < end:
        rows: Any = schemaless_reader(stream, _LONG)
        size: Any = schemaless_reader(stream, _LONG)
        block = stream.read(size)
        if stream.read(_SYNC_BYTES) != sync:
            raise ValueError(f"a block does not end in the file's sync marker, at byte {stream.tell()}")
        yield rows, isal_zlib.decompress(block, wbits=-15) if codec == "deflate" else block


def _raw_deflate(data: memoryview) -> bytes:
    """Deflate without zlib's header and checksum (Avro 1.12, "Required Codecs").

    ISA-L takes a fifth of the time that zlib takes at its fastest level, and gives some percent fewer bytes.
    """
    return isal_zlib.compress(data, level=_DEFLATE_LEVEL, wbits=-15)


def _blocks(rows: pa.Array, rows_per_block: int) -> Iterator[tuple[int, memoryview]]:
    """Cut the array's buffer at row boundaries. Yield the number of rows and the bytes of each block."""
    if rows.null_count:
        raise ValueError(f"{rows.null_count} of {len(rows)} rows are null: a container file holds only encoded rows")
    offsets, data = offsets_of(rows), memoryview(rows.buffers()[2] or b"")
    for first in range(0, len(rows), rows_per_block):
        last = min(first + rows_per_block, len(rows))
        yield last - first, data[offsets[first] : offsets[last]]
