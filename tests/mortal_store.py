"""A store whose user is killed after some writes, or sleeps: what comes after it must come out right at any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringsync.storage.local import LocalStore

IMMORTAL = 10**9


class Killed(BaseException):
    """``kill -9``: nobody catches it."""


class MortalStore(LocalStore):
    """Its user is killed before it puts or deletes once more than it may.

    :ivar left: so many puts and deletes are still done
    :ivar others: is done in place of the kill, once: the user only sleeps meanwhile
    """

    left = IMMORTAL
    others: Callable[[], object] | None = None

    def put(self, *arguments: Any, **options: Any) -> Any:
        self._live()
        return super().put(*arguments, **options)

    def delete(self, key: str) -> None:
        self._live()
        super().delete(key)

    def _live(self) -> None:
        if not self.left:
            if self.others is None:
                raise Killed
            others, self.others, self.left = self.others, None, IMMORTAL
            others()
        self.left -= 1
