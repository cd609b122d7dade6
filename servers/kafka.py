"""A real Kafka broker with KRaft, one node on the loopback interface, for demo, tests and benchmarks."""

from __future__ import annotations

import base64
import socket
import ssl
import struct
import subprocess
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from servers import ServerError, last_lines
from servers.certificates import Certificates
from servers.jars import fetch
from servers.java import find_java_home
from servers.ports import free_port, require_free
from servers.process import OneProcess

START_SECONDS = 60
FORMAT_SECONDS = 60
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)
"""The request that every broker answers: size, key, version, correlation id, no client id (Kafka protocol guide)."""


@dataclass(frozen=True)
class BrokerSettings:
    """
    The set-up of a broker.

    :param address: a loopback address.
    :param port: port for clients.
    :param controller_port: port for the broker itself.
    :param heap_mb: Java heap, in MiB; the process takes about 100 MiB more.
    :param short_lived: compile quickly and optimise less; switch it off in benchmarks.
    :param partitions: number of partitions of a topic that the broker creates when a client names it.
    :param certificates: the server's certificates for TLS; clients have none of their own. None: no TLS.
    :param login: user and password with which clients log in (SCRAM-SHA-512); None: no such login.
    :param takes_tokens: whether clients log in with OAuth tokens, which nobody needs to sign.
    """

    address: str = "127.0.0.1"
    port: int = 9092
    controller_port: int = 9093
    heap_mb: int = 256
    short_lived: bool = True
    partitions: int = 1
    certificates: Certificates | None = None
    login: tuple[str, str] | None = field(default=None, repr=False)
    takes_tokens: bool = False

    def on_free_ports(self) -> BrokerSettings:
        """Return the same settings with two ports on which nothing listens now."""
        return replace(self, port=free_port(self.address), controller_port=free_port(self.address))


@dataclass
class KafkaBroker(OneProcess):
    """
    One broker, from a folder of its own: `with KafkaBroker(folder, settings, cache) as broker: …`.

    The topics stay in the folder; a second start uses them again.

    :param folder: data, configuration and `server.log` of the broker.
    :param settings: how it is set up.
    :param cache: folder that keeps the jars.
    """

    settings: BrokerSettings
    cache: Path

    @property
    def bootstrap(self) -> str:
        """Address for clients: their `bootstrap.servers`."""
        return f"{self.settings.address}:{self.settings.port}"

    @property
    def class_path(self) -> str:
        """Class path of a Java client, or of Kafka's own tools."""
        return f"{fetch('kafka', self.cache).resolve()}/*"

    def start(self) -> None:
        """
        Start the broker and wait until it answers a request.

        :raises ServerError: the broker runs already, a port is taken, the jars or Java are missing, or the broker does
            not come up within 60 s; with the end of its log.
        """
        if self._process is not None:
            raise ServerError(f"The broker in {self.folder} is already running.")
        settings = self.settings
        require_free(settings.address, {"Kafka": settings.port, "Kafka controller": settings.controller_port})
        jars = fetch("kafka", self.cache)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        (self.folder / "server.properties").write_text(properties(self.folder, settings))
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(jars)
        command = java_command(jars, settings, "kafka.Kafka", str(self.folder / "server.properties"))
        self._run(command, "server.log", self._answers, START_SECONDS, "Kafka")

    def _format(self, jars: Path) -> None:
        # An id that begins with "-" would be read as an option.
        cluster_id = "r" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:].rstrip("=")
        options = ["format", "--standalone", "-t", cluster_id, "-c", str(self.folder / "server.properties")]
        if self.settings.login:
            user, password = self.settings.login
            options += ["--add-scram", f"SCRAM-SHA-512=[name={user},password={password}]"]
        answer = subprocess.run(
            java_command(jars, self.settings, "kafka.tools.StorageTool", *options),
            capture_output=True,
            text=True,
            timeout=FORMAT_SECONDS,
            check=False,
        )
        if answer.returncode != 0:
            raise ServerError(f"Kafka's storage cannot be prepared:\n{last_lines(answer.stdout + answer.stderr)}")

    def _answers(self) -> bool:
        try:
            with self._connection() as connection:
                connection.sendall(_API_VERSIONS)
                answer = connection.recv(10)
        except OSError:
            return False
        # Size, correlation id, error code.
        return len(answer) == 10 and answer[4:] == bytes((0, 0, 0, 1, 0, 0))

    def _connection(self) -> socket.socket:
        settings = self.settings
        plain = socket.create_connection((settings.address, settings.port), timeout=2)
        if settings.certificates is None:
            return plain
        context = ssl.create_default_context(cafile=settings.certificates.authority)
        return context.wrap_socket(plain, server_hostname=settings.address)


def java_command(jars: Path, settings: BrokerSettings, main_class: str, *arguments: str) -> list[str]:
    """
    Return the command that runs a program of Kafka's jars.

    :param jars: the folder of jars.
    :param settings: how the broker is set up.
    :param main_class: the program's class.
    :param arguments: the program's arguments.
    :raises ServerError: there is no Java 17.
    """
    return [
        *(str(find_java_home() / "bin" / "java"), f"-Xms{settings.heap_mb}m", f"-Xmx{settings.heap_mb}m"),
        *("-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
        *(["-XX:TieredStopAtLevel=1"] if settings.short_lived else []),
        *("-cp", f"{jars.resolve()}/*", main_class, *arguments),
    ]


def properties(folder: Path, settings: BrokerSettings) -> str:
    """
    Return the content of `server.properties`.

    :param folder: the folder of the broker.
    :param settings: how it is set up.
    """
    client, controller = (f"{settings.address}:{port}" for port in (settings.port, settings.controller_port))
    values = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.bootstrap.servers": controller,
        "listeners": f"CLIENTS://{client},CONTROLLER://{controller}",
        "advertised.listeners": f"CLIENTS://{client}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "CLIENTS",
        **_security(settings),
        "log.dirs": folder / "data",
        "num.partitions": settings.partitions,
        # There is one broker.
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 2,
        # Groups do not wait for further members, and the session of a killed broker ends soon.
        "group.initial.rebalance.delay.ms": 0,
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 1000,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _security(settings: BrokerSettings) -> dict[str, object]:
    """Return the settings of TLS and logins for clients."""
    tls, login = settings.certificates, settings.login
    protocol = ("SASL_" if login or settings.takes_tokens else "") + ("SSL" if tls else "PLAINTEXT")
    security: dict[str, object] = {"listener.security.protocol.map": f"CLIENTS:{protocol},CONTROLLER:PLAINTEXT"}
    if tls:
        security |= {
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": tls.keystore,
            "ssl.keystore.password": tls.password,
            "ssl.key.password": tls.password,
            # The broker itself is a client, too.
            "ssl.truststore.type": "PKCS12",
            "ssl.truststore.location": tls.truststore,
            "ssl.truststore.password": tls.password,
        }
    module = "org.apache.kafka.common.security"
    if login:
        entry = f'{module}.scram.ScramLoginModule required username="{login[0]}" password="{login[1]}";'
        security |= _login("SCRAM-SHA-512", entry)
    if settings.takes_tokens:
        # The broker itself is a client, too.
        entry = f'{module}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
        security |= _login("OAUTHBEARER", entry)
    return security


def _login(mechanism: str, entry: str) -> dict[str, object]:
    """Return the settings of a mechanism of logins."""
    return {
        "sasl.enabled.mechanisms": mechanism,
        "sasl.mechanism.inter.broker.protocol": mechanism,
        f"listener.name.clients.{mechanism.lower()}.sasl.jaas.config": entry,
    }
