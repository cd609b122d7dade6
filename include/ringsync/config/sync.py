"""The sections of ringsync.yaml about the sync: its loops, the stream's Kafka, metrics."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ringsync.config.secrets import Secret, Section
from ringsync.config.sections import Tls
from ringsync.cql.identifiers import parse_table_name, parse_table_pattern

AfterImage = Literal["source", "replica", "none"]
BucketBy = Literal["write_time", "arrival"]

EVERY_TABLE = ("*.*",)
"""Patterns that leave out none."""

DEFAULT_QUEUE = "default"
"""Queue of the nodes that ``sync.queue_of_node`` does not name: Airflow's own default queue, whatever its name."""


def _checked_pattern(text: str) -> str:
    return str(parse_table_pattern(text))


Pattern = Annotated[str, AfterValidator(_checked_pattern)]
"""``keyspace.table`` as in CQL, where ``*`` stands for any characters."""


def _checked_queue(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError("must be the name of an Airflow queue: up to 100 letters, digits and _ . -")
    return name


def _checked_address(address: str) -> str:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/,]+):\d{1,5}", address):
        raise ValueError("must be host:port, e.g. kafka-1:9092")
    return address


class TableSync(Section):
    """What is different for one table, or for all that a pattern names; None: as ``sync`` says."""

    after_image: AfterImage | None = None
    expand_deletions: bool | None = None
    bucket_by: BucketBy = "write_time"


class Sync(Section):
    """The loops from the commit logs to messages and replica."""

    run_s: Annotated[float, Field(gt=0)] = 600.0
    poll_interval_ms: Annotated[int, Field(ge=100)] = 1000
    after_image: AfterImage = "source"
    expand_deletions: bool = False
    source_query: bool = True
    digest_retention_h: Annotated[float, Field(gt=0)] = 4.0
    queue_of_node: dict[str, Annotated[str, AfterValidator(_checked_queue)]] = Field(default_factory=dict)
    datacenters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    stage_cores: Annotated[int, Field(ge=1)] = 2
    cdc_raw: str | None = None
    keystore: str | None = None
    include: Annotated[tuple[Pattern, ...], Field(min_length=1, strict=False)] = EVERY_TABLE
    exclude: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    tables: dict[Pattern, TableSync] = Field(default_factory=dict)

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues of workers, the default's first: each has a ``commitlog_stage`` of its own."""
        return (DEFAULT_QUEUE, *sorted(set(self.queue_of_node.values()) - {DEFAULT_QUEUE}))

    def queue_of(self, address: str, host_id: str) -> str:
        """The queue whose workers can read a node's ``cdc_raw``.

        :param address: the node's address, as the cluster names it
        :param host_id: the node's id, which wins if both are named
        """
        return self.queue_of_node.get(host_id) or self.queue_of_node.get(address) or DEFAULT_QUEUE

    def follows(self, table: str) -> bool:
        """Whether the sync follows a table, if it has ``cdc = true``: it is included, and not excluded.

        :param table: ``keyspace.table`` as in CQL
        """
        name = _checked_pattern(table)
        return any(_names(one, name) for one in self.include) and not any(_names(one, name) for one in self.exclude)

    def useless_patterns(self, tables: Collection[str]) -> list[str]:
        """Keys of ours that name no table.

        :param tables: names of the tables with ``cdc = true``, ``keyspace.table`` as in CQL
        :returns: such as ``sync.exclude: shop.tmp_*``
        """
        keys = {"include": self.include, "exclude": self.exclude, "tables": tuple(self.tables)}
        return [
            f"sync.{key}: {pattern}"
            for key, patterns in keys.items()
            for pattern in patterns
            if pattern not in EVERY_TABLE and not any(_names(pattern, table) for table in tables)
        ]

    def after_image_of(self, table: str) -> AfterImage:
        """Where the row after a change comes from.

        :param table: ``keyspace.table`` as in CQL
        """
        return self._of(table).after_image or self.after_image

    def expand_deletions_of(self, table: str) -> bool:
        """Whether each row that the deletion of a partition or range has removed gets a message of its own.

        :param table: ``keyspace.table`` as in CQL
        """
        own = self._of(table).expand_deletions
        return self.expand_deletions if own is None else own

    def bucket_by_of(self, table: str) -> BucketBy:
        """Whether a table's changes are put into buckets by their write time or by their arrival.

        :param table: ``keyspace.table`` as in CQL
        """
        return self._of(table).bucket_by

    def _of(self, table: str) -> TableSync:
        """Its own entry, else that of the first pattern that names it."""
        name = _checked_pattern(table)
        found = (one for pattern, one in self.tables.items() if _names(pattern, name))
        return self.tables.get(name) or next(found, TableSync())


def _names(pattern: str, table: str) -> bool:
    """Whether a pattern names a table; both are as :func:`_checked_pattern` gives them."""
    return pattern == table or ("*" in pattern and parse_table_pattern(pattern).matches(*parse_table_name(table)))


class Kafka(Section):
    """The brokers that get a copy of the streams; presence of the section switches it on."""

    bootstrap_servers: Annotated[
        tuple[Annotated[str, AfterValidator(_checked_address)], ...], Field(min_length=1, strict=False)
    ]
    serialisation: Literal["avro", "json"] = "avro"
    json_schemas: bool = True
    schema_registry_url: str | None = None
    tls: Tls | None = None
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    username: str | None = None
    password: Secret | None = None
    partitions: Annotated[int, Field(ge=1)] = 4
    replication_factor: Annotated[int, Field(ge=1)] | None = None
    partition_by: Literal["partition_key", "primary_key"] = "partition_key"

    @model_validator(mode="after")
    def _whole(self) -> Kafka:
        login = (self.sasl_mechanism, self.username, self.password)
        if any(part is None for part in login) and any(part is not None for part in login):
            raise ValueError("sasl_mechanism, username and password go together: set all or none")
        if self.serialisation == "json" and self.schema_registry_url is not None:
            raise ValueError(
                "schema_registry_url is for serialisation avro: json has its schema in each message, or none"
            )
        if self.serialisation == "avro" and not self.json_schemas:
            raise ValueError("json_schemas is for serialisation json")
        if self.schema_registry_url is not None and not re.fullmatch(
            r"https?://[^/@]+(/[^@]*)?", self.schema_registry_url
        ):
            raise ValueError("schema_registry_url must begin with http:// or https://, and hold no user or password")
        return self


class Metrics(Section):
    """Where the loops' numbers go, besides the status objects and Airflow's own metrics."""

    prometheus_file: str | None = None
