"""``cdcservice status``: how the sync stands, for people and for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from rich.console import Console

from ringsync.config import load_config
from ringsync.ledger.alarms import raised_now
from ringsync.metrics import exposition
from ringsync.service.delays import counted
from ringsync.service.look import look
from ringsync.service.show import status_lines
from ringsync.status import known_now, read_statuses
from ringsync.steps.application import ExitCode
from ringsync.terminal import say
from ringsync.wiring import store_of


def status(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store, now_s = store_of(config), time.time()
    if arguments.prometheus:
        raised = [alarm.labels for alarm in raised_now(store)]
        sys.stdout.write(exposition({**known_now(read_statuses(store), now_s), **counted(store)}, raised))
        return ExitCode.OK
    seen = look(config, store, now_s)
    if arguments.json:
        document = {
            "healthy": not seen.problems,
            "problems": [{"kind": one.kind, "where": one.where, "text": one.text} for one in seen.problems],
            "stopped": seen.stopped,
            "loops": seen.statuses,
            "dags": {dag: asdict(health) for dag, health in seen.dags.items()},
        }
        print(json.dumps(document, indent=2))
    else:
        for line in status_lines(seen.statuses, seen.dags, now_s):
            say(console, line)
        for problem in seen.problems:
            say(console, f"! {problem.text} (docs/runbook.md#{problem.kind})")
        if not seen.problems:
            say(console, "all is well")
    return ExitCode.COMPLETED_WITH_ERRORS if seen.problems else ExitCode.OK
