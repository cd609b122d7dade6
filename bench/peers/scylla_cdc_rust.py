"""Build the program in ``peers/scylla_cdc``, which reads a CDC log by the published crate scylla-cdc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from servers import ServerError, last_lines

PROJECT = Path(__file__).with_name("scylla_cdc")
PROGRAM = "scylla-cdc-peer"
BUILD_SECONDS = 1800


def build(cache: Path) -> Path:
    """Compile the program, unless it is there; return its path. Cargo fetches what Cargo.lock names.

    :param cache: folder that keeps what Cargo made
    :raises ServerError: there is no Cargo (Rust 1.85 or later), or it fails; with its last lines
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise ServerError("There is no cargo on PATH: install Rust 1.85 or later (Debian: rustup or cargo).")
    target = (cache / "peers" / "scylla_cdc").resolve()
    done = subprocess.run(
        [cargo, "build", "--release", "--locked"],
        cwd=PROJECT,
        env=os.environ | {"CARGO_TARGET_DIR": str(target)},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise ServerError(f"The peer could not be built:\n{last_lines(done.stdout + done.stderr)}")
    return target / "release" / PROGRAM
