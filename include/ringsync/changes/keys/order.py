"""Clusterings, bounds and cell paths as bytes whose unsigned order is Cassandra's order.

A value's own bytes need not sort like the value (−1, 1.0 and 1.00, a descending column). This module turns it into
bytes that do (C: the comparators in db/marshal; docs/formats.md, 3.2). Sorting, grouping and the test whether a range
covers a row are then comparisons of bytes. Equal values get equal bytes, so 1.0 and 1.00 cannot be told apart any more.

A value becomes a marker (null before empty before all others) and a body. No body is the beginning of another one. In
descending columns all bits are inverted, except for null. A clustering becomes its values and one byte: 128 for a row,
0 for a bound before all rows that begin with its values, 255 for a bound after them. So ``start < row < end`` is a
plain comparison, whether the bounds belong to the range or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ringsync.changes.keys import order_kernels as kernels
from ringsync.changes.keys.order_kernels import START
from ringsync.compiled.arrow import Integers, pooled
from ringsync.compiled.memory import PADDING, address
from ringsync.cql import types as cql
from ringsync.cql.cells import Cells, codes
from ringsync.cql.codec.split import total_bytes
from ringsync.cql.natives import BYTES, NATIVES
from ringsync.schema.table import TableSchema


def path_type(cql_type: cql.CqlType) -> cql.CqlType:
    """Return the type of a multi-cell column's paths: elements, keys, timeuuids of list entries, field numbers."""
    match cql_type:
        case cql.SetType(element=kind) | cql.MapType(key=kind):
            return kind
        case cql.UserType():
            return cql.Native("smallint")
    return cql.Native("timeuuid")


def clustering_keys(cells: Cells, table: TableSchema, side: int = START) -> Cells:
    """Encode clusterings and bounds; null stays null.

    :param cells: ``clustering`` or ``range_end`` of change rows
    :param side: START or END: the side of the range at which bounds stand
    :raises ValueError: some bytes are no clustering of this table
    """
    types = [column.type for column in table.clustering]
    program = type_program(types)
    descending = np.array([column.descending for column in table.clustering] or [False], np.uint8)
    output, ends = _room(cells)
    size = kernels.put_clusterings(
        *cells.arguments, address(program), len(types), address(descending), side, address(output), address(ends)
    )
    if size < 0:
        raise ValueError(
            f"a clustering of {table.full_name} is not encoded as ringsync.changes.schema says: are these rows of "
            "another table, or of another version of ringsync?"
        )
    return _cells(output, ends, cells.lengths < 0)


def value_keys(cells: Cells, cql_type: cql.CqlType) -> Cells:
    """Encode serialised values of a type, for example paths of cells (see :func:`path_type`). No key is null."""
    program = type_program([cql_type])
    output, ends = _room(cells)
    kernels.put_values(*cells.arguments, address(program), 0, address(output), address(ends))
    return _cells(output, ends, np.zeros(len(cells), np.bool_))


def key_numbers(table: TableSchema, *keys: tuple[Cells, Cells]) -> list[Integers]:
    """Number keys: equal ones have equal numbers, also in different batches.

    One clustering may be written in several ways (1.0 and 1.00), but it has one place in the order.

    :param keys: partition keys and clusterings of each batch; a null clustering is that of the static row
    """
    partitions = codes([partition_key for partition_key, _ in keys])
    clusterings = codes([clustering_keys(clustering, table) for _, clustering in keys])
    numbers = numbered(np.concatenate(partitions) << 32 | np.concatenate(clusterings))
    return np.split(numbers, np.cumsum([len(partition) for partition in partitions])[:-1])


def numbered(values: Integers) -> Integers:
    """Number values from 0: equal ones have equal numbers."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _room(cells: Cells) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    size = kernels.GROWTH * total_bytes(cells) + kernels.MARGIN * len(cells) + PADDING
    if size > np.iinfo(np.int32).max:
        raise ValueError(f"{len(cells)} keys have more than 500 MB together: pass fewer rows at once")
    return pooled(size, np.uint8), pooled(len(cells) + 1, np.int32)


def _cells(output: npt.NDArray[np.uint8], ends: npt.NDArray[np.int32], nulls: npt.NDArray[np.bool_]) -> Cells:
    lengths = np.diff(ends)
    lengths[nulls] = -1
    return Cells(output, ends[:-1], lengths)


def type_program(types: Sequence[cql.CqlType]) -> npt.NDArray[np.int64]:
    """List the nodes of types: first those of the types themselves, then the children of each node in a row."""
    nodes: list[list[int]] = []
    waiting = list(types)
    while len(nodes) < len(waiting):
        kind, inner, number = _node(waiting[len(nodes)])
        nodes.append([kind, len(waiting), len(inner), number])
        waiting += inner
    return np.array(nodes or [[0] * 4], np.int64)


def _node(cql_type: cql.CqlType) -> tuple[int, Sequence[cql.CqlType], int]:
    match cql_type:
        case cql.Native(name):
            return NATIVES[name].order, (), NATIVES[name].width
        case cql.ListType() | cql.SetType() | cql.MapType():
            return kernels.SEQUENCE, cql.types_inside(cql_type), 0
        case cql.TupleType() | cql.UserType():
            return kernels.FIELDS, cql.types_inside(cql_type), 0
        case cql.VectorType(element, dimension):
            return kernels.VECTOR, (element,), dimension << 32 | max(cql.stored_length(element), 0)
        case cql.CustomType():
            return BYTES, (), 0
