"""Status of the sync's loops: each loop puts it every few seconds under ``status/`` of the object store.

All functions raise UnavailableError if the store cannot be used. A status that is damaged, or of another version,
counts as if it were not there: its loop writes it again within seconds. :func:`look_at_statuses` names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore, Stat, get_json, list_named

STALE_AFTER_S = 40.0
"""Seconds without a status before a loop counts as dead."""

ABANDONED_AFTER_S = 300.0
"""Seconds without a sign of life before a bootstrap counts as abandoned: between two of its tasks there are fewer."""

BOOTSTRAPS = "bootstrap/"
"""Prefix of the names of statuses that belong to unfinished bootstraps, not to loops."""

NODES = "cluster/nodes"
"""Name of the status that tells who is down: whoever makes a plan of the sync puts it."""

STOP_KEY = "control/stop.json"
"""Object that asks all loops to end after their present cycle."""

LEFT_KEY = "control/left.json"
"""Object that is there from ``cdcservice leave`` on, until ``start``: no bootstrap may switch cdc on."""

LATE_ROWS = "staging/late/"
"""Folder of late rows that are not published yet."""

MOST_AHEAD_MS = 2_000
"""A clock may be ahead of the store's by so much, ms."""

MOST_BEHIND_MS = 10_000
"""A clock may be behind the store's by so much, ms: a store that is slow takes some seconds to write a status."""

LATELY_MS = 60_000
"""A status tells of its host's clock if it was written so long before the newest one at most, by the store's clock."""

MOST = 2**63
"""Numbers of a status are smaller than this."""

READERS = 16
"""Threads that read statuses."""

_FOLDER = "status/"

Status = Mapping[str, Any]
"""A status object; ``at_ms`` is the time when it was put, ms since the epoch."""


@dataclass(frozen=True)
class Statuses:
    """All statuses at a moment.

    :ivar understood: by the loops' names, ``<application>/<name>``, e.g. ``commitlog_stage/default``
    :ivar damaged: why others cannot be read, by the same names
    :ivar ahead_ms: ms by which clocks of the loops' hosts are ahead of the store's, by host; negative: behind. Clocks
        that are right within a store's latency are left out
    """

    understood: dict[str, Status] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    ahead_ms: dict[str, int] = field(default_factory=dict)


def look_at_statuses(store: ObjectStore) -> Statuses:
    """Read all statuses, each on its own."""
    seen = Statuses()
    clocks: list[tuple[str, int, int]] = []  # host, when a status was written, and by what its clock was ahead then

    def read(stat: Stat) -> tuple[Status, int] | str:
        """Read a status, and by what its clock is ahead, ms; a text: why it cannot be read, empty if it was removed."""
        try:
            status = _parsed(_loop(stat), store.get(stat.key))
            return status, _ahead_ms(store, stat, status)
        except NotFoundError:
            return ""
        except (ChecksumError, ValueError) as error:
            return str(error) or type(error).__name__

    stats = list_named(store, _FOLDER, r"[^/ ]+/[^/ ]+\.json")
    if len(stats) < READERS:
        answers = list(map(read, stats))
    else:  # two or three for each queue
        with ThreadPoolExecutor(READERS, thread_name_prefix="statuses") as readers:
            answers = list(readers.map(read, stats))
    for stat, answer in zip(stats, answers, strict=True):
        loop = _loop(stat)
        if isinstance(answer, str):
            seen.damaged.update({loop: answer} if answer else {})
            continue
        status, ahead_ms = answer
        seen.understood[loop] = _not_ahead(status, ahead_ms)
        if host := status.get("host"):
            clocks.append((host, stat.written_ms, ahead_ms))
    newest_ms = max((written_ms for _, written_ms, _ in clocks), default=0)
    for host, written_ms, ahead_ms in clocks:
        if written_ms > newest_ms - LATELY_MS and abs(ahead_ms) > abs(seen.ahead_ms.get(host, 0)):
            seen.ahead_ms[host] = ahead_ms
    return seen


