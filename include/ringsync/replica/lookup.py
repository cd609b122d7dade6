"""Lookup of a replica's newest images without a JVM: for the keys of a pass's change rows, or for a token range.

delta-rs reads both tables and respects their deletion vectors. The query joins the table with the tokens wanted, so
that it reads only the tokens of other rows. Whole keys then select the rows, batch by batch: a partition of a million
rows need not fit into memory for the sake of one row. Only if the table has static columns must what was changed in it
lately, since the newest of these rows shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Integers, Mask
from ringsync.images.keys import key_digests, partition_digests
from ringsync.images.schema import row_image_schema
from ringsync.images.to_changes import has_clustering
from ringsync.replica.base import check_same_schema, own_properties
from ringsync.replica.changes import VERSION, ReplicaState, changes_schema, delta_path
from ringsync.ring.tokens import MAX_TOKEN
from ringsync.schema.table import TableSchema

TOKENS_AT_ONCE = 20_000
"""Most tokens written out in one query. A list of 100,000 overflows the stack of delta-rs's parser."""

_TOKEN = f"coalesce(b.token, {MAX_TOKEN})"

SESSION = {
    "datafusion.execution.parquet.pushdown_filters": "true",
    # A Spark task has one core.
    "datafusion.execution.target_partitions": "1",
}


@dataclass(frozen=True)
class _Wanted:
    """The rows that a lookup asks for.

    :ivar tokens: tokens of all of them, sorted, each once
    :ivar keys: digests of the keys of single rows
    :ivar whole: tokens of the partitions that are wanted whole
    :ivar partitions: digests of the single rows' partitions; None: the table has no static columns
    """

    table: TableSchema
    tokens: Integers
    keys: pa.Array
    whole: pa.Array
    partitions: pa.Array | None

    def select(self, rows: pa.RecordBatch, keys: pa.Array) -> tuple[Mask, Mask]:
        """Select the rows that are wanted, and the others that show a wanted partition's static cells."""
        wanted = _is_in(keys, self.keys) | _is_in(rows["token"], self.whole)
        if self.partitions is None:
            return wanted, np.zeros_like(wanted)
        among = _is_in(partition_digests(rows, self.table), self.partitions)
        alone = ~has_clustering(rows, self.table)
        return wanted | (among & alone), among & ~wanted & ~alone


def previous_images(
    state: ReplicaState, table: TableSchema, keys: pa.RecordBatch, partitions: pa.Array | None = None
) -> pa.RecordBatch:
    """Read the newest images of rows and of whole partitions, each row once, in token order.

    If the table has static columns, each partition of ``keys`` also gives its row without clustering, and one other
    row if it has any: all rows of a partition show its static cells, and a new row needs them.

    :param state: :func:`ringsync.replica.changes.replica_state`
    :param keys: keys of the rows wanted: ``token``, the key columns and ``_x`` as in
        :func:`ringsync.images.schema.row_image_schema`
    :param partitions: int64, tokens of the partitions wanted whole; other partitions with these tokens come along
    :returns: row images of the rows that the replica has, dead rows included as long as it keeps them
    """
    wanted = _wanted(table, keys, partitions)
    asked = bool(len(wanted.tokens))
    changes: Iterable[pa.RecordBatch] = ()
    if asked and state.changes_version >= 0:
        changes = _read(_changes(state), changes_schema(table), wanted.tokens)
    if wanted.partitions is None:
        changes = (batch.filter(pa.array(wanted.select(batch, key_digests(batch, table))[0])) for batch in changes)
    newest = _newest(changes, table)
    superseded = key_digests(newest, table)
    images: list[pa.RecordBatch] = []
    witnesses: list[pa.RecordBatch] = []
    _collect(newest.drop_columns([VERSION]), superseded, wanted, images, witnesses)
    for batch in _read(_base(state), row_image_schema(table), wanted.tokens) if asked else ():
        batch_keys = key_digests(batch, table)
        left = pa.array(~_is_in(batch_keys, superseded))
        _collect(batch.filter(left), batch_keys.filter(left), wanted, images, witnesses)
    schema = row_image_schema(table)
    rows = pa.Table.from_batches([*images, *_one_each(witnesses, table)], schema).combine_chunks()
    return _first_batch(rows.take(pc.sort_indices(rows["token"])), table)


def images_between(state: ReplicaState, table: TableSchema, start: int, end: int) -> Iterator[pa.RecordBatch]:
    """Read the newest images of all rows of a token range, each row once.

    Rows without a token, which only others write, are read with the ring's last token: so the last range has them.
    The range's images in the changes table must fit into memory; those in the base need not.

    :param start: token, excluded
    :param end: token, included; not less than ``start``
    """
    # The least token is no SQL literal: the parser would negate a number that is too large.
    where = f"WHERE b.token > CAST('{start}' AS BIGINT) AND b.token <= CAST('{end}' AS BIGINT){_or_null(end)}"
    newest = _newest([] if state.changes_version < 0 else _query(_changes(state), changes_schema(table), where), table)
    yield newest.drop_columns([VERSION])
    superseded = key_digests(newest, table)
    for batch in _query(_base(state), row_image_schema(table), where):
        yield batch.filter(pa.array(~_is_in(key_digests(batch, table), superseded))) if len(superseded) else batch


