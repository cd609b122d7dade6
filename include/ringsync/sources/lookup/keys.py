"""The keys of rows to read: what a SELECT gets to find them, and which of them a row of its result is.

Partition keys stay the bytes that Cassandra wrote: they are bound as they are, and results are told apart by them.
Clusterings have their canonical form (:mod:`ringsync.changes.keys.canonical`): the row of 1.0 is found by 1.00, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.keys.canonical import canonical_cells, has_aliases
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.compiled.arrow import Integers, filled, integers, valid_mask
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.encode import encode, partition_key_bytes
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import CQL
from ringsync.cql.text.values import value_texts
from ringsync.cql.types import Native, TupleType
from ringsync.schema.table import Column, TableSchema

ROW_KEYS = pa.schema(
    [
        ("token", pa.int64()),
        ("partition_key", pa.binary()),
        ("clustering", pa.binary()),
        ("whole_partition", pa.bool_()),
    ]
)
"""``partition_key``, ``clustering``: as in :data:`ringsync.changes.schema.CHANGE_ROWS`; without clustering the key
stands for the partition's static columns, or for all rows if ``whole_partition`` says so. That column may be left out.
A table without clustering columns has no other keys than partition keys, whatever stands in these two columns."""

STATIC, WHOLE = -1, -2
"""Instead of a clustering's number."""

_BLOB = Native("blob")


@dataclass(frozen=True)
class RowKeys:
    """Keys in the order of their tokens, each once, also if it was given in two spellings.

    There are no other keys of a partition that is wanted as a whole.

    :ivar places: place of each key among the given keys
    :ivar partitions: the number of each key's partition, which are counted in the order of tokens
    :ivar clusterings: the number of each key's clustering, or ``STATIC``, or ``WHOLE``
    :ivar partition_keys: binary, by number of the partition
    :ivar partition_parts: the same by column of the partition key, serialised
    :ivar clustering_parts: values of each clustering column by number of the clustering, serialised, canonical
    """

    table: TableSchema
    places: Integers
    tokens: Integers
    partitions: Integers
    clusterings: Integers
    partition_keys: pa.Array
    partition_parts: tuple[pa.Array, ...]
    clustering_parts: tuple[pa.Array, ...]

    @cached_property
    def prefixes(self) -> Integers:
        """A number for each partition, equal where all columns of its key but the last are."""
        if len(self.partition_parts) == 1:
            return np.zeros(len(self.partition_keys), np.int64)
        return integers(_framed(self.partition_parts[:-1]).dictionary_encode().indices)

    @cached_property
    def identities(self) -> pa.Array:
        """Of rows, as :func:`row_identities` gives them; by key. Those of other keys mean nothing."""
        clusterings = np.maximum(self.clusterings, 0)
        parts = [taken(part, clusterings) for part in self.clustering_parts]
        return row_identities(taken(self.partition_keys, self.partitions), parts)

    @cached_property
    def last_frames(self) -> pa.Array:
        """The last column of each partition's key, for :func:`list_of`."""
        return _framed(self.partition_parts[-1:])

    @cached_property
    def clustering_frames(self) -> pa.Array:
        """The clusterings for :func:`list_of`: values if there is one column, else tuples."""
        framed = _framed(self.clustering_parts)
        return framed if len(self.clustering_parts) == 1 else _framed([framed])

    def text(self, key: int) -> str:
        """Return a key as the condition of a WHERE, for messages."""
        partition, clustering = int(self.partitions[key]), int(self.clusterings[key])
        found = _condition(self.table.partition_key, self.partition_parts, partition)
        if clustering >= 0:
            found += _condition(self.table.clustering, self.clustering_parts, clustering)
        return " AND ".join(found)


def row_keys(keys: pa.RecordBatch, table: TableSchema) -> RowKeys:
    """Sort keys, and take them apart.

    :param keys: batch of :data:`ROW_KEYS`
    :raises ValueError: for a key that is not one of the table's
    """
    if keys.column("partition_key").null_count:
        raise ValueError("a partition key is null")
    partition_codes, partition_keys = _numbered(keys.column("partition_key"))
    clustering_codes, parts = _clusterings(keys, table)
    if table.clustering and "whole_partition" in keys.schema.names:
        whole = pc.fill_null(keys.column("whole_partition"), False)
        clustering_codes[whole.to_numpy(zero_copy_only=False)] = WHOLE
    tokens = integers(keys.column("token"))
    order = np.lexsort((clustering_codes, partition_codes, tokens))
    codes, clusterings = partition_codes[order], clustering_codes[order]
    new = differs(codes)
    partitions = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    # WHOLE is the smallest number, so it is the first of its partition.
    kept = (new | differs(clusterings)) & ((clusterings[first] != WHOLE)[partitions] | new)
    partition_keys = taken(partition_keys, codes[first])
    cells = cells_of(partition_keys)
    parts_of_keys = [raw_values(part) for part in partition_parts(cells, table)]
    if any(part.null_count for part in parts_of_keys):
        raise ValueError(
            f"a partition key does not have the {len(table.partition_key)} columns that {table.full_name} has"
        )
    return RowKeys(
        table,
        order[kept],
        tokens[order][kept],
        partitions[kept],
        clusterings[kept],
        partition_keys,
        tuple(parts_of_keys),
        tuple(parts),
    )


