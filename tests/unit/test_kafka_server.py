"""The configuration of a local Kafka, without starting one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poundlock.errors import UsageError
from poundlock.servers.kafka import KafkaServer, _escape
from poundlock.servers.kafka_security import Security, _jaas


def settings(server: KafkaServer, home, node: str = "1") -> dict[str, str]:
    """The configuration file of a broker. The storage counts as formatted, so no Java runs."""
    (home / "formatted").touch()
    server.prepare(home, {name: 10_000 + i for i, name in enumerate(server.port_names)})
    file = home / "config" / f"server-{node}.properties"
    assert file.stat().st_mode & 0o027 == 0, "only the owner and the server's group may read it"
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("brokers", "replicas", "in_sync"), [(1, "1", "1"), (2, "2", "1"), (3, "3", "2"), (5, "3", "2")]
)
def test_replication_fits_the_number_of_brokers(tmp_path, brokers, replicas, in_sync):
    found = settings(KafkaServer(brokers), tmp_path)
    assert found["transaction.state.log.replication.factor"] == replicas
    assert found["offsets.topic.replication.factor"] == replicas
    assert found["transaction.state.log.min.isr"] == in_sync
    assert found["min.insync.replicas"] == in_sync
    assert found["controller.quorum.voters"].count("@") == brokers


def test_every_listener_is_on_the_loopback(tmp_path):
    found = settings(KafkaServer(3), tmp_path, node="3")
    assert found["listeners"] == "CLIENT://127.0.0.1:10004,CONTROLLER://127.0.0.1:10005"


def test_properties_of_the_user_precede_ours(tmp_path):
    server = KafkaServer(properties={"min.insync.replicas": "7", "transaction.max.timeout.ms": "1"})
    found = settings(server, tmp_path)
    assert found["min.insync.replicas"] == "7"
    assert found["transaction.max.timeout.ms"] == "1"
    assert "transaction.max.timeout.ms" not in settings(KafkaServer(), tmp_path)


def test_a_cluster_without_brokers_is_refused():
    with pytest.raises(UsageError, match="at least one"):
        KafkaServer(0)


def test_a_comma_in_the_path_is_refused(tmp_path):
    (tmp_path / "a,b").mkdir()
    with pytest.raises(UsageError, match="without a comma"):
        settings(KafkaServer(), tmp_path / "a,b")


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"a b": "x"}, "cannot be a user's name"),
        ({"poundlock-broker": "x"}, "which is the brokers' own"),
        ({"alice": "two words"}, "password of 'alice'"),
        ({"alice": "a,b"}, "password of 'alice'"),
        ({"alice": ""}, "password of 'alice'"),
        ({}, "at least one user"),
    ],
)
def test_users_that_kafka_cannot_store_are_refused_without_showing_the_password(users, message):
    with pytest.raises(UsageError, match=message) as caught:
        Security(users)
    assert "two words" not in str(caught.value)


def test_passwords_are_not_printed():
    assert "hidden" not in repr(KafkaServer(security=Security({"alice": "hidden"})))


def test_quotes_and_backslashes_survive_both_readers():
    """First java.util.Properties reads the line, then JAAS reads the value."""
    assert _jaas("m", {"password": 'a"b\\c'}) == 'm required password="a\\"b\\\\c";'
    assert _escape("a\\b") == "a\\\\b"
    assert _escape("größe") == "gr\\u00f6\\u00dfe"


def test_the_command_line_loads_no_driver():
    heavy = ["pyspark", "kafka", "confluent_kafka", "rich"]
    program = f"import sys, poundlock.cli.servers; print([m for m in {heavy} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
