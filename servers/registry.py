"""A real schema registry, Apicurio, that keeps its schemas in memory, on the loopback interface, for tests."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from servers import ServerError
from servers.jars import fetch
from servers.java import find_java_home
from servers.ports import free_port, require_free
from servers.process import OneProcess

START_SECONDS = 60
_ADDRESS = "127.0.0.1"


@dataclass
class RegistryServer(OneProcess):
    """
    One registry: `with RegistryServer(folder, cache) as registry: …`.

    :param folder: folder of its `server.log`.
    :param cache: folder that keeps the jars.
    :param port: port for clients.
    """

    cache: Path
    port: int = field(default_factory=lambda: free_port(_ADDRESS))

    @property
    def url(self) -> str:
        """The root of Confluent's REST API."""
        return f"http://{_ADDRESS}:{self.port}/apis/ccompat/v7"

    def start(self) -> None:
        """
        Start the registry and wait until it answers.

        :raises ServerError: the registry runs already, the port is taken, the jars or Java are missing, or the registry
            does not come up within 60 s; with the end of its log.
        """
        if self._process is not None:
            raise ServerError(f"The registry in {self.folder} is already running.")
        require_free(_ADDRESS, {"Schema registry": self.port})
        jars = fetch("apicurio", self.cache).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(str(find_java_home() / "bin" / "java"), "-Xms64m", "-Xmx256m", "-XX:+UseSerialGC"),
            *("-XX:TieredStopAtLevel=1", f"-Dquarkus.http.host={_ADDRESS}", f"-Dquarkus.http.port={self.port}"),
            *("-cp", f"{jars}/*", "io.quarkus.runner.GeneratedMain"),
        ]
        self._run(command, "server.log", self._answers, START_SECONDS, "The schema registry")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
