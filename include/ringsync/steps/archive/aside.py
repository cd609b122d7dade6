"""Work in a thread of its own, so that who needs its result goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """One piece of work at a time. When the process ends, it is not waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work was begun whose result was not taken."""
        return self._thread is not None

    def begin(self, work: Callable[[], Any]) -> None:
        """Begin work. Nothing else may be under way."""

        def run() -> None:
            self._result = self._error = None
            try:
                self._result = work()
            except Exception as error:
                self._error = error

        assert self._thread is None
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Tell whether the work is done; wait so long for it, in seconds."""
        if self._thread is None:
            return False
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Take the result of work that is done.

        :raises Exception: the work has failed
        """
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._result
