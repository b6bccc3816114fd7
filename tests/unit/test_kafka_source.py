"""What of librdkafka's security settings reaches Spark's own Kafka client, and what travels."""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import poundlock as lock
from poundlock import sinks
from poundlock.errors import UsageError
from poundlock.sinks.kafka.settings import SECURITY_PREFIXES, to_kafka_python
from poundlock.sources.kafka import _NO_SECRETS, KafkaSource, OffsetMode, _java_security

PASSWORD = "hunter2"
TLS = {"security.protocol": "ssl"}
LOGIN = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "scram-sha-256",
    "sasl.username": "me",
    "sasl.password": PASSWORD,
}


@pytest.mark.parametrize(
    ("settings", "java"),
    [
        ({}, {}),
        ({"security.protocol": "plaintext", "client.id": "x"}, {}),
        (TLS, {"kafka.security.protocol": "SSL"}),
        (
            {"ssl.ca.location": "/ca"},
            {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": "/ca"},
        ),
        ({"ssl.ca.location": "probe"}, {}),
        (
            {"ssl.ca.pem": "-----BEGIN"},
            {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.certificates": "-----BEGIN"},
        ),
        (
            {"ssl.cipher.suites": "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256"},
            {"kafka.ssl.cipher.suites": "TLS_AES_256_GCM_SHA384,TLS_AES_128_GCM_SHA256"},
        ),
        (
            {"ssl.endpoint.identification.algorithm": "none"},
            {"kafka.ssl.endpoint.identification.algorithm": ""},
        ),
        ({"enable.ssl.certificate.verification": "true"}, {}),
    ],
)
def test_a_setting_is_honoured(settings: dict[str, str], java: dict[str, str]) -> None:
    given = TLS | settings if set(settings) - {"security.protocol", "client.id"} else settings
    expected = ({"kafka.security.protocol": "SSL"} if given is not settings else {}) | java
    assert _java_security(given, {}) == expected


def test_a_login_is_honoured() -> None:
    java = _java_security(LOGIN, {})
    assert java["kafka.sasl.mechanism"] == "SCRAM-SHA-256"
    assert 'username="me" password="hunter2";' in java["kafka.sasl.jaas.config"]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("ssl.crl.location", "/crl", "kafka.ssl.crl.location"),
        ("ssl.cipher.suites", "ECDHE-RSA-AES256-GCM-SHA384", "kafka.ssl.cipher.suites"),
        ("ssl.certificate.location", "/c", "kafka.ssl.keystore.location"),
        ("ssl.certificate.pem", "pem", "kafka.ssl.keystore.certificate.chain"),
        ("ssl.key.location", "/k", "kafka.ssl.keystore.location"),
        ("ssl.key.pem", "pem", "kafka.ssl.keystore.key"),
        ("ssl.key.password", PASSWORD, "kafka.ssl.key.password"),
        ("ssl.keystore.location", "/k", "kafka.ssl.keystore.location"),
        ("ssl.curves.list", "P-521", "kafka.ssl.curves.list"),
        ("ssl.sigalgs.list", "x", "kafka.ssl.sigalgs.list"),
        ("sasl.kerberos.keytab", "/k", "kafka.sasl.kerberos.keytab"),
        ("sasl.oauthbearer.client.id", "x", "kafka.sasl.oauthbearer.client.id"),
        ("enable.sasl.oauthbearer.unsecure.jwt", "true", "kafka.enable.sasl.oauthbearer"),
        ("https.ca.location", "/ca", "kafka.https.ca.location"),
    ],
)
def test_a_setting_that_would_be_lost_is_refused(name: str, value: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        _java_security(TLS | {name: value}, {})
    assert name in str(refused.value) and instead in str(refused.value)
    assert PASSWORD not in str(refused.value)
    assert _java_security(TLS | {name: value}, {_whole(instead, name): "x"})


def _whole(instead: str, name: str) -> str:
    return f"kafka.{name}" if f"kafka.{name}".startswith(instead) else instead.upper()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (TLS | {"enable.ssl.certificate.verification": "false"}, "always verifies"),
        (TLS | {"ssl.endpoint.identification.algorithm": "x"}, "must be https or none"),
        (LOGIN | {"sasl.mechanism": "GSSAPI"}, "not supported"),
        ({n: v for n, v in LOGIN.items() if n != "sasl.mechanism"}, "GSSAPI is not supported"),
        ({"ssl.ca.location": "/ca"}, "without security.protocol the source connects in plain text"),
        ({"sasl.password": PASSWORD}, "without security.protocol"),
    ],
)
def test_what_would_weaken_the_source_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        _java_security(settings, {})
    assert PASSWORD not in str(refused.value)


def test_every_security_setting_of_the_driver_is_honoured_or_refused() -> None:
    """Whatever the driver's own client accepts must not get lost on the way to Spark's."""
    names = [
        n for n in to_kafka_python.__globals__["_TRANSLATED"] if n.startswith(SECURITY_PREFIXES)
    ]
    assert len(names) > 10
    base = _java_security(LOGIN, {})
    for name in set(names) - {"security.protocol", "sasl.mechanisms"}:
        changed = LOGIN | {name: LOGIN.get(name, "none") + "x"}
        with contextlib.suppress(UsageError):
            assert _java_security(changed, {}) != base, name


def _participants() -> list[Any]:
    settings = LOGIN | {"sasl.password": "env:KAFKA_PASSWORD"}
    source = KafkaSource("g", OffsetMode.TRANSACTIONAL, settings | {"bootstrap.servers": "a:1"})
    return [sinks.Kafka("t", bootstrap_servers="a:1", settings=settings), source.participant()]


def test_a_password_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    for made in _participants():
        assert PASSWORD not in repr(vars(made))
        travelling = pickle.dumps(made)
        assert PASSWORD.encode() not in travelling
        monkeypatch.setenv("KAFKA_PASSWORD", "as the executor knows it")
        arrived = pickle.loads(travelling)
        assert arrived.client._config["sasl_plain_password"] == "as the executor knows it"
        monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)


def test_a_missing_variable_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(UsageError, match="KAFKA_PASSWORD is not set"):
        _participants()


@pytest.mark.parametrize("servers", ["hidden:port", "one:1,hidden:99999", ":1", "env:BROKERS"])
def test_servers_that_are_no_addresses_are_refused(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKERS", "hidden:secret")
    spark: Any = None  # refused before it is used
    with pytest.raises(UsageError, match="host:port") as read:
        lock.read_kafka(spark, "t", bootstrap_servers=servers)
    with pytest.raises(UsageError, match="host:port") as written:
        sinks.Kafka("t", bootstrap_servers=servers).preflight()
    assert "hidden" not in f"{read.value} {written.value}"  # it may be another variable's value


@pytest.mark.parametrize(
    "reader",
    [lock.read_kafka, lock.read_files, lock.read_socket, lock.from_collection, lock.custom],
)
def test_a_reader_says_that_it_returns_a_frame(reader: Callable[..., Any]) -> None:
    assert inspect.signature(reader).return_annotation == "DataFrame"


@pytest.mark.parametrize(
    "call", ["skafka.ssl.keystore.key\ns...", "skafka.x\ns-----BEGIN RSA PRIVATE KEY-----\\nAAAA"]
)
def test_no_debug_output_of_py4j_has_a_private_key(call: str) -> None:
    record = logging.LogRecord("py4j", logging.DEBUG, "", 0, f"Command to send: {call}", (), None)
    assert not _NO_SECRETS.filter(record)
