"""A forecast that cannot be made ends no bootstrap; a scan that would be refused is told before it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.session import GuardrailError
from ringsync.sources.scan.forecast import Unknown
from ringsync.steps.application import ExitCode
from ringsync.steps.bootstrap import prepare
from ringsync.steps.bootstrap.plan import SSTABLE, TOKEN_RANGE
from ringsync.steps.bootstrap.space import Space


@dataclass(frozen=True)
class Scan:
    """A scan's plan, as far as it is looked at."""

    table: Any
    element_times: bool = True


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepares a table whose forecast does this; gives the forecast that its plan is made with."""
    monkeypatch.setattr(prepare, "make_scan_plan", lambda *_, **__: Scan(SimpleNamespace(full_name="shop.orders")))
    monkeypatch.setattr(prepare, "as_recorded", lambda _, table: table)
    monkeypatch.setattr(prepare, "check_selection", lambda *_: None)
    monkeypatch.setattr(prepare, "expected_bytes", lambda *_: 0)
    monkeypatch.setattr(prepare, "check_space", lambda *_: None)
    monkeypatch.setattr(prepare, "plan_table", lambda *given: ({"forecast": given[3]}, ExitCode.OK))

    def run(mode: str, forecast: Any) -> Any:
        monkeypatch.setattr(prepare, "read_a_little", forecast)
        options = SimpleNamespace(
            mode=mode, splits=None, columns=None, token_range=None, where=None, dry_run=True, enable_cdc=False
        )
        application = SimpleNamespace(config=None, options=options, store=None, run="r")
        shared = SimpleNamespace(session=None)
        given: Any = SimpleNamespace(
            application=application, shared=shared, now=0, permits=None, tables=1, space=Space()
        )
        report, code = prepare.prepare_table(given, ("shop", "orders"))
        assert code == ExitCode.OK
        return report["forecast"]

    return run


def refused(*_: Any) -> Any:
    raise GuardrailError("pages of 5,000 rows are not allowed", "page_size")


def test_what_would_refuse_the_scan_too_is_told_before_it(prepared: Any) -> None:
    with pytest.raises(GuardrailError, match="not allowed"):
        prepared(TOKEN_RANGE, refused)


@pytest.mark.parametrize("mode", [TOKEN_RANGE, SSTABLE])
def test_a_bootstrap_goes_on_without_a_forecast(prepared: Any, mode: str) -> None:
    unknown = Unknown("a place cannot be read")
    assert prepared(mode, lambda *_: unknown) == unknown
