"""Rows that differed at a first look at source and replica, and what two more looks tell of them.

Suspects lie in files while the replica takes what was logged, as many as there are: those of a busy table are what was
written in a minute or two. Each file is looked at in one task: at the replica, by keys, then at the source. Most rows
equal one of the looks, which their digests tell; only the others are judged cell by cell
(:mod:`ringsync.images.judgement`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.keys.canonical import has_aliases
from ringsync.changes.schema import ROW
from ringsync.compiled.arrow import Mask
from ringsync.images.differences import Difference, row_differences
from ringsync.images.digests import canonical
from ringsync.images.judgement import DIFFERENT, EXACT, Copy, Looks, Outcome, Slack, judge
from ringsync.images.keys import binary_digests, comparable, key_digests, partition_digests
from ringsync.images.live import selected_rows, shown_rows
from ringsync.images.schema import lake_names
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.schema.table import TableSchema

ROWS_OF_A_FILE = 5_000
BYTES_OF_A_FILE = 32 << 20
"""Most suspects in one file, and about how many bytes of them: so many are looked up together."""


@dataclass(frozen=True)
class WaitingRows:
    """The keys of rows that wait as late: nobody knows yet what they are.

    :ivar rows: partition keys and clusterings, as in change rows
    :ivar partitions: keys of partitions in which any row may be meant
    """

    rows: frozenset[tuple[bytes, bytes]] = frozenset()
    partitions: frozenset[bytes] = frozenset()

    @staticmethod
    def of(changes: Iterable[pa.RecordBatch], table: TableSchema) -> WaitingRows:
        """Return the keys of change rows."""
        rows: set[tuple[bytes, bytes]] = set()
        partitions: set[bytes] = set()
        are_plain = not any(has_aliases(column.type) for column in table.clustering)
        for batch in changes:
            keys = batch["partition_key"].to_pylist()
            for key, clustering, kind in zip(
                keys, batch["clustering"].to_pylist(), batch["kind"].to_pylist(), strict=True
            ):
                if are_plain and (kind == ROW or not table.clustering):
                    rows.add((key, clustering if table.clustering else b""))
                else:
                    partitions.add(key)
        return WaitingRows(frozenset(rows), frozenset(partitions))


@dataclass(frozen=True)
class Round:
    """How a round looks at suspects.

    :ivar images: reads the newest images in the replica, dead ones too, of the rows with these keys (``token``, the key
        columns and ``_x``), and of the whole partitions with these tokens
    :ivar rows: reads images of the source by keys (see :func:`ringsync.sources.lookup.keys.row_keys`), and tells as of
        which moment, s since the epoch
    :ivar rows_of_all: does the same from all replicas, for rows that differ, and tells which keys could be read: a
        quorum may not show what only one has; None: none can be read
    :ivar has_all: whether the replica has all that was logged at look 1
    :ivar waiting: rows that waited as late after that was logged, and before look 2
    :ivar copy: the table is not followed; None: it is
    :ivar limit: most differences to list; all are counted
    """

    images: Callable[[pa.RecordBatch, pa.Array], pa.RecordBatch]
    rows: Callable[[pa.RecordBatch], tuple[pa.RecordBatch, int]]
    rows_of_all: Callable[[pa.RecordBatch], tuple[pa.RecordBatch, int, Mask] | None] = lambda keys: None
    has_all: bool = True
    waiting: WaitingRows = WaitingRows()
    slack: Slack = EXACT
    copy: Copy | None = None
    limit: int = 1000


@dataclass
class Judged:
    """What was found out.

    :ivar outcomes: rows by outcome; each suspect has one, or is left
    :ivar tokens: tokens of rows that differ; ``late``: of those that wait as late
    :ivar left: suspects to look at again, for :func:`judge_suspects`; None: there are none
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    listed: list[Difference] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    left: pa.RecordBatch | None = None

    def count(
        self, verdicts: Iterable[tuple[Outcome, Sequence[Difference]]], tokens: Sequence[int], limit: int
    ) -> None:
        """Count verdicts, but for rows that are not judged, and list the first differences."""
        for (outcome, differences), token in zip(verdicts, tokens, strict=True):
            if outcome == "not_judged":
                continue
            self.outcomes[outcome] += 1
            if outcome in DIFFERENT:
                self.tokens.add(token)
            if outcome == "late":
                self.late.add(token)
            self.kinds.update(difference.kind for difference in differences)
            self.listed += differences[: max(0, limit - len(self.listed))]


