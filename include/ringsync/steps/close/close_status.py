"""What ``bucket_close`` says of a table, for ``cdcservice status`` and for ``wait``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringsync.steps.application import plain
from ringsync.steps.close.table_state import TableState


def status_of(
    state: TableState, kafka: Mapping[str, Any], closed_until: int, complete_until: int | None
) -> dict[str, Any]:
    """Tell how it stands.

    :param kafka: what is said of its topic there; empty: nothing
    :param closed_until: end of the buckets that are closed, ms since the epoch
    :param complete_until: the same, if the table has been looked at since; None: not yet
    """
    lags, agreements = state.lags_ms, state.agreement_ms
    follow_ups = _status_of_follow_ups(state)
    return {
        "error": state.error,
        "table_id": state.table.table_id,
        "topic": state.table.topic,
        "open_buckets": len(state.buckets),
        "oldest_open_bucket_ms": min((bucket.start for bucket in state.buckets), default=None),
        "rows_published": state.counts["rows"],
        "messages": state.counts["messages"],
        "duplicates": state.counts["repeated"] + state.counts["published_before"],
        "rows_agreed": state.counts["agreed"],
        "rows_read_at_close": state.counts["at_close"],
        "only_one_replica": state.counts["only_one"],
        "lag_ms": {
            "message_p50": int(np.percentile(lags, 50)) if lags else None,
            "message_p99": int(np.percentile(lags, 99)) if lags else None,
            "agreement_p50": int(np.percentile(agreements, 50)) if agreements else None,
        },
        **follow_ups,
        "complete_until_ms": complete_until if _is_complete(state, follow_ups, closed_until) else None,
        "kafka_messages": kafka.get("messages"),
        "kafka_error": kafka.get("error"),
    }


def _status_of_follow_ups(state: TableState) -> dict[str, Any]:
    """Tell how far the table's passes have come; what cannot be asked now is not known."""
    if state.follow_ups is None:
        return {"last_pass": 0, "bootstrap": "", "replica_error": None, "replica_pass": None}
    try:
        return state.follow_ups.status()
    except Exception as error:
        return {
            "last_pass": state.follow_ups.last,
            "bootstrap": "",
            "replica_error": plain(error),
            "replica_pass": None,
        }


def _is_complete(state: TableState, follow_ups: Mapping[str, Any], closed: int) -> bool:
    """Tell whether the replica has all that was written before the closed buckets' end, but for what came late.

    :param follow_ups: their status
    :param closed: ms since the epoch
    """
    return (
        not state.table.by_arrival
        and not follow_ups["bootstrap"]
        and follow_ups["replica_pass"] == follow_ups["last_pass"]
        and all(bucket.end > closed for bucket in state.buckets)
    )
