"""Run programs in a network of their own, since Debezium opens an HTTP port on all interfaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import ServerError


def may_be_alone() -> bool:
    """Tell whether we may make a network of our own: root may."""
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


def switch_loopback_on() -> None:
    """Switch the loopback interface on in a new network."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def run_program(program: Path, order: dict[str, Any], *, alone: bool, name: str) -> Any:
    """Run one of our programs with an order as JSON to its end; return its last line, which is JSON, too.

    :param alone: whether to run in a network of its own
    :param name: the program's name in the message
    :raises ServerError: the program fails; it has printed the reason to stderr
    """
    command = [*(["unshare", "-n"] if alone else []), sys.executable, str(program), json.dumps(order)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate()
    finally:
        # SIGTERM, not SIGKILL: it has servers to stop.
        process.terminate()
        process.wait()
    if process.returncode != 0:
        raise ServerError(f"{name} has failed with code {process.returncode}: see above.")
    return json.loads(printed.splitlines()[-1])
