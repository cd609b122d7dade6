"""Nodes that are down: since when, and for how long the others keep hints for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringsync.cluster.cluster import DEFAULT_HINT_WINDOW_MS, HINT_WINDOW, hint_window_ms, read_settings
from ringsync.status import Status
from ringsync.steps.sync_plan import FRESH_MS, SyncPlan

LASTS_MS = 3_600_000
"""How long what a plan tells counts after its interval: cycles with a backlog are long. A loop that finds no newer plan
repeats the old one for days."""


class DownNodes:
    """The nodes that are down by the plans, also over several runs.

    :param before: status of ``bucket_close`` by the run before; None: there is none. After a longer stop nobody knows
        whether the nodes were up meanwhile, and it does not count
    :param now_ms: present time, ms since the epoch
    """

    def __init__(self, before: Status | None, now_ms: int) -> None:
        self._until_ms = (before or {}).get("down_until_ms", 0)
        is_fresh = before is not None and now_ms - before["at_ms"] <= FRESH_MS and now_ms <= self._until_ms
        self._down: Mapping[str, Status] = before.get("down", {}) if before and is_fresh else {}
        self._window_ms = 0

    def look(self, plan: SyncPlan, session: Any, now_ms: int) -> None:
        """Take note of who is down by a new plan. The first time that somebody is, a live node is asked for how long it
        keeps hints; ScyllaDB does not say it. Nodes may be cut off and work if nobody of their datacenter is heard."""
        self._until_ms, heard = plan.interval.end + LASTS_MS, {host.datacenter for host in plan.hosts if host.up}
        self._down = {
            host.id: {
                "endpoint": host.endpoint,
                "since_ms": min(now_ms, self._down[host.id]["since_ms"]) if host.id in self._down else now_ms,
                "is_cut_off": host.datacenter not in heard,
            }
            for host in plan.hosts
            if not host.up
        }
        live = next((host for host in plan.hosts if host.up), None)
        if self._down and not self._window_ms and live is not None:
            told = {} if plan.of_scylla else read_settings(session, live.id, HINT_WINDOW)
            self._window_ms = hint_window_ms(told)

    def status(self) -> dict[str, Any]:
        """Return who is down, for ``cdcservice status``, and until when that counts."""
        window_ms = self._window_ms or DEFAULT_HINT_WINDOW_MS
        return {"down": dict(self._down), "down_until_ms": self._until_ms, "hint_window_ms": window_ms}
