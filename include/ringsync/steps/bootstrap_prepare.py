"""Prepare a bootstrap: check everything it needs, and decide once how it is done (DESIGN §6, step 1).

The plan is ``plans/bootstrap/<run>.json``, written once: a repeated task reads the first one, so that all steps
of a run agree. Nothing in the source is written.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringsync.config import Config
from ringsync.sources.plan import ScanPlan
from ringsync.sources.planning import make_scan_plan
from ringsync.sources.session import connect
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore
from ringsync.streams.topics import data_topic

LAKE_BYTES_PER_SOURCE_BYTE = 2.0
"""Room that replica and stream may take, for each byte that Cassandra estimates; generous."""


@dataclass(frozen=True)
class BootstrapPlan:
    """What all steps of one bootstrap agree on.

    :ivar run: id of the run
    :ivar scan: table, moment, token range splits
    :ivar topic: of the change stream
    :ivar bucket: of the stream, for the rows of this bootstrap
    """

    run: str
    scan: ScanPlan
    topic: str
    bucket: str

    @property
    def as_of_us(self) -> int:
        """µs; cells written later may or may not be in what was read."""
        return self.scan.now * 1_000_000

    def to_json(self) -> str:
        """The plan as JSON, with what somebody who follows the run wants to know on top."""
        document = {
            "run": self.run,
            "table": self.scan.table.full_name,
            "splits": len(self.scan.splits),
            "ranges": sum(len(split.ranges) for split in self.scan.splits),
            "estimated_rows": estimated_rows(self.scan),
            "topic": self.topic,
            "bucket": self.bucket,
            "scan": json.loads(self.scan.to_json()),
        }
        return json.dumps(document, indent=1)

    @staticmethod
    def from_json(text: str) -> BootstrapPlan:
        document = json.loads(text)
        scan = ScanPlan.from_json(json.dumps(document["scan"]))
        return BootstrapPlan(document["run"], scan, document["topic"], document["bucket"])


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Check and plan.

    :raises StepError: too little space; another plan under the same run id
    :raises ClusterError: unreachable, no login, no rights
    :raises SchemaError: no such table
    """
    config = _with_splits(application.config, application.options.splits)
    keyspace, table = application.table
    session = connect(config.cluster_settings())
    scan = make_scan_plan(session, config, keyspace, table, now=int(clock()))
    bucket = time.strftime("bootstrap-%Y%m%dT%H%M%SZ", time.gmtime(scan.now))
    plan = BootstrapPlan(application.run, scan, data_topic(config.server_name, scan.table), bucket)
    check_space(application.store, plan)
    if not application.options.dry_run:
        plan = _keep(application.store, plan)
    return _forecast(plan, application.options.dry_run), ExitCode.OK


def load_plan(store: ObjectStore, run: str) -> BootstrapPlan:
    """The plan of a run.

    :raises StepError: ``bootstrap_prepare`` has not written one
    """
    try:
        return BootstrapPlan.from_json(store.get(_key(run)).decode())
    except NotFoundError:
        raise StepError(f"run {run} has no plan: run bootstrap_prepare with the same --run first") from None


def check_space(store: ObjectStore, plan: BootstrapPlan) -> None:
    """Refuse to begin what cannot end, where the store is a local directory and the table's size is known.

    :raises StepError: with the bytes needed and free
    """
    needed = (_estimated(plan.scan, "estimated_bytes") or 0) * LAKE_BYTES_PER_SOURCE_BYTE
    if store.url.startswith("file://"):
        folder = Path(store.url.removeprefix("file://"))
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        if free < needed:
            raise StepError(
                f"{store.url}: about {needed / 2**30:.1f} GiB are needed for {plan.scan.table.full_name}, but "
                f"{free / 2**30:.1f} GiB are free: make room, or set store.url to another place"
            )


def estimated_rows(scan: ScanPlan) -> int | None:
    """Rows by Cassandra's estimate, which counts partitions: known only where a partition is one row."""
    return None if scan.table.clustering else _estimated(scan, "estimated_partitions")


def _estimated(scan: ScanPlan, name: str) -> int | None:
    values = [getattr(split, name) for split in scan.splits]
    return None if None in values else sum(values)


def _with_splits(config: Config, splits: int | None) -> Config:
    if splits is None:
        return config
    return config.model_copy(
        update={"scan": config.scan.model_copy(update={"min_splits": splits, "max_splits": splits})}
    )


def _key(run: str) -> str:
    return f"plans/bootstrap/{run}.json"


def _keep(store: ObjectStore, plan: BootstrapPlan) -> BootstrapPlan:
    """Write the plan, or take the one that an earlier attempt of this run wrote."""
    try:
        store.put(_key(plan.run), plan.to_json().encode(), if_absent=True)
        return plan
    except AlreadyExistsError:
        kept = load_plan(store, plan.run)
    if kept.scan.table.full_name != plan.scan.table.full_name:
        raise StepError(f"run {plan.run} has a plan for {kept.scan.table.full_name}: use another run id")
    return kept


def _forecast(plan: BootstrapPlan, dry_run: bool) -> dict[str, Any]:
    scan = plan.scan
    return {
        "dry_run": dry_run,
        "columns": {column.name: str(column.type) for column in scan.table.columns},
        "schema_digest": scan.schema_digest,
        "ring_digest": scan.ring_digest,
        "consistency_level": scan.consistency_level,
        "element_times": scan.element_times,
        "splits": len(scan.splits),
        "ranges": sum(len(split.ranges) for split in scan.splits),
        "estimated_partitions": _estimated(scan, "estimated_partitions"),
        "estimated_bytes": _estimated(scan, "estimated_bytes"),
        "topic": plan.topic,
        "bucket": plan.bucket,
    }
