"""A store into which people and their tools put what is not ours: everywhere, under names of all kinds."""

from __future__ import annotations

from pathlib import Path

from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat

NAMES = ("notes.txt", "copy of 000000000001.json", "000000000001.json~", "Thumbs.db", "x y.arrow", "a b/c/d.json")
"""What lies in each folder, beside ``.DS_Store``, which is a file and no object."""


class StrayStore(LocalStore):
    """In each folder that has anything, and in the one that is listed, lies what is not ours."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.removed: list[str] = []

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        """List the objects, and all that lies beside them."""
        found = super().list(prefix, start)
        folders = {prefix.rpartition("/")[0], *(stat.key.rpartition("/")[0] for stat in found)}
        keys = (f"{folder}/{name}".lstrip("/") for folder in folders for name in NAMES)
        strays = [Stat(key, 9, 0, "1") for key in keys if key.startswith(prefix) and key >= start]
        return sorted(found + strays, key=lambda stat: stat.key)

    def get(self, key: str) -> bytes:
        """Read an object."""
        return b"\0\xff{junk" if is_stray(key) else super().get(key)

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Read a part of an object."""
        return self.get(key)[start : start + size] if is_stray(key) else super().get_range(key, start, size)

    def stat(self, key: str) -> Stat | None:
        """Look up an object."""
        return Stat(key, 7, 0, "1") if is_stray(key) else super().stat(key)

    def delete(self, key: str) -> None:
        """Remove an object; what is not ours stays, and is counted."""
        if is_stray(key):
            self.removed.append(key)
        else:
            super().delete(key)


def is_stray(key: str) -> bool:
    """Tell whether an object is not ours."""
    return f"/{key}".endswith(tuple(f"/{name}" for name in NAMES))
