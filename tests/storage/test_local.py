"""The local store: kills at every step, damage, other writers, links, and disks that refuse."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from ringsync.service.checks import tell_readers
from ringsync.storage import local
from ringsync.storage.local import LocalStore
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    StorageError,
    UnavailableError,
    VersionMismatchError,
)

KEY = "staging/shop.orders/part.bin"
OLD = b"old" * 1_000
NEW = b"the new one" * 1_000


def in_child(work: Callable[[], Any]) -> int:
    """Run something in a forked process; its exit code, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(step: int) -> None:
    """Have the kernel kill this process just before its n-th change of the file system; a write is cut in half."""
    steps = 0

    def guard(name: str) -> None:
        call = getattr(os, name)

        def guarded(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += name != "open" or bool(arguments[1] & os.O_CREAT)
            if steps == step:
                if name == "write":
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        setattr(os, name, guarded)

    for name in ("open", "mkdir", "write", "fsync", "link", "rename", "unlink", "rmdir", "utime"):
        guard(name)


def hidden_files(store: LocalStore) -> list[Path]:
    return [path for path in store.path.glob(".ringsync/*/*") if path.name != "lock"]


CHANGES: dict[str, Callable[[LocalStore], Any]] = {
    "put": lambda store: store.put(KEY, NEW),
    "put if absent": lambda store: store.put(KEY, NEW, if_absent=True),
    "put if version": lambda store: store.put(KEY, NEW, if_version=store.stat(KEY).version),
    "delete": lambda store: store.delete(KEY),
}


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("put", None, NEW),
        ("put", OLD, NEW),
        ("put if absent", None, NEW),
        ("put if version", OLD, NEW),
        ("delete", OLD, None),
    ],
)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, change: str, before: bytes | None, after: bytes | None
) -> None:
    seen = []
    for step in range(1, 500):
        store = LocalStore(tmp_path / str(step))
        if before is not None:
            store.put(KEY, before)

        def work(store: LocalStore = store, step: int = step) -> None:
            kill_at(step)
            CHANGES[change](store)

        code = in_child(work)
        assert code in (0, -signal.SIGKILL)
        stat = store.stat(KEY)
        found = store.get(KEY) if stat else None
        assert found in (before, after)
        assert store.list() == ([stat] if stat else [])
        if stat:
            assert (stat.size, stat.crc32c) == (len(found), google_crc32c.value(found))
            assert not stat.version.startswith("file-"), "the object lost its checksum"
        seen.append(found)

        again = store.put(KEY, b"again", if_version=stat.version if stat else None, if_absent=not stat)
        assert store.stat(KEY) == again
        assert len(hidden_files(store)) == 1, "what the kill left is cleaned up"
        if code == 0:
            break
    else:
        pytest.fail("the change has no end")
    assert step > 5
    assert seen == sorted(seen, key=lambda found: found == after), "once new, always new"
    assert seen[0] == before
    assert seen[-1] == after


def test_a_writer_killed_at_random_moments_never_breaks_an_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, b"start")
    moments = random.Random(1)
    for _ in range(25):
        writer = os.fork()
        if writer == 0:
            try:
                while True:
                    store.put(KEY, os.urandom(200_000))
                    store.put("beside", os.urandom(10))
                    store.delete("beside")
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.001, 0.03))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        assert len(store.get(KEY)) in (5, 200_000)
        assert {stat.key for stat in store.list()} - {"beside"} == {KEY}
    store.put(KEY, b"end")
    store.put("beside", b"end")
    assert len(hidden_files(store)) == 2


def test_readers_see_whole_objects_while_writers_replace_them(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, b"0" * 50_000)
    writers = []
    for letter in (b"1", b"2"):
        writer = os.fork()
        if writer == 0:
            try:
                while True:
                    store.put(KEY, letter * 50_000)
            finally:
                os._exit(1)
        writers.append(writer)
    try:
        versions: set[str] = set()
        while len(versions) < 50:
            assert len(set(store.get(KEY))) == 1
            (stat,) = store.list("staging/")
            assert not stat.version.startswith("file-")
            versions.add(stat.version)
            assert all(os.waitpid(writer, os.WNOHANG) == (0, 0) for writer in writers), "a writer failed"
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)


def test_processes_race_and_one_wins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("counter", b"0")

    def increment() -> None:
        try:
            store.put("plan", str(os.getpid()).encode(), if_absent=True)
            (tmp_path / f"winner-{os.getpid()}").touch()
        except AlreadyExistsError:
            pass
        for _ in range(5):
            while True:
                version = store.stat("counter").version
                number = int(store.get("counter"))
                try:
                    store.put("counter", str(number + 1).encode(), if_version=version)
                    break
                except VersionMismatchError:
                    continue

    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                increment()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    assert int(store.get("counter")) == 40
    assert [path.name for path in tmp_path.glob("winner-*")] == [f"winner-{store.get('plan').decode()}"]


