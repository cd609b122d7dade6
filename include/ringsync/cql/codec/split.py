"""Composite values split into elements of collections and vectors, or fields of tuples and UDTs. Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.compiled.arrow import Mask
from ringsync.compiled.memory import address
from ringsync.cql import types as cql
from ringsync.cql.cells import Cells
from ringsync.cql.codec.gather import count_bytes, split_collections, split_fields, split_vectors

Composite = cql.ListType | cql.SetType | cql.MapType | cql.VectorType | cql.TupleType | cql.UserType


@dataclass(frozen=True)
class Parts:
    """The parts of a column of composite values.

    :ivar types: type of a collection's or vector's element; of a map's key and value; of each field
    :ivar cells: cells of each of these types, of all rows
    :ivar starts: Arrow's list offsets: the first element of each row; None: each row has one cell of each type
    :ivar misfits: mask of rows whose bytes are malformed; they have no elements
    """

    types: tuple[cql.CqlType, ...]
    cells: tuple[Cells, ...]
    starts: pa.Buffer | None
    misfits: Mask

    def spread(self, elements: Mask | None) -> None:
        """Mark the rows of these elements or fields as misfits."""
        if elements is None:
            return
        if self.starts is None:
            self.misfits[elements] = True
        else:
            starts = np.frombuffer(self.starts, np.int32)
            self.misfits[np.searchsorted(starts, np.flatnonzero(elements), side="right") - 1] = True


def split(cql_type: Composite, cells: Cells) -> Parts:
    """Find the parts of each value of a column. Null keys of maps and empty values are misfits."""
    match cql_type:
        case cql.VectorType():
            return _vectors(cql_type, cells)
        case cql.TupleType() | cql.UserType():
            return _fields(cql.types_inside(cql_type), cells)
        case cql.MapType() | cql.ListType() | cql.SetType():
            return _collections(cql.types_inside(cql_type), cells)


def total_bytes(cells: Cells) -> int:
    """Return the number of bytes of all values together."""
    return int(count_bytes(*cells.arguments[2:]))


def offsets_room(cells: Cells) -> pa.Buffer:
    """Allocate room for Arrow's offsets of values or lists."""
    return pa.allocate_buffer(4 * len(cells) + 4)


def _collections(types: tuple[cql.CqlType, ...], cells: Cells) -> Parts:
    elements, starts = np.empty((2, total_bytes(cells) // 4), np.int32), offsets_room(cells)
    misfits = np.zeros(len(cells), np.bool_)
    width = len(types)
    entries = split_collections(*cells.arguments, width, starts.address, *map(address, (*elements, misfits)))
    children = []
    for place in range(width):
        part = slice(place, entries * width, width)
        offsets, lengths = (np.ascontiguousarray(numbers[part]) for numbers in elements)
        children.append(Cells(cells.buffer, offsets, lengths))
    parts = Parts(types, tuple(children), starts, misfits)
    if width == 2 and (nulls := children[0].lengths < 0).any():
        parts.spread(nulls)
    return parts


def _vectors(cql_type: cql.VectorType, cells: Cells) -> Parts:
    room = min(total_bytes(cells), cql_type.dimension * len(cells))
    elements, starts, misfits = np.empty((2, room), np.int32), offsets_room(cells), np.zeros(len(cells), np.bool_)
    count = split_vectors(
        *cells.arguments,
        cql_type.dimension,
        max(cql.stored_length(cql_type.element), 0),
        starts.address,
        *map(address, (*elements, misfits)),
    )
    child = Cells(cells.buffer, elements[0][:count], elements[1][:count])
    return Parts((cql_type.element,), (child,), starts, misfits)


def _fields(types: tuple[cql.CqlType, ...], cells: Cells) -> Parts:
    offsets, lengths = (np.empty((len(types), len(cells)), np.int32) for _ in range(2))
    misfits = np.zeros(len(cells), np.bool_)
    split_fields(*cells.arguments, len(types), *map(address, (offsets, lengths, misfits)))
    fields = (Cells(cells.buffer, offsets[place], lengths[place]) for place in range(len(types)))
    return Parts(types, tuple(fields), None, misfits)
