"""The keys of rows to read: the values that a SELECT gets, and the match between its result's rows and the keys.

Partition keys stay the bytes that Cassandra wrote: a SELECT gets these bytes, and its rows are matched by them.
Clusterings have their canonical form (:mod:`ringsync.changes.keys.canonical`): the key 1.00 finds the row of 1.0, too.
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

STATIC, WHOLE = -1, -2
"""Values in place of a clustering's number."""

_BLOB = Native("blob")


@dataclass(frozen=True)
class RowKeys:
    """Keys in token order, each once, even if it was given in two spellings.

    A partition that is wanted as a whole has no other key.

    :ivar places: place of each key among the given keys
    :ivar partitions: number of each key's partition; partitions are numbered in token order
    :ivar clusterings: number of each key's clustering, or ``STATIC``, or ``WHOLE``
    :ivar partition_keys: binary, by number of the partition
    :ivar partition_parts: values of each partition key column by number of the partition, serialised
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
        """A number for each partition, equal if all partition key columns but the last are equal."""
        if len(self.partition_parts) == 1:
            return np.zeros(len(self.partition_keys), np.int64)
        return integers(_framed(self.partition_parts[:-1]).dictionary_encode().indices)

    @cached_property
    def identities(self) -> pa.Array:
        """The identity of each key's row (:func:`row_identities`); it means nothing for keys that are not rows."""
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
        """Format a key as the condition of a WHERE, for error messages."""
        partition, clustering = int(self.partitions[key]), int(self.clusterings[key])
        conditions = _condition(self.table.partition_key, self.partition_parts, partition)
        if clustering >= 0:
            conditions += _condition(self.table.clustering, self.clustering_parts, clustering)
        return " AND ".join(conditions)


def row_keys(keys: pa.RecordBatch, table: TableSchema) -> RowKeys:
    """Sort keys, and divide them into their columns.

    :param keys: ``token`` (int64); ``partition_key`` and ``clustering`` (binary) as in
        :data:`ringsync.changes.schema.CHANGE_ROWS`; ``whole_partition`` (bool) may be left out. A key with a null
        clustering stands for the partition's static columns, or for all its rows if ``whole_partition`` is true. In a
        table without clustering columns each partition key is the key of a row: the last two columns are ignored
    :raises ValueError: a key does not fit the table
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
    """Return a binary value for each row that identifies it within its table.

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
    """Return the place in ``wanted`` of each value of ``found``; -1: it is not there. Both are binary."""
    return filled(pc.index_in(found, value_set=wanted), -1)


def taken(values: pa.Array, places: Integers) -> pa.Array:
    """Return the values at these places."""
    return values.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places.astype(np.int64))]))


def _clusterings(keys: pa.RecordBatch, table: TableSchema) -> tuple[Integers, list[pa.Array]]:
    """Return the number of each key's clustering, or ``STATIC``, and each clustering column's values by number."""
    if not table.clustering:
        return np.zeros(keys.num_rows, np.int64), []
    given = keys.column("clustering")
    codes, distinct = _numbered(given)
    cells = cells_of(distinct)
    counts, parts, sizes = clustering_parts(cells, len(table.clustering))
    if (counts != len(parts)).any() or (sizes != cells.lengths).any():
        raise ValueError(f"a clustering does not have the {len(parts)} columns that {table.full_name} has")
    values = _canonical(parts, table)
    if any(has_aliases(column.type) for column in table.clustering):
        forms = integers(_framed(values).dictionary_encode().indices)
        _, first = np.unique(forms, return_index=True)
        values = [taken(part, first) for part in values]
        codes[valid_mask(given)] = forms[codes[valid_mask(given)]]
    return np.where(valid_mask(given), codes, STATIC), values


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
    """Join each row's values, each after its int32 length: the bytes of a CQL tuple."""
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
    """Mark each row that differs from the row before in any column, and the first row."""
    differing = np.zeros(len(columns[0]), np.bool_)
    differing[:1] = True
    for column in columns:
        differing[1:] |= column[1:] != column[:-1]
    return differing


def _condition(columns: Sequence[Column], parts: Sequence[pa.Array], row: int) -> list[str]:
    conditions = []
    for column, part in zip(columns, parts, strict=True):
        text = value_texts(CQL, column.type, cells_of(part.slice(row, 1)))[0].as_py()
        conditions.append(f"{printable(column.name)} = {text or '0x' + (part[row].as_py() or b'').hex()}")
    return conditions
