"""What every object store promises, asked of each of them."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.storage import gcs, open_store
from ringsync.storage.gcs import GcsStore
from ringsync.storage.port import (
    AlreadyExistsError,
    NotFoundError,
    ObjectStore,
    StorageError,
    VersionMismatchError,
    is_legal_key,
)
from servers.gcs import GcsEmulator
from tests.gcs_faults import KINDS, OWN, faulty

RACERS = 16
LEGAL_KEYS = [
    "plain",
    "plans/2026-01-01T00:00:00Z/plan.json",
    "with space/ and more ",
    "per%cent/%2e%2e/%41",
    "hash#mark?query&a=b+c",
    "brackets[0]*{x}",
    "quote'\"`",
    "back\\slash",
    "x.../y.",
    "-",
    "日本/ü/🙂",
    "e\u0301 is not \u00e9",
    "x" * 255,
    "/".join(["d" * 99] * 10),
]
ILLEGAL_KEYS = [
    "",
    "/",
    "/rooted",
    "trailing/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "nul\0",
    "line\nbreak",
    "delete\x7f",
    "half\ud800",
    "x" * 256,
    "/".join(["d" * 99] * 11),
    ".ringsync/x",
    "a/.ringsync",
    ".DS_Store",
    "cdc/.DS_Store",
    "..x/y",
]


FAULTS = 0.02
"""Share of requests that meet each kind of fault."""


@pytest.fixture(
    scope="module", params=["local", *(pytest.param(kind, marks=pytest.mark.server) for kind in ("gcs", "faulty gcs"))]
)
def new_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ObjectStore]]:
    """Makes an empty store on each call."""
    numbers = count()
    if request.param == "local":
        root = tmp_path_factory.mktemp("store")
        yield lambda: open_store(f"file://{root}/{next(numbers)}")
        return
    with GcsEmulator() as emulator, faulty(emulator, 4, 0.0) as proxy, pytest.MonkeyPatch.context() as patch:
        endpoint = emulator.endpoint
        if request.param == "faulty gcs":
            endpoint, proxy.share, proxy.cuts_refusals = proxy.endpoint, FAULTS, True
            patch.setattr(gcs, "DEFAULT_RETRY", gcs.DEFAULT_RETRY.with_delay(initial=0.01))
        yield lambda: GcsStore(emulator.bucket, f"store/{next(numbers)}", endpoint=endpoint, rewrite_seconds=0)
        if proxy.counts["requests"] >= 1500:  # all tests were run
            more = GcsStore(emulator.bucket, "more", endpoint=endpoint, rewrite_seconds=0)
            for number in range(3000):  # what has not come by chance comes now
                if all(proxy.counts[kind] for kind in (*KINDS, OWN)):
                    break
                more.put(f"{number}", b"content", if_absent=True)
                assert more.get(f"{number}") == b"content"
            assert all(proxy.counts[kind] for kind in (*KINDS, OWN)), proxy.counts


@pytest.fixture
def store(new_store: Callable[[], ObjectStore]) -> ObjectStore:
    return new_store()


def race(attempt: Callable[[int], Any]) -> list[Any]:
    """Call from many threads at once; what each returned, or the storage error that it raised."""
    start = threading.Barrier(RACERS)

    def run(racer: int) -> Any:
        start.wait()
        try:
            return attempt(racer)
        except StorageError as error:
            return error

    with ThreadPoolExecutor(RACERS) as pool:
        return list(pool.map(run, range(RACERS)))


@pytest.mark.parametrize(
    "data", [b"", b"hello", bytes(range(256)) * 20_480, bytes(9 << 20)], ids=["empty", "small", "5 MiB", "9 MiB"]
)
def test_what_was_put_is_got(store: ObjectStore, data: bytes) -> None:
    stat = store.put("a/b", data)
    assert (stat.key, stat.size, stat.crc32c) == ("a/b", len(data), google_crc32c.value(data))
    assert store.get("a/b") == data
    assert store.stat("a/b") == stat
    assert store.list() == [stat]


def test_a_part_is_got(store: ObjectStore) -> None:
    store.put("a/b", bytes(range(256)))
    assert store.get_range("a/b", 10, 3) == b"\x0a\x0b\x0c"
    assert store.get_range("a/b", 250, 100) == bytes(range(250, 256))
    assert store.get_range("a/b", 256, 5) == store.get_range("a/b", 0, 0) == b""
    with pytest.raises(NotFoundError, match="a/c is not there"):
        store.get_range("a/c", 0, 1)


def test_an_empty_store_answers(store: ObjectStore) -> None:
    assert store.list() == store.list("a/b") == []
    assert store.stat("a/b") is None
    store.delete("a/b")
    with pytest.raises(NotFoundError, match="a/b is not there"):
        store.get("a/b")


def test_a_put_replaces(store: ObjectStore) -> None:
    first = store.put("a", b"a longer one")
    second = store.put("a", b"short")
    assert first.version != second.version
    assert store.get("a") == b"short"
    assert store.list() == [second]


def test_what_is_said_replaces(store: ObjectStore) -> None:
    first = store.put("a/b", b"a longer one")
    store.say("a/b", b"short")
    second = store.stat("a/b")
    assert second is not None
    assert (second.size, second.crc32c) == (5, google_crc32c.value(b"short"))
    assert first.version != second.version
    store.say("a/b", b"again")
    assert store.get("a/b") == b"again"
    assert store.list() == [store.stat("a/b")]
    store.delete("a/b")
    assert store.stat("a/b") is None
    with pytest.raises(ValueError, match="key"):
        store.say("a//b", b"")


def test_it_is_known_when_an_object_was_written(store: ObjectStore) -> None:
    """By the store's clock, which is the same for all who ask."""
    store.put("put", b"x")
    store.say("said", b"x")
    now_ms, listed = time.time() * 1000, {stat.key: stat for stat in store.list()}
    for key in ("put", "said"):
        stat = store.stat(key)
        assert stat is not None
        assert stat.written_ms == listed[key].written_ms
        assert now_ms - 60_000 < stat.written_ms < now_ms + 5_000
    time.sleep(0.01)
    store.say("said", b"y")
    again = store.stat("said")
    assert again is not None
    assert again.written_ms > listed["said"].written_ms


