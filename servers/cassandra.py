"""A real Cassandra node of version 4.0, 4.1 or 5.0 on the loopback interface."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from cassandra import DriverException, OperationTimedOut
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.policies import WhiteListRoundRobinPolicy

from servers import ServerError, last_lines
from servers.certificates import Certificates
from servers.jars import fetch
from servers.java import find_java_home
from servers.ports import free_port, require_free
from servers.process import OneProcess

START_SECONDS = 120
NODETOOL_SECONDS = 300
REQUEST_KINDS = ("read", "range", "write", "counter_write", "truncate")
REQUEST_SECONDS = 60
"""Limit for requests: on a busy laptop Cassandra's own limits of 2 to 10 s are too short."""
SUPERUSER = ("cassandra", "cassandra")
"""The role that Cassandra itself creates when it starts with password authentication for the first time."""

GUARDRAILS = "org.apache.cassandra.db:type=Guardrails"
"""The MBean by which guardrails are set."""

EXPORTS = """
java.base/jdk.internal.misc java.base/jdk.internal.ref java.base/sun.nio.ch java.base/java.lang.ref java.sql/java.sql
java.management.rmi/com.sun.jmx.remote.internal.rmi java.rmi/sun.rmi.registry java.rmi/sun.rmi.server
jdk.unsupported/sun.misc
"""
OPENS = """
java.base/java.io java.base/java.lang java.base/java.lang.module java.base/java.lang.reflect java.base/java.math
java.base/java.net java.base/java.nio java.base/java.util java.base/java.util.concurrent
java.base/java.util.concurrent.atomic java.base/jdk.internal.loader java.base/jdk.internal.math
java.base/jdk.internal.module java.base/jdk.internal.ref java.base/jdk.internal.reflect
java.base/jdk.internal.util.jar java.base/sun.nio.ch java.rmi/sun.rmi.transport.tcp
jdk.management/com.sun.management.internal
"""
MODULE_FLAGS = [
    *(flag for module in EXPORTS.split() for flag in ("--add-exports", f"{module}=ALL-UNNAMED")),
    *(flag for module in OPENS.split() for flag in ("--add-opens", f"{module}=ALL-UNNAMED")),
]
"""Tried with JDK 17 and 4.0.19, 4.1.10 and 5.0.9: enough for the server and for nodetool."""

LOGBACK = """<configuration>
  <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level [%thread] %date{{ISO8601}} %F:%L - %msg%n</pattern></encoder>
  </appender>
  <root level="{level}"><appender-ref ref="console"/></root>
</configuration>
"""


@dataclass(frozen=True)
class CommitLogEncryption:
    """
    The key with which a node encrypts its commit log (AES/CBC/PKCS5Padding).

    :param keystore: keystore with the secret key. JKS cannot hold a secret key; Cassandra reads only keystores.
    :param store_type: `JCEKS` or `PKCS12`.
    :param store_password: the keystore's password.
    :param key_alias: name of the key; JCEKS supports lower case only.
    :param key_password: the key's password; with PKCS12 it must be the store's.
    :param chunk_kib: largest plain block; a section holds several.
    """

    keystore: Path
    store_type: Literal["JCEKS", "PKCS12"]
    store_password: str = field(repr=False)
    key_alias: str
    key_password: str = field(repr=False)
    chunk_kib: int = 64


