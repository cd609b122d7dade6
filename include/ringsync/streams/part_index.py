"""A part's index: the length of each key and value, and the event ids, so that messages are copied, not decoded.

The index is an Arrow IPC stream of ``key_length``, ``value_length``, ``event_id`` with a row for each message, some 20
bytes. Its metadata hold the schema's version and the CRC-32C of the part. All of it can also be read from the part by
decoding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastavro import parse_schema, schemaless_reader

from ringsync.avro.container import read_blocks
from ringsync.avro.mapping import without_logical_types
from ringsync.streams.messages import Messages
from ringsync.streams.tokens import Steps, steps_to_token, tokens_of

EVENT_ID_BYTES = 16
_SCHEMA = pa.schema(
    [
        pa.field("key_length", pa.int32(), nullable=False),
        pa.field("value_length", pa.int32(), nullable=False),
        pa.field("event_id", pa.binary(EVENT_ID_BYTES), nullable=False),
    ]
)


@dataclass(frozen=True)
class MessageBlock:
    """Some messages of a part, in order.

    :ivar keys: Avro datum of each key
    :ivar values: Avro datum of each value
    :ivar event_ids: event id of each message, 32 hexadecimal digits
    :ivar tokens: int64, ``source.token`` of each message
    :ivar schema_version: version of the stream's schemas that the messages follow
    """

    keys: list[bytes]
    values: list[bytes]
    event_ids: list[bytes]
    tokens: pa.Array
    schema_version: int

    def cut(self, first: int, count: int) -> MessageBlock:
        """Return some of the messages.

        :param first: number of the first message, from 0
        :param count: greatest number of messages
        """
        end = first + count
        return MessageBlock(
            self.keys[first:end],
            self.values[first:end],
            self.event_ids[first:end],
            self.tokens.slice(first, count),
            self.schema_version,
        )


class PartIndex:
    """A builder of a part's index.

    :param schema_version: schema version of the part's messages
    """

    def __init__(self, schema_version: int) -> None:
        self._schema_version = schema_version
        self._batches: list[pa.RecordBatch] = []

    def add(self, messages: Messages) -> None:
        """Append messages in the order in which the part got them.

        :raises ValueError: a message has no event id
        """
        if messages.event_ids.null_count:
            raise ValueError(f"{messages.event_ids.null_count} of {len(messages.event_ids)} messages have no event id")
        lengths = [pc.binary_length(array).cast(pa.int32()) for array in (messages.keys, messages.values)]
        self._batches.append(pa.RecordBatch.from_arrays([*lengths, messages.event_ids], schema=_SCHEMA))

    def finish(self, crc32c: int) -> bytes:
        """Return the content of the index file.

        :param crc32c: CRC-32C of the part's file
        """
        metadata = {"schema_version": str(self._schema_version), "crc32c": f"{crc32c:08x}"}
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, _SCHEMA.with_metadata(metadata), options=options) as writer:
            for batch in self._batches:
                writer.write_batch(batch)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def blocks_by_index(data: bytes, crc32c: int, index: bytes) -> Iterator[MessageBlock]:
    """Cut the messages of a part out of its file, by its index.

    :param data: content of the part's file
    :param crc32c: CRC-32C of the part's file
    :param index: content of the index file (:meth:`PartIndex.finish`)
    :raises ValueError: this is no index, or another part's
    """
    table = pa.ipc.open_stream(index).read_all()
    metadata = table.schema.metadata or {}
    if metadata.get(b"crc32c") != f"{crc32c:08x}".encode() or table.schema.remove_metadata() != _SCHEMA:
        raise ValueError("it is not the index of this part")
    version = int(metadata[b"schema_version"])
    schema, blocks = read_blocks(data)
    steps = steps_to_token(schema)
    first = 0
    for rows, block in blocks:
        yield _block(block, table.slice(first, rows), rows, version, steps)
        first += rows
    if first != len(table):
        raise ValueError(f"it has {len(table)} messages, but the part has {first}")


def _block(data: bytes, index: pa.Table, rows: int, version: int, steps: Steps) -> MessageBlock:
    lengths = np.stack([index.column(i).to_numpy() for i in range(2)], axis=1).ravel()
    bounds = np.zeros(2 * len(index) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    if len(index) != rows or bounds[-1] != len(data) or lengths.min(initial=0) < 0:
        raise ValueError(f"it has {len(index)} messages of {bounds[-1]} bytes, but the part has {rows} of {len(data)}")
    ends = bounds.tolist()
    return MessageBlock(
        [data[a:b] for a, b in zip(ends[:-1:2], ends[1::2], strict=True)],
        [data[a:b] for a, b in zip(ends[1::2], ends[2::2], strict=True)],
        _hexadecimal(index.column(2)),
        tokens_of(data, bounds[1:], rows, steps),
        version,
    )


def _hexadecimal(event_ids: pa.ChunkedArray) -> list[bytes]:
    digits = b"".join(event_ids.to_numpy()).hex().encode()
    width = 2 * EVENT_ID_BYTES
    return [digits[i : i + width] for i in range(0, len(digits), width)]


def blocks_by_decoding(data: bytes) -> Iterator[MessageBlock]:
    """Cut the messages of a part without index out of its file: decode them one by one.

    :param data: content of the part's file
    :raises ValueError: this is not a part of change messages
    """
    schema: Any
    schema, blocks = read_blocks(data)
    key, value = (parse_schema(without_logical_types(field["type"])) for field in schema["fields"])
    for rows, block in blocks:
        stream = BytesIO(block)
        keys, values, sources = [], [], []
        for _ in range(rows):
            start = stream.tell()
            schemaless_reader(stream, key)
            middle = stream.tell()
            envelope: Any = schemaless_reader(stream, value)
            keys.append(block[start:middle])
            values.append(block[middle : stream.tell()])
            sources.append(envelope["source"])
        event_ids = [source["event_id"].encode() for source in sources]
        tokens = pa.array([source["token"] for source in sources], pa.int64())
        yield MessageBlock(keys, values, event_ids, tokens, sources[0]["schema_version"])