@pytest.mark.parametrize("change", CHANGES)
def test_nobody_waits_for_a_writer_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """As when a host is suspended: it holds the lock until it goes on."""
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.2)
    store = LocalStore(tmp_path)
    store.put(KEY, OLD)
    paused = os.fork()
    if paused == 0:
        code, fsync = 1, os.fsync
        try:
            monkeypatch.setattr(os, "fsync", lambda file: (os.kill(os.getpid(), signal.SIGSTOP), fsync(file)))
            store.put(KEY, NEW)
            code = 0
        finally:
            os._exit(code)
    try:
        assert os.WIFSTOPPED(os.waitpid(paused, os.WUNTRACED)[1])
        held = rf"{_shard(KEY)}/lock: .* \(process {paused}\) .* 0\.2 s"
        with pytest.raises(UnavailableError, match=held):
            CHANGES[change](store)
        assert store.get(KEY) == OLD
        store.put(f"{KEY}.beside", NEW)
        os.kill(paused, signal.SIGCONT)
        while os.WIFSTOPPED(status := os.waitpid(paused, os.WUNTRACED)[1]):
            os.kill(paused, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(paused, signal.SIGKILL)
            os.waitpid(paused, 0)
    assert store.get(KEY) == NEW
    store.put(KEY, OLD)
    assert len(hidden_files(store)) == 2


def test_what_is_only_said_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.0)
    store = LocalStore(tmp_path)
    store.put(KEY, OLD)
    before = store.stat(KEY)
    with store._locked(KEY):
        for _ in range(2):
            store.say(KEY, NEW)
            assert store.get(KEY) == NEW
    now = store.stat(KEY)
    assert now.version != before.version
    assert (now.size, now.crc32c) == (len(NEW), google_crc32c.value(NEW))
    with pytest.raises(VersionMismatchError):
        store.put(KEY, OLD, if_version=before.version)
    store.put(KEY, OLD, if_version=now.version)
    assert len(hidden_files(store)) == 1
    with pytest.raises(UnavailableError, match="another key"):
        store.say(KEY.rpartition("/")[0], NEW)
    assert len(hidden_files(store)) == 1


def test_damage_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, OLD)
    with open(tmp_path / KEY, "r+b") as file:
        file.seek(1_234)
        file.write(b"X")
    with pytest.raises(ChecksumError, match=r"part\.bin is damaged.*restore"):
        store.get(KEY)
    os.truncate(tmp_path / KEY, 10)
    with pytest.raises(ChecksumError, match="damaged"):
        store.get(KEY)
    store.put(KEY, NEW)
    assert store.get(KEY) == NEW


def test_objects_are_plain_files_and_those_of_others_are_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("replica/a.parquet", b"ours")
    assert (tmp_path / "replica/a.parquet").read_bytes() == b"ours"
    (tmp_path / "replica/b.parquet").write_bytes(b"theirs")
    assert [stat.key for stat in store.list("replica/")] == ["replica/a.parquet", "replica/b.parquet"]
    theirs = store.stat("replica/b.parquet")
    assert theirs.crc32c == google_crc32c.value(b"theirs")
    assert store.get("replica/b.parquet") == b"theirs"
    with pytest.raises(AlreadyExistsError):
        store.put("replica/b.parquet", b"", if_absent=True)
    (tmp_path / "new").write_bytes(b"theirs, replaced")
    os.rename(tmp_path / "new", tmp_path / "replica/b.parquet")
    with pytest.raises(VersionMismatchError):
        store.put("replica/b.parquet", b"", if_version=theirs.version)
    latest = store.stat("replica/b.parquet").version
    store.put("replica/b.parquet", b"now ours", if_version=latest)
    assert store.get("replica/b.parquet") == b"now ours"
    store.delete("replica/b.parquet")
    assert store.stat("replica/b.parquet") is None


def test_others_may_replace_or_remove_our_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("a", "b"):
        store.put(key, b"ours")
    (tmp_path / "new").write_bytes(b"theirs")
    os.rename(tmp_path / "new", tmp_path / "a")
    os.unlink(tmp_path / "b")
    assert store.get("a") == b"theirs"
    assert store.stat("b") is None
    store.put("b", b"again", if_absent=True)
    assert store.get("b") == b"again"


