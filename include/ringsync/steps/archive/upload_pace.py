"""The speed limit of uploads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class UploadPace:
    """Lets several threads upload no faster than a limit, all together.

    :param bytes_per_s: None: no limit
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int, sleep: Callable[[float], None] | None = None) -> None:
        """Wait until so many bytes may be uploaded: after those that were asked for before.

        :param sleep: waits, given seconds; it may end early, if the bytes are not uploaded any more
        """
        if self._bytes_per_s is None:
            return
        with self._lock:
            begins = max(self._clock(), self._free_at)
            self._free_at = begins + size / self._bytes_per_s
        (sleep or self._sleep)(max(0.0, begins - self._clock()))
