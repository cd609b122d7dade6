"""Serialised CQL values decoded to Arrow, one column at a time.

A value that its Arrow type cannot hold exactly is a *misfit*: it decodes to null and is marked, so that the caller can
keep the bytes. Encoding gives back the bytes of all other values, with one exception: a tuple or UDT that lacks fields
at its end (ALTER TYPE … ADD) decodes to nulls there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from ringsync.compiled.arrow import Mask
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.cells import Cells, gathered, raw_values, validity
from ringsync.cql.codec.gather import (
    gather_booleans,
    gather_durations,
    gather_fixed,
    gather_timestamps,
    mark_invalid_text,
)
from ringsync.cql.codec.split import Composite, offsets_room, split, total_bytes
from ringsync.cql.codec.text_forms import (
    DIGITS_PER_BYTE,
    INET_ROOM,
    NUMBER_ROOM,
    UUID_ROOM,
    inet_text,
    number_text,
    uuid_text,
)
from ringsync.cql.natives import DATE_EPOCH, NATIVES, Codec, NativeType
from ringsync.cql.types import CqlType, CustomType, MapType, Native, arrow_type

_arrow_type = lru_cache(maxsize=1024)(arrow_type)


@dataclass(frozen=True)
class Decoded:
    """A decoded column.

    :ivar values: array of exactly ``arrow_type(cql_type)``; null if the cell is null or a misfit
    :ivar misfits: mask of rows whose value the Arrow type cannot hold; None: there are none
    """

    values: pa.Array
    misfits: Mask | None

    def raw(self, cells: Cells) -> pa.Array:
        """Return the bytes of the misfits among the cells that were decoded, null for all others."""
        if self.misfits is None:
            return pa.nulls(len(cells), pa.binary())
        return raw_values(cells.without(~self.misfits))


def decode(cql_type: CqlType, cells: Cells) -> Decoded:
    """Decode a column of any type.

    Misfits are: empty values (except of text, ascii, blob and custom types), bytes of a wrong length, timestamps beyond
    int64 µs, invalid UTF-8, numbers and vints that are longer than necessary, booleans that are neither 00 nor 01,
    malformed collections, null map keys, and all values that contain one of these.
    """
    decoded = _decode(cql_type, cells)
    if decoded.misfits is None:
        return decoded
    # The kernels leave arbitrary values for malformed bytes, so the others are decoded again without them.
    return Decoded(_decode(cql_type, cells.without(decoded.misfits)).values, decoded.misfits)


def misfit_reason(cql_type: CqlType, value: bytes) -> str:
    """Explain why the type's Arrow type cannot hold these bytes, a misfit: a phrase for messages."""
    if not value:
        return f"an empty value of type {cql_type}"
    if not isinstance(cql_type, Native):
        return f"a malformed value of type {cql_type}, or one that contains a value no Arrow type holds"
    native = NATIVES[cql_type.name]
    if native.width not in (0, len(value)):
        return f"{len(value)} bytes where type {cql_type} has {native.width}"
    return native.misfit.format(length=len(value))


def _decode(cql_type: CqlType, cells: Cells) -> Decoded:
    """Decode cells. The values of marked misfits are undefined."""
    match cql_type:
        case Native(name):
            native = NATIVES[name]
            return _CODECS[native.codec](native, cells)
        case CustomType():
            return Decoded(raw_values(cells), None)
        case _:
            return _composites(cql_type, cells)


def _array(kind: pa.DataType, cells: Cells, *buffers: pa.Buffer, children: Sequence[pa.Array] = ()) -> pa.Array:
    """Make an Arrow array with the nulls of the cells."""
    bitmap, nulls = validity(cells)
    return pa.Array.from_buffers(kind, len(cells), [bitmap, *buffers], null_count=nulls, children=list(children))


def _fixed(native: NativeType, cells: Cells) -> Decoded:
    width = native.width
    output = pa.allocate_buffer(len(cells) * width)
    others = gather_fixed(*cells.arguments, width, DATE_EPOCH if native.codec == "date" else 0, output.address)
    misfits = _any((cells.lengths >= 0) & (cells.lengths != width)) if others else None
    return Decoded(_array(native.arrow, cells, output), misfits)


def _timestamps(native: NativeType, cells: Cells) -> Decoded:
    output, misfits = pa.allocate_buffer(8 * len(cells)), _no_misfits(cells)
    gather_timestamps(*cells.arguments, output.address, address(misfits))
    return Decoded(_array(native.arrow, cells, output), _any(misfits))


