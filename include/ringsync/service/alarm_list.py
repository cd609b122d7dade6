"""``cdcservice alarms``: what is raised now, and what was raised and cleared before."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console

from ringsync.config import load_config
from ringsync.ledger.alarms import Alarm, history, raised_now
from ringsync.progress import duration
from ringsync.service.expected import ALARMS
from ringsync.status import STALE_AFTER_S, age_s, read_status
from ringsync.steps.application import ExitCode
from ringsync.terminal import say, say_error
from ringsync.wiring import store_of


def alarms(arguments: argparse.Namespace, console: Console) -> ExitCode:
    now_ms = int(time.time() * 1000)
    store, since_ms = store_of(load_config(arguments.conf)), now_ms - int(arguments.days * 86_400_000)
    raised = raised_now(store)
    before = [alarm for alarm in history(store, since_ms) if alarm.cleared_ms is not None]
    alarms = sorted([*raised, *before], key=lambda alarm: alarm.raised_ms or 0)
    watch = read_status(store, ALARMS)
    is_silent = watch is None or age_s(watch, now_ms / 1000) > STALE_AFTER_S
    if is_silent:
        say_error("nobody watches: the DAG alarms gives no sign of life; cdcservice start switches it on")
    for line in map(_as_json, alarms) if arguments.json else alarm_lines(alarms, now_ms):
        say(console, line)
    return ExitCode.COMPLETED_WITH_ERRORS if raised or is_silent else ExitCode.OK


def _as_json(alarm: Alarm) -> str:
    return json.dumps(asdict(alarm) | {"page": alarm.page})


def alarm_lines(alarms: Sequence[Alarm], now_ms: int) -> Iterator[str]:
    """Format alarms for people.

    :param now_ms: present time, ms since the epoch
    """
    if not alarms:
        yield "no alarm was raised"
    for alarm in alarms:
        assert alarm.raised_ms is not None
        lasted = duration(((alarm.cleared_ms or now_ms) - alarm.raised_ms) / 1000)
        state = f"cleared after {lasted}" if alarm.cleared_ms else f"raised for {lasted}"
        moment = datetime.fromtimestamp(alarm.raised_ms / 1000, UTC).isoformat(timespec="seconds")
        yield f"{moment} {alarm.kind} at {alarm.where}, {state}: {alarm.text} ({alarm.page})"
