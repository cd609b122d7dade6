"""When each token range of a replica was last found equal to its source: ``proofs/<table id>.json``.

A verification of some ranges is a proof of these. So a big table is compared a part each day, the parts that were
compared longest ago first, and the table's proof is as old as the oldest of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringsync.ledger.dropped_tables import all_dropped
from ringsync.ledger.followed import followed_tables
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    ObjectStore,
    VersionMismatchError,
    get_json,
    list_named,
)

_FOLDER = "proofs/"

PROOFS = "replica_verify/proofs"
"""Name of the status that tells what is proved of the replicas. It belongs to no loop."""

_DAY_MS = 86_400_000

GRACE_DAYS = 2
"""So much older than ``replica.verify_days`` may a proof be before that is a problem."""

_ATTEMPTS = 20


@dataclass(frozen=True)
class Proof:
    """What is proved of a replica.

    :ivar table: its name
    :ivar base: id of the base; a bootstrap makes another one, of which nothing is proved
    :ivar since_ms: when the replica was first looked at, ms since the epoch
    :ivar ranges_ms: of each token range when it was last found equal; 0: never
    :ivar compared_ms: of each when it was last compared, whatever was found; 0: never
    :ivar differing: numbers of the ranges that had differences when they were last looked at
    :ivar run: the run that has found the newest of these; ``rows_differing``: how many rows; ``found_ms``: when
    :ivar part_ms: when a part of it was last chosen (:func:`due_ranges`); 0: never
    :ivar is_followed: whether the sync kept the replica in step
    """

    table_id: str
    table: str
    base: str
    since_ms: int
    ranges_ms: tuple[int, ...]
    compared_ms: tuple[int, ...]
    differing: tuple[int, ...] = ()
    run: str = ""
    rows_differing: int = 0
    found_ms: int = 0
    part_ms: int = 0
    is_followed: bool = True

    @property
    def proved_ms(self) -> int:
        """When the whole replica was proved, at least; 0: never."""
        return min(self.ranges_ms)

    def overdue_ms(self, days: float) -> int | None:
        """Return from when on a part of it is not proved for too long, ms since the epoch; None: nobody expects it.

        :param days: within which each range is to be compared
        """
        oldest_ms = max(self.proved_ms, self.since_ms)
        return oldest_ms + int((days + GRACE_DAYS) * _DAY_MS) if self.is_followed else None


@dataclass(frozen=True)
class Examined:
    """What a verification has found out of a replica.

    :ivar base: id of the replica's base
    :ivar count: number of token ranges of the ring
    :ivar chosen: numbers of those that were compared; ``differing``: that have differences; ``unjudged``: that have
        rows which could not be judged, or wait as late
    :ivar began_ms: what was written before this moment was compared, ms since the epoch
    :ivar is_part: whether these ranges were chosen because they were due
    """

    table_id: str
    table: str
    base: str
    count: int
    chosen: Collection[int]
    differing: Collection[int]
    unjudged: Collection[int]
    rows_differing: int
    began_ms: int
    run: str
    is_part: bool
    is_followed: bool


def note_examined(store: ObjectStore, examined: Examined) -> Proof:
    """Add what a verification has found out to the proof of a replica."""
    for _ in range(_ATTEMPTS):
        stat = store.stat(_key(examined.table_id))
        known = get_proof(store, examined.table_id) if stat is not None else None
        proof = _added(known, examined)
        data = json.dumps(asdict(proof)).encode()
        with suppress(VersionMismatchError, AlreadyExistsError):
            if stat is None:
                store.put(_key(examined.table_id), data, if_absent=True)
            else:
                store.put(_key(examined.table_id), data, if_version=stat.version)
            return proof
    raise VersionMismatchError(f"{store.uri(_key(examined.table_id))}: other verifications were faster: verify again")


def _added(known: Proof | None, found: Examined) -> Proof:
    if known is None or known.base != found.base:
        never = (0,) * found.count
        known = Proof(found.table_id, found.table, found.base, found.began_ms, never, never)
    known = _in_ranges(known, found.count)
    bad = {*found.differing, *found.unjudged}
    ranges_ms, compared_ms = list(known.ranges_ms), list(known.compared_ms)
    for number in found.chosen:
        compared_ms[number] = max(compared_ms[number], found.began_ms)
        if number not in bad:
            ranges_ms[number] = max(ranges_ms[number], found.began_ms)
    differing = sorted((set(known.differing) - set(found.chosen)) | set(found.differing) | (set(known.differing) & bad))
    times: dict[str, Any] = {"ranges_ms": tuple(ranges_ms), "compared_ms": tuple(compared_ms)}
    proof = replace(known, table=found.table, is_followed=found.is_followed, **times)
    if found.is_part:
        proof = replace(proof, part_ms=found.began_ms)
    if found.differing:
        news = {"run": found.run, "rows_differing": found.rows_differing, "found_ms": found.began_ms}
        proof = replace(proof, **news)  # type: ignore[arg-type]
    return replace(proof, differing=tuple(differing))


def _in_ranges(proof: Proof, count: int) -> Proof:
    """Return what is known in so many ranges, as ``verify.ranges`` may have changed: of each, what is known of all old
    ranges that it touches."""
    old = len(proof.ranges_ms)
    if old == count:
        return proof
    touched = [range(number * old // count, -(-(number + 1) * old // count)) for number in range(count)]
    differing = tuple(number for number in range(count) if not set(proof.differing).isdisjoint(touched[number]))
    ranges_ms, compared_ms = (
        tuple(min(times[i] for i in some) for some in touched) for times in (proof.ranges_ms, proof.compared_ms)
    )
    return replace(proof, ranges_ms=ranges_ms, compared_ms=compared_ms, differing=differing)


def due_ranges(proof: Proof | None, base: str, count: int, days: float, now_ms: int) -> tuple[int, ...]:
    """Choose the token ranges to compare now: those compared longest ago, as many as belong to the time since the last
    choice, and at most as many of those that were not found equal when they were last compared.

    :param base: id of the replica's base
    :param count: number of token ranges
    :param days: within which each range is to be compared
    """
    if proof is None or proof.base != base:
        return tuple(range(math.ceil(count / max(days, 1))))
    proof = _in_ranges(proof, count)
    elapsed = (now_ms - proof.part_ms) / _DAY_MS if proof.part_ms else 1.0
    share = min(count, max(1, math.ceil(count * elapsed / days)))
    again = {number for number in range(count) if proof.compared_ms[number] > proof.ranges_ms[number]}
    again |= {*proof.differing}

    def oldest(numbers: Collection[int]) -> list[int]:
        return sorted(numbers, key=lambda number: (proof.compared_ms[number], proof.ranges_ms[number], number))[:share]

    return tuple(sorted([*oldest({*range(count)} - again), *oldest(again)]))


def get_proof(store: ObjectStore, table_id: str) -> Proof | None:
    """Read what is proved of a replica; None: nothing, or the object is damaged."""
    return _read(store, _key(table_id))


def proofs(store: ObjectStore) -> dict[str, Proof]:
    """Read what is proved, by table id. Damaged objects are left out: the next verification writes them again."""
    found = (_read(store, stat.key) for stat in list_named(store, _FOLDER, r"[0-9a-f]{32}\.json"))
    return {proof.table_id: proof for proof in found if proof is not None}


def tell_proofs(store: ObjectStore, days: float | None, now_ms: int) -> None:
    """Tell in the status what is proved of all replicas. What is known of tables that were dropped is forgotten.
    Of those that the sync does not follow any more, nothing is expected.

    :param days: within which each range is to be compared; None: nobody does by itself
    """
    known, dropped, followed = proofs(store), all_dropped(store), followed_tables(store)
    for table_id in dropped & known.keys():
        store.delete(_key(table_id))
    told = {
        proof.table: {
            "proved_ms": proof.proved_ms,
            "overdue_ms": proof.overdue_ms(days) if days is not None and table_id in followed else None,
            "ranges": len(proof.ranges_ms),
            "ranges_differing": len(proof.differing) if proof.is_followed and table_id in followed else 0,
            **{name: getattr(proof, name) for name in ("rows_differing", "found_ms", "run")},
        }
        for table_id, proof in sorted(known.items(), key=lambda one: one[1].table)
        if table_id not in dropped
    }
    store.say(f"status/{PROOFS}.json", json.dumps({"at_ms": now_ms, "proofs": told}).encode())


def _read(store: ObjectStore, key: str) -> Proof | None:
    with suppress(ChecksumError, ValueError, TypeError, KeyError):
        if (document := get_json(store, key)) is not None:
            lists = {name: tuple(document[name]) for name in ("ranges_ms", "compared_ms", "differing")}
            return Proof(**{**document, **lists})
    return None


def _key(table_id: str) -> str:
    return f"{_FOLDER}{table_id}.json"