def digested(rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Return ``key`` (digest of token and key columns), ``digest`` (of everything) and ``row`` for each live row."""
    rows = comparable(rows, table)
    row = pa.StructArray.from_arrays(rows.columns, fields=list(rows.schema))
    return pa.record_batch([key_digests(rows, table), binary_digests(rows), row], names=["key", "digest", "row"])


def suspects(found: pa.RecordBatch, now_s: int) -> pa.RecordBatch:
    """Make suspects of rows that differ (:func:`ringsync.replica.compare.compare_rows`).

    :param now_s: moment of look 1, s since the epoch
    """
    nothing = pa.nulls(len(found), pa.binary())
    return _suspects(found["source"], found["digest"], found["replica"], nothing, now_s)


def _suspects(source: pa.Array, digest: pa.Array, replica: pa.Array, image: pa.Array, now_s: int) -> pa.RecordBatch:
    moments = pa.array(np.full(len(source), now_s))
    columns = [source, digest.cast(pa.binary()), replica, image, moments]
    return pa.record_batch(columns, names=["source", "digest", "replica", "image", "now_s"])


def row_tokens(rows: pa.RecordBatch) -> pa.Array:
    """Return the tokens of suspects."""
    return pc.coalesce(*(pc.struct_field(rows[side], ["token"]) for side in ("source", "replica")))


@dataclass(frozen=True)
class _Side:
    """Live rows by the digests of their keys; a row has several if it is there several times.

    :ivar plain: the rows as they were read
    :ivar rows: the same in canonical form, for comparisons
    """

    plain: pa.Array
    rows: pa.Array
    places: Mapping[bytes, Sequence[int]]
    digests: Sequence[bytes]

    @staticmethod
    def of(batches: Iterable[pa.RecordBatch], table: TableSchema) -> _Side:
        found = pa.Table.from_batches([digested(batch, table) for batch in batches]).combine_chunks()
        places: dict[bytes, list[int]] = defaultdict(list)
        for place, key in enumerate(found["key"].to_pylist()):
            places[key].append(place)
        rows = found["row"].combine_chunks()
        return _Side(rows, canonical(rows), places, found["digest"].to_pylist())

    def of_key(self, key: bytes) -> list[bytes]:
        """Return the digests of a key's rows."""
        return [self.digests[place] for place in self.places.get(key, ())]

    def row(self, key: bytes) -> Any:
        """Return the first of a key's rows, as Python; None: there is none."""
        return self.rows[self.places[key][0]].as_py() if key in self.places else None

    def first(self, keys: Sequence[bytes], kind: pa.DataType) -> pa.Array:
        """Return the first row of each key, null if there is none."""
        places = [self.places[key][0] if key in self.places else None for key in keys]
        return self.plain.take(pa.array(places, pa.int64())).cast(kind)


def judge_suspects(found: pa.RecordBatch, table: TableSchema, looks: Round) -> Judged:
    """Look at suspects at the replica, then at the source, and judge them.

    :param found: suspects, all of one moment
    """
    keys = _keys(found, table)
    names, alone = key_digests(keys, table).to_pylist(), ~has_clustering(keys, table)
    images = looks.images(keys, pc.unique(keys["token"].filter(pa.array(alone))))
    then = _Side.of(shown_rows([images], table, int(found["now_s"][0].as_py())), table)
    digests = found["digest"].to_pylist()
    rest = [place for place, name in enumerate(names) if not _is_shown(digests[place], then.of_key(name))]
    if looks.slack != EXACT:  # then digests differ where rows do not: spare look 3
        first = canonical(found["source"])
        rest = [
            place for place in rest if not _is_close(table, first[place].as_py(), then.row(names[place]), looks.slack)
        ]
    judged = Judged(Counter(equal=len(names) - len(rest)))
    if not rest:
        return judged
    chosen = pa.array(rest)
    found, keys, names = found.take(chosen), keys.take(chosen), [names[place] for place in rest]
    third = _Third.of(*looks.rows(_lookup_keys(keys, table)), images, table)
    of_images = _image_digests(images, keys, alone[rest], table)
    source, before = (canonical(found[side]) for side in ("source", "replica"))
    known, waits = found["image"].to_pylist(), _waits(keys, table, looks.waiting)

    def judge_at(place: int, third: _Third) -> tuple[Outcome, Sequence[Difference]]:
        name = names[place]
        seen = Looks(
            source[place].as_py(),
            then.row(name),
            third.ours.row(name),
            third.source.row(name),
            before=before[place].as_py() if known[place] is not None else None,
            is_unchanged=known[place] == of_images[place],
            has_image=bool(of_images[place]) or bool(alone[rest[place]]),
            has_all=looks.has_all,
            copy=looks.copy,
        )
        outcome, differences = _outcome(table, seen, looks.slack, third.source.of_key(name), third.ours.of_key(name))
        return ("late", ()) if waits[place] and outcome != "equal" else (outcome, differences)

    verdicts = [judge_at(place, third) for place in range(len(names))]
    differ = [place for place, (outcome, _) in enumerate(verdicts) if outcome in DIFFERENT]
    if differ and (of_all := looks.rows_of_all(_lookup_keys(keys.take(pa.array(differ)), table))):
        last = _Third.of(*of_all[:2], images, table)
        for place in itertools.compress(differ, of_all[2]):
            verdicts[place] = judge_at(place, last)
    left = [place for place, (outcome, _) in enumerate(verdicts) if outcome == "not_judged"]
    judged.count(verdicts, keys["token"].to_pylist(), looks.limit)
    if left:
        judged.left = found.take(pa.array(left))
        if looks.has_all:
            images_left = [of_images[place] for place in left]
            judged.left = third.as_first(judged.left, [names[place] for place in left], images_left)
    return judged


@dataclass(frozen=True)
class _Third:
    """Look 3: the source, and what the replica shows as of that moment, ``now_s``."""

    source: _Side
    ours: _Side
    now_s: int

    @staticmethod
    def of(rows: pa.RecordBatch, now_s: int, images: pa.RecordBatch, table: TableSchema) -> _Third:
        source = _Side.of([selected_rows(rows, table, now_s)], table)
        return _Third(source, _Side.of(shown_rows([images], table, now_s), table), now_s)

    def as_first(self, before: pa.RecordBatch, names: Sequence[bytes], images: Sequence[bytes]) -> pa.RecordBatch:
        """Make it look 1 of the next round, for some suspects, and remember what the replica had."""
        source, replica = (
            side.first(names, before.schema.field(name).type)
            for side, name in ((self.source, "source"), (self.ours, "replica"))
        )
        digests = [next(iter(self.source.of_key(name)), None) for name in names]
        return _suspects(source, pa.array(digests, pa.binary()), replica, pa.array(images, pa.binary()), self.now_s)


def _is_shown(digest: bytes | None, ours: Sequence[bytes]) -> bool:
    """Tell whether the replica shows a row as a look at the source; None: the row is not there."""
    return digest in ours if digest is not None else not ours


def _is_close(table: TableSchema, source: Any, replica: Any, slack: Slack) -> bool:
    """Tell whether two rows are equal, but for what the source cannot tell."""
    is_there = source is not None and replica is not None
    return is_there and judge(table, Looks(source, replica, replica, source, has_all=False), slack)[0] == "equal"


def _outcome(
    table: TableSchema, seen: Looks, slack: Slack, later: Sequence[bytes], now: Sequence[bytes]
) -> tuple[Outcome, Sequence[Difference]]:
    """Judge a row; first by the digests of what look 3 and look 2 show."""
    if seen.source is None and len(now) > 1:  # its other copy has found its partner
        return "extra", list(row_differences(table, None, seen.replica))
    if _is_shown(later[0] if later else None, now):
        return "equal", ()
    return judge(table, seen, slack)


def _keys(found: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Return the keys of suspects as row images have them: ``token``, the key columns, and their bytes in ``_x``."""
    there = pc.is_valid(found["source"]).to_numpy(zero_copy_only=False)
    places = np.arange(len(found)) + np.where(there, 0, len(found))
    rows = pa.concat_arrays([found["source"], found["replica"].cast(found["source"].type)]).take(pa.array(places))
    names = [lake_names(table)[column.name] for column in table.key_columns]
    raw = [pa.StructArray.from_arrays([pc.struct_field(rows, ["_cells", name, "raw"])], ["raw"]) for name in names]
    columns = [pc.struct_field(rows, [name]) for name in ("token", *names)]
    return pa.record_batch([*columns, pa.StructArray.from_arrays(raw, names)], names=["token", *names, "_x"])


def _lookup_keys(keys: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Return keys for :func:`ringsync.sources.lookup.read.read_rows`."""
    partition_keys, clusterings = image_keys(keys, table)
    is_row = pa.array(has_clustering(keys, table))
    columns = [keys["token"], partition_keys, pc.if_else(is_row, clusterings, None), pc.invert(is_row)]
    return pa.record_batch(columns, names=["token", "partition_key", "clustering", "whole_partition"])


def _image_digests(images: pa.RecordBatch, keys: pa.RecordBatch, alone: Mask, table: TableSchema) -> list[bytes]:
    """Return what tells whether the replica's images of each key are still the same; empty: it has none.

    Static cells that are shown without a row depend on all images of their partition.
    """
    found: dict[bytes, list[bytes]] = defaultdict(list)
    contents = binary_digests(images).to_pylist()
    for names in (key_digests(images, table), partition_digests(images, table)) if len(images) else ():
        for name, content in zip(names.to_pylist(), contents, strict=True):
            found[name].append(content)
    wanted = pc.if_else(pa.array(alone), partition_digests(keys, table), key_digests(keys, table))
    return [b"".join(sorted(found[name])) for name in wanted.to_pylist()]


def _waits(keys: pa.RecordBatch, table: TableSchema, waiting: WaitingRows) -> list[bool]:
    """Tell which rows wait as late."""
    partitions, clusterings = (array.to_pylist() for array in image_keys(keys, table))
    if not table.clustering:
        clusterings = [b""] * len(partitions)
    return [
        partition in waiting.partitions or (partition, clustering) in waiting.rows
        for partition, clustering in zip(partitions, clusterings, strict=True)
    ]
