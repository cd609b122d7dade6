"""What is read of a log, and when: every moment of every generation, whatever becomes known when."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from ringsync.scylla.generations import intervals
from ringsync.scylla.progress import (
    LONGEST_WINDOW_MS,
    OVERLAP_MS,
    SLOT_MS,
    WANTED_ROWS,
    Again,
    Piece,
    Position,
    Rules,
    Sweep,
    Waiting,
    advanced,
    again_pieces,
    grown,
    noticed,
    was_read_again,
    window_end,
    window_pieces,
)
from ringsync.scylla.sweeps import due, late_ms, summed, sweep_pieces, swept_far, swept_near
from tests.scylla.generations import operates

RULES = Rules(30_000, 15_000, 600_000, 3_600_000, 43_200_000)
START = 1_790_000_000_000


def test_a_position_survives_its_document() -> None:
    waiting = (Waiting(START, "00" * 16, "11" * 16, START + 5, START),)
    sweep = Sweep(START, START - 1, START + 7, 60_000)
    slots, again = ((START, 3, 4, 5),), (Again(START, START + 1, START),)
    position = Position(
        START, (1, 2), sweep, replace(sweep, next_ms=None), 15_000, waiting, START + 9, START - 5, slots, again
    )
    assert Position.of(position.to_document()) == position


@pytest.mark.parametrize("seed", range(30))
def test_every_moment_of_every_generation_is_read(seed: int) -> None:
    """Generations become known at any time, even after their beginning; a window is as long as it happens to be."""
    chance = random.Random(seed)
    begins = [START - 1_000_000]
    for _ in range(chance.randrange(8)):
        begins.append(begins[-1] + chance.choice((1, 900, 30_000, 240_000, 900_000)))
    # Scylla publishes a generation about a minute before it begins; a reader may learn of it later.
    known_at = {begin: begin - 65_000 + chance.choice((0, 0, 60_000, 200_000)) for begin in begins}
    known_at[begins[0]] = 0
    now = START
    position = Position.begin(START - 60_000, [one for one in begins if known_at[one] <= now], 15_000)
    read: dict[int, list[Piece]] = defaultdict(list)
    while now < begins[-1] + 2_000_000:
        known = intervals([one for one in begins if known_at[one] <= now])
        end_ms = window_end(position, now, RULES)
        if end_ms is not None:
            assert end_ms <= now - RULES.confidence_ms
            position = noticed(position, known)
            for piece in (*window_pieces(position, end_ms, known), *again_pieces(position, known)):
                # Whatever is read can be read in shorter steps.
                assert piece.end_ms - piece.start_ms <= max(end_ms - position.until_ms, position.again_ms)
                read[piece.generation_ms].append(piece)
            position = was_read_again(position, chance.choice((0, 10, WANTED_ROWS, 10**7)))
            position = advanced(position, end_ms, chance.choice((0, 10, WANTED_ROWS, 10**7)), RULES)
        now += chance.choice((1_000, 15_000, 120_000))
    every = intervals(begins)
    assert not position.again
    for one in every:
        begin = max(one.start_ms, START - 60_000)
        end = min(position.until_ms, one.end_ms if one.end_ms is not None else position.until_ms)
        at = begin
        for piece in sorted(read[one.start_ms], key=lambda piece: piece.start_ms):
            assert piece.start_ms <= at, "a hole"
            at = max(at, piece.end_ms)
        assert at >= end
    total = sum(piece.end_ms - piece.start_ms for pieces in read.values() for piece in pieces)
    late = sum(max(0, known_at[one] - one) for one in begins[1:])
    assert total <= position.until_ms - (START - 60_000) + len(begins) * OVERLAP_MS + 2 * late + 400_000 + SLOT_MS


def test_a_cold_start_needs_few_windows() -> None:
    now = START + 30 * 86_400_000
    position, windows = Position.begin(START, [START], RULES.window_ms), 0
    while (end_ms := window_end(position, now, RULES)) is not None:
        position, windows = advanced(position, end_ms, 0, RULES), windows + 1
    assert windows <= 11
    assert position.until_ms == now - RULES.confidence_ms


def test_windows_follow_the_rows_that_they_have() -> None:
    assert grown(15_000, 0, 15_000) == 60_000
    assert grown(15_000, 5, 15_000) == 30_000
    assert grown(60_000, WANTED_ROWS, 15_000) == 60_000
    assert grown(60_000, WANTED_ROWS + 1, 15_000) == 30_000
    assert grown(15_000, 10**9, 15_000) == 15_000
    assert grown(LONGEST_WINDOW_MS, 0, 15_000) == LONGEST_WINDOW_MS


def test_a_log_that_is_lost_is_read_to_its_end() -> None:
    position = replace(Position.begin(START, [START - 1], 15_000), ends_ms=START + 4_000)
    assert position.until_ms == (begin := START // SLOT_MS * SLOT_MS)
    assert window_end(position, begin + 31_000, RULES) == begin + 1_000
    position = replace(position, until_ms=START)
    assert window_end(position, START + 60_000, RULES) == START + 4_000
    assert window_end(replace(position, until_ms=START + 4_000), START + 60_000, RULES) is None


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_what_comes_late_is_in_a_sweep_after_it(seed: int, of_all: bool) -> None:
    """A row of any write time becomes visible at any moment after its arrival, by a hint for example: a later sweep
    finds it, if it is not older than hours; and older ones if they arrived so late."""
    chance = random.Random(seed)
    known = intervals([START - 500_000, START + 9_000_000])
    rules = replace(RULES, far_ms=1_000_000, far_of_all=of_all)
    position, now = Position.begin(START, [one.start_ms for one in known], 15_000), START
    rows = []
    for _ in range(200):
        time = chance.randrange(START - 400_000, START + 12_000_000)
        arrived = max(time, START) + chance.choice((0, 0, 0, 40_000, 1_000_000, 6_000_000))
        rows.append((time, arrived, arrived + chance.choice((0, 0, 5_000, 600_000, 2_000_000))))
    read: Counter[tuple[int, int, int]] = Counter()

    def inside(piece: Piece) -> list[tuple[int, int, int]]:
        # A generation has the rows of its own time.
        of = next(one for one in known if one.start_ms == piece.generation_ms)
        seen = [row for row in rows if row[2] <= now and operates(of, row[0])]
        return [row for row in seen if piece.start_ms <= row[0] < piece.end_ms]

    def sums(pieces: list[Piece]) -> dict[int, tuple[int, int, int]]:
        found: dict[int, tuple[int, int, int]] = {}
        for row in (row for piece in pieces for row in inside(piece)):
            before = found.get(slot := row[0] // SLOT_MS * SLOT_MS, (0, 0, 0))
            found[slot] = (before[0] + 1, before[1] + row[0] * 31 + row[1] * 17 + row[2], before[2])
        return found

    while now < START + 24_000_000:
        position = due(position, now, rules, known[0].start_ms)
        end_ms = window_end(position, now, rules)
        windows = window_pieces(position, end_ms, known) if end_ms is not None else []
        sweeps, again = sweep_pieces(position, known, rules), again_pieces(position, known)
        for piece in (*windows, *again):
            read.update(inside(piece))
        for piece in (piece for piece in sweeps if piece.kind == "far"):
            for row in inside(piece):
                least_ms = late_ms(rules) if row[0] >= piece.compared_from_ms else 0
                from_ms = max(piece.arrived_from_ms, row[0] + least_ms)
                read[row] += from_ms <= row[1] < piece.arrived_until_ms
        near = sums([piece for piece in sweeps if piece.kind == "near"])
        position = swept_far(swept_near(was_read_again(position, 10), near, 10), 10)
        position = summed(position, sums(windows), rules)
        if end_ms is not None:
            position = advanced(position, end_ms, 10, rules)
        now += 15_000
    # With vnodes, Scylla takes a write into a generation only while this operates.
    ended = known[1].start_ms
    late = rules.reach_ms - 2 * rules.near_ms
    expected = {
        row
        for row in rows
        if (row[0] >= START and row[2] - row[0] <= late)
        or ((row[1] - row[0] >= late or row[0] < position.begin_ms) and row[2] == row[1])
        if of_all or row[0] >= ended or row[1] < ended
    }
    assert read.keys() >= expected
    assert len(expected) > 100
    on_time = [row for row in rows if row[0] >= START and row[2] == row[0]]
    quiet = [row for row in on_time if all(row[0] // SLOT_MS != other[0] // SLOT_MS for other in rows if other != row)]
    assert all(read[row] == 1 for row in quiet)


def test_slots_that_have_not_changed_are_not_read_again() -> None:
    position = summed(Position.begin(START, [START - 1], 15_000), {START // SLOT_MS * SLOT_MS: (2, 5, 7)}, RULES)
    position = replace(
        summed(position, {START // SLOT_MS * SLOT_MS: (1, 2**64 - 1, 1)}, RULES), until_ms=START + 3 * SLOT_MS
    )
    begin = START // SLOT_MS * SLOT_MS
    assert position.slots == ((begin, 3, 4, 8),)
    near = Sweep(START, START - 1, begin, 3 * SLOT_MS)
    same = swept_near(replace(position, near=near), {begin: (3, 4, 8)}, 3)
    assert (same.again, same.slots) == ((), position.slots)
    other = swept_near(replace(position, near=near), {begin: (3, 4, 8), begin + SLOT_MS: (1, 1, 1)}, 3)
    assert other.again == (Again(begin + SLOT_MS, begin + 2 * SLOT_MS, begin + SLOT_MS),)
    assert other.slots == ((begin, 3, 4, 8), (begin + SLOT_MS, 1, 1, 1))
    assert was_read_again(replace(other, again_ms=SLOT_MS // 2), 5).again == (
        Again(begin + SLOT_MS + SLOT_MS // 2, begin + 2 * SLOT_MS, begin + SLOT_MS + SLOT_MS // 2),
    )
    assert was_read_again(other, 5).again == ()


def test_a_generation_that_gets_its_streams_late_is_read_in_steps() -> None:
    """It may have been stepped over weeks ago, and have more rows than a task can take at once."""
    first, late, last = START - 10**9, START - 10**8, START - 5 * 10**7
    generations = intervals([first, late, last])
    position = replace(Position.begin(START - 2 * 10**8, [first, last], 15_000), until_ms=START)
    position = noticed(position, generations)
    assert noticed(position, generations) == position
    assert position.again == (Again(late, last + OVERLAP_MS, late),)
    at_ms, steps = late, 0
    while position.again:
        pieces = {piece.generation_ms: piece for piece in again_pieces(position, generations)}
        assert pieces[late].start_ms == at_ms
        at_ms, steps = pieces[late].end_ms, steps + 1
        position = was_read_again(position, 0)
    assert at_ms == last + OVERLAP_MS
    assert steps < 10
    shrunk = replace(noticed(replace(position, known=(first, last)), generations), again_ms=1)
    assert again_pieces(shrunk, generations)[-1] == Piece(late, late, late + 1, "again")
    # What is older than the begin of the reading was never to be read.
    begun = noticed(replace(position, known=(last,), begin_ms=last + OVERLAP_MS + 1), generations)
    assert (begun.again, begun.known) == ((), (first, late, last))


def test_a_sweep_after_a_stop_begins_where_the_one_before_was_blind() -> None:
    """A row that came after its slot was compared, and hours of a stop: the next sweep compares that slot."""
    hour = 3_600_000
    rules = replace(RULES, near_ms=hour, reach_ms=7 * hour // 2)
    begin = START // SLOT_MS * SLOT_MS
    slots = tuple((begin + number * SLOT_MS, 1, 1, 1) for number in range(48))
    until_ms = begin + 4 * hour
    near = Sweep(until_ms, until_ms - hour, until_ms - hour // 2)
    position = replace(Position.begin(begin, [START - 1], 15_000), until_ms=until_ms, near=near, slots=slots)
    late_row_ms = until_ms + 60_000 - late_ms(rules)
    after = summed(replace(position, until_ms=until_ms + 20 * hour), {}, rules)
    assert late_row_ms // SLOT_MS * SLOT_MS in [slot for slot, *_ in after.slots]
    following = due(replace(after, near=replace(near, next_ms=None)), until_ms + 21 * hour, rules, START - 1)
    assert following.near.next_ms is not None
    assert following.near.next_ms <= late_row_ms


def test_windows_do_not_agree_on_more_than_they_have_read() -> None:
    position = Position.begin(START, [START - 1], 15_000)
    for _ in range(50):
        position = advanced(position, position.until_ms + 15_000, 40_000, RULES)
    assert position.window_ms == 30_000


def test_the_begin_of_a_log_is_no_gap() -> None:
    assert Position.begin(START + 7, [START], 15_000, START).until_ms == START
    assert Position.begin(START + 7, [START], 15_000, 0).until_ms == START // SLOT_MS * SLOT_MS


def test_rows_keep_the_ttl_that_they_were_written_with() -> None:
    """TTLs are altered while the sync stands, or goes on: what was written before expires by its own."""
    position = replace(Position.begin(START, [START - 1], 15_000), ttl_s=3600)
    begin_ms = position.until_ms
    assert position.with_ttl(3600, START + 5) == position
    first_ms, second_ms, late_ms_ = START + 10_000_000, START + 11_000_000, START + 14_500_000
    once = position.with_ttl(86_400, first_ms)
    assert (once.ttls_s, once.expired(begin_ms, second_ms)) == ((86_400, 3600), (begin_ms, second_ms - 3_600_000))
    assert once.expired(begin_ms, late_ms_) == (begin_ms, first_ms), "nothing later has the former TTL"
    twice = replace(once, until_ms=second_ms - 9).with_ttl(0, second_ms)
    assert (twice.ttl_s, twice.ttls_s) == (0, (86_400, 3600))
    back = twice.with_ttl(3600, second_ms + 5)
    assert back.ttls_s == (3600, 86_400)
    # Far sweeps look for all that was logged before.
    read = replace(twice, until_ms=second_ms)
    assert read.with_ttl(0, second_ms + 9) == read
    over = Sweep(first_ms + 120_000, START)
    swept = replace(read, near=over, far=over)
    assert swept.with_ttl(0, second_ms + 9).ttls_s == (86_400, 3600), "rows with it may be read again"
    assert swept.with_ttl(0, first_ms + 3_600_000).ttls_s == (86_400,)
    for owing in (replace(swept, near=Sweep(first_ms, START)), replace(swept, far=Sweep(first_ms, START))):
        assert owing.with_ttl(0, first_ms + 3_600_000).ttls_s == (86_400, 3600)
    over = Sweep(second_ms + 120_000, START)
    assert replace(swept, near=over, far=over).with_ttl(0, second_ms + 86_400_000).ttls_s == ()
    assert replace(position, ttl_s=0).with_ttl(3600, START).ttls_s == (3600,)
    # A smaller one counts from when it may have been there.
    less = replace(position, ttl_s=86_400, until_ms=first_ms).with_ttl(3600, first_ms + 30_000)
    assert less.expired(begin_ms, first_ms + 3_000_000) == (begin_ms, begin_ms)
    assert less.expired(begin_ms, first_ms + 4_000_000) == (first_ms, first_ms + 400_000)
