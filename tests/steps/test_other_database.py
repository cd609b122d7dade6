"""A loop that reads logs refuses the other database, and names the DAG that reads this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ringsync.replica.session
import ringsync.steps.loop
from ringsync.ledger.database import follows_scylla
from ringsync.steps.application import StepError
from ringsync.steps.errors.records import OF_CDC_LOG, Record, decode
from ringsync.steps.scylla import scylla_log_stage
from ringsync.steps.stage import commitlog_stage
from ringsync.storage.local import LocalStore


@pytest.mark.parametrize(
    ("module", "of_scylla", "told"),
    [
        (commitlog_stage, True, "this cluster is ScyllaDB: its CDC logs are read by the DAG scylla_log_stage"),
        (scylla_log_stage, False, "this cluster is no ScyllaDB: its commit logs are read by the DAG commitlog_stage"),
    ],
    ids=["commitlog_stage", "scylla_log_stage"],
)
def test_the_other_database_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, of_scylla: bool, told: str
) -> None:
    spark = SimpleNamespace(sparkContext=None)
    monkeypatch.setattr(ringsync.replica.session, "spark_session", lambda *_, **__: spark)
    for place in (module, ringsync.steps.loop):
        for name, fake in {"start_workers": None, "connect_patiently": None, "cluster_settings": None}.items():
            if hasattr(place, name):
                monkeypatch.setattr(place, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(module, "is_scylla", lambda _: of_scylla)
    store = LocalStore(tmp_path)
    application: Any = SimpleNamespace(
        config=SimpleNamespace(sync=SimpleNamespace(stage_cores=1)),
        store=store,
        run="r",
        options=SimpleNamespace(queue="default"),
    )
    with pytest.raises(StepError, match=rf"^{told}; cdcservice start$"):
        module.run(application)
    assert not follows_scylla(store)


def test_rows_of_cdc_logs_are_told_and_stay() -> None:
    """They are no mutations: what decoding would make of their bytes is nonsense."""
    mutation = b"\x01" * 40
    records = [Record("cdc_logs", "ks.t_scylla_cdc_log", 7, len(mutation), "unknown operation", None, mutation)]
    found = decode(records, {})
    assert found.rows.num_rows == 0
    assert found.undecoded == {0: OF_CDC_LOG}
