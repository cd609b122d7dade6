"""Airflow 3.3 on one machine: SQLite, LocalExecutor, everything on the loopback interface.

`airflow standalone` also starts servers of task logs. They listen on every interface, and no setting changes that
(airflow/utils/serve_logs/core.py, 3.3.2). So we start the four components one by one, without log servers; the API
server reads the logs from their files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from servers import ServerError, last_lines
from servers.java import find_java_home
from servers.ports import require_free
from servers.process import Server, ServerProcess, stop_together

PROJECT = Path(__file__).parent.parent
ADDRESS = "127.0.0.1"
START_SECONDS = 180
STOP_SECONDS = 10
MIGRATE_SECONDS = 180
COMPONENTS = {
    "api-server": [],
    "scheduler": ["--skip-serve-logs"],
    "dag-processor": [],
    "triggerer": ["--skip-serve-logs"],
}
HEALTHY_PARTS = ("metadatabase", "scheduler", "dag_processor", "triggerer")


class Airflow(Server):
    """
    Airflow in a folder of its own: `with Airflow(home, port, dags) as airflow: airflow.url`.

    A second start uses the runs, the password and the keys of the first one.

    :param home: folder of database, logs, keys and password; only the owner may read it.
    :param port: port of the UI and the API.
    :param dags: folder of the DAGs.
    :param plugins: folder of the plugins; None: none.
    :param environment: further environment variables for all components and tasks, for example `RINGSYNC_CONFIG`.
    :param parallelism: number of tasks that run at once; the sync's loops are four of them.
    """

    username = "admin"

    def __init__(
        self,
        home: Path,
        port: int,
        dags: Path,
        plugins: Path | None = None,
        environment: Mapping[str, str] | None = None,
        parallelism: int = 6,
    ) -> None:
        self.home = home.resolve()
        self.port = port
        self.dags = dags.resolve()
        self.plugins = plugins.resolve() if plugins else self.home / "plugins"
        self.parallelism = parallelism
        self._environment = dict(environment or {})
        self._processes: dict[str, ServerProcess] = {}
        self._dead: list[ServerProcess] = []

    @property
    def url(self) -> str:
        """Address of the UI and the API."""
        return f"http://{ADDRESS}:{self.port}"

    @property
    def password_file(self) -> Path:
        """JSON object of user name → password, readable by the owner only."""
        return self.home / "passwords.json"

    @property
    def password(self) -> str:
        """
        The password of `username`; the first start makes one.

        :raises ServerError: Airflow has not been started yet.
        """
        try:
            return str(json.loads(self.password_file.read_text())[self.username])
        except FileNotFoundError as error:
            raise ServerError(f"There is no password yet: start Airflow first. ({self.password_file})") from error

    @property
    def pids(self) -> dict[str, int]:
        """Component → the id of its process, which is also the id of its session; empty if Airflow is not running."""
        return {name: process.pid for name, process in self._processes.items()}

    def start(self) -> None:
        """
        Prepare the database, start the components and wait until all are healthy.

        :raises ServerError: Airflow runs already, the port is taken, Java is missing, or a component does not come up;
            with the end of the component's log.
        """
        if self._processes:
            raise ServerError(f"The Airflow in {self.home} is already running.")
        require_free(ADDRESS, {"Airflow": self.port})
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        self.plugins.mkdir(exist_ok=True)
        self._make_password()
        environment = self.environment()
        self._migrate(environment)
        try:
            for name in COMPONENTS:
                self._processes[name] = self._component(name, environment)
            self._processes["api-server"].wait_until(self._healthy, START_SECONDS, "Airflow")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all components and everything they started (SIGTERM; running tasks have 10 s to end, then SIGKILL)."""
        stop_together([*self._processes.values(), *self._dead], STOP_SECONDS)
        self._processes.clear()
        self._dead.clear()

    def revive(self, component: str) -> None:
        """
        Start a dead component again, as a service manager does. Processes that it had started may live on until `stop`.

        :param component: a name in `COMPONENTS`.
        :raises ServerError: the component has not ended.
        """
        if not self._processes[component].ended:
            raise ServerError(f"Airflow's {component} is running: it cannot be revived.")
        self._dead.append(self._processes[component])
        self._processes[component] = self._component(component, self.environment())

    def _component(self, name: str, environment: Mapping[str, str]) -> ServerProcess:
        command = [*airflow_command(), name, *COMPONENTS[name]]
        return ServerProcess(command, self.home / f"{name}.log", environment, self.home)

    def environment(self) -> dict[str, str]:
        """
        Return the environment variables of all components and tasks; settings of another Airflow are left out.

        :raises ServerError: there is no Java 17.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
        # The task that raises alarms asks the API how the DAGs stand.
        password = {"RINGSYNC_AIRFLOW_PASSWORD": self.password} if self.password_file.exists() else {}
        return inherited | self._settings() | spark_environment() | password | self._environment

    def _settings(self) -> dict[str, str]:
        settings: dict[str, dict[str, object]] = {
            "core": {
                "dags_folder": self.dags,
                "plugins_folder": self.plugins,
                "executor": "LocalExecutor",
                "parallelism": self.parallelism,
                "load_examples": False,
                "dags_are_paused_at_creation": False,
                "execution_api_server_url": f"{self.url}/execution/",
                "simple_auth_manager_users": f"{self.username}:admin",
                "simple_auth_manager_passwords_file": self.password_file,
                # The default asks the resolver for a name.
                "hostname_callable": "socket.gethostname",
            },
            "database": {"sql_alchemy_conn": f"sqlite:///{self.home / 'airflow.db'}"},
            "logging": {"base_log_folder": self.home / "logs"},
            "api": {"host": ADDRESS, "port": self.port, "base_url": self.url, "workers": 1},
            # A file that changes is parsed at once. Parsing all every few seconds would take a quarter of a core.
            "dag_processor": {"refresh_interval": 5, "min_file_process_interval": 60, "parsing_processes": 1},
            "scheduler": {
                "enable_health_check": False,
                # A loop whose worker was killed stands still for so many seconds: the default is 300.
                "task_instance_heartbeat_timeout": 60,
                "orphaned_tasks_check_interval": 60,
            },
            # On busy cores the API server's answer may take longer than the default of five seconds.
            "workers": {"execution_api_timeout": 30},
        }
        variables = {
            f"AIRFLOW__{section}__{key}".upper(): str(value)
            for section, keys in settings.items()
            for key, value in keys.items()
        }
        spark = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
        return variables | {"AIRFLOW_HOME": str(self.home), "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(spark)}

    def _make_password(self) -> None:
        if not self.password_file.exists():
            self.password_file.touch(mode=0o600)
            self.password_file.write_text(json.dumps({self.username: secrets.token_urlsafe(12)}))

    def _migrate(self, environment: Mapping[str, str]) -> None:
        version = importlib.metadata.version("apache-airflow")
        migrated = self.home / f"migrated-{version}"
        if migrated.exists():
            return
        answer = subprocess.run(
            [*airflow_command(), "db", "migrate"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(environment),
            cwd=self.home,
            timeout=MIGRATE_SECONDS,
            check=False,
        )
        if answer.returncode != 0:
            raise ServerError(f"Airflow could not prepare its database:\n{last_lines(answer.stdout)}")
        migrated.touch()

    def _healthy(self) -> bool:
        for name, process in self._processes.items():
            if process.ended:
                raise ServerError(f"Airflow's {name} ended while starting.\n{process.log_end()}")
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/monitor/health", timeout=5) as answer:
                health = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return False  # not up yet
        return all((health.get(part) or {}).get("status") == "healthy" for part in HEALTHY_PARTS)


def airflow_command() -> list[str]:
    """Return the command that runs the Airflow of this Python."""
    return [sys.executable, "-m", "airflow"]


def spark_environment() -> dict[str, str]:
    """
    Return variables by which tasks find this Python, the project and Spark, and keep Spark on the loopback interface.

    :raises ServerError: there is no Java 17, or pyspark is not installed.
    """
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or not pyspark.submodule_search_locations:
        raise ServerError("pyspark is not installed; install the requirements of this project.")
    programs = Path(sys.executable).parent
    return {
        "JAVA_HOME": str(find_java_home()),
        "SPARK_HOME": pyspark.submodule_search_locations[0],
        "SPARK_LOCAL_IP": ADDRESS,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(PROJECT / "include"),
        "PYTHONUNBUFFERED": "1",
    }
