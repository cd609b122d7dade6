"""Facts about the Spark applications for the DAGs: where they are, how to submit them, what their exit codes mean.

Airflow imports this when it parses the DAG files, so it imports only the standard library. Everything is a value or a
pure function, so tests need neither Airflow nor Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

OWNER = "ringsync"

NAME_PATTERN = r'("([^"]|"")+"|[A-Za-z][A-Za-z0-9_]*)'
TABLE_PATTERN = rf"^{NAME_PATTERN}\.{NAME_PATTERN}$"
"""``keyspace.table`` for the trigger form and API; :func:`ringsync.cql.identifiers.parse_table_name` reads the same."""

_PIECE = r'("([^"]|"")+"|[A-Za-z0-9_*?])+'
TABLES_PATTERN = rf"^\s*{_PIECE}\.{_PIECE}([\s,]+{_PIECE}\.{_PIECE})*[\s,]*$"
"""Names and patterns of tables; :func:`ringsync.cql.identifiers.parse_table_patterns` reads these, and is stricter."""

PROJECT = Path(os.environ.get("RINGSYNC_HOME") or Path(__file__).resolve().parents[2])
"""Folder with spark_apps/ and config/: this checkout unless RINGSYNC_HOME names another."""

SPARK_CONNECTION = "spark_default"
SPARK_POOL = os.environ.get("RINGSYNC_SPARK_POOL") or "default_pool"
"""Pool of Spark JVMs, one slot each. Airflow always has default_pool; any other pool must be created first."""

LOOP_POOL = "default_pool"
"""Pool of the loops: they always run, so they must not wait behind bootstraps or occupy slots of Spark's pool."""

RETRIES, RETRY_DELAY_S = 2, 30.0
"""Further tries of a step whose application crashed, was killed or was interrupted; other failures get none."""
LOOP_RETRIES, LOOP_RETRY_DELAY_S = 100, 5.0
"""Further tries of a loop, which goes on where it was. If even the last one fails, the next run begins at once."""
LOOPS_SINCE = datetime(2026, 1, 1, tzinfo=UTC)
"""Start date of ``@continuous`` DAGs, and the date of their first run; a later run's date is the end of the run before.
Without it the first run ends on its own date, so the second would have the same date and never start."""
LOOP_PRIORITY = 100
"""Priority of loops if there are more tasks than slots; any other task has one plus the number of tasks behind it."""
LOOP_REST_S = 30.0
"""Seconds for which a loop that failed for good keeps its run open: ``@continuous`` starts the next run at once."""
LOOP_GRACE_S = 300.0
"""Seconds that a loop without Spark may take to end after ``sync.run_s``; then it hangs."""
SPARK_LOOP_GRACE_S = 1800.0
"""The same of a loop with Spark, whose last cycle may be the large one of a backlog."""


def _task_arguments(pool: str, priority: int, retries: int, delay_s: float) -> dict[str, Any]:
    delay = timedelta(seconds=delay_s)
    return {"pool": pool, "priority_weight": priority, "retries": retries, "retry_delay": delay}


STEP_ARGUMENTS = _task_arguments(SPARK_POOL, 1, RETRIES, RETRY_DELAY_S)
PROCESS_ARGUMENTS = _task_arguments(LOOP_POOL, 1, RETRIES, RETRY_DELAY_S)
URGENT_ARGUMENTS = _task_arguments(LOOP_POOL, LOOP_PRIORITY, RETRIES, RETRY_DELAY_S)
LOOP_ARGUMENTS = _task_arguments(LOOP_POOL, LOOP_PRIORITY, LOOP_RETRIES, LOOP_RETRY_DELAY_S)
MERGE_LOOK_S = 300.0
"""Greatest number of seconds between two looks for changes to merge into the replicas' bases."""

