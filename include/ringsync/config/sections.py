"""The sections of ringsync.yaml: source, store, replica, scan, state, verification, Airflow; secrets and logins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from ringsync.config.section import Filename, Secret, Section, absolute
from ringsync.storage import check_url


def _store_url(url: str, info: ValidationInfo) -> str:
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("must hold no user or password: use store.gcs_credentials_file")
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url)
    return (check_url if is_url or info.context else str)(url if is_url else absolute(url, info))


def _once(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    result, first = validate(value), dict[Any, Any]()
    for key in value:
        (name,) = validate({key: value[key]})
        if (other := first.setdefault(name, key)) != key:
            raise ValueError(f"{other} and {key} are one: put both together")
    return result


Name = TypeVar("Name")
Value = TypeVar("Value")
Named = Annotated[dict[Name, Value], WrapValidator(_once)]
"""A mapping that refuses two spellings of one key: the last would win, and nobody would be told."""


class Tls(Section):
    """TLS of a connection, with PEM files. A connection without this section does not use TLS.

    :ivar ca_file: certificates to trust; None: the operating system's
    :ivar certificate_file: our own certificate, for servers that ask for one
    :ivar key_file: private key of our certificate; None: it is in the certificate's file
    :ivar key_password: passphrase of the private key; None: it has none
    :ivar verify_hostname: whether the server's certificate must name the address that we connect to
    """

    ca_file: Filename | None = None
    certificate_file: Filename | None = None
    key_file: Filename | None = None
    key_password: Secret | None = None
    verify_hostname: bool = True

    @model_validator(mode="after")
    def _key_has_certificate(self) -> Tls:
        if self.certificate_file is None and (self.key_file or self.key_password):
            raise ValueError("key_file and key_password belong to a certificate: set certificate_file, too")
        return self


def matching(pattern: str, rule: str) -> AfterValidator:
    """Make a validator that accepts a text if the whole of it matches a pattern.

    :param rule: what the text must be, for the error message
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {rule}")
        return text

    return AfterValidator(check)


def _server(url: str) -> str:
    try:
        is_url = urlsplit(url).port != 0 and re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", url)
    except ValueError:
        is_url = None
    if not is_url:
        raise ValueError("must be like http://host:port or https://host, and hold no user or password")
    return url


Url = Annotated[str, AfterValidator(_server)]
"""URL of a server."""


def _host(text: str) -> str:
    if re.fullmatch(r"([^:]+|\[.*\]):\d+", text):
        raise ValueError("must have no port: that is cassandra.port")
    if not re.fullmatch(r"[\w.:%-]+", text):
        raise ValueError("must be the name or the address of a host, e.g. 10.0.0.1")
    return text


Host = Annotated[str, AfterValidator(_host)]
"""Name or address of a host, without a port."""

Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
Hours = Annotated[float, Field(gt=0, le=8760)]
Days = Annotated[float, Field(gt=0, le=3660)]
Milliseconds = Annotated[int, Field(ge=100, le=86_400_000)]


class OAuth(Section):
    """A login with tokens that a server gives for a client's credentials (OAuth 2.0)."""

    token_url: Url
    client_id: str
    client_secret: Secret
    scope: str | None = None


class RegistryLogin(Section):
    """The login to the schema registry, in one of three ways."""

    username: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    oauth: OAuth | None = None
    logical_cluster: str | None = None
    identity_pool_id: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> RegistryLogin:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password go together: set both or neither")
        ways = {"username and password": self.username, "token": self.token, "oauth": self.oauth}
        found = [way for way, value in ways.items() if value is not None]
        if len(found) != 1:
            raise ValueError(f"set one of username and password, token, oauth; set are: {', '.join(found) or 'none'}")
        if self.username is not None and (self.logical_cluster or self.identity_pool_id):
            raise ValueError("logical_cluster and identity_pool_id are for token and oauth")
        if ":" in (self.username or ""):
            raise ValueError("username must not contain a colon, which ends it in the header that carries it")
        return self


_NAME_RULE = "letters, digits and underscores, since it begins topic names and Avro names"
_KEYSPACE_RULE = "a keyspace name: 1 to 48 letters, digits and underscores, a letter first"

ServerName = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", _NAME_RULE)]
Port = Annotated[int, Field(ge=1, le=65535)]
ConsistencyLevel = Literal["ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE"]


