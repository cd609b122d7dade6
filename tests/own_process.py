"""Programs that may crash, so that a crash is the failure of one test and not the end of all."""

from __future__ import annotations

import os
import subprocess
import sys


def output_of(program: str) -> str:
    """Run a Python program in a process of its own; what it printed, once it has come to its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip()
