"""Our side of bench/scan.py: each function reads splits in the process that calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers.measure import Work

from ringsync.config import Config, load_config
from ringsync.ring.splits import Split
from ringsync.sources.cassandra_table import Progress, SplitPartition, read_split
from ringsync.sources.plan import ScanPlan

IN_FLIGHT = 2
"""Token ranges that one process asks for at once; the other Python clients of the benchmark do the same."""


def to_arrow(config: Config, plan: ScanPlan, splits: Sequence[Split]) -> Work:
    """Read splits as Arrow row images and throw these away."""
    rows = 0
    for index, split in enumerate(splits):
        progress = Progress(None, "", SplitPartition(index, split))
        for batch in read_split(config, plan, split, progress):
            rows += batch.num_rows
    return Work(rows)


OURS = {"arrow": to_arrow}
"""What bench/scan.py measures: name → function."""


def reader(name: str, config_path: str, plan_json: str, splits: Sequence[Split]) -> Callable[[], Work]:
    """The read of the splits by one of ``OURS``, after it has read one of them to warm up."""
    config, plan = load_config(config_path), ScanPlan.from_json(plan_json)
    OURS[name](config, plan, splits[:1])
    return lambda: OURS[name](config, plan, splits)