def row_identities(partition_keys: pa.Array, clustering_parts: Sequence[pa.Array]) -> pa.Array:
    """Return a binary value for each row, by which rows of one table can be told apart.

    :param partition_keys: serialised
    :param clustering_parts: the values of each clustering column, serialised, canonical
    """
    return _framed([partition_keys, *clustering_parts]) if clustering_parts else partition_keys


def key_columns_of(cells: Sequence[Cells], table: TableSchema) -> tuple[pa.Array, list[pa.Array]]:
    """Return partition keys, and values of the clustering columns in their canonical form, serialised.

    :param cells: cells of the key columns in their order; those of clustering columns may be missing
    """
    width = len(table.partition_key)
    return partition_key_bytes([raw_values(cell) for cell in cells[:width]]), _canonical(cells[width:], table)


def places_in(wanted: pa.Array, found: pa.Array) -> Integers:
    """Tell where in ``wanted`` each value of ``found`` stands; -1: nowhere. Both are binary."""
    return filled(pc.index_in(found, value_set=wanted), -1)


def taken(values: pa.Array, places: Integers) -> pa.Array:
    """Return the values at these places."""
    return values.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places.astype(np.int64))]))


def _clusterings(keys: pa.RecordBatch, table: TableSchema) -> tuple[Integers, list[pa.Array]]:
    """Return the number of each key's clustering, or ``STATIC``; the values of each column by number."""
    if not table.clustering:
        return np.zeros(keys.num_rows, np.int64), []
    given = keys.column("clustering")
    codes, distinct = _numbered(given)
    cells = cells_of(distinct)
    counts, parts, sizes = clustering_parts(cells, len(table.clustering))
    if (counts != len(parts)).any() or (sizes != cells.lengths).any():
        raise ValueError(f"a clustering does not have the {len(parts)} columns that {table.full_name} has")
    found = _canonical(parts, table)
    if any(has_aliases(column.type) for column in table.clustering):
        forms = integers(_framed(found).dictionary_encode().indices)
        _, first = np.unique(forms, return_index=True)
        found = [taken(part, first) for part in found]
        codes[valid_mask(given)] = forms[codes[valid_mask(given)]]
    return np.where(valid_mask(given), codes, STATIC), found


def _canonical(clustering: Sequence[Cells], table: TableSchema) -> list[pa.Array]:
    """Return values of the first clustering columns in their canonical form."""
    return [
        raw_values(canonical_cells(cells, column.type))
        for cells, column in zip(clustering, table.clustering, strict=False)
    ]


def _numbered(values: pa.Array) -> tuple[Integers, pa.Array]:
    encoded = values.dictionary_encode()
    return integers(encoded.indices), encoded.dictionary


def _framed(parts: Sequence[pa.Array]) -> pa.Array:
    """Return each row's values one behind the other, each with its int32 length before it: a tuple of CQL."""
    return encode(
        TupleType((_BLOB,) * len(parts)), pa.StructArray.from_arrays(parts, [str(i) for i in range(len(parts))])
    )


def list_of(frames: pa.Array, places: Integers) -> bytes:
    """Return the frames at these places as a serialised list of CQL."""
    frames = taken(frames, places)
    _, starts, data = frames.buffers()
    limits = np.frombuffer(starts, np.int32)
    values: bytes = data[int(limits[0]) : int(limits[len(frames)])].to_pybytes()
    return len(frames).to_bytes(4, "big") + values


def differs(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Tell where any of the columns differs from the row before; the first row does."""
    found = np.zeros(len(columns[0]), np.bool_)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found


def _condition(columns: Sequence[Column], parts: Sequence[pa.Array], row: int) -> list[str]:
    conditions = []
    for column, part in zip(columns, parts, strict=True):
        text = value_texts(CQL, column.type, cells_of(part.slice(row, 1)))[0].as_py()
        conditions.append(f"{printable(column.name)} = {text or '0x' + (part[row].as_py() or b'').hex()}")
    return conditions