def test_deletion_may_be_repeated(store: ObjectStore) -> None:
    store.put("a/b/c", b"1")
    store.put("a/b/d", b"2")
    for _ in range(2):
        store.delete("a/b/c")
        assert store.stat("a/b/c") is None
    store.delete("a/b")  # a folder is no object
    assert store.stat("a/b") is None
    assert [stat.key for stat in store.list()] == ["a/b/d"]
    store.put("a/b/c", b"3")
    assert store.get("a/b/c") == b"3"


def test_if_absent_has_one_winner(store: ObjectStore) -> None:
    for key in ("x/plan.json", "y/plan.json", "z/plan.json"):
        results = race(lambda racer, key=key: store.put(key, b"racer %d" % racer, if_absent=True))
        winners = [racer for racer, result in enumerate(results) if not isinstance(result, StorageError)]
        assert len(winners) == 1, results
        assert store.get(key) == b"racer %d" % winners[0]
        losers = [result for result in results if isinstance(result, StorageError)]
        assert {type(error) for error in losers} == {AlreadyExistsError}


def test_compare_and_set_has_one_winner(store: ObjectStore) -> None:
    version = store.put("state", b"start").version
    for _ in range(3):
        results = race(lambda racer, seen=version: store.put("state", b"racer %d" % racer, if_version=seen))
        winners = [racer for racer, result in enumerate(results) if not isinstance(result, StorageError)]
        assert len(winners) == 1, results
        assert store.get("state") == b"racer %d" % winners[0]
        losers = [result for result in results if isinstance(result, StorageError)]
        assert {type(error) for error in losers} == {VersionMismatchError}
        version = results[winners[0]].version
        assert store.stat("state").version == version


def test_a_stale_version_is_refused(store: ObjectStore) -> None:
    first = store.put("a", b"1").version
    second = store.put("a", b"2", if_version=first).version
    for stale in (first, "0", "1", "", "no version", "²"):
        with pytest.raises(VersionMismatchError, match="a"):
            store.put("a", b"3", if_version=stale)
    assert store.get("a") == b"2"
    assert store.stat("a").version == second
    store.delete("a")
    with pytest.raises(VersionMismatchError, match="is not there"):
        store.put("a", b"3", if_version=second)
    assert store.stat("a") is None


def test_a_version_never_comes_back(store: ObjectStore) -> None:
    versions = [store.put("a", b"same").version for _ in range(5)]
    store.delete("a")
    versions += [store.put("a", b"same").version for _ in range(5)]
    assert len(set(versions)) == 10
    with pytest.raises(VersionMismatchError):
        store.put("a", b"other", if_version=versions[0])


def test_the_two_conditions_exclude_each_other(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="not both"):
        store.put("a", b"", if_absent=True, if_version="1")