_LOG_SETTINGS = PROJECT / "config" / "spark-log4j2.properties"
_LEAN_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For applications of some seconds: C1 only, one GC thread (docs/performance.md)."""

_END_OF_RUN = {
    1: "completed with differences or errors, which its report lists",
    2: "aborted, too many errors or wrong arguments",
    3: "configuration, connection or rights",
    4: "interrupted",
    5: "crashed",
}
_FINAL = frozenset({1, 2, 3})
"""Exit codes after which another try would fail again."""


def config_path() -> str:
    """Return the path of ringsync.yaml: RINGSYNC_CONFIG, or config/ringsync.yaml of the project."""
    return os.environ.get("RINGSYNC_CONFIG") or str(PROJECT / "config" / "ringsync.yaml")


def known_config() -> Any:
    """Return the configuration, or the last good one: a typo must not take the DAGs out of Airflow. Tasks read the file
    again.

    :returns: a :class:`ringsync.config.Config`
    :raises ConfigError: the file is wrong, and never was right on this host
    """
    from ringsync.config.last_good import load_last_good

    return load_last_good(config_path())[0]


_TABLES = "(params.table or '*.*')"
"""The tables of a run, in templates; only ``replica_verify`` runs without their names: for all that are due."""


@dataclass(frozen=True)
class SparkApplication:
    """One Spark application, as it is submitted.

    :ivar name: name of its file in spark_apps/, without ``.py``
    :ivar options: the arguments that only this application has, as Jinja templates of the DAG run's ``params``;
        a template that renders to nothing is left out (:func:`given`)
    :ivar driver_memory: greatest heap of the driver's JVM; empty: it is a plain process, without Spark
    :ivar lean: whether to start fast rather than run fast
    :ivar of_table: whether a run is for the tables of the parameter ``table``
    :ivar urgent: whether it has a slot beside the loops, and never waits behind bootstraps
    :ivar loop: whether it works for some minutes, and can be killed and started again at any time
    :ivar queue: name of the queue whose workers can run it; None: any
    :ivar lasting: whether it goes on with the last good configuration while ``ringsync.yaml`` is wrong, and without
        secrets that cannot be had
    :ivar secrets: sections of the configuration whose secrets it uses
    :ivar bound: name of the setting that says how long a try of its tasks may take, hours, or seconds of a loop; empty:
        as long as it needs
    """

    name: str
    options: tuple[str, ...]
    driver_memory: str
    lean: bool = False
    of_table: bool = True
    urgent: bool = False
    loop: bool = False
    queue: str | None = None
    lasting: bool = False
    secrets: tuple[str, ...] = ("cassandra", "kafka")
    bound: str = ""

    @property
    def path(self) -> str:
        """Path of the application's file."""
        return str(PROJECT / "spark_apps" / f"{self.name}.py")

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Arguments of its Airflow tasks that say when they run and how often they are tried."""
        if self.loop:
            return LOOP_ARGUMENTS
        return URGENT_ARGUMENTS if self.urgent else STEP_ARGUMENTS if self.driver_memory else PROCESS_ARGUMENTS

    def longest_s(self, config: Any) -> float | None:
        """Return how long a try of its tasks may take, s; None: as long as it needs.

        :param config: a :class:`ringsync.config.Config`
        """
        if not self.bound:
            return None
        section, name = self.bound.split(".")
        value = float(getattr(getattr(config, section), name))
        grace_s = SPARK_LOOP_GRACE_S if self.driver_memory else LOOP_GRACE_S
        return value + grace_s if self.loop else 3600 * value

    @property
    def run(self) -> str:
        """Template of the run's id, which is also the report's name; ``safe_run_id`` is a macro of the DAGs."""
        return f"{{{{ safe_run_id(run_id ~ '.{self.queue}') }}}}" if self.queue else "{{ safe_run_id(run_id) }}"

    @property
    def title(self) -> str:
        """Template of the name that Spark shows."""
        return " ".join((self.name, *([f"{{{{ {_TABLES} | truncate(80) }}}}"] if self.of_table else []), self.run))

    def arguments(self) -> list[str]:
        """Return the application's arguments, as templates."""
        table = ["--table", f"{{{{ {_TABLES} }}}}"] if self.of_table else []
        queue = ["--queue", self.queue] if self.queue else []
        return ["--conf", config_path(), *table, "--run", self.run, *queue, *self.options]

    def spark_conf(self) -> dict[str, str]:
        """Return the settings that the JVM needs at its start; the application makes all others."""
        options = [f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}", *([_LEAN_JVM] if self.lean else [])]
        conf = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": " ".join(options)}
        if jars := os.environ.get("RINGSYNC_SPARK_JARS"):
            conf["spark.jars"] = jars
        return conf


