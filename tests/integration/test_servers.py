# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false
"""Local Kafka servers, with real brokers and real clients."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from poundlock.errors import UsageError
from poundlock.servers import base, kafka
from program import call_program

QUIET = {"log_level": "0"}


def write(settings: dict[str, str], topic: str, values: list[str]) -> None:
    """Write values in one transaction."""
    producer = Producer({**settings, **QUIET, "transactional.id": f"test-{topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value.encode(), partition=0)
    producer.commit_transaction(30)


def read(settings: dict[str, str], topic: str, count: int) -> list[str]:
    consumer = Consumer({**settings, **QUIET, "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[str] = []
    while len(found) < count:
        messages = consumer.consume(count, timeout=30)
        assert messages, f"only {found} came"
        for message in messages:
            assert message.error() is None
            found.append(message.value().decode())
    consumer.close()
    return found


def test_a_cluster_keeps_its_address_and_data_over_a_restart(tmp_path):
    """As a user runs it, with the command line."""

    def run(*arguments, expect=0):
        done = call_program(*arguments, "--dir", tmp_path)
        assert done.returncode == expect, done
        return done

    try:
        up = run("servers", "up", "kafka")
        address = base.status(base.home_of("kafka", tmp_path)).url
        assert up.stdout == f"kafka  {address}\n"
        assert "Starting kafka ..." in up.stderr
        settings = {"bootstrap.servers": address}
        write(settings, "kept", ["a", "b"])
        again = run("servers", "up", "kafka")
        assert (again.stdout, again.stderr) == (up.stdout, "kafka runs already\n")

        shown = json.loads(run("servers", "status", "--json").stdout)
        assert shown["kafka"]["running"]
        assert run("servers", "env").stdout == f"export SERVERS={address}\n"
        run("servers", "down")
        assert "down" in run("servers", "status").stdout
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address.split(":"), timeout=1)

        assert run("servers", "up", "kafka").stdout.split() == ["kafka", address]
        assert read(settings, "kept", 2) == ["a", "b"]

        other = run("servers", "up", "kafka", "--brokers", 3, expect=1)
        assert "kafka is not started: the data" in other.stderr
        assert "made for brokers=1" in other.stderr
    finally:
        run("servers", "down", "--wipe")
    assert [path.name for path in (tmp_path / "kafka").iterdir()] == ["lock"]


def test_a_server_that_cannot_start_stops_no_other(tmp_path):
    there = ("--dir", tmp_path)
    missing = {"POUNDLOCK_VALKEY_BIN": str(tmp_path / "none")}
    try:
        up = call_program("servers", "up", "valkey", "postgres", *there, **missing)
        url = base.status(base.home_of("postgres", tmp_path)).url
        assert (up.returncode, up.stdout) == (1, f"postgres  {url}\n"), up
        assert "valkey is not started: POUNDLOCK_VALKEY_BIN is" in up.stderr
        assert up.stderr.endswith("not started: valkey. The reasons are above\n")
        again = call_program("servers", "up", "valkey", "postgres", "--json", *there, **missing)
        found = json.loads(again.stdout)
        assert again.returncode == 1 and found["postgres"]["running"]
        assert not found["valkey"]["running"] and "POUNDLOCK_VALKEY" in found["valkey"]["problem"]
    finally:
        call_program("servers", "down", "--wipe", *there)


def test_a_killed_broker_restarts_with_its_data(tmp_path):
    with kafka.running(tmp_path) as cluster:
        write(cluster.client_settings(), "kept", ["a", "b"])
        cluster.kill(1)
        assert cluster.running() == []
        cluster.start(1)
        assert read(cluster.client_settings(), "kept", 2) == ["a", "b"]
    assert not base.status(tmp_path).nodes


def test_brokers_listen_on_the_loopback_only(kafka_server):
    ports = base.State.load(kafka_server.directory).ports
    listening = {
        int(line.split()[1].split(":")[1], 16): line.split()[1].split(":")[0]
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    # 127.0.0.1 in the kernel's format, in IPv4 and mapped to IPv6.
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert {listening[port] for port in ports.values()} <= loopback


def test_transactions_have_version_two(kafka_server):
    """Poundlock needs version 2, and it is Kafka's default."""
    from kafka.admin import KafkaAdminClient

    admin = KafkaAdminClient(bootstrap_servers=kafka_server.bootstrap_servers)
    features = admin.describe_features()
    admin.close()
    assert features["transaction.version"]["finalized"] == (2, 2)


def test_three_brokers_go_on_without_one_of_them(tmp_path):
    with kafka.running(tmp_path, brokers=3) as cluster:
        settings = cluster.client_settings()
        assert settings["bootstrap.servers"].count(",") == 2
        admin = AdminClient({**settings, **QUIET})
        admin.create_topics([NewTopic("kept", 1, 3)])["kept"].result(30)
        cluster.kill(2)
        write(settings, "kept", ["a"])
        cluster.start(2)
        cluster.pause(1)
        cluster.resume(1)
        cluster.stop(3)
        assert sorted(cluster.running()) == [1, 2]
        assert read(settings, "kept", 1) == ["a"]


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    users = {"alice": 'pass"word\\1', "bob": "builder"}
    # With an authorizer, alice and bob may do nothing until they are allowed to.
    rights = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
    home = tmp_path_factory.mktemp("secure")
    with kafka.running(home, security="SASL_SSL", users=users, properties=rights) as cluster:
        write(cluster.admin_settings(), "secret", ["a"])
        yield cluster


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("user", ["alice", "bob"])
def test_the_right_password_is_accepted(secure, user, mechanism):
    settings = secure.client_settings(user, mechanism=mechanism)
    assert AdminClient({**settings, **QUIET}).list_topics(timeout=30).brokers


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_is_refused(secure, mechanism):
    settings = secure.client_settings("bob", mechanism=mechanism) | {"sasl.password": "wrong"}
    assert KafkaError._AUTHENTICATION in codes(settings)


def test_a_server_with_another_certificate_is_not_trusted(secure):
    settings = secure.client_settings()
    del settings["ssl.ca.location"]
    assert KafkaError._SSL in codes(settings)


def test_a_user_has_only_the_granted_rights(secure):
    producer = Producer({**secure.client_settings(), **QUIET, "transactional.id": "mine"})
    with pytest.raises(KafkaException, match="TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
        producer.init_transactions(30)


def test_only_their_owner_can_read_files_with_secrets(secure):
    config = secure.directory / "config"
    secrets = {'pass"word', "builder", (config / "broker.password").read_text()}
    # A broker that root starts runs as another user, who may read the files by their group.
    mode = 0o640 if os.geteuid() == 0 else 0o600
    for file in (*secure.directory.iterdir(), *config.iterdir()):
        if file.is_file() and any(it.encode() in file.read_bytes() for it in secrets):
            assert file.stat().st_mode & 0o777 == mode, file
    assert (config / "broker.p12").stat().st_mode & 0o777 == mode
    assert not (config / "format.arguments").exists()


def test_users_need_security(tmp_path):
    with (
        pytest.raises(UsageError, match="users= needs security='SASL_SSL'"),
        kafka.running(tmp_path, users={"alice": "secret"}),
    ):
        pass


def codes(settings: dict[str, str]) -> set[int]:
    """Return the error codes that a client gets with these settings."""
    seen: set[int] = set()
    client = Producer({**settings, **QUIET, "error_cb": lambda error: seen.add(error.code())})
    with pytest.raises(KafkaException):
        client.list_topics(timeout=5)
    client.poll(1)
    return seen
