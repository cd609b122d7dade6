"""The Kafka broker: it starts, keeps, stops, and listens on the loopback interface only."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from servers import ServerError
from servers.jars import DEFAULT_CACHE
from servers.java import find_java_home
from servers.kafka import BrokerSettings, KafkaBroker, properties


def test_listens_on_its_address_only(tmp_path: Path) -> None:
    text = properties(tmp_path, BrokerSettings(address="127.0.0.9", port=1, controller_port=2))
    assert "\nlisteners=CLIENTS://127.0.0.9:1,CONTROLLER://127.0.0.9:2\n" in text


@pytest.mark.server
def test_records_survive_kill_and_stop(tmp_path: Path) -> None:
    settings = BrokerSettings().on_free_ports()
    broker = KafkaBroker(tmp_path / "kafka", settings, DEFAULT_CACHE)
    with broker:
        with pytest.raises(ServerError, match="already running"):
            broker.start()
        with pytest.raises(ServerError, match=str(settings.port)):
            KafkaBroker(tmp_path / "other", settings, DEFAULT_CACHE).start()
        assert records(broker, 3) == 3
        broker.kill()
        broker.start()
        assert records(broker, 2) == 5
    with pytest.raises(ServerError, match="not running"):
        print(broker.pid)
    with broker:
        assert records(broker, 0) == 5
    broker.stop()


def records(broker: KafkaBroker, more: int) -> int:
    """Append records to a topic; how many it has now, as a client of Kafka's own sees them."""
    program = str(Path(__file__).with_name("KafkaRecords.java"))
    command = [str(find_java_home() / "bin" / "java"), "-cp", broker.class_path, program, broker.bootstrap, str(more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return int(done.stdout)