@dataclass(frozen=True)
class NodeSettings:
    """
    The set-up of a node.

    :param version: `4.0`, `4.1` or `5.0`; the patch version is in `servers/poms`.
    :param address: a loopback address, for the other nodes and for clients; JMX is always on 127.0.0.1.
    :param native_port: port for CQL.
    :param storage_port: port for other nodes; the same on all nodes of a cluster.
    :param jmx_port: port for nodetool.
    :param seeds: addresses of the seed nodes; empty: the node itself.
    :param cluster_name: name that clients show; a node refuses to start on data of another cluster.
    :param num_tokens: token ranges per node.
    :param auto_bootstrap: whether a node that joins a cluster first copies its share of the data; nodes of a new
        cluster have nothing to copy.
    :param datacenter: if it is given, the node is in this datacenter (and `rack`); otherwise datacenter1, rack1.
    :param rack: see `datacenter`.
    :param heap_mb: Java heap, in MiB; the process takes about 400 MiB more. 256 is enough for small tables.
    :param short_lived: compile quickly and optimise less, which saves a sixth of the CPU time of the first minutes;
        switch it off in benchmarks.
    :param cdc: whether tables may switch on `cdc`.
    :param segment_mib: size of a commit log segment; a mutation may have half of it.
    :param commitlog_sync_ms: how often the commit log is synced, and the `_cdc.idx` files are written.
    :param commitlog_compressor: compressor of the commit log, for example `LZ4Compressor`; None: plain.
    :param commitlog_encryption: if given, the commit log is encrypted.
    :param cdc_total_mib: size of `cdc_raw`, in MiB, from which Cassandra refuses writes to tables with `cdc`.
    :param cdc_on_repair: whether rows that other nodes stream to this one (repair, bootstrap, decommission) are logged
        for CDC; 5.0 only.
    :param properties: further system properties of Java, for example `cassandra.replace_address_first_boot`.
    :param classes: folders of further Java classes.
    :param authenticator: `allow`: clients need no login; `password`: roles and permissions, at first only `SUPERUSER`.
    :param client_tls: if given, clients must use TLS.
    :param client_certificates: with `client_tls`: clients must show a certificate as well.
    :param compatibility: `storage_compatibility_mode` of 5.0: `NONE`, `UPGRADING` or `CASSANDRA_4`.
    :param sstable_format: `big`, or with `compatibility` `NONE` also `bti`, whose indexes are tries.
    :param uuid_sstable_ids: whether new SSTables are named by UUIDs instead of numbers; from 4.1 on.
    :param more: further keys of cassandra.yaml, for example guardrails.
    """

    version: Literal["4.0", "4.1", "5.0"] = "5.0"
    address: str = "127.0.0.1"
    native_port: int = 9042
    storage_port: int = 7000
    jmx_port: int = 7199
    seeds: tuple[str, ...] = ()
    cluster_name: str = "ringsync"
    num_tokens: int = 4
    auto_bootstrap: bool = False
    datacenter: str | None = None
    rack: str = "rack1"
    heap_mb: int = 512
    short_lived: bool = True
    cdc: bool = True
    segment_mib: int = 1
    commitlog_sync_ms: int = 1000
    commitlog_compressor: str | None = None
    commitlog_encryption: CommitLogEncryption | None = None
    cdc_total_mib: int = 1024
    cdc_on_repair: bool = True
    properties: tuple[tuple[str, str], ...] = ()
    classes: tuple[Path, ...] = ()
    authenticator: Literal["allow", "password"] = "allow"
    client_tls: Certificates | None = None
    client_certificates: bool = False
    compatibility: str = "NONE"
    sstable_format: Literal["big", "bti"] = "big"
    uuid_sstable_ids: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    def on_free_ports(self) -> NodeSettings:
        """Return the same settings with three ports on which nothing listens now."""
        native, storage, jmx = free_port(self.address), free_port(self.address), free_port()
        return replace(self, native_port=native, storage_port=storage, jmx_port=jmx)