def flag(name: str) -> str:
    """Return the template of a flag that is given if the parameter of its name is true: ``dry_run`` → ``--dry-run``."""
    return f"{{{{ '--{name.replace('_', '-')}' if params.get('{name}') else '' }}}}"


def option(name: str) -> str:
    """Return the template of an option, given if its parameter has a value: ``token_range`` → ``--token-range=…``.

    Name and value are one argument, since a value may begin with a hyphen.
    """
    return f"{{{{ '--{name.replace('_', '-')}=' ~ params.get('{name}') if params.get('{name}') else '' }}}}"


_SCAN_BOUND = "scan.task_timeout_h"
BOOTSTRAP_PREPARE = SparkApplication(
    "bootstrap_prepare",
    (
        *map(option, ("mode", "splits", "columns", "token_range", "where")),
        *map(flag, ("restart", "enable_cdc", "dry_run")),
    ),
    driver_memory="1g",
    lean=True,
    bound=_SCAN_BOUND,
)
NO_SNAPSHOT = (
    "{{ 'dry run: nothing is copied' if params.dry_run else "
    "'' if (params.mode or default_mode) == 'sstable' else 'the rows are selected from the cluster' }}"
)
"""Template of why no snapshots are taken; ``default_mode`` is a macro of the DAG."""

BOOTSTRAP_SCAN = SparkApplication("bootstrap_scan", (), driver_memory="2g", bound=_SCAN_BOUND)
BOOTSTRAP_DRAIN = SparkApplication(
    *("bootstrap_drain", ("{{ '' if params.verify else '--last' }}",)),
    driver_memory="1g",
    lean=True,
    bound=_SCAN_BOUND,
)
REPLICA_VERIFY = SparkApplication(
    *("replica_verify", (flag("repair"), "{{ '' if params.table else '--due' }}")),
    driver_memory="2g",
    bound=_SCAN_BOUND,
)


def _loop(name: str, *, driver_memory: str = "1g", queue: str | None = None) -> SparkApplication:
    return SparkApplication(
        *(name, (), driver_memory), lean=True, of_table=False, loop=True, queue=queue, bound="sync.run_s"
    )


BUCKET_CLOSE = _loop("bucket_close")
SCYLLA_LOG_STAGE = _loop("scylla_log_stage")
OUT_OF_SEQUENCE = _loop("out_of_sequence")
SCHEMA_UPDATE = _loop("schema_update", driver_memory="512m")
REPLICA_MERGE = SparkApplication(
    "replica_merge", (option("table"),), driver_memory="2g", of_table=False, bound="replica.task_timeout_h"
)


def sstable_snapshot(queue: str) -> SparkApplication:
    """Return the application that takes the snapshots of a queue's nodes. It is a plain process, without Spark."""
    of_run = "--bootstrap-run={{ safe_run_id(run_id) }}"
    return SparkApplication(
        *("sstable_snapshot", (of_run,)),
        driver_memory="",
        queue=queue,
        secrets=("cassandra",),
        bound="sstable.task_timeout_h",
    )


def commitlog_stage(queue: str) -> SparkApplication:
    """Return the application that reads the logs of a queue's nodes."""
    return replace(_loop("commitlog_stage", queue=queue), secrets=("cassandra",))


def commitlog_archive(queue: str) -> SparkApplication:
    """Return the application that archives the logs of a queue's nodes. It is a plain process, without Spark."""
    return replace(_loop("commitlog_archive", driver_memory="", queue=queue), lasting=True, secrets=("cassandra",))


_OF_BACKFILL = "dag_run.run_type == 'backfill'"
ARCHIVE_REPROCESS = SparkApplication(
    "archive_reprocess",
    tuple(
        f"{{{{ '--{name}=' ~ {moment}.isoformat() if {_OF_BACKFILL} else "
        f"'--{name}=' ~ params.get('{name}') if params.get('{name}') else '' }}}}"
        for name, moment in (("since", "data_interval_start"), ("until", "data_interval_end"))
    ),
    driver_memory="1g",
    lean=True,
    of_table=False,
    urgent=True,
    bound="archive.task_timeout_h",
)


def dag_of(application: SparkApplication) -> str:
    """Return the DAG of a loop. Each loop has its own, and so has each queue: one whose workers are away, or that is
    slow, must keep no other from working.

    :param application: the loop; of that of the default queue, and of those without a queue, the DAG has its name
    """
    from ringsync.config import DEFAULT_QUEUE

    is_default = application.queue in (None, DEFAULT_QUEUE)
    return application.name if is_default else f"{application.name}_{application.queue}"