class Cassandra(Section):
    """The source cluster."""

    contact_points: Annotated[tuple[Host, ...], Field(min_length=1, strict=False)]
    port: Port = 9042
    local_datacenter: str | None = None
    username: str | None = None
    password: Secret | None = None
    tls: Tls | None = None
    consistency_level: ConsistencyLevel = "LOCAL_QUORUM"
    page_size: Annotated[int, Field(ge=1, le=100_000)] = 5000
    request_timeout_s: Seconds = 30.0
    connect_timeout_s: Seconds = 10.0

    @model_validator(mode="after")
    def _login_is_whole(self) -> Cassandra:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password go together: set both or neither")
        return self


class Store(Section):
    """The object store: a local directory or a GCS bucket."""

    url: Annotated[str, AfterValidator(_store_url)]
    gcs_project: str | None = None
    gcs_endpoint: Url | None = None
    gcs_credentials_file: Filename | None = None


class Stream(Section):
    """Change messages."""

    mapping: Literal["exact", "classic"] = "exact"
    codec: Literal["deflate", "null"] = "deflate"


_CRON = r"(?i:@(hourly|daily|weekly)|([\d*/,-]|[a-z]{3})+( +([\d*/,-]|[a-z]{3})+){4})"
_CRON_RULE = "@hourly, @daily, @weekly, five fields as for cron (30 2 * * *), or off"


def _comes(schedule: str) -> str:
    from croniter import croniter  # as Airflow reads schedules

    try:
        croniter(schedule).get_next()
    except ValueError as error:
        raise ValueError(f"must be {_CRON_RULE}, and come again: {error}") from None
    return schedule


class Replica(Section):
    """The Delta replica."""

    unrepresentable_values: Literal["error", "raw"] = "error"
    element_times: Literal["error", "unknown"] = "error"
    deletion_vectors: bool = True
    merge_interval_s: Seconds = 1800.0
    merge_rows_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    verify_schedule: Annotated[str, matching(_CRON, _CRON_RULE), AfterValidator(_comes)] | None = "@daily"
    verify_days: Annotated[float, Field(ge=1, le=365)] = 7.0

    @field_validator("verify_schedule", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value in (False, "off") else value  # YAML reads the word off as a truth value

    task_timeout_h: Annotated[float, Field(gt=0)] = 24.0


BootstrapMode = Literal["token_range", "sstable"]
"""Where a bootstrap reads rows: from the cluster, by SELECT, or from the SSTables of a snapshot of its nodes."""


class Scan(Section):
    """The division of a table into token ranges, and the handling of ranges that fail."""

    mode: BootstrapMode = "token_range"
    split_size_mb: Annotated[int, Field(ge=1)] = 64
    min_splits: Annotated[int, Field(ge=1)] = 4
    max_splits: Annotated[int, Field(ge=1)] = 4096
    file_size_mb: Annotated[int, Field(ge=1, le=1024)] = 64
    commit_interval_s: Seconds = 60.0
    max_failed_ranges: Annotated[int, Field(ge=0)] = 20
    task_timeout_h: Hours = 168.0
    on_topology_change: Literal["continue", "fail"] = "continue"

    @model_validator(mode="after")
    def _least_is_less(self) -> Scan:
        if self.min_splits > self.max_splits:
            raise ValueError(f"min_splits {self.min_splits} is more than max_splits {self.max_splits}")
        return self


def _no_password(command: tuple[str, ...]) -> tuple[str, ...]:
    if any(re.search(r"(^|\s)(-pw|--password)([\s=]|$)", argument) for argument in command):
        raise ValueError("must hold no password: who lists processes sees it. Write it into a file, and -pwf FILE here")
    return command


Command = Annotated[tuple[str, ...], Field(min_length=1, strict=False), AfterValidator(_no_password)]
"""A program and its first arguments."""


class SSTableNode(Section):
    """The settings of one node's snapshots; None: as in ``sstable``."""

    nodetool: Command | None = None
    data_directories: Annotated[tuple[Filename, ...], Field(min_length=1, strict=False)] | None = None


class SSTables(Section):
    """Snapshots of the nodes' SSTables, for bootstraps with mode ``sstable``."""

    read: Literal["upload", "in_place"] = "upload"
    nodetool: Command = ("nodetool",)
    nodetool_timeout_s: Seconds = 600.0
    data_directories: Annotated[tuple[Filename, ...], Field(strict=False)] = ()
    nodes: dict[Host, SSTableNode] = Field(default_factory=dict)
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = 100.0
    uploads: Annotated[int, Field(ge=1, le=32)] = 4
    free_space_factor: Annotated[float, Field(ge=0)] = 1.0
    max_age_h: Hours = 168.0
    task_timeout_h: Hours = 24.0
    memory_mb: Annotated[int, Field(ge=16)] = 256

    def nodetool_of(self, address: str, host_id: str) -> tuple[str, ...]:
        """Return the command that reaches a node's management interface.

        :param address: address of the node, as the cluster names it
        :param host_id: id of the node, which wins if both are named
        """
        return self._of(address, host_id).nodetool or self.nodetool

    def data_directories_of(self, address: str, host_id: str) -> tuple[str, ...]:
        """Return a node's data directories; empty: the node is to be asked."""
        return self._of(address, host_id).data_directories or self.data_directories

    def _of(self, address: str, host_id: str) -> SSTableNode:
        return self.nodes.get(host_id) or self.nodes.get(address) or SSTableNode()


class ClusterLimits(Section):
    """The limits of queries to the cluster, for all runs and tasks together."""

    rows_per_s: Annotated[float, Field(gt=0)] | None = None
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1)] | None = None


