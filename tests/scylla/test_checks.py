"""What is checked before a sync or a bootstrap of a ScyllaDB begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.cluster.session import close_all, connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.config.sections import Scylla
from ringsync.service.checks import check_cluster, longest_sync_period_ms
from ringsync.service.table_checks import CheckError
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.prepare import check_server
from ringsync.wiring import cluster_settings
from servers.cassandra import CassandraNode
from tests.scylla_server.proxy import StandIn, scylla_stand_in


@pytest.fixture(scope="module")
def scylla(cassandra: CassandraNode) -> Iterator[StandIn]:
    with scylla_stand_in(cassandra) as found:
        yield found
        close_all()


def config_of(folder: Path, contact: tuple[str, int], **more: Any) -> Config:
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [contact[0]], "port": contact[1], "consistency_level": "ONE"},
        "store": {"url": "lake"},
        **more,
    }
    path = folder / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_config(path)


@pytest.mark.server
def test_the_cluster_is_checked(scylla: StandIn, keyspace: str, tmp_path: Path) -> None:
    sync = {"include": [f"{keyspace}.*"]}
    config = config_of(tmp_path, (scylla.host, scylla.port), sync=sync)
    session = connect(cluster_settings(config))
    for name, options in (("a", "'enabled': true"), ("b", "'enabled': true, 'ttl': 0"), ("c", "'enabled': false")):
        session.execute(f"CREATE TABLE {keyspace}.{name} (p int PRIMARY KEY) WITH cdc = {{{options}}}")
    assert check_cluster(config) == [
        f"tables that are followed: {keyspace}.a, {keyspace}.b",
        "ScyllaDB: changes come from the logs (*_scylla_cdc_log), by CQL",
        f"warning: the log of {keyspace}.b has ttl = 0: nothing ever removes its rows",
    ]
    assert longest_sync_period_ms(config) == 0
    session.execute(f"ALTER TABLE {keyspace}.b WITH cdc = {{'enabled': true, 'delta': 'keys'}}")
    with pytest.raises(CheckError, match=rf"the cdc of {keyspace}\.b has delta = keys"):
        check_cluster(config)
    left_out = config_of(tmp_path, (scylla.host, scylla.port), sync={**sync, "exclude": [f"{keyspace}.b"]})
    option = "cdc = {'enabled': true}"
    told = f"tables with {option} that sync.include or sync.exclude leaves out: {keyspace}.b"
    assert told in check_cluster(left_out)
    session.execute(f"ALTER TABLE {keyspace}.a WITH cdc = {{'enabled': true, 'ttl': 600}}")
    short = (
        f"warning: the log of {keyspace}.a keeps its rows for 600 s only (ttl): what was not read until then is lost"
    )
    assert short in check_cluster(left_out)


@pytest.mark.server
def test_no_sstables_of_scylla(scylla: StandIn, cassandra: CassandraNode, tmp_path: Path) -> None:
    config = config_of(tmp_path, (scylla.host, scylla.port))
    of_cassandra = config_of(tmp_path, (cassandra.contact_point, cassandra.port))
    for mode in ("token_range", "sstable"):
        application: Any = SimpleNamespace(config=config, options=SimpleNamespace(mode=mode))
        check_server(application, connect(cluster_settings(of_cassandra)))
        if mode == "sstable":
            with pytest.raises(StepError, match="not of ScyllaDB: use mode token_range"):
                check_server(application, connect(cluster_settings(config)))
        else:
            check_server(application, connect(cluster_settings(config)))


def test_the_section_scylla(tmp_path: Path) -> None:
    assert config_of(tmp_path, ("a", 1)).scylla == Scylla(log_ttl_s=86_400, preimage="false", postimage=False)
    given = {"log_ttl_s": 60, "preimage": True, "postimage": True}
    assert config_of(tmp_path, ("a", 1), scylla=given).scylla == Scylla(log_ttl_s=60, preimage="true", postimage=True)
    assert config_of(tmp_path, ("a", 1), scylla={"preimage": "full"}).scylla.preimage == "full"
    for wrong in ({"preimage": "half"}, {"log_ttl_s": -1}, {"postimage": "yes"}, {"delta": "keys"}):
        with pytest.raises(ConfigError, match="scylla"):
            config_of(tmp_path, ("a", 1), scylla=wrong)