ALARMS_DAG = "alarms"
"""The DAG that raises alarms."""

ARCHIVE_ASSET = "ringsync_archive"
"""The asset that changes when commit logs were archived."""


def nothing_archived() -> str:
    """Return why there is nothing to reprocess; empty: archived commit logs wait. For the DAG's template: this is asked
    before Spark is started.

    :raises StorageError: the object store cannot be asked
    """
    from ringsync.ledger.archive import is_waiting
    from ringsync.wiring import store_of

    return "" if is_waiting(store_of(known_config())) else "no archived commit log waits"


Parameter = dict[str, Any]
"""Arguments of Airflow's ``Param``: the default, and the JSON schema that makes its field in the trigger form."""


def _text(title: str, description: str) -> Parameter:
    return {
        **{"default": None, "type": ["null", "string"]},
        **{"title": title, "section": "Selection", "description_md": description},
    }


def _switch(title: str, description: str, default: bool = False) -> Parameter:
    return {"default": default, "type": "boolean", "title": title, "description_md": description}


TABLE_PARAMETER: Parameter = {
    "type": "string",
    "pattern": TABLE_PATTERN,
    "title": "Table",
    "description_md": "`keyspace.table`, e.g. `shop.orders`. As in CQL, double quotes keep case and special characters",
}

TABLES_PARAMETER: Parameter = {
    "type": "string",
    "pattern": TABLES_PATTERN,
    "title": "Tables",
    "description_md": "`keyspace.table`, e.g. `shop.orders`; or several of them, and patterns with `*` and `?`, e.g. "
    "`shop.*, crm.customers`. As in CQL, double quotes keep case and special characters",
}

BOOTSTRAP_PARAMETERS: dict[str, Parameter] = {
    "table": TABLES_PARAMETER,
    "dry_run": _switch("Dry run", "Check and forecast only; copy nothing"),
    "verify": _switch("Verify", "Compare source and replica cell by cell afterwards", default=True),
    "enable_cdc": _switch(
        "Enable cdc",
        "`ALTER TABLE … WITH cdc = true`, so that the sync, which must run, follows the table; off: the table is not "
        "altered",
    ),
    "restart": _switch("Restart", "Begin anew, even if an earlier run left an unfinished bootstrap to continue"),
    "mode": {
        **{"default": None, "type": ["null", "string"], "enum": [None, "token_range", "sstable"]},
        **{"title": "Mode", "section": "Tuning"},
        "description_md": "`token_range`: rows are selected from the cluster; `sstable`: they come from snapshots of "
        "the nodes; empty: as `scan.mode` says",
    },
    "columns": _text("Columns", "`name, name, …`: copy only these value columns, and the key; empty: all columns"),
    "token_range": _text("Token range", "`START:END`: copy only tokens above START, up to END; empty: the whole ring"),
    "where": _text("Where", "Copy only rows whose key fits this condition, e.g. `day >= '2026-01-01'`; empty: all"),
    "splits": {
        **{"default": None, "type": ["null", "integer"], "minimum": 1, "maximum": 65536},
        **{"title": "Splits", "section": "Tuning"},
        "description_md": "Pieces into which the token ring is cut; empty: by the table's size",
    },
}
"""Parameters of the DAG ``bootstrap_table``."""

VERIFY_PARAMETERS: dict[str, Parameter] = {
    "table": {
        **TABLES_PARAMETER,
        **{"default": None, "type": ["null", "string"]},
        "description_md": f"{TABLES_PARAMETER['description_md']}; empty, as in scheduled runs: all that the sync "
        "follows, of large ones the token ranges that were compared longest ago",
    },
    "repair": _switch("Repair", "Read ranges that differ again, and correct the replica"),
}
"""Parameters of the DAG ``replica_verify``."""

MERGE_PARAMETERS: dict[str, Parameter] = {
    "table": {
        **TABLE_PARAMETER,
        **{"default": None, "type": ["null", "string"]},
        "description_md": "`keyspace.table`: merge this table now; empty: all tables that are due",
    },
}
"""Parameters of the DAG ``replica_merge``."""


