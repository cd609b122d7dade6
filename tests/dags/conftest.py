"""The DAGs of the repository, in a home of Airflow of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dags.tasks import DAGS


@pytest.fixture(scope="module", autouse=True)
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Airflow reads its settings when it is imported: a home of its own, no database, no examples."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AIRFLOW_HOME", str(tmp_path_factory.mktemp("airflow")))
    patch.setenv("AIRFLOW__CORE__LOAD_EXAMPLES", "false")
    patch.setenv(
        "AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}'
    )
    patch.delenv("RINGSYNC_SPARK_JARS", raising=False)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def bag(airflow_home: None) -> Any:
    from airflow.dag_processing.dagbag import BundleDagBag

    return BundleDagBag(DAGS, bundle_path=DAGS, bundle_name="dags")
