"""The versions of SSTables, and in what their files differ.

See docs/formats.md, 9.2; C: BigFormat.BigVersion, BtiFormat.BtiVersion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["big", "bti"]


@dataclass(frozen=True)
class Version:
    """A version of SSTables.

    :ivar name: two letters
    :ivar format: ``big``: the index is a list; ``bti``: it is a trie
    :ivar checksums: whether Statistics.db has checksums, and CompressionInfo.db the length of chunks that are stored
        as they are
    :ivar unsigned_times: whether deletion times are unsigned, and a byte says that a partition is not deleted
    """

    name: str
    format: Format
    checksums: bool = True
    unsigned_times: bool = False


_ALL = (
    *(Version(name, "big", checksums=False) for name in ("ma", "mb", "mc", "md", "me")),
    *(Version(name, "big") for name in ("na", "nb", "nc")),
    Version("oa", "big", unsigned_times=True),
    Version("da", "bti", unsigned_times=True),
)
VERSIONS = {(version.format, version.name): version for version in _ALL}
"""By format and name: Cassandra 3.x writes ma to me, 4.x na and nb, 5.0 nb, oa or da; nc was never released."""
