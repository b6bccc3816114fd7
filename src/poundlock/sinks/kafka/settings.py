"""librdkafka's connection settings in kafka-python's words.

The driver must speak to Kafka with the same TLS and SASL as the producers in the tasks, which take
librdkafka's settings. What only tunes a producer is passed over; a setting that guards the connection
is either honoured here or refused by name, never dropped.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from poundlock.errors import UsageError

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_GUARDS = ("security.", "ssl.", "sasl.", "enable.ssl.", "enable.sasl.", "https.")
_HONOURED = frozenset(
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
_TRUTH = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


def translate(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return kafka-python's configuration for librdkafka's `settings`."""
    settings = {name: str(value) for name, value in settings.items()}
    refused = sorted(
        name for name in settings if name.startswith(_GUARDS) and name not in _HONOURED
    )
    if refused:
        raise UsageError(
            f"the driver cannot honour {', '.join(refused)}, so it would speak to Kafka with less "
            f"protection than the producers. Say the same with: {', '.join(sorted(_HONOURED))}"
        )
    protocol = settings.get("security.protocol", "plaintext").upper()
    if protocol not in _PROTOCOLS:
        raise UsageError(f"security.protocol must be one of {_listed(_PROTOCOLS)}")
    config: dict[str, Any] = {
        "bootstrap_servers": servers(settings),
        "security_protocol": protocol,
    }
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
    """Return the `host:port` names of `bootstrap.servers`."""
    listed = settings.get("bootstrap.servers") or settings.get("metadata.broker.list") or ""
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    if not hosts:
        raise UsageError("bootstrap.servers is missing: give it as host:port,host:port")
    if any("://" in host for host in hosts):
        raise UsageError(
            "bootstrap.servers takes host:port alone; the protocol goes into security.protocol"
        )
    return hosts


def _sasl(settings: Mapping[str, str]) -> dict[str, Any]:
    # librdkafka knows the setting under both names, and GSSAPI is its default.
    given = settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or "GSSAPI"
    mechanism = given.upper()
    if mechanism not in _MECHANISMS:
        raise UsageError(
            f"sasl.mechanism {given} cannot be spoken by the driver: set it to one of "
            f"{_listed(_MECHANISMS)}, or use TLS client certificates (security.protocol=SSL)"
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
    if not _truth(settings, "enable.ssl.certificate.verification", default=True):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with _blaming("ssl.ca.location", "ssl.ca.pem"):
        _load_authorities(context, settings)
    with _blaming("ssl.certificate.location", "ssl.key.location", "ssl.key.password"):
        _load_certificate(context, settings)
    with _blaming("ssl.crl.location"):
        _load_revoked(context, settings)
    with _blaming("ssl.cipher.suites"):
        _load_ciphers(context, settings)
    return context


@contextmanager
def _blaming(*names: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # SSLError is an OSError
        # The error's text can quote a PEM that was given in place of a path: say its kind only.
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
        # Without any password OpenSSL would ask on the terminal, and wait for ever.
        context.load_cert_chain(certificate, key, settings.get("ssl.key.password", ""))


def _load_revoked(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    if revoked := settings.get("ssl.crl.location"):
        context.load_verify_locations(revoked)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _load_ciphers(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    if ciphers := settings.get("ssl.cipher.suites"):
        context.set_ciphers(ciphers)


def _truth(settings: Mapping[str, str], name: str, *, default: bool) -> bool:
    if name not in settings:
        return default
    try:
        return _TRUTH[settings[name].lower()]
    except KeyError:
        raise UsageError(f"{name} must be true or false") from None


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words)
