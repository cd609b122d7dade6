"""The one configuration: the keys of ringsync.yaml, validated whole before anything is touched.

Every key is commented in config/ringsync.yaml. Secrets are references (an environment variable, a file, an
Airflow connection), never values, so that no secret is in arguments, logs, reports or the Airflow UI.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from ringsync.sources.limits import Limits
    from ringsync.sources.session import ClusterSettings
    from ringsync.storage.port import ObjectStore


class ConfigError(ValueError):
    """The configuration is wrong: the message names the file, the key and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Secret(_Section):
    """Where a secret is found: exactly one of the three."""

    env: str | None = None
    file: str | None = None
    airflow_connection: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_plain_text(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(
                "a secret must not stand here itself: write {env: NAME}, {file: PATH} or {airflow_connection: ID}"
            )
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Secret:
        if sum(value is not None for value in (self.env, self.file, self.airflow_connection)) != 1:
            raise ValueError("a secret is a reference with exactly one of the keys env, file, airflow_connection")
        return self

    def resolve(self, key: str) -> str:
        """Read the secret.

        :param key: the configuration key, for the error
        :raises ConfigError: when the variable is not set or the file cannot be read
        """
        if self.file is not None:
            try:
                return Path(self.file).read_text().rstrip("\n")
            except OSError as error:
                raise ConfigError(f"{key}: cannot read the secret's file {self.file}: {error.strerror}") from None
        variable = self.env or connection_variable(self.airflow_connection or "")
        if variable not in os.environ:
            remedy = f"the DAGs set it from the Airflow connection {self.airflow_connection}; elsewhere set it yourself"
            raise ConfigError(
                f"{key}: environment variable {variable} is not set" + (self.env is None) * f" ({remedy})"
            )
        return os.environ[variable]


def connection_variable(connection_id: str) -> str:
    """Environment variable in which the DAGs hand an Airflow connection's password to a Spark application."""
    return "RINGSYNC_PASSWORD_" + re.sub(r"\W", "_", connection_id).upper()


class Tls(_Section):
    """TLS to the cluster; presence of the section switches it on."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    verify_hostname: bool = True


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be letters, digits and underscores, since it begins topic names and Avro names")
    return name


def _checked_keyspace(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,47}", name):
        raise ValueError("must be a keyspace name: 1 to 48 letters, digits and underscores, a letter first")
    return name


Port = Annotated[int, Field(ge=1, le=65535)]
ConsistencyLevel = Literal["ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE"]


class Cassandra(_Section):
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


class Store(_Section):
    """The object store: a local directory or a GCS bucket."""

    url: str
    gcs_project: str | None = None
    gcs_endpoint: str | None = None
    gcs_credentials_file: str | None = None


class Stream(_Section):
    """Change messages."""

    mapping: Literal["exact", "classic"] = "exact"
    codec: Literal["deflate", "null"] = "deflate"


class Replica(_Section):
    """The Delta replica."""

    unrepresentable_values: Literal["error", "raw"] = "error"
    element_times: Literal["error", "unknown"] = "error"
    deletion_vectors: bool = True


class Scan(_Section):
    """How a table is cut into token ranges, and what becomes of those that fail."""

    split_size_mb: Annotated[int, Field(ge=1)] = 64
    min_splits: Annotated[int, Field(ge=1)] = 4
    max_splits: Annotated[int, Field(ge=1)] = 4096
    file_size_mb: Annotated[int, Field(ge=1, le=1024)] = 64
    commit_interval_s: Annotated[float, Field(gt=0)] = 60.0
    max_failed_ranges: Annotated[int, Field(ge=0)] = 20
    on_topology_change: Literal["continue", "fail"] = "continue"


class ClusterLimits(_Section):
    """How hard the cluster may be asked, by all runs and tasks together."""

    rows_per_s: Annotated[float, Field(gt=0)] | None = None
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1)] | None = None


class State(_Section):
    """ringsync's own keyspace in the source cluster."""

    keyspace: Annotated[str, AfterValidator(_checked_keyspace)] = "cdc"
    replication: dict[str, str] | None = None


class Verify(_Section):
    """Comparison of source and replica."""

    ranges: Annotated[int, Field(ge=1, le=65536)] = 256
    max_listed_differences: Annotated[int, Field(ge=0)] = 100


class Airflow(_Section):
    """Where cdcservice finds Airflow."""

    url: str = "http://127.0.0.1:8080"
    username: str = "admin"
    password: Secret = Secret(env="RINGSYNC_AIRFLOW_PASSWORD")


class Config(_Section):
    """Everything in ringsync.yaml."""

    server_name: Annotated[str, AfterValidator(_checked_name)]
    cassandra: Cassandra
    store: Store
    stream: Stream = Stream()
    replica: Replica = Replica()
    scan: Scan = Scan()
    limits: ClusterLimits = ClusterLimits()
    state: State = State()
    verify: Verify = Verify()
    airflow: Airflow = Airflow()

    def cluster_settings(self) -> ClusterSettings:
        """Settings of the connection, secrets resolved.

        :raises ConfigError: when a secret cannot be read
        """
        from ringsync.sources.session import ClusterSettings, TlsSettings

        source = self.cassandra
        return ClusterSettings(
            contact_points=source.contact_points,
            port=source.port,
            local_datacenter=source.local_datacenter,
            username=source.username,
            password=source.password.resolve("cassandra.password") if source.password else None,
            tls=TlsSettings(**source.tls.model_dump()) if source.tls else None,
            consistency_level=source.consistency_level,
            page_size=source.page_size,
            request_timeout_s=source.request_timeout_s,
            connect_timeout_s=source.connect_timeout_s,
        )

    def cluster_limits(self) -> Limits:
        """The configured limits; others may be set while ringsync runs (docs/bootstrap.md)."""
        from ringsync.sources.limits import Limits

        megabytes = self.limits.megabytes_per_s
        return Limits(
            rows_per_s=self.limits.rows_per_s,
            bytes_per_s=None if megabytes is None else megabytes * 1e6,
            concurrent_requests=self.limits.concurrent_requests,
        )

    def open_store(self) -> ObjectStore:
        """The object store (DESIGN §9)."""
        from ringsync.storage import open_store

        try:
            return open_store(
                self.store.url,
                gcs_endpoint=self.store.gcs_endpoint,
                gcs_project=self.store.gcs_project,
                gcs_credentials_file=self.store.gcs_credentials_file,
            )
        except ValueError as error:
            raise ConfigError(f"store.url: {error}") from None

    def airflow_connections(self) -> tuple[str, ...]:
        """Ids of the Airflow connections that hold secrets of the Spark applications."""
        secret = self.cassandra.password
        return (secret.airflow_connection,) if secret and secret.airflow_connection else ()


def load_config(path: str | Path) -> Config:
    """Read and validate a configuration file. Relative paths inside it are relative to its folder.

    :raises ConfigError: naming the file and every key that is wrong, with what to do
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text") from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: the configuration must be a mapping of keys, see config/ringsync.yaml")
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems)) from None
    return _with_absolute_paths(config, path.resolve().parent)


def _explain(problem: Any) -> str:
    """One of pydantic's errors in the words of somebody who edits a YAML file."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location) or "the document"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known keys here: {', '.join(known)}"
        return f"{key}: unknown key; {meant}"
    if problem["type"] == "missing":
        return f"{key}: this key is required"
    found = problem["input"]
    shown = "" if isinstance(found, dict) or "password" in key else f", found {found!r}"
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def _known_keys(location: list[str]) -> list[str]:
    model: Any = Config
    for part in location:
        annotation = model.model_fields[part].annotation
        model = next(
            kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")
        )
    return list(model.model_fields)


def _with_absolute_paths(config: Config, folder: Path) -> Config:
    def absolute(path: str | None) -> str | None:
        return None if path is None else str(folder / path)

    def secret(reference: Secret | None) -> Secret | None:
        return reference and reference.model_copy(update={"file": absolute(reference.file)})

    tls = config.cassandra.tls
    if tls:
        files = ("ca_file", "certificate_file", "key_file")
        tls = tls.model_copy(update={name: absolute(getattr(tls, name)) for name in files})
    url = config.store.url if "://" in config.store.url else str(absolute(config.store.url))
    updates: dict[str, Any] = {
        "cassandra": config.cassandra.model_copy(
            update={"password": secret(config.cassandra.password), "tls": tls},
        ),
        "store": config.store.model_copy(
            update={"url": url, "gcs_credentials_file": absolute(config.store.gcs_credentials_file)},
        ),
        "airflow": config.airflow.model_copy(update={"password": secret(config.airflow.password)}),
    }
    return config.model_copy(update=updates)
