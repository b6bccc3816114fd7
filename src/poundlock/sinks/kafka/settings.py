"""Kafka settings, in librdkafka's names: for the producers in tasks, and for the driver's client.

Producers take the settings as they are. Settings that would break the guarantee are refused. The
driver's client is kafka-python, so its settings are translated. It must use the same TLS and SASL as
the producers: it ignores settings that only tune a producer, but it never ignores one that secures the
connection. Such a setting is translated or refused.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from poundlock.core.reach import parse_address
from poundlock.errors import UsageError
from poundlock.secret import SECRET_NAME, resolve_all
from poundlock.sinks.kafka import librdkafka

# Fast in long batches, without a wait in short ones. Users may change all of these.
DEFAULTS = {
    # Partitions as Java's producers do, and so as Spark's own sink does.
    "partitioner": "murmur2_random",
    "linger.ms": "5",
    "batch.size": "300000",
    "batch.num.messages": "100000",
    "message.max.bytes": "1000000",
    # Together these limit the memory of a task, however long its batch. More messages make it slower:
    # the library walks over them several times, and should find them in the processor's cache.
    "queue.buffering.max.messages": "50000",
    "queue.buffering.max.kbytes": "32768",
    # The library waits half of this between its first two connections.
    "reconnect.backoff.ms": "20",
    # A misspelled topic is an error, not a new topic.
    "allow.auto.create.topics": "false",
    # Every producer would wait for a last report before it ends.
    "enable.metrics.push": "false",
}

# The producer id is read from the statistics. A report costs time in proportion to the partitions of
# all topics written to, and a short batch waits for one report. 50 ms suits long and short batches.
STATISTICS_MS = "50"

_FIXED: Mapping[str, str] = {
    "transactional.id": "each task's producer gets its own",
    "statistics.interval.ms": "the producer id is read from the statistics",
    "enable.gapless.guarantee": "the transaction already gives more",
    "delivery.report.only.error": "every acknowledgement is checked",
    "log.queue": "nobody reads that queue",
    "test.mock.num.brokers": "the rows would be written to no real broker",
}
_TRANSACTIONAL_VALUES: Mapping[str, frozenset[str]] = {
    "enable.idempotence": frozenset({"true"}),
    "acks": frozenset({"all", "-1"}),
    "request.required.acks": frozenset({"all", "-1"}),
}

PORT = 9092  # of an address without one

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SECURITY_PREFIXES = ("security.", "ssl.", "sasl.", "enable.ssl.", "enable.sasl.", "https.")
_TRANSLATED = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.cipher.suites",
        "ssl.crl.location",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "enable.ssl.certificate.verification",
    }
)
_BOOLEANS = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


def client_settings(bootstrap_servers: str, settings: Mapping[str, str] | None) -> dict[str, str]:
    """Combine the two ways to name the brokers. Raises `UsageError` if they differ.

    What names a secret is left as it is: settings travel to the executors. `resolve_all` reads it where
    a connection is made.
    """
    given = {str(name): str(value) for name, value in (settings or {}).items()}
    named = given.get("bootstrap.servers", bootstrap_servers)
    if named != bootstrap_servers:
        raise UsageError(
            "bootstrap_servers= and settings['bootstrap.servers'] differ: give only one of them"
        )
    return given | {"bootstrap.servers": bootstrap_servers}


def check_settings(settings: Mapping[str, str], *, transactional: bool = True) -> None:
    """Raise `UsageError` for a producer's settings that are unknown or would break the guarantee."""
    settings = resolve_all(settings)
    for name, value in settings.items():
        reason = _FIXED.get(name)
        if reason is None and name.endswith("_cb"):
            reason = "callbacks cannot travel to the executors"
        allowed = _TRANSACTIONAL_VALUES.get(name)
        if transactional and allowed and str(value).lower() not in allowed:
            reason = f"exactly-once output needs {' or '.join(sorted(allowed))}"
        if reason is not None:
            raise UsageError(f"the Kafka setting {name!r} cannot be set here: {reason}. Remove it")
    if not (settings.get("bootstrap.servers") or settings.get("metadata.broker.list")):
        raise UsageError("the Kafka setting 'bootstrap.servers' is missing: give host:port[,...]")
    librdkafka.load().conf_destroy(configure(settings))


def configure(settings: Mapping[str, str]) -> int:
    """Return a new rd_kafka_conf_t, which the caller owns."""
    library = librdkafka.load()
    conf = library.conf_new()
    for name, value in settings.items():
        why = librdkafka.set_option(conf, name, str(value))
        if why is not None:
            library.conf_destroy(conf)
            version = librdkafka.decode(library.version_str())
            raise UsageError(
                f"librdkafka {version} refuses the Kafka setting {name!r}: "
                f"{'its value is wrong' if SECRET_NAME.search(name) else why}. Correct or remove it; "
                "all settings are listed in librdkafka's CONFIGURATION.md"
            )
    return conf


