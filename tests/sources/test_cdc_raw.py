"""What a worker may not do in a node's cdc_raw; told by another user, since root may do everything."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringsync.steps.stage.rights import what_is_refused

SEGMENT = "CommitLog-7-1.log"
NOBODY = 65534


def as_nobody(ask: Callable[[], str | None]) -> str:
    """What a process of another user says; empty: nothing."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writable, (ask() or "").encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a segment, below folders that everybody may enter."""
    found = Path(tempfile.mkdtemp(prefix="cdc_raw-"))
    found.chmod(0o777)
    (found / SEGMENT).write_bytes(b"log")
    (found / SEGMENT).chmod(0o644)
    yield found
    shutil.rmtree(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "refused"),
    [
        (0o777, 0o644, ""),
        (0o711, 0o644, "{folder} cannot be listed: "),
        (0o744, 0o644, "{folder} cannot be listed: "),
        (0o777, 0o600, "{folder}/CommitLog-7-1.log cannot be read: "),
        (0o755, 0o644, "nothing can be deleted in {folder}, and it fills: "),
        (0o1777, 0o644, "files of other users cannot be deleted in {folder}, and it fills: take away its sticky bit"),
    ],
)
def test_what_another_user_may_not_do(folder: Path, folder_mode: int, file_mode: int, refused: str) -> None:
    (folder / SEGMENT).chmod(file_mode)
    folder.chmod(folder_mode)
    said = as_nobody(lambda: what_is_refused(folder))
    assert said.startswith(refused.format(folder=folder))
    assert bool(said) == bool(refused)
    assert (folder / SEGMENT).read_bytes() == b"log"


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / SEGMENT).write_bytes(b"log")
    assert what_is_refused(tmp_path) is None


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    said = what_is_refused(tmp_path / "nowhere")
    assert said
    assert "nowhere cannot be listed" in said