def _loop(stat: Stat) -> str:
    return stat.key.removeprefix(_FOLDER).removesuffix(".json")


def _ahead_ms(store: ObjectStore, listed: Stat, status: Status) -> int:
    """Return by what the clock was ahead that dated a status; 0: it was right, or the store does not tell."""
    ahead_ms = int(status["at_ms"]) - listed.written_ms
    if -MOST_BEHIND_MS <= ahead_ms <= MOST_AHEAD_MS or not listed.written_ms:
        return 0
    now = store.stat(listed.key)  # what was read may have been written after it was listed
    return ahead_ms if now is not None and now.version == listed.version else 0


def _not_ahead(status: Status, ahead_ms: int) -> Status:
    """Return a status as if its clock had been right: else the last word of a dead loop stays fresh for as long as its
    clock was ahead."""
    if ahead_ms <= 0:
        return status
    moved = {"at_ms": status["at_ms"] - ahead_ms}
    if "busy" in status:
        moved["busy"] = {**status["busy"], "since_ms": status["busy"]["since_ms"] - ahead_ms}
    return {**status, **moved}


def read_statuses(store: ObjectStore) -> dict[str, Status]:
    """Read the status of each loop, by ``<application>/<name>``, e.g. ``commitlog_stage/default``."""
    return look_at_statuses(store).understood


def read_status(store: ObjectStore, key: str) -> Status | None:
    """Read the status of one loop, ``<application>/<name>``; None: there is none yet, or it cannot be understood."""
    try:
        if (stat := store.stat(f"{_FOLDER}{key}.json")) is None:
            return None
        status = _parsed(key, store.get(stat.key))
        return _not_ahead(status, _ahead_ms(store, stat, status))
    except NotFoundError:
        return None
    except (ChecksumError, ValueError) as error:
        print(f"ringsync: warning: {store.uri(f'{_FOLDER}{key}.json')} is passed over: {error}", flush=True)
        return None


def known_now(statuses: Mapping[str, Status], now_s: float) -> dict[str, Status]:
    """Return the statuses without who is down by a plan that is old: while the sync is stopped, nobody knows."""
    told = statuses.get(NODES, {})
    is_old = now_s * 1000 > (told.get("down_until_ms") or 0)
    known = {NODES: {key: value for key, value in told.items() if key != "down"}} if told and is_old else {}
    return {**statuses, **known}


def age_s(status: Status, now_s: float) -> float:
    """Return the age of a status in seconds."""
    return max(0.0, now_s - float(status["at_ms"]) / 1000)


def cycle_ms(status: Status) -> float:
    """Return when what a status says was so, ms since the epoch: while a cycle takes long, the last one is repeated."""
    return float(status["busy"]["since_ms"] if "busy" in status else status["at_ms"])


def has_left(store: ObjectStore) -> bool:
    """Tell whether ``cdcservice leave`` has ended: nobody captures for ringsync any more, and nothing is watched."""
    try:
        return bool((get_json(store, LEFT_KEY) or {}).get("has_ended"))
    except (ChecksumError, ValueError, AttributeError):
        return False


def forget(store: ObjectStore, key: str) -> None:
    """Remove the status of a loop that no longer exists, e.g. of a queue that the configuration no longer names."""
    store.delete(f"{_FOLDER}{key}.json")


def _parsed(loop: str, data: bytes) -> Status:
    """Parse a status.

    :raises ValueError: it is no JSON object, lacks a field that all have, or has one of another type
    """
    try:
        status = json.loads(data)
    except RecursionError:
        raise ValueError("the status is nested too deeply") from None
    _check(status, _BOOTSTRAP if loop.startswith(BOOTSTRAPS) else _LOOP, "the status")
    return status  # type: ignore[no-any-return]


Form = Mapping[str, Any] | type | tuple[type, ...]
"""What a field must be: of a type; or an object, with the forms of its fields, or (:data:`_EACH`) of all its values. A
field that is null or not there is unknown, but no object or list is null. A name in capitals must be there."""

