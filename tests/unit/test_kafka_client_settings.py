"""The Kafka client's settings, its secrets, and the releases of kafka-python that it accepts."""

from __future__ import annotations

import logging
import ssl

import pytest
from scripted_broker import SECRET, SERVERS

from poundlock.errors import UsageError
from poundlock.sinks.kafka import kafka_python as _kafka_python
from poundlock.sinks.kafka.client import KafkaClient
from poundlock.sinks.kafka.settings import to_kafka_python

LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": SECRET}


def test_plain_settings_need_only_servers():
    assert to_kafka_python(SERVERS) == {
        "bootstrap_servers": ["a:9092", "b:9093"],
        "security_protocol": "PLAINTEXT",
    }


@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms"])
def test_both_names_of_the_sasl_mechanism_are_translated(name: str):
    config = to_kafka_python(
        {
            **SERVERS,
            "security.protocol": "sasl_plaintext",
            name: "scram-sha-512",
            "sasl.username": "me",
            "sasl.password": SECRET,
        }
    )
    assert config["security_protocol"] == "SASL_PLAINTEXT"
    assert config["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl_plain_username"], config["sasl_plain_password"]) == ("me", SECRET)


def test_tls_verifies_certificate_and_host_name_by_default():
    context = to_kafka_python({**SERVERS, "security.protocol": "SSL"})["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2

    nameless = {**SERVERS, "security.protocol": "ssl"}
    nameless["ssl.endpoint.identification.algorithm"] = "none"
    context = to_kafka_python(nameless)["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.check_hostname

    trusting = {**SERVERS, "security.protocol": "SASL_SSL", **LOGIN}
    trusting["enable.ssl.certificate.verification"] = "false"
    assert to_kafka_python(trusting)["ssl_context"].verify_mode is ssl.CERT_NONE


def test_settings_that_only_tune_a_producer_are_ignored():
    tuned = {"linger.ms": "5", "compression.type": "zstd", "transaction.timeout.ms": "60000"}
    assert to_kafka_python({**SERVERS, **tuned}) == to_kafka_python(SERVERS)


@pytest.mark.parametrize(
    "name",
    [
        "sasl.oauthbearer.method",
        "sasl.kerberos.keytab",
        "ssl.keystore.location",
        "ssl.key.pem",
        "ssl.engine.location",
        "ssl.curves.list",
        "enable.sasl.oauthbearer.unsecure.jwt",
        "security.something.new",
        "https.ca.location",
    ],
)
def test_an_unsupported_security_setting_is_refused_by_name(name: str):
    with pytest.raises(UsageError, match=name.replace(".", r"\.")) as caught:
        to_kafka_python({**SERVERS, name: SECRET})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", "AWS_MSK_IAM"])
def test_an_unsupported_sasl_mechanism_is_refused_by_name(mechanism: str):
    with pytest.raises(UsageError, match=mechanism):
        to_kafka_python({**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": mechanism})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"bootstrap\.servers is missing"),
        ({"bootstrap.servers": "SSL://a:1"}, r"security\.protocol"),
        ({**SERVERS, "security.protocol": "TLS"}, "SASL_SSL"),
        ({**SERVERS, "security.protocol": "SASL_SSL"}, "GSSAPI"),
        (
            {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
            r"sasl\.username and sasl\.password",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.ca.location": "/no/such"},
            r"ssl\.ca\.location.*FileNotFoundError",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.key.location": "/no/such"},
            r"ssl\.certificate\.location",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "x"},
            "https or none",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "enable.ssl.certificate.verification": "x"},
            "true or false",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, said: str):
    with pytest.raises(UsageError, match=said):
        KafkaClient(settings)


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture):
    client = KafkaClient({**SERVERS, "security.protocol": "SASL_PLAINTEXT", **LOGIN})
    assert SECRET not in repr(client)
    assert repr(client) == "KafkaClient(a:9092,b:9093)"
    _kafka_python._silence_wire_dumps()
    with caplog.at_level(logging.DEBUG):
        for name in ("kafka.protocol.parser", "kafka.net.connection"):
            logging.getLogger(name).debug("Send: %r", SECRET)
            logging.getLogger(name).info("still heard")
    assert SECRET not in caplog.text
    assert "still heard" in caplog.text


def test_a_pem_instead_of_a_path_is_not_quoted():
    with pytest.raises(UsageError) as caught:
        to_kafka_python({**SERVERS, "security.protocol": "SSL", "ssl.ca.pem": SECRET})
    assert SECRET not in str(caught.value)


# kafka-python.


def test_a_release_of_kafka_python_without_a_method_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delattr(_kafka_python._Manager, "send")
    with pytest.raises(UsageError, match=r"KafkaConnectionManager\.send\(node_id"):
        KafkaClient(SERVERS)


def test_a_release_of_kafka_python_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_kafka_python._Manager, "send", lambda self, request, node_id: None)
    with pytest.raises(UsageError, match="request_timeout_ms"):
        KafkaClient(SERVERS)
