"""``cdcservice gaps``: what is missing in streams and replicas, and taking note of it."""

from __future__ import annotations

import argparse
import getpass
import json
import time
from dataclasses import asdict

from rich.console import Console

from ringsync.config import load_config
from ringsync.ledger.gaps import Acknowledged, Gaps, acknowledge, acknowledged, close_gap, gap_key
from ringsync.service.lost import Lost, look_for_lost
from ringsync.status import read_statuses
from ringsync.steps.application import ExitCode, StepError
from ringsync.terminal import say
from ringsync.wiring import store_of


def list_gaps(arguments: argparse.Namespace, console: Console) -> ExitCode:
    store = store_of(load_config(arguments.conf))
    found = look_for_lost(store, read_statuses(store), Gaps(store))
    there = [lost for lost in found if lost.unverified is not None]
    for lost in there:
        text = lost.problem(store).text
        say(console, json.dumps(_document(lost, text)) if arguments.json else f"{lost.key}: {text}")
    for noted in acknowledged(store) if arguments.all else ():
        say(console, json.dumps(asdict(noted)) if arguments.json else _acknowledged(noted))
    if not there and not arguments.json:
        say(console, "no gap is open")
    return ExitCode.COMPLETED_WITH_ERRORS if there else ExitCode.OK


def acknowledge_gaps(arguments: argparse.Namespace, console: Console) -> ExitCode:
    store = store_of(load_config(arguments.conf))
    if not arguments.reason.strip():
        raise StepError("--reason is empty: say why the gap is not repaired; it is kept with the gap")
    keys = [gap_key(name) for name in arguments.gaps]
    there = Gaps(store).look()
    if missing := [key for key in keys if key not in there]:
        raise StepError(f"{', '.join(missing)}: there is no such gap; cdcservice gaps list shows all. Nothing was done")
    for key in keys:
        gap = there[key]
        document = asdict(gap) if gap else None
        acknowledge(store, Acknowledged(key, arguments.reason, _user(), int(time.time() * 1000), document))
        close_gap(store, key)
        say(console, f"{key} is acknowledged: what it names stays missing")
    return ExitCode.OK


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may have no name for its user
        return ""


def _document(lost: Lost, text: str) -> dict[str, object]:
    return {"key": lost.key, "text": text, "unverified": lost.unverified, "gap": asdict(lost.gap) if lost.gap else None}


def _acknowledged(noted: Acknowledged) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(noted.at_ms / 1000))
    return f"{noted.key}: acknowledged at {moment} by {noted.by or 'somebody'}: {noted.reason}"