def to_kafka_python(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return kafka-python's configuration for librdkafka's `settings`."""
    settings = {name: str(value) for name, value in settings.items()}
    refused = sorted(
        name for name in settings if name.startswith(SECURITY_PREFIXES) and name not in _TRANSLATED
    )
    if refused:
        raise UsageError(
            f"the driver cannot use {', '.join(refused)}, so its connection to Kafka would be less "
            f"secure than the producers'. Use these settings instead: {', '.join(sorted(_TRANSLATED))}"
        )
    protocol = settings.get("security.protocol", "plaintext").upper()
    if protocol not in _PROTOCOLS:
        raise UsageError(f"security.protocol must be one of {', '.join(_PROTOCOLS)}")
    config: dict[str, Any] = {"bootstrap_servers": servers(settings), "security_protocol": protocol}
    if "client.id" in settings:
        config["client_id"] = settings["client.id"]
    if "client.dns.lookup" in settings:
        config["client_dns_lookup"] = settings["client.dns.lookup"]
    if protocol.startswith("SASL"):
        config.update(_sasl(settings))
    if protocol.endswith("SSL"):
        config["ssl_context"] = _tls(settings)
    return config


def servers(settings: Mapping[str, str]) -> list[str]:
    """Return the addresses in `bootstrap.servers`."""
    listed = settings.get("bootstrap.servers") or settings.get("metadata.broker.list") or ""
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    if not hosts:
        raise UsageError("bootstrap.servers is missing: give it as host:port,host:port")
    if any("://" in host for host in hosts):
        raise UsageError(
            "bootstrap.servers takes only host:port; set the protocol in security.protocol"
        )
    wrong = [number for number, host in enumerate(hosts, 1) if parse_address(host, PORT) is None]
    if wrong:  # not quoted, because a variable may have been named that holds something else
        raise UsageError(
            f"address {wrong[0]} of {len(hosts)} in bootstrap.servers is not host:port: give "
            "host:port[,...], or env:NAME or file:PATH that holds it"
        )
    return hosts


def _sasl(settings: Mapping[str, str]) -> dict[str, Any]:
    # librdkafka has two names for this setting. Its default is GSSAPI.
    given = settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or "GSSAPI"
    mechanism = given.upper()
    if mechanism not in MECHANISMS:
        raise UsageError(
            f"sasl.mechanism {given} is not supported by the driver: set it to one of "
            f"{', '.join(MECHANISMS)}, or use TLS client certificates (security.protocol=SSL)"
        )
    missing = [name for name in ("sasl.username", "sasl.password") if not settings.get(name)]
    if missing:
        raise UsageError(f"sasl.mechanism {mechanism} needs {' and '.join(missing)}")
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": settings["sasl.username"],
        "sasl_plain_password": settings["sasl.password"],
    }


def _tls(settings: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    algorithm = settings.get("ssl.endpoint.identification.algorithm", "https").lower()
    if algorithm not in ("https", "none"):
        raise UsageError("ssl.endpoint.identification.algorithm must be https or none")
    context.check_hostname = algorithm == "https"
    if not _boolean(settings, "enable.ssl.certificate.verification", default=True):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with _name_in_errors("ssl.ca.location", "ssl.ca.pem"):
        _load_authorities(context, settings)
    with _name_in_errors("ssl.certificate.location", "ssl.key.location", "ssl.key.password"):
        _load_certificate(context, settings)
    with _name_in_errors("ssl.crl.location"):
        if revoked := settings.get("ssl.crl.location"):
            context.load_verify_locations(revoked)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    with _name_in_errors("ssl.cipher.suites"):
        if ciphers := settings.get("ssl.cipher.suites"):
            context.set_ciphers(ciphers)
    return context


@contextmanager
def _name_in_errors(*names: str) -> Iterator[None]:
    """Turn an error into one that names these settings."""
    try:
        yield
    except (OSError, ValueError) as error:  # SSLError is an OSError
        # The error may quote a PEM that was given instead of a path, so show only its type.
        raise UsageError(
            f"{' or '.join(names)} cannot be used ({type(error).__name__}): check that the files "
            "exist, are readable PEM and belong together, and that the key's password is right"
        ) from None


def _load_authorities(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    location, pem = settings.get("ssl.ca.location"), settings.get("ssl.ca.pem")
    if pem:
        context.load_verify_locations(cadata=pem)
    elif location and location != "probe":
        context.load_verify_locations(location)
    else:
        context.load_default_certs()


def _load_certificate(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    certificate, key = settings.get("ssl.certificate.location"), settings.get("ssl.key.location")
    if certificate or key:
        if not certificate:
            raise ValueError("a key without a certificate")
        # Without a password OpenSSL would ask on the terminal and wait for ever.
        context.load_cert_chain(certificate, key, settings.get("ssl.key.password", ""))


def _boolean(settings: Mapping[str, str], name: str, *, default: bool) -> bool:
    if name not in settings:
        return default
    try:
        return _BOOLEANS[settings[name].lower()]
    except KeyError:
        raise UsageError(f"{name} must be true or false") from None
