"""A store whose user is killed after some writes: what is repeated after a kill at any of them must come out right."""

from __future__ import annotations

from typing import Any

from ringsync.storage.local import LocalStore

IMMORTAL = 10**9


class Killed(BaseException):
    """``kill -9``: nobody catches it."""


class MortalStore(LocalStore):
    """Is killed before it puts or deletes once more than it may.

    :ivar left: so many puts and deletes are still done
    """

    left = IMMORTAL

    def put(self, *arguments: Any, **options: Any) -> Any:
        self._live()
        return super().put(*arguments, **options)

    def delete(self, key: str) -> bool:
        self._live()
        return super().delete(key)

    def _live(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1