def _wanted(table: TableSchema, keys: pa.RecordBatch, partitions: pa.Array | None) -> _Wanted:
    whole = pa.array([], pa.int64()) if partitions is None else partitions
    tokens = np.union1d(keys["token"].to_numpy(), whole.to_numpy()).astype(np.int64)
    has_static = bool(table.clustering and table.of_kind("static"))
    return _Wanted(
        table,
        tokens,
        key_digests(keys, table),
        whole,
        pc.unique(partition_digests(keys, table)) if has_static else None,
    )


def _newest(batches: Iterable[pa.RecordBatch], table: TableSchema) -> pa.RecordBatch:
    """Return the newest row of each key, from rows of the changes table."""
    rows = _first_batch(pa.Table.from_batches(batches, changes_schema(table)).combine_chunks(), table)
    if not rows.num_rows:
        return rows
    numbered = pa.table([key_digests(rows, table), rows[VERSION], np.arange(rows.num_rows)], names=["key", "v", "i"])
    order = numbered.sort_by([("key", "ascending"), ("v", "descending")])
    ranked = order["key"].combine_chunks()
    first = np.ones(len(ranked), np.bool_)
    first[1:] = pc.not_equal(ranked[1:], ranked[:-1]).to_numpy(zero_copy_only=False)
    return rows.take(pa.array(np.sort(order["i"].to_numpy()[first])))


def _collect(
    batch: pa.RecordBatch,
    keys: pa.Array,
    wanted: _Wanted,
    images: list[pa.RecordBatch],
    witnesses: list[pa.RecordBatch],
) -> None:
    if not batch.num_rows:
        return
    selected, witness = wanted.select(batch, keys)
    if selected.any():
        images.append(batch.filter(pa.array(selected)))
    if witness.any():
        witnesses += _one_each([batch.filter(pa.array(witness))], wanted.table)


def _one_each(batches: list[pa.RecordBatch], table: TableSchema) -> list[pa.RecordBatch]:
    """Return the first row of each partition."""
    if not batches:
        return []
    rows = _first_batch(pa.Table.from_batches(batches).combine_chunks(), table)
    numbers = partition_digests(rows, table).dictionary_encode().indices.to_numpy()
    _, first = np.unique(numbers, return_index=True)
    return [rows.take(pa.array(first))]


def copied_images(
    state: ReplicaState, table: TableSchema, version: int, keys: pa.RecordBatch, partitions: pa.Array | None = None
) -> pa.RecordBatch | None:
    """Read what a bootstrap has copied of rows and of whole partitions, like :func:`previous_images`.

    :param version: version of the base that the bootstrap made
    :returns: None: the table had other columns then, or the version cannot be read any more
    """
    copied = replace(state, base_version=version, changes_version=-1)
    try:
        check_same_schema(state.base_uri, own_properties(_base(copied).metadata().configuration), table)
        return previous_images(copied, table, keys, partitions)
    except Exception:  # a mismatch, or any error of delta-rs since a file is gone
        return None


def _base(state: ReplicaState) -> Any:
    return _open(state.base_uri, state.base_version, state)


def _changes(state: ReplicaState) -> Any:
    return _open(state.changes_uri, state.changes_version, state)


def _open(uri: str, version: int, state: ReplicaState) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(delta_path(uri), version=version, storage_options=dict(state.options))


def _read(table: Any, schema: pa.Schema, tokens: Integers) -> Iterator[pa.RecordBatch]:
    """Read all rows with these tokens."""
    for first in range(0, len(tokens), TOKENS_AT_ONCE):
        some = tokens[first : first + TOKENS_AT_ONCE].tolist()
        joined = f"LEFT SEMI JOIN (VALUES {', '.join(f'({token})' for token in some)}) AS asked(token)"
        between = f"b.token BETWEEN {some[0]} AND {some[-1]}{_or_null(some[-1])}"
        token = _TOKEN if some[-1] == MAX_TOKEN else "b.token"
        yield from _query(table, schema, f"{joined} ON {token} = asked.token WHERE {between}")


def _or_null(last: int) -> str:
    return " OR b.token IS NULL" if last == MAX_TOKEN else ""


def _query(table: Any, schema: pa.Schema, rest: str) -> Iterator[pa.RecordBatch]:
    """Query all columns of some rows.

    :param table: DeltaTable
    :param rest: rest of the query after FROM; the table's alias is ``b``
    """
    from deltalake import QueryBuilder

    columns = ", ".join([f"{_TOKEN} AS token", *('b."' + name.replace('"', '""') + '"' for name in schema.names[1:])])
    for batch in QueryBuilder(SESSION).register("images", table).execute(f"SELECT {columns} FROM images b {rest}"):
        yield pa.record_batch(batch).cast(schema)


def _first_batch(rows: pa.Table, table: TableSchema) -> pa.RecordBatch:
    """Return rows without chunks as one batch.

    :raises ValueError: a column is larger than one Arrow array can be
    """
    batches = rows.to_batches()
    if len(batches) > 1:
        raise ValueError(
            f"replica of {table.full_name}: {rows.num_rows:,} rows looked up together have more than 2 GiB in a "
            "column: lower replica.merge_interval_s"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)


def _is_in(values: pa.Array, among: pa.Array) -> Mask:
    mask: Mask = pc.is_in(values, among).to_numpy(zero_copy_only=False)
    return mask
