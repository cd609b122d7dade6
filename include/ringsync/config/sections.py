"""The sections of ringsync.yaml: source, store, replica, scan, state, verification, Airflow."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ringsync.config.secrets import Secret, Section


class Tls(Section):
    """TLS of a connection; the section switches it on."""

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


ServerName = Annotated[str, AfterValidator(_checked_name)]
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

    url: str
    gcs_project: str | None = None
    gcs_endpoint: str | None = None
    gcs_credentials_file: str | None = None


class Stream(Section):
    """Change messages."""

    mapping: Literal["exact", "classic"] = "exact"
    codec: Literal["deflate", "null"] = "deflate"


class Replica(Section):
    """The Delta replica."""

    unrepresentable_values: Literal["error", "raw"] = "error"
    element_times: Literal["error", "unknown"] = "error"
    deletion_vectors: bool = True
    merge_interval_s: Annotated[float, Field(gt=0)] = 1800.0
    merge_rows_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01


class Scan(Section):
    """The division of a table into token ranges, and the handling of ranges that fail."""

    split_size_mb: Annotated[int, Field(ge=1)] = 64
    min_splits: Annotated[int, Field(ge=1)] = 4
    max_splits: Annotated[int, Field(ge=1)] = 4096
    file_size_mb: Annotated[int, Field(ge=1, le=1024)] = 64
    commit_interval_s: Annotated[float, Field(gt=0)] = 60.0
    max_failed_ranges: Annotated[int, Field(ge=0)] = 20
    on_topology_change: Literal["continue", "fail"] = "continue"


class ClusterLimits(Section):
    """The limits of queries to the cluster, for all runs and tasks together."""

    rows_per_s: Annotated[float, Field(gt=0)] | None = None
    megabytes_per_s: Annotated[float, Field(gt=0)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1)] | None = None


class State(Section):
    """ringsync's own keyspace in the source cluster."""

    keyspace: Annotated[str, AfterValidator(_checked_keyspace)] = "cdc"
    replication: dict[str, str] | None = None


class Verify(Section):
    """Comparison of source and replica."""

    ranges: Annotated[int, Field(ge=1, le=65536)] = 256
    max_listed_differences: Annotated[int, Field(ge=0)] = 100


class Airflow(Section):
    """The connection of cdcservice to Airflow."""

    url: str = "http://127.0.0.1:8080"
    username: str = "admin"
    password: Secret = Secret(env="RINGSYNC_AIRFLOW_PASSWORD")
