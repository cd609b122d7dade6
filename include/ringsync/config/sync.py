"""The sections of ringsync.yaml about the sync: its loops, the stream's Kafka, metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ringsync.config.section import Filename, Secret, Section
from ringsync.config.sections import (
    Host,
    Hours,
    Milliseconds,
    Named,
    OAuth,
    RegistryLogin,
    Seconds,
    Tls,
    Url,
    matching,
)
from ringsync.cql.identifiers import parse_table_name, parse_table_pattern, printable

AfterImage = Literal["source", "replica", "none"]
BucketBy = Literal["write_time", "arrival"]

EVERY_TABLE = ("*.*",)
"""Patterns that match every table."""

DEFAULT_QUEUE = "default"
"""Queue of the nodes that ``sync.queue_of_node`` does not name: Airflow's own default queue, whatever its name."""


def _checked_pattern(text: str) -> str:
    return str(parse_table_pattern(text))


def _checked_name(text: str) -> str:
    return ".".join(map(printable, parse_table_name(text)))


TableName = Annotated[str, AfterValidator(_checked_name)]
"""``keyspace.table`` as in CQL."""

Pattern = Annotated[str, AfterValidator(_checked_pattern)]
"""``keyspace.table`` as in CQL, where ``*`` stands for any characters."""


_QUEUE = matching(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", "the name of an Airflow queue: up to 100 letters, digits and _ . -"
)
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
_ADDRESS = matching(rf"(\[[0-9A-Fa-f:.]+\]|[^\s:/,@]+):{_PORT}", "host:port, e.g. kafka-1:9092")


_TOPIC = matching(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}", "the name of a topic: up to 249 letters, digits and . _ -")


class TableSync(Section):
    """The settings of one table, or of all tables that a pattern names; None: as in ``sync``."""

    after_image: AfterImage | None = None
    expand_deletions: bool | None = None
    bucket_by: BucketBy = "write_time"


class Sync(Section):
    """The loops from the commit logs to messages and replica. Methods name tables ``keyspace.table`` as in CQL."""

    run_s: Seconds = 14_400.0
    poll_interval_ms: Milliseconds = 1000
    after_image: AfterImage = "source"
    expand_deletions: bool = False
    source_query: bool = True
    digest_retention_h: Hours = 4.0
    max_errors_per_hour: Annotated[int, Field(ge=1)] = 10_000
    queue_of_node: dict[Host, Annotated[str, _QUEUE]] = Field(default_factory=dict)
    datacenters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    stage_cores: Annotated[int, Field(ge=1)] = 2
    cdc_raw: Filename | None = None
    keystore: Filename | None = None
    include: Annotated[tuple[Pattern, ...], Field(min_length=1, strict=False)] = EVERY_TABLE
    exclude: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    tables: Named[Pattern, TableSync] = Field(default_factory=dict)

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues of workers, the default first. Each has its own ``commitlog_stage``."""
        return (DEFAULT_QUEUE, *sorted(set(self.queue_of_node.values()) - {DEFAULT_QUEUE}))

    def queue_of(self, address: str, host_id: str) -> str:
        """Return the queue whose workers can read a node's ``cdc_raw``.

        :param address: address of the node, as the cluster names it
        :param host_id: id of the node, which wins if both are named
        """
        return self.queue_of_node.get(host_id) or self.queue_of_node.get(address) or DEFAULT_QUEUE

    def follows(self, table: str) -> bool:
        """Tell whether the sync follows a table with ``cdc = true``: it is included and not excluded."""
        name = _checked_pattern(table)
        return any(_names(p, name) for p in self.include) and not any(_names(p, name) for p in self.exclude)

    def useless_patterns(self, tables: Collection[str]) -> list[str]:
        """List the keys whose patterns match no table.

        :param tables: names of the tables with ``cdc = true``
        :returns: keys with their patterns, e.g. ``sync.exclude: shop.tmp_*``
        """
        keys = {"include": self.include, "exclude": self.exclude, "tables": tuple(self.tables)}
        return [
            f"sync.{key}: {pattern}"
            for key, patterns in keys.items()
            for pattern in patterns
            if pattern not in EVERY_TABLE and not any(_names(pattern, table) for table in tables)
        ]

    def after_image_of(self, table: str) -> AfterImage:
        """Return the source of the row after a change."""
        return self._of(table).after_image or self.after_image

    def expand_deletions_of(self, table: str) -> bool:
        """Tell whether each row that a deletion of a partition or range removed gets its own message."""
        of_table = self._of(table).expand_deletions
        return self.expand_deletions if of_table is None else of_table

    def bucket_by_of(self, table: str) -> BucketBy:
        """Return the time by which a table's changes go into buckets: their write time or their arrival."""
        return self._of(table).bucket_by

    def _of(self, table: str) -> TableSync:
        """Return the table's own entry, else that of the first pattern that names it."""
        name = _checked_pattern(table)
        entries = (entry for pattern, entry in self.tables.items() if _names(pattern, name))
        return self.tables.get(name) or next(entries, TableSync())