def test_a_list_is_sorted_and_its_prefix_need_not_be_a_folder(store: ObjectStore) -> None:
    keys = ["a-b/1", "a/1", "a/10", "a/2", "a/b/c/d", "ab", "b", "Z", "ü", "\U0001f642", "\uffff"]
    for key in reversed(keys):
        store.put(key, key.encode())
    assert [stat.key for stat in store.list()] == sorted(keys)
    for prefix in ("a", "a/", "a/1", "a/b", "a/b/", "a/b/c/d", "a/b/c/d/", "ab", "c", "c/d", "ü", "."):
        assert [stat.key for stat in store.list(prefix)] == sorted(k for k in keys if k.startswith(prefix)), prefix
    for prefix in ("/", "a//", "../", "a/../", "\0"):
        with pytest.raises(ValueError, match="object key"):
            store.list(prefix)


def test_a_list_begins_where_it_is_asked_to(store: ObjectStore) -> None:
    keys = ["a-b/1", "a/1", "a/10", "a/2", "a/b/c/d", "a/b/c/e", "a/c/1", "ab", "b", "ü", "\U0001f642", "\uffff"]
    for key in keys:
        store.put(key, key.encode())
    for prefix in ("", "a", "a/", "a/b/"):
        for start in ("", "a", "a/", "a/1", "a/11", "a/b", "a/b/c/", "a/b/c/e", "a/b/d", "a0", "b", "ü", "\uffff/"):
            expected = sorted(key for key in keys if key.startswith(prefix) and key >= start)
            assert [stat.key for stat in store.list(prefix, start)] == expected, (prefix, start)
    with pytest.raises(ValueError, match="object key"):
        store.list("", "../")


def test_a_list_is_longer_than_a_page(store: ObjectStore) -> None:
    keys = [f"many/{number:05d}" for number in range(1_100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, key.encode()), keys))
    store.put("more", b"")
    assert [(stat.key, stat.crc32c) for stat in store.list("many/")] == [
        (key, google_crc32c.value(key.encode())) for key in keys
    ]


@pytest.mark.parametrize("key", LEGAL_KEYS)
def test_odd_keys_are_kept_apart(store: ObjectStore, key: str) -> None:
    store.put(key, b"odd")
    store.put("beside", b"plain")
    assert store.get(key) == b"odd"
    assert store.stat(key).key == key
    assert [stat.key for stat in store.list()] == sorted([key, "beside"])
    assert [stat.key for stat in store.list(key)] == [key]
    assert store.uri(key) == f"{store.url}/{key}"
    store.delete(key)
    assert [stat.key for stat in store.list()] == ["beside"]


@pytest.mark.parametrize("key", ILLEGAL_KEYS)
def test_illegal_keys_are_refused(store: ObjectStore, key: str) -> None:
    for call in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.stat(key)):
        with pytest.raises(ValueError, match="object key"):
            call()
    for call in (lambda: store.delete(key), lambda: store.uri(key)):
        with pytest.raises(ValueError, match="object key"):
            call()
    assert not is_legal_key(key)


OPERATIONS = st.tuples(
    st.sampled_from(["put", "put if absent", "put if latest", "put if stale", "delete"]),
    st.sampled_from(["a", "b/c", "b/d"]),
    st.binary(max_size=20),
)


@settings(max_examples=30, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=12))
def test_a_store_behaves_like_a_dictionary(
    new_store: Callable[[], ObjectStore], operations: list[tuple[str, str, bytes]]
) -> None:
    store = new_store()
    model: dict[str, tuple[bytes, str]] = {}
    stale = ["1"]
    for operation, key, data in operations:
        old = model.get(key)
        if operation == "delete":
            store.delete(key)
            model.pop(key, None)
        else:
            latest = old[1] if old else stale[0]
            conditions: dict[str, dict[str, Any]] = {
                "put": {},
                "put if absent": {"if_absent": True},
                "put if latest": {"if_version": latest},
                "put if stale": {"if_version": stale[-1]},
            }
            allowed = {"put": True, "put if absent": not old, "put if latest": bool(old), "put if stale": False}
            try:
                model[key] = data, store.put(key, data, **conditions[operation]).version
                assert allowed[operation]
            except (AlreadyExistsError, VersionMismatchError):
                assert not allowed[operation]
        if old and model.get(key) != old:
            stale.append(old[1])
    assert {stat.key: stat.version for stat in store.list()} == {key: version for key, (_, version) in model.items()}
    assert {key: store.get(key) for key in model} == {key: data for key, (data, _) in model.items()}