_Replication = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    matching(r"[^'\"\s]+", "as in CQL's replication map, without its quotes"),
]


class State(Section):
    """ringsync's own keyspace in the source cluster."""

    keyspace: Annotated[str, matching(r"[A-Za-z][A-Za-z0-9_]{0,47}", _KEYSPACE_RULE)] = "cdc"
    replication: Named[_Replication, _Replication] | None = None


class Scylla(Section):
    """How the CDC logs of ScyllaDB's tables are read, and the cdc options that a bootstrap with ``enable_cdc`` sets.
    Times are in ms unless their names say otherwise."""

    confidence_ms: Annotated[int, Field(ge=5000)] = 30_000
    window_ms: Annotated[int, Field(ge=1000)] = 15_000
    queries_per_s: Annotated[int, Field(ge=1)] = 500
    lookback_s: Annotated[int, Field(ge=0)] = 3600
    near_sweep_ms: Annotated[int, Field(ge=1000)] = 3_600_000
    near_reach_ms: Annotated[int, Field(ge=300_000)] = 12_600_000
    far_sweep_ms: Annotated[int, Field(ge=1000)] = 43_200_000
    log_ttl_s: Annotated[int, Field(ge=0, le=630_720_000)] = 86_400
    preimage: Literal["false", "true", "full"] = "false"
    postimage: bool = False


class Archive(Section):
    """The archive of commit logs in the object store."""

    policy: Literal["pressure", "always", "off"] = "pressure"
    free_percent: Annotated[float, Field(gt=0, lt=100)] = 50.0
    free_mb: Annotated[int, Field(ge=0)] = 0
    total_mb: Annotated[int, Field(ge=0)] = 0
    poll_interval_ms: Milliseconds = 5000
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = None
    uploads: Annotated[int, Field(ge=1, le=32)] = 4
    retention_days: Days = 30.0
    task_timeout_h: Hours = 24.0


class Notifier(Section):
    """One of Airflow's notifiers.

    :ivar name: full name of its class
    :ivar arguments: its arguments; texts may be templates that use ``alarm``. Secrets belong into Airflow's connections
    """

    name: Annotated[str, matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", "the full name of a class: package.module.Class")]
    arguments: dict[str, Any] = Field(default_factory=dict)


class Alarms(Section):
    """What is told when something is wrong for long, and to whom."""

    after_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    interval_s: Annotated[float, Field(ge=1, le=600)] = 10.0
    lag_s: Seconds = 60.0
    late_s: Seconds = 3600.0
    retention_days: Days = 90.0
    notifiers: Annotated[tuple[Notifier, ...], Field(strict=False)] = ()


class Verify(Section):
    """Comparison of source and replica."""

    ranges: Annotated[int, Field(ge=1, le=65536)] = 256
    wait_s: Annotated[float, Field(ge=0, le=86_400)] = 900.0
    max_listed_differences: Annotated[int, Field(ge=0)] = 100


class Airflow(Section):
    """The connection of cdcservice to Airflow."""

    url: Url = "http://127.0.0.1:8080"
    username: str = "admin"
    password: Secret = Secret(env="RINGSYNC_AIRFLOW_PASSWORD")
