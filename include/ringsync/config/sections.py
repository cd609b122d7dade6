"""The sections of ringsync.yaml: source, store, replica, scan, state, verification, Airflow; secrets and logins."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)


class ConfigError(ValueError):
    """The configuration is wrong: the message names the file, the key and what to do."""


class Section(BaseModel):
    """A section of the configuration: it is frozen, refuses unknown keys and converts nothing silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def secrets(self, key: str) -> dict[str, Secret]:
        """Return the references to secrets in this section, and in those inside, by their keys.

        :param key: key of this section
        """
        found: dict[str, Secret] = {}
        for name in type(self).model_fields:
            part = getattr(self, name)
            if isinstance(part, Secret):
                found[f"{key}.{name}"] = part
            elif isinstance(part, Section):
                found |= part.secrets(f"{key}.{name}")
        return found


def _absolute(path: str, info: ValidationInfo) -> str:
    return path if info.context is None else str(info.context / path)


def _absolute_url(url: str, info: ValidationInfo) -> str:
    return url if "://" in url else _absolute(url, info)


Filename = Annotated[str, AfterValidator(_absolute)]
"""Path of a file or folder; relative paths begin in the folder that is the validation's context, if there is one."""


class Secret(Section):
    """A reference to a secret, by exactly one of the three keys."""

    env: str | None = None
    file: Filename | None = None
    airflow_connection: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_plain_text(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(
                "do not write the secret itself here: write {env: NAME}, {file: PATH} or {airflow_connection: ID}"
            )
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Secret:
        if sum(value is not None for value in (self.env, self.file, self.airflow_connection)) != 1:
            raise ValueError("a secret is a reference with exactly one of the keys env, file, airflow_connection")
        return self

    def resolve(self, key: str) -> str:
        """Read the secret.

        :param key: configuration key, for the error message
        :raises ConfigError: the variable is not set, or the file cannot be read
        """
        if self.file is not None:
            try:
                return Path(self.file).read_text().rstrip("\n")
            except OSError as error:
                raise ConfigError(f"{key}: cannot read the secret's file {self.file}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ConfigError(f"{key}: the secret's file {self.file} is not text in UTF-8") from None
        variable = self.env or connection_variable(self.airflow_connection or "")
        if variable not in os.environ:
            remedy = f"the DAGs set it from the Airflow connection {self.airflow_connection}; elsewhere set it yourself"
            raise ConfigError(
                f"{key}: environment variable {variable} is not set" + (self.env is None) * f" ({remedy})"
            )
        return os.environ[variable]


def connection_variable(connection_id: str) -> str:
    """Name the environment variable in which the DAGs pass an Airflow connection's password to a Spark application."""
    return "RINGSYNC_PASSWORD_" + re.sub(r"\W", "_", connection_id).upper()


class Tls(Section):
    """TLS of a connection, with PEM files. A connection without this section does not use TLS.

    :ivar ca_file: certificates to trust; None: the operating system's
    :ivar certificate_file: our own certificate, for servers that ask for one
    :ivar key_file: private key of our certificate
    :ivar verify_hostname: whether the server's certificate must name the address that we connect to
    """

    ca_file: Filename | None = None
    certificate_file: Filename | None = None
    key_file: Filename | None = None
    verify_hostname: bool = True


def matching(pattern: str, rule: str) -> AfterValidator:
    """Make a validator that accepts a text if the whole of it matches a pattern.

    :param rule: what the text must be, for the error message
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {rule}")
        return text

    return AfterValidator(check)


def check_url(key: str, url: str) -> None:
    """Check the URL of a server.

    :raises ValueError: it is no URL, or it holds a user or password
    """
    if not re.fullmatch(r"https?://[^/@]+(/[^@]*)?", url):
        raise ValueError(f"{key} must begin with http:// or https://, and hold no user or password")


class OAuth(Section):
    """A login with tokens that a server gives for a client's credentials (OAuth 2.0)."""

    token_url: str
    client_id: str
    client_secret: Secret
    scope: str | None = None

    @model_validator(mode="after")
    def _has_url(self) -> OAuth:
        check_url("token_url", self.token_url)
        return self


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

    contact_points: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    port: Port = 9042
    local_datacenter: str | None = None
    username: str | None = None
    password: Secret | None = None
    tls: Tls | None = None
    consistency_level: ConsistencyLevel = "LOCAL_QUORUM"
    page_size: Annotated[int, Field(ge=1, le=100_000)] = 5000
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    connect_timeout_s: Annotated[float, Field(gt=0)] = 10.0

    @model_validator(mode="after")
    def _login_is_whole(self) -> Cassandra:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password go together: set both or neither")
        return self


class Store(Section):
    """The object store: a local directory or a GCS bucket."""

    url: Annotated[str, AfterValidator(_absolute_url)]
    gcs_project: str | None = None
    gcs_endpoint: str | None = None
    gcs_credentials_file: Filename | None = None


class Stream(Section):
    """Change messages."""

    mapping: Literal["exact", "classic"] = "exact"
    codec: Literal["deflate", "null"] = "deflate"


_FIELD = r"[0-9A-Za-z*/,#?-]+"
_CRON = rf"@(hourly|daily|weekly)|{_FIELD}( +{_FIELD}){{4}}"
_CRON_RULE = "@hourly, @daily, @weekly, five fields as for cron (30 2 * * *), or off"


class Replica(Section):
    """The Delta replica."""

    unrepresentable_values: Literal["error", "raw"] = "error"
    element_times: Literal["error", "unknown"] = "error"
    deletion_vectors: bool = True
    merge_interval_s: Annotated[float, Field(gt=0)] = 1800.0
    merge_rows_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    verify_schedule: Annotated[str, matching(_CRON, _CRON_RULE)] | None = "@daily"
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
    commit_interval_s: Annotated[float, Field(gt=0)] = 60.0
    max_failed_ranges: Annotated[int, Field(ge=0)] = 20
    task_timeout_h: Annotated[float, Field(gt=0)] = 168.0
    on_topology_change: Literal["continue", "fail"] = "continue"


Command = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
"""A program and its first arguments."""


class SSTableNode(Section):
    """The settings of one node's snapshots; None: as in ``sstable``."""

    nodetool: Command | None = None
    data_directories: Annotated[tuple[Filename, ...], Field(min_length=1, strict=False)] | None = None


class SSTables(Section):
    """Snapshots of the nodes' SSTables, for bootstraps with mode ``sstable``."""

    read: Literal["upload", "in_place"] = "upload"
    nodetool: Command = ("nodetool",)
    nodetool_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    data_directories: Annotated[tuple[Filename, ...], Field(strict=False)] = ()
    nodes: dict[str, SSTableNode] = Field(default_factory=dict)
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = 100.0
    uploads: Annotated[int, Field(ge=1, le=32)] = 4
    free_space_factor: Annotated[float, Field(ge=0)] = 1.0
    max_age_h: Annotated[float, Field(gt=0)] = 168.0
    task_timeout_h: Annotated[float, Field(gt=0)] = 24.0
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


class State(Section):
    """ringsync's own keyspace in the source cluster."""

    keyspace: Annotated[str, matching(r"[A-Za-z][A-Za-z0-9_]{0,47}", _KEYSPACE_RULE)] = "cdc"
    replication: dict[str, str] | None = None


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

    @field_validator("preimage", mode="before")
    @classmethod
    def _plain_truth(cls, value: Any) -> Any:
        # YAML reads the words true and false as truth values.
        return str(value).lower() if isinstance(value, bool) else value


class Archive(Section):
    """The archive of commit logs in the object store."""

    policy: Literal["pressure", "always", "off"] = "pressure"
    free_percent: Annotated[float, Field(gt=0, lt=100)] = 50.0
    free_mb: Annotated[int, Field(ge=0)] = 0
    total_mb: Annotated[int, Field(ge=0)] = 0
    poll_interval_ms: Annotated[int, Field(ge=100)] = 5000
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = None
    uploads: Annotated[int, Field(ge=1, le=32)] = 4
    retention_days: Annotated[float, Field(gt=0)] = 30.0
    task_timeout_h: Annotated[float, Field(gt=0)] = 24.0


class Notifier(Section):
    """One of Airflow's notifiers.

    :ivar name: full name of its class
    :ivar arguments: its arguments; texts may be templates that use ``alarm``. Secrets belong into Airflow's connections
    """

    name: Annotated[str, matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", "the full name of a class: package.module.Class")]
    arguments: dict[str, Any] = {}


class Alarms(Section):
    """What is told when something is wrong for long, and to whom."""

    after_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    interval_s: Annotated[float, Field(ge=1, le=600)] = 10.0
    lag_s: Annotated[float, Field(gt=0, le=31_536_000)] = 60.0
    late_s: Annotated[float, Field(gt=0, le=31_536_000)] = 3600.0
    retention_days: Annotated[float, Field(gt=0, le=3660)] = 90.0
    notifiers: Annotated[tuple[Notifier, ...], Field(strict=False)] = ()


class Verify(Section):
    """Comparison of source and replica."""

    ranges: Annotated[int, Field(ge=1, le=65536)] = 256
    wait_s: Annotated[float, Field(ge=0, le=86_400)] = 900.0
    max_listed_differences: Annotated[int, Field(ge=0)] = 100


class Airflow(Section):
    """The connection of cdcservice to Airflow."""

    url: str = "http://127.0.0.1:8080"
    username: str = "admin"
    password: Secret = Secret(env="RINGSYNC_AIRFLOW_PASSWORD")