def test_what_was_removed_by_hand_is_freed_within_a_day(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("removed", b"x")
    (hidden,) = hidden_files(store)
    shard = hidden.parent.name
    beside = next(key for key in map(str, range(100_000)) if _shard(key) == shard)
    kept = next(key for key in map(str, range(200_000, 300_000)) if _shard(key) == shard)
    store.put(kept, b"kept")
    os.unlink(tmp_path / "removed")
    store.put(beside, b"1")
    assert hidden.exists(), "not swept today"
    yesterday = time.time() - 25 * 3600
    os.utime(hidden.parent / "lock", (yesterday, yesterday))
    store.put(beside, b"2")
    assert not hidden.exists()
    assert (store.get(beside), store.get(kept)) == (b"2", b"kept")
    assert len(hidden_files(store)) == 2


def _shard(key: str) -> str:
    from ringsync.storage.local import _SHARD_DIGITS, _hash

    return _hash(key)[:_SHARD_DIGITS]


def test_empty_folders_go_with_their_last_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/b/c/d", b"")
    store.put("a/e", b"")
    store.delete("a/b/c/d")
    assert sorted(path.name for path in (tmp_path / "root/a").iterdir()) == ["e"]
    store.delete("a/e")
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [".ringsync"]


def test_symbolic_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    store = LocalStore(tmp_path / "root")
    store.put("inside", b"inside")
    (tmp_path / "root/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "root/file").symlink_to(tmp_path / "outside/secret")
    for key in ("folder/secret", "file"):
        with pytest.raises(NotFoundError):
            store.get(key)
        assert store.stat(key) is None
        store.delete(key)
    with pytest.raises(UnavailableError, match="symbolic link"):
        store.put("folder/new", b"")
    store.put("file", b"replaces the link")
    assert [stat.key for stat in store.list()] == ["file", "inside"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]
    assert (tmp_path / "outside/secret").read_bytes() == b"secret"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    LocalStore(tmp_path / "root").put("a", b"1")
    assert LocalStore(tmp_path / "disk").get("a") == b"1"


def test_a_file_cannot_be_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    store.put("b/c", b"")
    for key in ("a/b", "b"):
        with pytest.raises(UnavailableError, match=f"/{key}: .*another key"):
            store.put(key, b"")
    assert [stat.key for stat in store.list()] == ["a", "b/c"]
    assert len(hidden_files(store)) == 2


def test_special_files_and_unreadable_names_are_no_objects(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "line\nbreak").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    store = LocalStore(tmp_path)
    assert store.list() == []
    assert store.stat("pipe") is None
    store.delete("pipe")


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Whoever runs the tests may not write to this folder; root, who may everywhere, becomes nobody."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_folder_without_rights_is_explained(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    with (
        without_rights(closed),
        pytest.raises(UnavailableError, match=r"closed/store/a: Permission denied; give this user the right"),
    ):
        LocalStore(closed / "store").put("a", b"")
    LocalStore(closed / "store").put("a", b"")


def test_a_file_in_place_of_the_root_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(UnavailableError, match=r"file.*/a: .*; a file, folder or symbolic link has this name"):
            LocalStore(root).put("a", b"")


def test_a_put_that_does_not_fit_leaves_the_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, OLD)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(UnavailableError, match=r"File too large; raise the limit"):
            store.put(KEY, b"x" * 20_000)

    assert in_child(work) == 0
    assert store.get(KEY) == OLD
    assert len(hidden_files(store)) == 1


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_folder_that_is_not_mounted_any_more_is_not_taken_for_the_store(tmp_path: Path, is_empty: bool) -> None:
    store = LocalStore(tmp_path / "lake")
    assert store.list() == []
    store.put(KEY, OLD)
    store.path.rename(tmp_path / "elsewhere")
    if is_empty:
        store.path.mkdir()
    calls: list[Callable[[], Any]] = [
        *(store.list, lambda: store.list("staging/"), lambda: store.get(KEY), lambda: store.get_range(KEY, 0, 1)),
        *(lambda: store.stat(KEY), lambda: store.put("a", NEW), lambda: store.say("a", NEW), lambda: store.delete(KEY)),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match=r"lake is not the folder any more that it was: is it mounted\?"):
            call()
    assert list(tmp_path.glob("lake/*")) == []
    if is_empty:
        store.path.rmdir()
    (tmp_path / "elsewhere").rename(store.path)
    assert store.get(KEY) == OLD


@pytest.mark.parametrize("path", ["relative", "", "/", "//", "/a/.."])
def test_a_path_must_name_a_folder(path: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        LocalStore(path)


def test_errors_are_storage_errors() -> None:
    for error in (AlreadyExistsError, ChecksumError, NotFoundError, UnavailableError, VersionMismatchError):
        assert issubclass(error, StorageError)


@pytest.mark.parametrize(("there", "mode"), [(None, 0o700), (0o750, 0o750), (0o2770, 0o2770), (0o755, 0o755)])
def test_who_may_read_is_decided_by_the_folder(tmp_path: Path, there: int | None, mode: int) -> None:
    """It keeps all others out of what is inside, even of files that other programs write by their own umask."""
    before = os.umask(0o022)
    try:
        folder = tmp_path / "above" / "lake"
        if there is not None:
            folder.mkdir(parents=True)
            folder.chmod(there)
        store = LocalStore(folder)
        store.put(KEY, OLD)
        assert folder.stat().st_mode & 0o7777 == mode
        assert folder.parent.stat().st_mode & 0o7777 == 0o755
        assert bool(tell_readers(store)) == bool(mode & 0o001)
    finally:
        os.umask(before)
