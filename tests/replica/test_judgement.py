"""What looks at a row tell, against a model: a source keeps the newest cells, a replica takes its log later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.types import ListType, MapType, Native
from ringsync.images.judgement import EXACT, Copy, Looks, Slack, judge
from ringsync.schema.table import Column, TableSchema

INT = Native("int")
TABLE = TableSchema(
    "shop",
    "orders",
    "3" * 32,
    (
        Column("id", "partition_key", INT),
        Column("a", "regular", INT),
        Column("b", "regular", INT),
        Column("m", "regular", MapType(Native("text"), INT)),
        Column("l", "regular", ListType(INT)),
    ),
)
PLACES = ("a", "b", "m.x", "m.y", "l.x", "l.y")
NOTHING = (-1, 0, 0)


@dataclass(frozen=True)
class Write:
    """A write: of the cell of a place, or of the row's liveness (``row``). A value of 0 is a tombstone; a tombstone of
    ``row`` deletes the whole row."""

    place: str
    at: int
    value: int
    expires_at: int | None = None


Row = dict[str, Any]


def state(writes: Sequence[Write]) -> dict[str, Write]:
    """The newest write of each place: at equal times a tombstone wins, then the greater value."""

    def order(one: Write) -> tuple[int, bool, int, int]:
        return one.at, one.value == 0, one.value, one.expires_at or 2**40

    newest: dict[str, Write] = {}
    for one in writes:
        for place in ("row", *PLACES) if (one.place, one.value) == ("row", 0) else (one.place,):
            if place not in newest or order(one) > order(newest[place]):
                newest[place] = one
    return newest


def shown(cells: dict[str, Write], now: int) -> Row | None:
    """What a SELECT shows of them."""
    live = {p: w for p, w in cells.items() if w.value and (w.expires_at is None or w.expires_at > now)}
    if not live:
        return None

    def times(*places: str) -> Row | None:
        some = [live[place] for place in places if place in live]
        if not some:
            return None
        if len(places) > 1:
            return {"writetime": [w.at for w in some], "expires_at": [w.expires_at for w in some], "raw": None}
        return {"writetime": some[0].at, "expires_at": some[0].expires_at, "raw": None}

    entries = [{"key": place[2:], "value": live[place].value} for place in ("m.x", "m.y") if place in live]
    items = [live[place].value for place in ("l.x", "l.y") if place in live]
    cells_ = {"id": {"raw": None}, "a": times("a"), "b": times("b"), "m": times("m.x", "m.y"), "l": times("l.x", "l.y")}
    values = {name: live[name].value if name in live else None for name in ("a", "b")}
    return {"token": 0, "id": 1, **values, "m": entries or None, "l": items or None, "_cells": cells_}


def writes(at: st.SearchStrategy[int]) -> st.SearchStrategy[Write]:
    expiry = st.one_of(st.none(), st.integers(0, 9))
    return st.builds(Write, st.sampled_from(("row", *PLACES)), at, st.integers(0, 3), expiry)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Write], list[int], list[int]]:
    """Writes in the order of their arrival, dated as it pleases their writers; up to where each of five looks sees
    them; and when each look is."""
    log = draw(st.lists(writes(st.one_of(st.integers(0, 5), st.just(10**18))), max_size=12))
    ends = sorted(draw(st.lists(st.integers(0, len(log)), min_size=5, max_size=5)))
    nows = sorted(draw(st.lists(st.integers(0, 9), min_size=5, max_size=5)))
    return log, ends, nows


def rounds(
    log: Sequence[Write], ends: Sequence[int], nows: Sequence[int], planted: dict[str, Write] | None = None
) -> list[Looks]:
    """Two rounds of looks: at the source, the replica, the source, the replica, the source. What is planted is in the
    replica all the time; a planted write of value 0 hides a cell."""
    states = [state(log[:end]) for end in ends]
    sees = [shown(one, now) for one, now in zip(states, nows, strict=True)]
    wrong = [{**states[i], **(planted or {})} for i in (1, 3)]
    ours = [(shown(wrong[i], nows[2 * i]), shown(wrong[i], nows[2 * i + 2])) for i in (0, 1)]
    first = Looks(sees[0], *ours[0], sees[2], has_image=bool(wrong[0]))
    second = Looks(
        sees[2], *ours[1], sees[4], before=ours[0][1], is_unchanged=wrong[0] == wrong[1], has_image=bool(wrong[1])
    )
    return [first, second]


@settings(max_examples=400, deadline=None)
@given(histories())
def test_what_is_late_or_ahead_is_no_difference(history: tuple[list[Write], list[int], list[int]]) -> None:
    for looks in rounds(*history):
        assert judge(TABLE, looks)[0] in ("equal", "moving", "not_judged")
        assert judge(TABLE, untold(looks), UNTOLD)[0] in ("equal", "moving", "not_judged")


UNTOLD = Slack(no_element_times=True)


def untold(looks: Looks) -> Looks:
    """Looks at a source that does not tell the times of elements: Cassandra before 5.0. The replica has read them."""

    def of(row: Row | None) -> Row | None:
        cells = {name: row["_cells"][name] and {**row["_cells"][name], **nothing} for name in ("m", "l")} if row else {}
        return row and {**row, "_cells": {**row["_cells"], **cells}}

    nothing = {"writetime": None, "expires_at": None}
    return replace(looks, source=of(looks.source), source_later=of(looks.source_later))


def test_collections_whose_times_only_the_replica_knows_are_equal() -> None:
    cells = {place: Write(place, at, 7) for at, place in enumerate(("a", "m.x", "m.y", "l.x", "l.y"), 1)}
    ours = shown(cells, 0)
    for has_all in (True, False):
        assert judge(TABLE, untold(Looks(ours, ours, ours, ours, has_all=has_all)), UNTOLD) == ("equal", [])
    for place in ("m.x", "l.x"):
        there = shown({**cells, place: Write(place, 9, 8)}, 0)
        outcome, named = judge(TABLE, untold(Looks(there, ours, ours, there, is_unchanged=True)), UNTOLD)
        assert (outcome, [(d.kind, d.column, d.source) for d in named]) == ("different", [("value", place[0], "8")])


@settings(max_examples=400, deadline=None)
@given(histories(), st.sampled_from(PLACES), st.integers(4, 6), st.integers(-5, 20))
def test_a_wrong_cell_is_found_whatever_is_written_beside_it(
    history: tuple[list[Write], list[int], list[int]], place: str, value: int, at: int
) -> None:
    """The cell itself is not written between the looks; its row, and all others of it, may be at any moment."""
    log, ends, nows = history
    head, tail = log[: ends[0]], [w for w in log[ends[0] :] if w.place != place and (w.place, w.value) != ("row", 0)]
    ends = [min(end, len(head) + len(tail)) for end in ends]
    planted = {place: Write(place, at, value)}
    assert any(
        judge(TABLE, looks)[0] in ("different", "extra", "missing")
        for looks in rounds([*head, *tail], ends, nows, planted)
    )


@pytest.mark.parametrize("place", ["m.x", "l.x"])
def test_a_value_that_is_back_may_have_been_another_in_between(place: str) -> None:
    """Where the source tells no times, only what the replica still has unchanged is wrong."""
    first, second, third = (shown({place: Write(place, at, value)}, 0) for at, value in ((1, 7), (2, 8), (3, 7)))
    looks = untold(Looks(first, second, second, third))
    assert judge(TABLE, looks, UNTOLD)[0] == "not_judged"
    assert judge(TABLE, replace(looks, before=second, is_unchanged=True), UNTOLD)[0] == "different"


@pytest.mark.parametrize("slack", [EXACT, UNTOLD])
@pytest.mark.parametrize("column", ["m", "l"])
def test_what_the_replica_follows_moves(column: str, slack: Slack) -> None:
    """A collection that is replaced every second never equals a look, and the replica has another one each time."""

    def replaced(at: int) -> Row:
        return row(b=Write("b", 1, 1), **{f"{column}.{'xy'[at % 2]}": Write(column, at, at)} if at > 3 else {})

    def seen(*ats: int) -> Looks:
        looks = Looks(*map(replaced, ats), before=None)
        return looks if slack is EXACT else untold(looks)

    looks = seen(3, 4, 4, 5)
    assert judge(TABLE, looks, slack)[0] == "not_judged", "one round proves nothing"
    follows = replace(looks, before=replaced(2))
    assert judge(TABLE, follows, slack)[0] == "moving"
    assert judge(TABLE, replace(follows, has_all=False), slack)[0] == "not_judged"
    assert judge(TABLE, replace(follows, before=looks.replica), slack)[0] == "different", "it stands still"
    stays = replace(follows, source_later=follows.source)
    assert judge(TABLE, stays, slack)[0] != "moving", "the source stands still"
    never = replace(seen(5, 0, 0, 7), before=replaced(0))
    assert judge(TABLE, never, slack)[0] == "not_judged", "it never comes, or was deleted each time"
    assert judge(TABLE, replace(never, is_unchanged=True), slack)[0] == "different"


@pytest.mark.parametrize("slack", [EXACT, UNTOLD])
def test_entries_of_a_list_in_another_order_differ(slack: Slack) -> None:
    """Also in a list that grows; where the source tells the times, also in a row that is written all the time."""

    def entries(a: int, *values: int, times: dict[int, int]) -> Row:
        found = row(*((1, 1) if slack is UNTOLD else (a, a)))
        cells = {"writetime": [times[v] for v in values], "expires_at": [None] * len(values), "raw": None}
        return {**found, "l": list(values), "_cells": {**found["_cells"], "l": cells}}

    times = {7: 2, 8: 2, 9: 3, 10: 4}
    first, later = entries(1, 7, 8, times=times), entries(3, 7, 8, 9, times=times)
    ours, before = entries(2, 8, 7, times=times), entries(1, 8, 7, times=times)

    def judged(looks: Looks) -> tuple[str, list[Any]]:
        return judge(TABLE, looks if slack is EXACT else untold(looks), slack)

    once = Looks(first, ours, ours, later)
    assert judged(once)[0] == "not_judged", "written anew with the same time"
    outcome, named = judged(replace(once, before=before, is_unchanged=slack is UNTOLD))
    assert (outcome, {one.column for one in named if one.kind == "value"}) == ("different", {"l"})
    right = entries(2, 7, 8, 9, times=times)
    assert (
        judged(replace(once, replica_then=right, replica=right, source_later=entries(3, 8, 9, times=times)))[0]
        == "equal"
    )
    grown = [entries(2, *places, times=times) for places in ((7, 8), (8, 7, 9), (7, 8, 9, 10))]
    outcome, _ = judged(Looks(grown[0], grown[1], grown[1], grown[2], before=before))
    assert outcome == ("moving" if slack is UNTOLD else "different")


def row(a: int = 1, at: int = 5, **more: Any) -> Row:
    found = shown({"a": Write("a", at, a), **more}, 0)
    assert found is not None
    return found


AHEAD = 4 * 10**18


@pytest.mark.parametrize("at", [5, AHEAD])
def test_the_time_of_a_write_proves_nothing(at: int) -> None:
    """Dated ahead, in nanoseconds or by arrival: what differs after all looks is a difference."""
    there, old = row(2, at), row(1, 1)
    assert judge(TABLE, Looks(there, old, old, there))[0] == "different"
    assert judge(TABLE, Looks(there, None, None, there, has_image=False))[0] == "missing"
    assert judge(TABLE, Looks(there, None, None, there))[0] == "missing", "its cell has stayed"


def test_the_replica_may_be_newer_than_look_1_and_older_than_look_3() -> None:
    first, second, third = row(1, 1), row(2, 2), row(3, 3)
    assert judge(TABLE, Looks(first, second, second, third))[0] == "equal"
    assert judge(TABLE, Looks(second, first, first, third))[0] == "different", "older than look 1"
    assert judge(TABLE, Looks(first, third, third, second))[0] == "different", "newer than look 3"


def test_without_all_that_was_logged_only_what_is_too_new_is_wrong() -> None:
    first, second, third = row(1, 1), row(2, 2), row(3, 3)
    behind = Looks(second, first, first, second, has_all=False)
    assert judge(TABLE, behind)[0] == "not_judged"
    assert judge(TABLE, replace(behind, replica_then=None, replica=None))[0] == "not_judged"
    assert judge(TABLE, replace(behind, replica_then=third, replica=third))[0] == "different"


def test_a_row_with_only_its_key() -> None:
    """It has no time: the replica's image tells whether it can have been deleted and written again."""
    alone = shown({"row": Write("row", 1, 1)}, 0)
    assert judge(TABLE, Looks(alone, None, None, alone, has_image=False))[0] == "missing"
    toggled = Looks(alone, None, None, alone)
    assert judge(TABLE, toggled)[0] == "not_judged", "deleted and written again between the looks"
    assert judge(TABLE, replace(toggled, is_unchanged=True))[0] == "missing"
    extra = Looks(None, alone, alone, None)
    assert [judge(TABLE, one)[0] for one in (extra, replace(extra, is_unchanged=True))] == ["not_judged", "extra"]


