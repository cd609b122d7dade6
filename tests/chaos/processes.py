"""Processes as the system shows them: who runs what, and who started it."""

from __future__ import annotations

from pathlib import Path


def running(*words: str) -> list[int]:
    """All processes that have these words in their command lines.

    :param words: parts of a command line, e.g. the name of an application and the path of its configuration
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if all(word in command_of(pid) for word in words)]


def chain(pid: int, ancestor: int) -> list[int]:
    """The processes between an ancestor and its descendant, and that one, from the top."""
    found: list[int] = []
    while pid != ancestor:
        assert pid > 1, [command_of(one) for one in found]
        found.insert(0, pid)
        pid = parent_of(pid)
    return found


def parent_of(pid: int) -> int:
    """The id of the parent; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def command_of(pid: int) -> str:
    """A process's command line, or what it calls itself; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return bool(command_of(pid))