def _names(pattern: str, table: str) -> bool:
    """Tell whether a pattern names a table; both as :func:`_checked_pattern` returns them."""
    return pattern == table or (
        not {"*", "?"}.isdisjoint(pattern) and parse_table_pattern(pattern).matches(*parse_table_name(table))
    )


_EXTENSION = matching(r"[A-Za-z]+", "letters")
_EXTENSION_VALUE = matching(r"[^,\s]+", "a text without commas and spaces")


class BrokerOAuth(OAuth):
    """The login to the brokers with ``sasl_mechanism: OAUTHBEARER``."""

    extensions: dict[Annotated[str, _EXTENSION], Annotated[str, _EXTENSION_VALUE]] = Field(default_factory=dict)


Compatibility = Literal[
    "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE"
]
"""Which new versions of a subject a schema registry takes."""


class Kafka(Section):
    """The brokers that get a copy of the streams. Without this section, nothing goes to Kafka."""

    bootstrap_servers: Annotated[tuple[Annotated[str, _ADDRESS], ...], Field(min_length=1, strict=False)]
    serialisation: Literal["avro", "json"] = "avro"
    json_schemas: bool = True
    schema_registry_url: Url | None = None
    schema_registry_login: RegistryLogin | None = None
    new_subject_compatibility: Compatibility | None = "BACKWARD"
    tls: Tls | None = None
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    username: str | None = None
    password: Secret | None = None
    oauth: BrokerOAuth | None = None
    partitions: Annotated[int, Field(ge=1)] = 4
    replication_factor: Annotated[int, Field(ge=1)] | None = None
    partition_by: Literal["partition_key", "primary_key"] = "partition_key"
    topic_name: Named[TableName, Annotated[str, _TOPIC]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _login_is_whole(self) -> Kafka:
        if (self.sasl_mechanism == "OAUTHBEARER") != (self.oauth is not None):
            raise ValueError("sasl_mechanism OAUTHBEARER and oauth go together: set both or neither")
        password = (self.username is not None, self.password is not None)
        if self.oauth is not None and any(password):
            raise ValueError("username and password are for other mechanisms than OAUTHBEARER, which has oauth")
        if self.oauth is None and {*password} != {self.sasl_mechanism is not None}:
            raise ValueError("sasl_mechanism, username and password go together: set all or none")
        return self

    @model_validator(mode="after")
    def _form_is_whole(self) -> Kafka:
        if self.serialisation == "json" and self.schema_registry_url is not None:
            raise ValueError(
                "schema_registry_url is for serialisation avro: json has its schema in each message, or none"
            )
        if self.serialisation == "avro" and not self.json_schemas:
            raise ValueError("json_schemas is for serialisation json")
        if self.schema_registry_url is None and self.schema_registry_login is not None:
            raise ValueError("schema_registry_login is for a registry: set schema_registry_url, too")
        return self


class Metrics(Section):
    """A further place for the loops' numbers, besides the status objects and Airflow's own metrics."""

    prometheus_file: Filename | None = None
