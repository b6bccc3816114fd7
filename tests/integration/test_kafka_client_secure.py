# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
"""The driver's Kafka client against a broker with TLS, SASL and ACLs."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import admin as administration

from kafka_probe import Probe
from poundlock.errors import NotAuthorised, UsageError
from poundlock.servers import base, kafka, rooms
from poundlock.sinks.kafka.transactions import Answer, Progress
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity
from poundlock.sinks.kafka.witness import Outcome

SECONDS = 20
SECRET = "s3cret-of-the-driver"
TOPIC = "secured"


def certify(directory: Path) -> tuple[Path, Path]:
    """Create an authority, and a key and certificate for a broker on 127.0.0.1."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=poundlock")
    openssl(*new, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(*new, "-keyout", "broker.key", "-out", "broker.csr")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1")
    sign = ("x509", "-req", "-days", "2", "-in", "broker.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
    openssl(*sign, "-CAcreateserial", "-extfile", "san", "-out", "broker.crt")
    store = directory / "broker.pem"
    store.write_text(
        (directory / "broker.key").read_text() + (directory / "broker.crt").read_text()
    )
    return directory / "ca.pem", store


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a broker with a second listener. Yield the settings for a driver to log in there."""
    authority, store = certify(tmp_path_factory.mktemp("certificates"))
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with kafka.running(properties=properties) as cluster:
        (port,) = base.free_ports(1)
        cluster.stop(1)
        config = cluster.directory / "config"
        shutil.copy(store, config)
        add_listener(config / "server-1.properties", port, config.resolve() / store.name)
        rooms.show(config)
        cluster.start(1)
        admin = administration.AdminClient(cluster.client_settings())
        admin.create_topics([administration.NewTopic(TOPIC, 1)])[TOPIC].result(SECONDS)
        grant(admin)
        yield {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "driver",
            "sasl.password": SECRET,
            "ssl.ca.location": str(authority),
        }


def add_listener(config: Path, port: int, store: Path) -> None:
    lines = []
    for line in config.read_text().splitlines():
        if line.startswith("listeners="):
            line += f",SECURE://127.0.0.1:{port}"
        if line.startswith("listener.security.protocol.map="):
            line += ",SECURE:SASL_SSL"
        lines.append(line)
    login = "org.apache.kafka.common.security.{}LoginModule required"
    users = f'user_driver="{SECRET}" user_poor="{SECRET}"'
    own = "listener.name.secure"
    lines += [
        f"{own}.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512",
        f"{own}.plain.sasl.jaas.config={login.format('plain.Plain')} {users};",
        f"{own}.scram-sha-512.sasl.jaas.config={login.format('scram.Scram')};",
        f"{own}.ssl.keystore.type=PEM",
        f"{own}.ssl.keystore.location={store}",
    ]
    config.write_text("\n".join(lines) + "\n")


def grant(admin: administration.AdminClient) -> None:
    """Give the driver only the rights that the documentation names."""
    kinds, operations = administration.ResourceType, administration.AclOperation
    whole, prefix = (
        administration.ResourcePatternType.LITERAL,
        administration.ResourcePatternType.PREFIXED,
    )
    rules = [
        (kinds.TRANSACTIONAL_ID, "mine.", prefix, (operations.WRITE, operations.DESCRIBE)),
        (kinds.TOPIC, TOPIC, whole, (operations.WRITE, operations.DESCRIBE, operations.READ)),
        (kinds.GROUP, "mine.", prefix, (operations.READ,)),
    ]
    acls = [
        administration.AclBinding(
            kind, name, pattern, f"User:{user}", "*", it, administration.AclPermissionType.ALLOW
        )
        for user in ("driver", "scram")
        for kind, name, pattern, allowed in rules
        for it in allowed
    ]
    for future in admin.create_acls(acls).values():
        future.result(SECONDS)
    scram = administration.ScramCredentialInfo(administration.ScramMechanism.SCRAM_SHA_512, 4096)
    upsertion = administration.UserScramCredentialUpsertion("scram", scram, SECRET.encode())
    for future in admin.alter_user_scram_credentials([upsertion]).values():
        future.result(SECONDS)


def leave_open(settings: dict[str, str]) -> tuple[TransactionIdentity, list[LastRecord]]:
    eos: dict[str, int] = {}
    offsets: list[int] = []
    id_ = f"mine.{uuid.uuid4().hex[:8]}"
    producer = confluent_kafka.Producer(
        {
            **settings,
            "transactional.id": id_,
            "log_level": 0,
            "statistics.interval.ms": 10,
            "stats_cb": lambda stats: eos.update(json.loads(stats)["eos"]),
            "on_delivery": lambda error, message: offsets.append(message.offset()),
        }
    )
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(TOPIC, value=b"row")
    producer.flush(SECONDS)
    eos.clear()
    until = time.monotonic() + SECONDS
    while eos.get("producer_id", -1) < 0:
        assert time.monotonic() < until
        producer.poll(0.05)
    with Probe(settings) as client:
        topic_id = client.topic_ids([TOPIC])[TOPIC]
    written = [LastRecord(TOPIC, topic_id, 0, max(offsets))]
    return TransactionIdentity(id_, eos["producer_id"], eos["producer_epoch"]), written


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_the_driver_logs_in_as_its_producers_do(secured, mechanism):
    user = {"PLAIN": "driver", "SCRAM-SHA-512": "scram"}[mechanism]
    settings = {**secured, "sasl.mechanism": mechanism, "sasl.username": user}
    identity, written = leave_open(settings)
    with Probe(settings) as client:
        assert [it.transactional_id for it in client.list_open("mine.")] == [
            identity.transactional_id
        ]
        assert client.end(*identity, commit=True) is Answer.DONE
        until = time.monotonic() + SECONDS
        while client.settled(identity, written).progress is not Progress.SETTLED:
            assert time.monotonic() < until
        assert client.witness_all(identity.producer_id, written).outcome is Outcome.COMMITTED
        client.commit_group_offsets("mine.group", {(TOPIC, 0): 1})
        assert client.features()["transaction.version"] >= 2


def test_a_wrong_password_is_named_at_once_and_not_shown(secured, caplog):
    wrong = "an-0ther-secret"
    with (
        caplog.at_level(logging.DEBUG),
        Probe({**secured, "sasl.password": wrong}, time_limit=3600) as client,
        pytest.raises(NotAuthorised, match=r"sasl\.password") as caught,
    ):
        client.describe(["mine.x"])
    assert wrong not in str(caught.value)
    assert wrong not in caplog.text


def test_a_right_password_is_not_shown_either(secured, caplog):
    with caplog.at_level(logging.DEBUG), Probe(secured) as client:
        assert client.describe(["mine.x"]) == {"mine.x": None}
    assert SECRET not in caplog.text
    assert "kafka.net" in caplog.text  # the library's log was captured


def test_an_unsupported_mechanism_is_reported(secured):
    with (
        Probe({**secured, "sasl.mechanism": "SCRAM-SHA-256"}) as client,
        pytest.raises(NotAuthorised, match=r"sasl\.mechanism"),
    ):
        client.describe(["mine.x"])


def test_a_certificate_of_an_unknown_authority_is_refused(secured, tmp_path):
    other, _ = certify(tmp_path)
    with (
        Probe({**secured, "ssl.ca.location": str(other)}) as client,
        pytest.raises(UsageError, match=r"certificate was not accepted.*ssl\.ca\.location"),
    ):
        client.describe(["mine.x"])


def test_a_certificate_for_another_host_is_refused_by_default(secured):
    elsewhere = secured["bootstrap.servers"].replace("127.0.0.1", "localhost")
    settings = {**secured, "bootstrap.servers": elsewhere}
    with Probe(settings) as client, pytest.raises(UsageError, match="localhost"):
        client.describe(["mine.x"])
    lax = {**settings, "ssl.endpoint.identification.algorithm": "none"}
    with Probe(lax) as client:
        assert client.describe(["mine.x"]) == {"mine.x": None}


def test_missing_permissions_are_named(secured):
    identity, written = leave_open(secured)
    id_ = identity.transactional_id
    with Probe({**secured, "sasl.username": "poor"}) as client:
        with pytest.raises(NotAuthorised, match=f"{id_}.*WRITE on"):
            client.end(*identity, commit=True)
        with pytest.raises(NotAuthorised, match=f"{id_}.*DESCRIBE"):
            client.describe([id_])
        with pytest.raises(NotAuthorised, match=f"DESCRIBE on Topic {TOPIC}"):
            client.topics([TOPIC])
        with pytest.raises(NotAuthorised, match="group"):
            client.commit_group_offsets("mine.group", {(TOPIC, 0): 1})
        config = client.broker_config(["transaction.max.timeout.ms"])
        assert config.values is None
        assert "DESCRIBE_CONFIGS on Cluster" in config.why
        assert client.list_open("mine.") == []  # Kafka hides topics that the user may not describe
    with Probe(secured) as client:
        assert client.end(*identity, commit=False) is Answer.DONE
        until = time.monotonic() + SECONDS
        while client.outcome(identity, written).outcome is not Outcome.ABORTED:
            assert time.monotonic() < until


def test_a_plain_text_connection_to_a_tls_port_ends_in_time(secured):
    from poundlock.errors import Unavailable

    settings = {"bootstrap.servers": secured["bootstrap.servers"]}
    with Probe(settings, time_limit=2) as client, pytest.raises(Unavailable):
        client.describe(["mine.x"])
