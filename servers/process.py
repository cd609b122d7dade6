"""A server as a session of processes of its own, which are started, watched and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from servers import ServerError, last_lines

POLL_SECONDS = 0.1
STOP_SECONDS = 15


class ServerProcess:
    """
    One running program and its children, with their output in a log file.

    :param command: the program and its arguments.
    :param log: file to which stdout and stderr are appended.
    :param environment: the environment variables of the program.
    :param folder: its working directory.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> None:
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the program, which is also the id of its session."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_seconds: float, name: str) -> None:
        """
        Wait until the server answers.

        :param ready: function that tells whether the server answers.
        :param timeout_seconds: seconds until waiting is given up.
        :param name: the server's name in messages.
        :raises ServerError: the program ended early, or the time is over; with the end of this run's log.
        """
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            if self.ended:
                raise ServerError(
                    f"{name} ended with code {self._process.returncode} while starting.\n{self.log_end()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{name} does not answer after {timeout_seconds:.0f} s.\n{self.log_end()}")
            time.sleep(POLL_SECONDS)

    def log_end(self) -> str:
        """Return the first errors and the last lines that this run has logged, after the name of the log."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        # A failing server often logs a clean shutdown after the reason.
        errors = [line for line in text.splitlines() if "ERROR" in line or "Exception" in line]
        return "\n".join([f"From {self.log}:", *errors[:5], "…", last_lines(text)])

    @property
    def ended(self) -> bool:
        """Whether the program itself, not only its children, has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the whole session at once and wait until it is gone."""
        while self._send(signal.SIGKILL):
            time.sleep(POLL_SECONDS)
        self._process.wait()

    def ask_to_end(self) -> None:
        """Send SIGTERM to the whole session."""
        self._send(signal.SIGTERM)

    @property
    def alive(self) -> bool:
        """Whether any process of the session is left."""
        return self._send(None)

    def _send(self, number: signal.Signals | None) -> bool:
        """Send a signal to every process of the session (None: only look), and return whether there was any."""
        self._process.poll()  # a child that has ended stays a process until its parent asks
        signalled = False
        for pid in session_members(self.pid):
            try:
                os.kill(pid, number or 0)
                signalled = True
            except ProcessLookupError:
                continue  # it has ended since
        return signalled


class Server(ABC):
    """A server that can be started and stopped: `with server: …`."""

    @abstractmethod
    def start(self) -> None:
        """
        Start the server and wait until it answers.

        :raises ServerError: the server does not come up.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the server and everything that it started. Nothing happens if it is not running."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass
class OneProcess(Server):
    """
    A server of one process that keeps its files in a folder of its own.

    :param folder: data, configuration and log.
    """

    folder: Path
    _process: ServerProcess | None = field(default=None, init=False, repr=False)

    @property
    def pid(self) -> int:
        """
        The process id.

        :raises ServerError: the server is not running.
        """
        if self._process is None:
            raise ServerError(f"The server in {self.folder} is not running.")
        return self._process.pid

    def stop(self) -> None:
        """End the server (SIGTERM; SIGKILL after 15 s). Nothing happens if it is not running."""
        if self._process is not None:
            stop_together([self._process], STOP_SECONDS)
            self._process = None

    def kill(self) -> None:
        """End the server as a power cut would (SIGKILL). Nothing happens if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _run(
        self, command: Sequence[str], log: str, ready: Callable[[], bool], timeout_seconds: float, name: str
    ) -> None:
        """
        Start the process and wait until the server answers.

        :param log: name of a file in the folder.
        :raises ServerError: as `ServerProcess.wait_until`; the process is then gone.
        """
        self._process = ServerProcess(command, self.folder / log, os.environ, self.folder)
        try:
            self._process.wait_until(ready, timeout_seconds, name)
        except BaseException:
            self.kill()
            raise


def session_members(session: int) -> list[int]:
    """
    Return the ids of a session's processes: they stay in the session when their group changes or a parent dies.

    :param session: the id of the process that opened it.
    """
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # man proc: pid (name) state parent group session …; the name may contain spaces and parentheses
                state, _, _, owner = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            if int(owner) == session and state != "Z":
                members.append(int(entry))
    return members


def stop_together(processes: Sequence[ServerProcess], grace_seconds: float) -> None:
    """
    End servers with all their children: ask all first, then kill the processes that are left.

    :param processes: the servers.
    :param grace_seconds: seconds in which the servers may end by themselves.
    """
    for process in processes:
        process.ask_to_end()
    deadline = time.monotonic() + grace_seconds
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:
        process.kill()
