"""Avro messages as JSON in Kafka Connect's form, which the original CDC design uses: schema and payload.

An Avro schema is compiled to a program. :mod:`ringsync.avro.to_json_kernels` runs it for each datum. docs/kafka.md has
the form of each type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro import to_json_kernels as kernels
from ringsync.avro.mapping import AvroRecord
from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import PADDING, address, padded
from ringsync.cql.codec.text_forms import DIGITS_PER_BYTE

JsonConverter = Callable[[Sequence[bytes]], list[bytes]]
"""A function that turns Avro datums of one schema into UTF-8 JSON."""

_ROOM = 8 << 20
"""Bytes of output at once, unless a single message is longer."""

_PRIMITIVES = {
    "boolean": ("boolean", kernels.BOOLEAN, 0),
    "bytes": ("bytes", kernels.BYTES, 0),
    "double": ("double", kernels.FLOAT, 8),
    "float": ("float", kernels.FLOAT, 4),
    "int": ("int32", kernels.LONG, 0),
    "long": ("int64", kernels.LONG, 0),
    "string": ("string", kernels.TEXT, 0),
}
"""Connect's name of each Avro type, the instruction that writes its values, and the instruction's number ``a``."""
_CONNECT_NAMES = {
    "date": "org.apache.kafka.connect.data.Date",
    "timestamp-millis": "org.apache.kafka.connect.data.Timestamp",
}


def json_converter(schema: AvroRecord, *, with_schema: bool = True) -> JsonConverter:
    """Return a function that turns Avro datums of this schema into ``{"schema": …, "payload": …}``.

    The function raises ValueError if a datum does not follow the schema.

    :param schema: schema of a key or an envelope, with its logical types
    :param with_schema: False: the payload alone is written
    """
    program = _Program()
    program.write(f'{{"schema":{_compact(_connect(schema, {}))},"payload":' if with_schema else "")
    _compile(schema, program, {})
    program.write("}" if with_schema else "")
    instructions, literals, depth = program.finished()

    def convert(data: Sequence[bytes]) -> list[bytes]:
        texts: list[bytes] = []
        room = _ROOM
        buffer, offsets = padded(b"".join(data)), np.zeros(len(data) + 1, np.int64)
        np.cumsum([len(datum) for datum in data], out=offsets[1:])
        while len(texts) < len(data):
            written = _written(instructions, literals, depth, buffer, offsets, len(texts), room)
            texts += written
            if not written:
                room *= 2
        return texts

    return convert


def _connect(schema: Any, records: dict[str, Any]) -> dict[str, Any]:
    """Convert a schema with its logical types to the form of JsonConverter. Structs are repeated at each use."""
    if isinstance(schema, list):
        return {**_connect(_not_null(schema), records), "optional": True}
    if isinstance(schema, str):
        if schema not in _PRIMITIVES:
            return _connect(records[schema], records)
        return {"type": _PRIMITIVES[schema][0], "optional": False}
    match schema["type"]:
        case "record":
            records[_full_name(schema)] = schema
            fields = [{"field": f["name"], **_connect(f["type"], records)} for f in schema["fields"]]
            return {"type": "struct", "name": _full_name(schema), "optional": False, "fields": fields}
        case "array":
            return {"type": "array", "items": _connect(schema["items"], records), "optional": False}
        case "map":
            keys = {"type": "string", "optional": False}
            return {"type": "map", "keys": keys, "values": _connect(schema["values"], records), "optional": False}
    logical = schema.get("logicalType")
    if logical == "big-decimal":
        return _connect("string", records)
    name = {"name": _CONNECT_NAMES[logical]} if logical in _CONNECT_NAMES else {}
    return {**_connect(schema["type"], records), **name}


def _not_null(union: list[Any]) -> Any:
    """Return the other branch of a union with null; messages have no other unions."""
    (other,) = (branch for branch in union if branch != "null")
    return other


def _full_name(record: AvroRecord) -> str:
    """Return the name by which a schema uses a record again."""
    return f"{record['namespace']}.{record['name']}" if "namespace" in record else str(record["name"])


class _Program:
    """A builder of programs. It joins neighbouring literals to one."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, int]] = []
        self._literals = bytearray()
        self._begun = 0
        self._depth = self._deepest = 0

    def write(self, text: str) -> None:
        """Add a literal."""
        self._literals += text.encode()

    def add(self, kind: int, a: int = 0, b: int = 0) -> int:
        """Add an instruction. Return its place."""
        self._end_literal()
        self._instructions.append((kind, a, b))
        return len(self._instructions) - 1

    def here(self) -> int:
        """Return the place of the next instruction in bytes."""
        self._end_literal()
        return len(self._instructions) * kernels.INSTRUCTION_BYTES

    def go_here(self, place: int) -> None:
        """Make the instruction at this place jump to the next one."""
        kind, a, _ = self._instructions[place]
        self._instructions[place] = (kind, a, self.here())

    def nest(self, levels: int) -> None:
        """Enter (1) or leave (−1) an array or map."""
        self._depth += levels
        self._deepest = max(self._deepest, self._depth)

    def finished(self) -> tuple[Integers, npt.NDArray[np.uint8], int]:
        """Return instructions, int64[count, 3]; literals; the deepest nesting of arrays and maps."""
        self.add(kernels.END)
        return np.array(self._instructions, np.int64), padded(bytes(self._literals)), self._deepest

    def _end_literal(self) -> None:
        size = len(self._literals) - self._begun
        if size:
            self._instructions.append((kernels.LITERAL, self._begun, size))
            self._begun += size