@dataclass
class CassandraNode(OneProcess):
    """
    One node, from a folder of its own: `with CassandraNode(folder, settings, cache) as node: node.connect()`.

    The data stay in the folder; a second start uses them again.

    :param folder: data, configuration and `system.log` of the node.
    :param settings: how it is set up.
    :param cache: folder that keeps the jars.
    """

    settings: NodeSettings
    cache: Path

    @property
    def contact_point(self) -> str:
        """The address to which clients connect."""
        return self.settings.address

    @property
    def port(self) -> int:
        """The port to which clients connect."""
        return self.settings.native_port

    @property
    def cdc_raw(self) -> Path:
        """The folder into which Cassandra links the commit log segments of tables with `cdc`."""
        return self.folder / "cdc_raw"

    def start(self) -> None:
        """
        Start the node and wait until it answers a query.

        :raises ServerError: the node runs already, a port is taken, the jars or Java are missing, or the node does not
            come up within 120 s; with the end of its log.
        """
        if self._process is not None:
            raise ServerError(f"The node in {self.folder} is already running.")
        settings = self.settings
        require_free(settings.address, {"CQL": settings.native_port, "storage": settings.storage_port})
        require_free("127.0.0.1", {"JMX": settings.jmx_port})
        jars = fetch(f"cassandra-{settings.version}", self.cache)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        write_configuration(self.folder, settings)
        command = server_command(self.folder, settings, jars)
        self._run(command, "system.log", self._answers, START_SECONDS, f"Cassandra {settings.version}")

    def restart(self) -> None:
        """
        Stop the node if it runs, and start it again.

        :raises ServerError: as `start`.
        """
        self.stop()
        self.start()

    def cluster(self, **options: Any) -> Any:
        """
        Return a driver `Cluster` for this node only: protocol 5, as the superuser, with TLS if the node requires it.

        The caller calls `connect()` on it, and `shutdown()` at the end.

        :param options: further arguments of `cassandra.cluster.Cluster`.
        """
        settings = self.settings
        profile = ExecutionProfile(WhiteListRoundRobinPolicy([settings.address]), request_timeout=60)
        if settings.authenticator == "password":
            options.setdefault("auth_provider", PlainTextAuthProvider(*SUPERUSER))
        if settings.client_tls is not None:
            options.setdefault("ssl_context", client_context(settings.client_tls))
        options.setdefault("execution_profiles", {EXEC_PROFILE_DEFAULT: profile})
        return Cluster([settings.address], port=settings.native_port, protocol_version=5, **options)

    def nodetool(self, *arguments: str) -> str:
        """
        Run nodetool and return what it prints.

        :param arguments: arguments of nodetool, for example `"flush", "flights"`.
        :raises ServerError: it fails; with its last lines.
        """
        jars = fetch(f"cassandra-{self.settings.version}", self.cache)
        answer = subprocess.run(
            nodetool_command(self.folder, self.settings, jars, arguments),
            capture_output=True,
            text=True,
            timeout=NODETOOL_SECONDS,
            check=False,
        )
        if answer.returncode != 0:
            raise ServerError(f"nodetool {' '.join(arguments)} failed:\n{last_lines(answer.stdout + answer.stderr)}")
        return answer.stdout

    def forbid(self, guardrail: str, values: str) -> None:
        """
        Set a guardrail that forbids some values, while the node runs (4.1 and later).

        :param guardrail: attribute of the MBean, for example `ReadConsistencyLevelsDisallowedCSV`.
        :param values: between commas; empty: everything is permitted.
        """
        self.nodetool("sjk", "mx", "-ms", "-b", GUARDRAILS, "-f", guardrail, "-v", values)

    def limit(self, guardrail: str, most: int = 10**9) -> None:
        """
        Set a guardrail with a threshold, while the node runs (4.1 and later).

        :param guardrail: its name in the MBean, for example `PageSize`.
        :param most: what is more is refused; by default nothing is.
        """
        self.nodetool(
            "sjk", "mx", "-mc", "-b", GUARDRAILS, "-op", f"set{guardrail}Threshold", "-a", f"{most}", f"{most}"
        )

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((self.settings.address, self.settings.native_port)) != 0:
                return False
        cluster = self.cluster(connect_timeout=5)
        try:
            cluster.connect().execute("SELECT release_version FROM system.local", timeout=10)
        except (NoHostAvailable, OperationTimedOut, DriverException):
            return False  # it listens, but does not answer yet, or has not created its default role yet
        finally:
            cluster.shutdown()
        return True


def client_context(certificates: Certificates) -> ssl.SSLContext:
    """
    Return the TLS settings of a client that checks the server's certificate and name, and shows its own certificate.

    :param certificates: certificates of the authority that signed the server's certificate.
    """
    context = ssl.create_default_context(cafile=str(certificates.authority))
    context.load_cert_chain(certificates.client_certificate, certificates.client_key)
    return context


