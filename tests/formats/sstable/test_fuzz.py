"""Tests of damaged SSTables: no crash, no hang, no access outside the memory, no unreported loss (see fuzz.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def fuzz(seed: int, count: int, seconds: int) -> None:
    command = [sys.executable, "-m", "tests.formats.sstable.fuzz", str(seed), str(count)]
    environment = {"PYTHONPATH": "include:."}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(f"{count} SSTables\n")


def test_damaged_sstables() -> None:
    fuzz(1, 1000, 600)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_many_damaged_sstables(seed: int) -> None:
    fuzz(seed, 2500, 1800)