_EACH = "*"
_NUMBER = (int, float)
_TEXTS: Form = {_EACH: str}
_TIMES: Form = {_EACH: _NUMBER}
_NODE: Form = {
    **{"endpoint": str, "error": str, "refused": str, "clear_at_ms": _NUMBER, "is_read": bool, "up": bool},
    **{"errors": int, "backlog_bytes": _NUMBER, "position": int, "records": int, "rows": int},
    **{"free_bytes": _NUMBER, "total_bytes": _NUMBER, "waiting": int, "archived": int, "late": int},
}
_TABLE: Form = {
    **{"error": str, "replica_error": str, "kafka_error": str, "table_id": str, "topic": str, "bootstrap": str},
    **{"last_pass": int, "published_pass": int, "replica_pass": int, "oldest_open_bucket_ms": _NUMBER},
    **{"open_buckets": int, "complete_until_ms": _NUMBER, "behind_ms": {"replica": _NUMBER, "kafka": _NUMBER}},
    "lag_ms": dict.fromkeys(("message_p50", "message_p99", "agreement_p50", "replica_p50", "kafka_p50"), _NUMBER),
}
_LOG: Form = {
    **{"error": str, "sweep_error": str, "until_ms": _NUMBER, "behind_ms": _NUMBER},
    **{"waiting": int, "waiting_from_ms": _NUMBER},
}
_PROOF: Form = {
    **{"RANGES": int, "RANGES_DIFFERING": int, "ROWS_DIFFERING": int, "FOUND_MS": _NUMBER, "PROVED_MS": _NUMBER},
    **{"overdue_ms": _NUMBER, "RUN": str},
}
_LOOP: Form = {
    **{"AT_MS": _NUMBER, "host": str, "installed": _TEXTS},
    **{"error": str, "problems": list, "unreadable": list, "broken": _TEXTS},
    **{"nodes": {_EACH: _NODE}, "tables": {_EACH: _TABLE}, "logs": {_EACH: _LOG}, "busy": {"SINCE_MS": _NUMBER}},
    **{"unread": _TEXTS, "unread_since_ms": _TIMES, "left_out": _TEXTS, "others_failed": _TEXTS},
    **{"files_broken": int, "commits_broken": _TEXTS, "rows_homeless": _TIMES, "homeless_since_ms": _TIMES},
    **{"datacenters_left_out": {_EACH: list}, "empty_generations_ms": list, "errors": int},
    **{"proofs": {_EACH: _PROOF}},
    **{"waiting": int, "oldest_ms": _NUMBER, "began_ms": _NUMBER, "clear_at_ms": _NUMBER},
    **{"disagreement_since_ms": _NUMBER, "clock_skew_ms": _NUMBER, "watched_ms": _NUMBER},
    **{"down": {_EACH: {"ENDPOINT": str, "SINCE_MS": _NUMBER, "is_cut_off": bool}}, "down_until_ms": _NUMBER},
    **{"hint_window_ms": _NUMBER},
}
_BOOTSTRAP: Form = {"AT_MS": _NUMBER, "TABLE": str, "BOOTSTRAP": str, "STEP": str, "FRACTION": _NUMBER}


def _check(value: Any, form: Form, where: str) -> None:
    """Check what readers rely on.

    :raises ValueError: a field is missing or of another type
    """
    if not isinstance(form, Mapping):
        is_no_number = isinstance(value, int | float) and not abs(value) < MOST  # NaN, too
        if not isinstance(value, form) or is_no_number or (isinstance(value, bool) and form is not bool):
            raise ValueError(f"{where} is {json.dumps(value)[:40]}")
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {json.dumps(value)[:40]}, no object")
    for key, inner in form.items():
        fields = value if key == _EACH else (key.lower(),)
        for name in fields:
            if value.get(name) is not None or (
                name in value and (key == _EACH or inner is list or isinstance(inner, Mapping))
            ):
                _check(value[name], inner, name)
            elif key.isupper():
                raise ValueError(f"{where} has no {name}")