def _compile(schema: Any, program: _Program, records: dict[str, Any]) -> None:
    if isinstance(schema, list):
        union = program.add(kernels.UNION, schema.index("null"))
        _compile(_not_null(schema), program, records)
        program.go_here(union)
    elif isinstance(schema, str) and schema in _PRIMITIVES:
        program.add(*_PRIMITIVES[schema][1:])
    elif isinstance(schema, str):
        _compile(records[schema], program, records)
    elif schema["type"] == "record":
        records[_full_name(schema)] = schema
        for place, field in enumerate(schema["fields"]):
            program.write(f"{',' if place else '{'}{_compact(field['name'])}:")
            _compile(field["type"], program, records)
        program.write("}" if schema["fields"] else "{}")
    elif schema["type"] == "array":
        _compile_items("[]", "", schema["items"], program, records)
    elif schema["type"] == "map":
        _compile_items("{}", ":", schema["values"], program, records)
    elif schema.get("logicalType") == "big-decimal":
        program.add(kernels.DECIMAL)
    else:
        _compile(schema["type"], program, records)


def _compile_items(brackets: str, after_key: str, inner: Any, program: _Program, records: dict[str, Any]) -> None:
    program.nest(1)
    program.write(brackets[0])
    items = program.add(kernels.ITEMS)
    first = program.here()
    if after_key:
        program.add(kernels.TEXT)
        program.write(after_key)
    _compile(inner, program, records)
    program.add(kernels.NEXT, b=first)
    program.go_here(items)
    program.write(brackets[1])
    program.nest(-1)


def _written(
    instructions: Integers,
    literals: npt.NDArray[np.uint8],
    depth: int,
    buffer: npt.NDArray[np.uint8],
    offsets: Integers,
    first: int,
    room: int,
) -> list[bytes]:
    """Write the JSON of the datums from ``first`` on, as many as fit into ``room`` bytes."""
    rows = len(offsets) - 1
    output, ends, stack = np.empty(room + PADDING, np.uint8), np.empty(rows, np.int64), np.empty(depth + 1, np.int64)
    floats = np.zeros(1 + 3 * (1 + (len(buffer) if (instructions[:, 0] == kernels.FLOAT).any() else 0) // 4), np.int64)
    longest = int(np.diff(offsets).max())
    scratch = np.empty((DIGITS_PER_BYTE + 2) * longest + 2 * PADDING, np.uint8)
    reached = kernels.write_json(
        address(instructions),
        address(literals),
        address(buffer),
        address(offsets),
        first,
        rows,
        address(output),
        address(output) + room,
        address(ends),
        address(floats),
        address(stack),
        address(scratch),
        address(scratch) + len(scratch) - PADDING,
    )
    if reached < 0:
        raise ValueError(f"message {-1 - reached} of {rows} does not follow its Avro schema")
    noted = floats[1 : 1 + 3 * floats[0]].reshape(-1, 3)
    return _with_floats(output, ends[first:reached], noted, buffer)


def _with_floats(
    output: npt.NDArray[np.uint8],
    ends: Integers,
    noted: Integers,
    buffer: npt.NDArray[np.uint8],
) -> list[bytes]:
    """Cut the output into messages, and insert the digits of its floats.

    :param ends: end of each message in the output
    :param noted: place in the output, address and bytes of each float
    """
    if not len(noted):
        return _cut(output, ends).to_pylist()  # type: ignore[no-any-return]
    # The output is cut before each float and at the end of each message.
    limits = np.concatenate([noted[:, 0], ends])
    order = np.argsort(limits, kind="stable")
    behind = pa.concat_arrays([_texts_of(noted, buffer), pa.array([""] * len(ends), pa.string())])
    pieces = pc.binary_join_element_wise(
        _cut(output, limits[order]), behind.take(pa.array(order)).cast(pa.binary()), b""
    )
    pieces_before = np.concatenate([[0], np.flatnonzero(order >= len(noted)) + 1])
    whole = pa.ListArray.from_arrays(pa.array(pieces_before.astype(np.int32)), pieces)
    return pc.binary_join(whole, b"").to_pylist()  # type: ignore[no-any-return]


def _texts_of(noted: Integers, buffer: npt.NDArray[np.uint8]) -> pa.Array:
    """Write the digits of floats."""
    texts, rows = [], []
    for width, kind in ((4, np.float32), (8, np.float64)):
        chosen = np.flatnonzero(noted[:, 2] == width)
        places = noted[chosen, 1, np.newaxis] - address(buffer) + np.arange(width)
        texts.append(_float_texts(pa.array(buffer[places].view(kind).ravel())))
        rows.append(chosen)
    return pa.concat_arrays(texts).take(pa.array(np.argsort(np.concatenate(rows))))


def _float_texts(values: pa.Array) -> pa.Array:
    """Write the shortest digits that give the same number. JSON has no NaN and no infinities: they become strings."""
    texts = values.cast(pa.string())
    whole = pc.match_substring_regex(texts, r"^-?\d+$")
    texts = pc.if_else(whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
    for printed, quoted in (("nan", '"NaN"'), ("-inf", '"-Infinity"'), ("inf", '"Infinity"')):
        texts = pc.if_else(pc.equal(texts, printed), quoted, texts)
    return texts


def _cut(output: npt.NDArray[np.uint8], ends: Integers) -> pa.Array:
    """Cut bytes into an array of values, by the end of each."""
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(output)])


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
