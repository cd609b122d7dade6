"""Values as CQL literals, a column at a time without a Python object for each where their type is a common one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.cells import NULL_LENGTH, Cells, valid_mask
from ringsync.cql.decode import decode
from ringsync.cql.literals import CQL
from ringsync.cql.types import CqlType, Native
from ringsync.cql.value_texts import value_texts

_LAST_TIMESTAMP_MS = 253402300799999
"""In the year 9999."""
_FIRST_DAY, _LAST_DAY = -719162, 2932896
"""0001-01-01 and 9999-12-31, days since 1970."""
_DATE_EPOCH = 2**31


def literal_array(cql_type: CqlType, cells: Cells) -> pa.Array:
    """A literal for each value, text; null where the cell is null, or where its bytes are no value of the type."""
    write = _WRITERS.get(cql_type.name) if isinstance(cql_type, Native) else None
    if write is not None:
        decoded = decode(cql_type, cells)
        if decoded.misfits is None:
            return write(decoded.values)
    texts = pa.array(value_texts(CQL, cql_type, cells), pa.string())
    return pc.if_else(pa.array(cells.lengths != NULL_LENGTH), texts, pa.scalar(None, pa.string()))


def text_literals(values: pa.Array) -> pa.Array:
    """Texts in single quotes."""
    return _quoted(pc.replace_substring(values, "'", "''"))


def hexadecimal_literals(values: pa.Array) -> pa.Array:
    """``0x…`` of binary values."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    limits = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)[limits[0] : limits[-1]]
    text = digits[np.stack([data >> 4, data & 15], axis=1)] if len(data) else data
    offsets = ((limits - limits[0]) * 2).astype(np.int32)
    bitmap = pa.py_buffer(np.packbits(valid_mask(values), bitorder="little"))
    found = pa.Array.from_buffers(pa.string(), len(values), [bitmap, pa.py_buffer(offsets), pa.py_buffer(text)])
    return pc.binary_join_element_wise("0x", found, "")


def _printed(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def _quoted(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise("'", values, "'", "")


def _floats(values: pa.Array) -> pa.Array:
    """Digits as Arrow prints them, the shortest that give the same number; what is no number by its function."""
    texts = pc.cast(values, pa.string())
    texts = pc.if_else(pc.equal(texts, "-0"), "-0.0", texts)
    odd = pc.fill_null(pc.invert(pc.is_finite(values)), False)
    if not pc.any(odd).as_py():
        return texts
    kind, name = (np.uint32, "Float") if pa.types.is_float32(values.type) else (np.uint64, "Double")
    bits = np.frombuffer(values.buffers()[1], kind, len(values), values.offset * np.dtype(kind).itemsize)
    raw = bits.astype(np.dtype(kind).newbyteorder(">")).tobytes()
    width = np.dtype(kind).itemsize
    digits = hexadecimal_literals(
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(raw)]).cast(pa.binary())
    )
    return pc.if_else(odd, pc.binary_join_element_wise(f"blobAs{name}(", digits, ")", ""), texts)


def _dates(values: pa.Array) -> pa.Array:
    days = values.view(pa.int32()).cast(pa.int64())
    numbers = pc.add(days, _DATE_EPOCH).cast(pa.string())
    usual = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less_equal(days, _LAST_DAY))
    within = pc.if_else(usual, days, 0).cast(pa.int32()).view(pa.date32())
    return pc.if_else(usual, _quoted(within.cast(pa.string())), numbers)


def _timestamps(values: pa.Array) -> pa.Array:
    milliseconds = pc.cast(values, pa.timestamp("ms", "UTC")).view(pa.int64())
    usual = pc.and_(pc.greater_equal(milliseconds, 0), pc.less_equal(milliseconds, _LAST_TIMESTAMP_MS))
    within = pc.if_else(usual, milliseconds, 0).view(pa.timestamp("ms"))
    texts = pc.binary_join_element_wise("'", within.cast(pa.string()), "Z'", "")
    return pc.if_else(usual, texts, milliseconds.cast(pa.string()))


_WRITERS: dict[str, Callable[[pa.Array], pa.Array]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint", "boolean"), _printed),
    **dict.fromkeys(("uuid", "timeuuid", "varint", "decimal"), _printed),
    **dict.fromkeys(("text", "ascii"), text_literals),
    **dict.fromkeys(("float", "double"), _floats),
    "blob": hexadecimal_literals,
    "date": _dates,
    "timestamp": _timestamps,
}