def test_a_static_cell_of_a_row_that_is_gone_proves_nothing() -> None:
    columns = (*TABLE.columns[:1], Column("c", "clustering", INT), Column("s", "static", INT), TABLE.columns[1])
    table = replace(TABLE, columns=columns)

    def seen(a: int, at: int) -> Row:
        cells = {"id": {"raw": None}, "c": {"raw": None}}
        times = {name: {"writetime": t, "expires_at": None, "raw": None} for name, t in (("s", 1), ("a", at))}
        return {"token": 0, "id": 1, "c": 2, "s": 7, "a": a, "_cells": {**cells, **times}}

    deleted = Looks(seen(1, 1), None, None, seen(2, 3))
    assert judge(table, deleted)[0] == "not_judged"
    assert judge(table, replace(deleted, source_later=seen(1, 1)))[0] == "missing"


def test_a_copy_that_nobody_follows() -> None:
    """What was written since is not its fault; what its writer dated ahead may be older than the copy."""
    copy = Copy(as_of_us=10, until_us=1000)
    old, since, ahead = row(1, 5), row(2, 20), row(2, AHEAD)
    assert judge(TABLE, Looks(since, old, old, since, copy=copy)) == ("changed_after", [])
    assert judge(TABLE, Looks(ahead, old, old, ahead, copy=copy))[0] == "different"
    assert judge(TABLE, Looks(since, None, None, since, copy=copy))[0] == "changed_after"
    both = row(2, 20, b=Write("b", 6, 1))
    assert judge(TABLE, Looks(both, row(1, 5), row(1, 5), both, copy=copy))[0] == "different", "b is older than it"
    assert judge(TABLE, Looks(None, old, old, None, copy=copy))[0] == "extra"


def test_what_the_source_cannot_tell_is_no_difference() -> None:
    first, second = row(), row()
    first["_cells"]["a"]["expires_at"], second["_cells"]["a"]["expires_at"] = 100, 103
    assert judge(TABLE, Looks(first, second, second, first), Slack(expiry_s=4))[0] == "equal"
    outcome, (named,) = judge(TABLE, Looks(first, second, second, first), EXACT)
    assert (outcome, named.kind, named.column, named.source, named.replica) == ("different", "ttl", "a", "100", "103")


def test_the_wrong_cell_is_named_and_not_what_is_only_late() -> None:
    """The row is written every second: its other cells differ, too, and are as late as they may be."""
    source, later = row(1, 1, b=Write("b", 5, 1)), row(1, 1, b=Write("b", 9, 3))
    ours = row(9, 1, b=Write("b", 7, 2))
    outcome, named = judge(TABLE, Looks(source, ours, ours, later))
    assert (outcome, [(d.kind, d.column, d.source, d.replica) for d in named]) == (
        "different",
        [("value", "a", "1", "9")],
    )
