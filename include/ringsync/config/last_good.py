"""The last good configuration: what protects production goes on with it while ``ringsync.yaml`` is wrong.

Each process of Airflow that reads a good file keeps a copy of its text on its own host, in ``AIRFLOW_HOME``: DAG files
are parsed without the network, and on workers without the DAG processor. The copy holds no secret: secrets are
references.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile

from ringsync.config import Config, ConfigError, parse_config, read_config
from ringsync.installed import digest_of_source, installed

SETTLED_S = 5.0
"""So long a file must stay unchanged, s, before it counts."""

_INSTEAD = "the last good configuration is used: "


def load_last_good(path: str | Path, *, waits: bool = False) -> tuple[Config, str]:
    """Read the configuration, and keep a copy. While the file is wrong, or was changed just now, read the copy.

    :param waits: whether to wait for some seconds while the file changes: a task keeps what it has read for a whole run
    :returns: the configuration, and what is wrong with the file; empty: nothing
    :raises ConfigError: the file is wrong, and there is no good copy
    """
    copy, end_s = _copy_of(path), time.monotonic() + 2 * SETTLED_S
    while waits and os.path.exists(path) and _is_new(path) and time.monotonic() < end_s:
        time.sleep(SETTLED_S / 25)
    try:
        text = read_config(path)
        config = parse_config(text, path)
    except ConfigError as error:
        try:
            return parse_config(read_config(copy), path), f"{_INSTEAD}{error}"
        except ConfigError:
            raise error from None
    if _is_new(path):
        with suppress(ConfigError):
            return parse_config(read_config(copy), path), ""
    _keep(copy, text)
    return config, ""


WRONG_S = 300.0
"""So long a run goes on while the file is wrong, s: then it ends, since others may work by a file that is right. What
protects production lasts."""

PACKAGE_EVERY_S = 60.0
"""Time between two looks at what is installed, s; it counts once two looks see the same: somebody may be installing."""


class Outdated:
    """Tells whether a file holds a good configuration by now, and another one than a run has read.

    :param config: what the run has read
    :ivar wrong: what is wrong with the file, as :func:`load_last_good` says it; empty: nothing
    """

    def __init__(
        self,
        path: str | Path,
        config: Config,
        wrong: str = "",
        *,
        lasting: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._config, self.wrong = path, config, wrong
        self._lasting, self._clock = lasting, clock
        self._seen: tuple[int, ...] | None = None
        self._is_outdated = False
        self._right_s, self._package_s, self._packages = clock(), clock(), ("", installed()["ringsync"])

    def __call__(self) -> bool:
        now_s, has_changed = self._clock(), self._has_changed()
        if not self.wrong:
            self._right_s = now_s
        if not self._lasting and now_s - self._right_s >= WRONG_S:
            return True
        if now_s - self._package_s >= PACKAGE_EVERY_S:
            self._package_s = now_s
            with suppress(OSError):  # somebody is installing
                self._packages = self._packages[1], digest_of_source()
        before, now = self._packages
        return has_changed or before == now != installed()["ringsync"]

    def _has_changed(self) -> bool:
        seen = _version(self._path)
        if seen != self._seen and (not seen or not _is_new(self._path)):
            try:
                text = read_config(self._path)
            except ConfigError as error:  # a disk may be away for a moment: it is read again
                self.wrong = f"{_INSTEAD}{error}"
                return self._is_outdated
            self._seen, self._is_outdated = seen, False
            try:
                self._is_outdated, self.wrong = parse_config(text, self._path) != self._config, ""
            except ConfigError as error:
                self.wrong = f"{_INSTEAD}{error}"
        return self._is_outdated


def what_is_wrong(path: str | Path) -> str:
    """Tell what is wrong with the configuration now; empty: nothing."""
    try:
        return load_last_good(path)[1]
    except ConfigError as error:
        return str(error)


def _version(path: str | Path) -> tuple[int, ...]:
    """Return what changes with a file; empty: it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_new(path: str | Path) -> bool:
    """Tell whether a file was changed just now: an editor may still write it, and its first half may look right."""
    try:
        return abs(time.time() - os.stat(path).st_mtime) < SETTLED_S
    except OSError:
        return True


def _copy_of(path: str | Path) -> Path:
    home = Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser()
    whole = os.path.abspath(path)  # of links, too, which may point to another file with each version
    return home / "ringsync" / f"{blake2b(os.fsencode(whole), digest_size=8).hexdigest()}.yaml"


def _keep(copy: Path, text: str) -> None:
    """Keep a good text, whole or not at all. Without a home of Airflow, nothing is kept."""
    if not copy.parent.parent.is_dir():
        return
    try:
        if copy.exists() and copy.read_text() == text:
            return
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        with NamedTemporaryFile("w", dir=copy.parent, delete=False) as file:  # readable by its user only
            file.write(text)
        try:
            os.replace(file.name, copy)
        finally:
            Path(file.name).unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        print(f"ringsync: warning: no copy of the good configuration can be kept: {error}", flush=True)
