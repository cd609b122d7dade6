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
    :ivar commitlog_from: whether the first position of the commit log is known, not only the last
    :ivar commitlog_intervals: whether the intervals of the commit log are known
    :ivar host_id: whether the id of the node that wrote it may be known
    :ivar checksums: whether Statistics.db has checksums, and CompressionInfo.db the length of chunks that are stored
        as they are
    :ivar repair: whether it is known in which repair the SSTable takes part
    :ivar clustering_values: whether STATS has the least and greatest clustering values as lists
    :ivar clustering_slice: whether it has them as a slice, and the first and last key
    :ivar unsigned_times: whether deletion times are unsigned, and a byte says that a partition is not deleted
    """

    name: str
    format: Format
    commitlog_from: bool = True
    commitlog_intervals: bool = True
    host_id: bool = True
    checksums: bool = True
    repair: bool = True
    clustering_values: bool = True
    clustering_slice: bool = False
    unsigned_times: bool = False


def _of_3(name: str) -> Version:
    return Version(
        name,
        "big",
        commitlog_from=name >= "mb",
        commitlog_intervals=name >= "mc",
        host_id=name >= "me",
        checksums=False,
        repair=False,
    )


_ALL = (
    *map(_of_3, ("ma", "mb", "mc", "md", "me")),
    Version("na", "big", host_id=False),
    Version("nb", "big"),
    Version("nc", "big", clustering_slice=True),
    Version("oa", "big", clustering_values=False, clustering_slice=True, unsigned_times=True),
    Version("da", "bti", clustering_values=False, clustering_slice=True, unsigned_times=True),
)
VERSIONS = {(version.format, version.name): version for version in _ALL}
"""By format and name: Cassandra 3.x writes ma to me, 4.x na and nb, 5.0 nb, oa or da; nc was never released."""
