"""The plan of a bootstrap, decided once by ``prepare``, kept as ``plans/bootstrap/<run>.json``, read by all steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ringsync.sources.scan.plan import ScanPlan
from ringsync.state.bootstrap import Bootstrap
from ringsync.steps.application import StepError
from ringsync.storage.port import AlreadyExistsError, ObjectStore, get_json

OUTPUTS_VERSION = 3
"""Version of files and ledger entries: a bootstrap of another version cannot be continued."""


@dataclass(frozen=True)
class BootstrapPlan:
    """What all steps of one run agree on.

    :ivar scan: table and moment; its splits are cut when it is read
    :ivar splits: number of splits that the user asked for; None: by size
    :ivar estimated_rows: estimated rows of the selection
    :ivar estimated_bytes: estimated size of the whole table's result pages
    """

    run: str
    bootstrap: Bootstrap
    scan: ScanPlan
    topic: str
    splits: int | None
    estimated_rows: int
    estimated_bytes: int


def find_plan(store: ObjectStore, run: str) -> BootstrapPlan | None:
    """Return the plan of a run; None: there is none."""
    document = get_json(store, _key(run))
    if document is None:
        return None
    scan = ScanPlan.from_json(json.dumps(document.pop("scan")))
    return BootstrapPlan(bootstrap=Bootstrap(**document.pop("bootstrap")), scan=scan, **document)


def load_plan(store: ObjectStore, run: str) -> BootstrapPlan:
    """Return the plan of a run.

    :raises StepError: ``bootstrap_prepare`` has not written one
    """
    plan = find_plan(store, run)
    if plan is None:
        raise StepError(f"run {run} has no plan: run bootstrap_prepare with the same --run first")
    return plan


def keep_plan(store: ObjectStore, plan: BootstrapPlan) -> BootstrapPlan:
    """Write the plan, or read the one that another attempt of this run has written meanwhile."""
    document = {**asdict(plan), "scan": json.loads(plan.scan.to_json())}
    try:
        store.put(_key(plan.run), json.dumps(document, indent=1).encode(), if_absent=True)
        return plan
    except AlreadyExistsError:
        return load_plan(store, plan.run)


def _key(run: str) -> str:
    return f"plans/bootstrap/{run}.json"