REPROCESS_PARAMETERS: dict[str, Parameter] = {
    name: {
        **{"default": None, "type": ["null", "string"], "format": "date-time"},
        "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d",
        **{"title": title, "description_md": about},
    }
    for name, title, about in (
        (
            "since",
            "Since",
            "Read logs with writes from this time on, read before or not; empty: only new logs",
        ),
        ("until", "Until", "Together with *since*: only logs with writes before this time"),
    )
}
"""Parameters of the DAG ``archive_reprocess``."""


def given(arguments: Sequence[str]) -> list[str]:
    """Return the rendered arguments without empty ones: a template that renders to nothing is an option not given."""
    return [argument for argument in arguments if argument != ""]


def safe_run_id(run_id: str) -> str:
    """Return a DAG run's id as applications take it: letters, digits and ``_.:+-``, a letter or digit first."""
    return re.sub(r"[^A-Za-z0-9_.:+-]", "-", run_id).lstrip("_.:+-")[:200] or "run"


LOOP_DAG: dict[str, Any] = {
    "schedule": "@continuous",
    "start_date": LOOPS_SINCE,
    "catchup": False,
    "max_active_runs": 1,
    "is_paused_upon_creation": True,
    "tags": ["ringsync", "sync"],
    "default_args": {"owner": OWNER},
    "user_defined_macros": {"safe_run_id": safe_run_id},
}
"""Arguments of the DAGs of loops: one run at a time, and the next one as soon as it ends."""


@dataclass(frozen=True)
class Failure:
    """The reason why a step failed, for people, and whether another try can help."""

    message: str
    may_retry: bool


def explain_failure(application: str, output: str) -> Failure:
    """Explain an exception of the Spark operator: what failed and what to do.

    The operator raises one exception for every failure: the command, ``Error code is: N.`` and the last lines of
    output (SparkSubmitHook.submit). The applications print ``ringsync: error: …`` and ``ringsync: report: …``, and
    exit with the codes in docs/airflow.md; a negative code is the signal that killed spark-submit.

    :param output: the exception's text
    """
    stated = re.search(r"Error code is: (-?\d+)", output)
    code = int(stated.group(1)) if stated else None
    errors = re.findall(r"^ringsync: error: (.*(?:\n(?!ringsync: |\d\d/\d\d/\d\d ).+)*)", output, re.MULTILINE)
    exceptions = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", output, re.MULTILINE)
    spoke = re.search(r"^ringsync: (error|report): ", output, re.MULTILINE) is not None
    if code is None:
        end = "could not be submitted"
    elif code < 0 or code in (137, 143):
        end = f"killed by signal {-code if code < 0 else code - 128}: out of memory, or stopped by somebody"
    elif not spoke:
        end = f"exit code {code} before it could say why"
    else:
        end = f"exit code {code}, {_END_OF_RUN.get(code, 'not one of ours')}"
    detail = (errors or exceptions or ["see its output above"])[-1].strip()
    # Spark itself exits with 1, too, when it cannot start or the application does not catch an exception.
    return Failure(f"{detail} [{application}: {end}]", not (spoke and code in _FINAL))


_AFTER_TIMEOUT = {
    "sstable_snapshot": "The scan reads the snapshots that are there, if they are enough. If copies were only slow, "
    "raise the setting, or sstable.megabytes_per_s. Run the bootstrap again, which copies what is missing",
    "commitlog_archive": "The next try goes on where it was. Nodes may lack room: see cdcservice status",
}
_LOOP_STUCK = "The next try goes on where it was; at what it was stuck is in cdcservice status"
_SLOW_OR_STUCK = "If it was only slow, raise the setting; run it again, which goes on where it stopped"


def explain_timeout(application: SparkApplication, longest_s: float) -> Failure:
    """Explain that a task was stopped because it took too long: a loop is tried again, a step would only hang again.

    :param longest_s: so long it was allowed to take, s
    """
    told = f"{longest_s / 3600:g} h" if longest_s >= 3600 else f"{longest_s:g} s"
    advice = _AFTER_TIMEOUT.get(application.name, _LOOP_STUCK if application.loop else _SLOW_OR_STUCK)
    return Failure(
        f"it did not end in {told} ({application.bound}), and was stopped: the end of its output, above, shows for "
        f"what it waited. {advice} [{application.name}: stopped]",
        application.loop,
    )