def server_command(folder: Path, settings: NodeSettings, jars: Path) -> list[str]:
    """
    Return the command that runs a node.

    :param folder: the folder of the node.
    :param settings: how it is set up.
    :param jars: the folder of jars.
    :raises ServerError: there is no Java 17.
    """
    asks_seeds = bool(settings.seeds) and settings.address not in settings.seeds
    properties = {
        "java.security.manager": "allow",
        "jdk.attach.allowAttachSelf": "true",
        "cassandra.config": (folder / "cassandra.yaml").as_uri(),
        "cassandra-rackdc.properties": (folder / "cassandra-rackdc.properties").as_uri(),
        "cassandra.storagedir": str(folder),
        "logback.configurationFile": str(folder / "logback.xml"),
        "cassandra.jmx.local.port": str(settings.jmx_port),
        "cassandra-foreground": "yes",
        # A node of a test need not wait until a ring of hundreds of nodes is stable. This is also the time in which a
        # busy seed must answer a node that starts (C: Gossiper.doShadowRound).
        "cassandra.ring_delay_ms": "10000" if asks_seeds else "1000",
        "cassandra.skip_wait_for_gossip_to_settle": "0",
        "cassandra.superuser_setup_delay_ms": "0",
        **dict(settings.properties),
    }
    return [
        str(find_java_home() / "bin" / "java"),
        *MODULE_FLAGS,
        # Measures objects; without it 4.0 and 4.1 use Unsafe, which JDK 17 refuses for lambdas.
        *(f"-javaagent:{agent}" for agent in jars.resolve().glob("jamm-*.jar")),
        *(f"-Xm{letter}{settings.heap_mb}m" for letter in "sx"),
        *("-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
        *(["-XX:TieredStopAtLevel=1"] if settings.short_lived else []),
        *(f"-D{key}={value}" for key, value in properties.items()),
        *("-cp", os.pathsep.join([f"{jars.resolve()}/*", *map(str, settings.classes)])),
        "org.apache.cassandra.service.CassandraDaemon",
    ]


def nodetool_command(folder: Path, settings: NodeSettings, jars: Path, arguments: tuple[str, ...]) -> list[str]:
    """
    Return the command that runs nodetool against a node.

    :param folder: the folder of the node.
    :param settings: how it is set up.
    :param jars: the folder of jars.
    :param arguments: the arguments of nodetool.
    :raises ServerError: there is no Java 17.
    """
    return [
        *(str(find_java_home() / "bin" / "java"), *MODULE_FLAGS),
        *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *(f"-Dlogback.configurationFile={folder / 'logback-off.xml'}", f"-Dcassandra.storagedir={folder}"),
        *("-cp", f"{jars.resolve()}/*", "org.apache.cassandra.tools.NodeTool"),
        *("-h", "127.0.0.1", "-p", str(settings.jmx_port), *arguments),
    ]


def write_configuration(folder: Path, settings: NodeSettings) -> None:
    """
    Write the configuration files of a node.

    :param folder: the folder of the node.
    :param settings: how it is set up.
    """
    configuration = common_configuration(folder, settings) | version_configuration(settings)
    configuration |= commitlog_configuration(settings) | dict(settings.more)
    if settings.client_tls is not None:
        configuration["client_encryption_options"] = tls_configuration(
            settings.client_tls, settings.client_certificates
        )
    (folder / "cassandra.yaml").touch(mode=0o600)  # it may hold passwords of keystores
    (folder / "cassandra.yaml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    if settings.datacenter is not None:
        (folder / "cassandra-rackdc.properties").write_text(f"dc={settings.datacenter}\nrack={settings.rack}\n")
    (folder / "logback.xml").write_text(LOGBACK.format(level="INFO"))
    (folder / "logback-off.xml").write_text(LOGBACK.format(level="OFF"))


def common_configuration(folder: Path, settings: NodeSettings) -> dict[str, Any]:
    """
    Return the keys of cassandra.yaml that are the same in all versions.

    :param folder: the folder of the node.
    :param settings: how it is set up.
    """
    seeds = ",".join(f"{seed}:{settings.storage_port}" for seed in settings.seeds or (settings.address,))
    password = settings.authenticator == "password"
    return {
        "cluster_name": settings.cluster_name,
        "num_tokens": settings.num_tokens,
        "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
        "data_file_directories": [str(folder / "data")],
        "commitlog_directory": str(folder / "commitlog"),
        "saved_caches_directory": str(folder / "saved_caches"),
        "hints_directory": str(folder / "hints"),
        "cdc_raw_directory": str(folder / "cdc_raw"),
        "cdc_enabled": settings.cdc,
        "commitlog_sync": "periodic",
        "authenticator": "PasswordAuthenticator" if password else "AllowAllAuthenticator",
        "authorizer": "CassandraAuthorizer" if password else "AllowAllAuthorizer",
        "role_manager": "CassandraRoleManager",
        "endpoint_snitch": "GossipingPropertyFileSnitch" if settings.datacenter else "SimpleSnitch",
        "seed_provider": [
            {"class_name": "org.apache.cassandra.locator.SimpleSeedProvider", "parameters": [{"seeds": seeds}]}
        ],
        "listen_address": settings.address,
        "rpc_address": settings.address,
        "start_native_transport": True,
        "native_transport_port": settings.native_port,
        "storage_port": settings.storage_port,
        "disk_failure_policy": "stop",
        "commit_failure_policy": "stop",
        "auto_snapshot": False,
        "auto_bootstrap": settings.auto_bootstrap,
        "memtable_allocation_type": "heap_buffers",
    }


def version_configuration(settings: NodeSettings) -> dict[str, Any]:
    """
    Return the keys of cassandra.yaml whose names or meaning depend on the version.

    :param settings: how the node is set up.
    """
    if settings.version == "4.0":
        return {
            **{f"{kind}_request_timeout_in_ms": REQUEST_SECONDS * 1000 for kind in REQUEST_KINDS},
            "commitlog_sync_period_in_ms": settings.commitlog_sync_ms,
            "commitlog_segment_size_in_mb": settings.segment_mib,
            "cdc_total_space_in_mb": settings.cdc_total_mib,
        }
    keys: dict[str, Any] = {
        **{f"{kind}_request_timeout": f"{REQUEST_SECONDS}s" for kind in REQUEST_KINDS},
        "commitlog_sync_period": f"{settings.commitlog_sync_ms}ms",
        "commitlog_segment_size": f"{settings.segment_mib}MiB",
        "cdc_total_space": f"{settings.cdc_total_mib}MiB",
        "uuid_sstable_identifiers_enabled": settings.uuid_sstable_ids,
    }
    if settings.version == "5.0":
        keys |= {
            "sstable": {"selected_format": settings.sstable_format},
            "storage_compatibility_mode": settings.compatibility,
            "cdc_on_repair_enabled": settings.cdc_on_repair,
            "native_transport_timeout": f"{REQUEST_SECONDS}s",
        }
    return keys


def commitlog_configuration(settings: NodeSettings) -> dict[str, Any]:
    """
    Return the part of cassandra.yaml that compresses or encrypts the commit log.

    :param settings: how the node is set up.
    """
    configuration: dict[str, Any] = {}
    if settings.commitlog_compressor is not None:
        configuration["commitlog_compression"] = [{"class_name": settings.commitlog_compressor}]
    encryption = settings.commitlog_encryption
    if encryption is not None:
        keystore = {
            "keystore": str(encryption.keystore.resolve()),
            "keystore_password": encryption.store_password,
            "store_type": encryption.store_type,
            "key_password": encryption.key_password,
        }
        configuration["transparent_data_encryption_options"] = {
            "enabled": True,
            "chunk_length_kb": encryption.chunk_kib,
            "cipher": "AES/CBC/PKCS5Padding",
            "key_alias": encryption.key_alias,
            "key_provider": [{"class_name": "org.apache.cassandra.security.JKSKeyProvider", "parameters": [keystore]}],
        }
    return configuration


def tls_configuration(certificates: Certificates, client_certificates: bool) -> dict[str, Any]:
    """
    Return the part of cassandra.yaml that makes clients use TLS.

    :param certificates: the server's keystore and the authority of the clients' certificates.
    :param client_certificates: whether clients must show a certificate.
    """
    return {
        "enabled": True,
        "optional": False,
        "require_client_auth": client_certificates,
        "store_type": "PKCS12",
        "keystore": str(certificates.keystore.resolve()),
        "keystore_password": certificates.password,
        "truststore": str(certificates.truststore.resolve()),
        "truststore_password": certificates.password,
    }
