"""``cdcservice limits``: shows and changes the limits of reading from the cluster."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from rich.console import Console

from ringsync.cluster.control import get_limits, put_limits
from ringsync.config import load_config
from ringsync.service.run_parsers import LIMITS
from ringsync.steps.application import ExitCode
from ringsync.terminal import say
from ringsync.wiring import cluster_limits, store_of


def limits(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store = store_of(config)
    amounts = {
        name: value * unit if value else None
        for name, (_, _, unit) in LIMITS.items()
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.reset:
        put_limits(store, None)
    if amounts:
        put_limits(store, replace(get_limits(store) or cluster_limits(config), **amounts))
    kept = get_limits(store)
    say(console, "limits of all runs together, " + ("set here" if kept else "from the configuration") + ":")
    for name, value in asdict(kept or cluster_limits(config)).items():
        _, meaning, unit = LIMITS[name]
        say(console, f"  {meaning}: {'no limit' if value is None else f'{value / unit:,g}'}")
    return ExitCode.OK