def _booleans(native: NativeType, cells: Cells) -> Decoded:
    output, misfits = pa.allocate_buffer((len(cells) + 7) // 8), _no_misfits(cells)
    gather_booleans(*cells.arguments, output.address, address(misfits))
    return Decoded(_array(native.arrow, cells, output), _any(misfits))


def _durations(native: NativeType, cells: Cells) -> Decoded:
    count, misfits = len(cells), _no_misfits(cells)
    parts = [pa.allocate_buffer(width * count) for width in (4, 4, 8)]
    gather_durations(*cells.arguments, *[part.address for part in parts], address(misfits))
    fields = [
        pa.Array.from_buffers(part.type, count, [None, buffer], null_count=0)
        for part, buffer in zip(native.arrow, parts, strict=True)
    ]
    return Decoded(_array(native.arrow, cells, children=fields), _any(misfits))


def _blobs(_native: NativeType, cells: Cells) -> Decoded:
    return Decoded(raw_values(cells), None)


def has_high_bit(data: pa.Buffer) -> bool:
    """Tell whether any byte is 0x80 or above."""
    return bool(np.frombuffer(data, np.uint8).max(initial=0) & 0x80)


def _texts(native: NativeType, cells: Cells) -> Decoded:
    starts, data = gathered(cells)
    misfits = _no_misfits(cells)
    if has_high_bit(data):
        mark_invalid_text(*cells.arguments, int(native.codec == "ascii"), address(misfits))
    return Decoded(_array(pa.string(), cells, starts, data), _any(misfits))


def _uuids(_native: NativeType, cells: Cells) -> Decoded:
    starts, output = offsets_room(cells), pa.allocate_buffer(len(cells) * UUID_ROOM + PADDING)
    size = uuid_text(*cells.arguments, starts.address, output.address)
    misfits = _any((cells.lengths >= 0) & (cells.lengths != 16)) if size < UUID_ROOM * len(cells) else None
    return Decoded(_array(pa.string(), cells, starts, output.slice(0, size)), misfits)


def _inets(_native: NativeType, cells: Cells) -> Decoded:
    starts, output = offsets_room(cells), pa.allocate_buffer(len(cells) * INET_ROOM + PADDING, resizable=True)
    size = inet_text(*cells.arguments, starts.address, output.address)
    output.resize(size)
    misfits = (cells.lengths >= 0) & (cells.lengths != 4) & (cells.lengths != 16)
    return Decoded(_array(pa.string(), cells, starts, output), _any(misfits))


def _numbers(native: NativeType, cells: Cells) -> Decoded:
    starts, misfits = offsets_room(cells), _no_misfits(cells)
    room = total_bytes(cells) * DIGITS_PER_BYTE + len(cells) * NUMBER_ROOM + PADDING
    output = pa.allocate_buffer(room, resizable=True)
    scratch = pa.allocate_buffer(int(cells.lengths.max(initial=0)) * (DIGITS_PER_BYTE + 2) + 2 * PADDING)
    size = number_text(
        *cells.arguments,
        int(native.codec == "decimal"),
        scratch.address,
        scratch.address + scratch.size - PADDING,
        starts.address,
        output.address,
        address(misfits),
    )
    if size > np.iinfo(np.int32).max:
        raise ValueError(f"{len(cells)} numbers have {size} digits together: pass fewer rows at once")
    output.resize(size)
    return Decoded(_array(pa.string(), cells, starts, output), _any(misfits))


_CODECS: dict[Codec, Callable[[NativeType, Cells], Decoded]] = {
    "ascii": _texts,
    "blob": _blobs,
    "boolean": _booleans,
    "date": _fixed,
    "decimal": _numbers,
    "duration": _durations,
    "fixed": _fixed,
    "inet": _inets,
    "text": _texts,
    "timestamp": _timestamps,
    "uuid": _uuids,
    "varint": _numbers,
}


def _composites(cql_type: Composite, cells: Cells) -> Decoded:
    parts = split(cql_type, cells)
    children = []
    for kind, part in zip(parts.types, parts.cells, strict=True):
        child = _decode(kind, part)
        parts.spread(child.misfits)
        children.append(child.values)
    misfits, arrow = _any(parts.misfits), _arrow_type(cql_type)
    if parts.starts is None:
        return Decoded(_array(arrow, cells, children=children), misfits)
    if isinstance(cql_type, MapType):
        if misfits is not None:  # Arrow ends the process if it gets a map with a null key.
            return Decoded(pa.nulls(len(cells), arrow), misfits)
        # Keys and values of a map, or of the list that replaces a map.
        entry = [arrow.key_field, arrow.item_field] if pa.types.is_map(arrow) else list(arrow.value_type)
        children = [pa.StructArray.from_arrays(children, fields=entry)]
    return Decoded(_array(arrow, cells, parts.starts, children=children), misfits)


def _no_misfits(cells: Cells) -> Mask:
    return np.zeros(len(cells), np.bool_)


def _any(misfits: Mask) -> Mask | None:
    return misfits if misfits.any() else None
