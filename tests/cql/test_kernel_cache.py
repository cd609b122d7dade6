"""Tests of the folder for compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def imported(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], **variables}
    code = "import os, ringsync.compiled.memory; print(os.environ['NUMBA_CACHE_DIR'])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_a_folder_of_ones_own_is_taken(tmp_path: Path) -> None:
    run = imported(XDG_CACHE_HOME=str(tmp_path))
    assert run.stdout.startswith(f"{tmp_path}/ringsync/kernels/"), run.stderr[-2000:]


def test_a_home_that_cannot_be_written_is_replaced_by_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = imported(XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert run.stdout.startswith(f"{tmp_path}/ringsync-{os.getuid()}/kernels/"), run.stderr[-2000:]


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = imported(NUMBA_CACHE_DIR=str(tmp_path / "file" / "kernels"))
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert f"compiled kernels cannot be kept in {tmp_path}/file/kernels: Not a directory" in last
    assert "NUMBA_CACHE_DIR" in last
