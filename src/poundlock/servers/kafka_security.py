"""SASL_SSL for a local Kafka, with a private certificate authority and users with passwords.

The brokers use it among themselves too, as the user `poundlock-broker`, whose password is random and
private. If an authorizer is on, every other user starts without rights, as in production.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from poundlock.errors import UsageError
from poundlock.jvm import java
from poundlock.servers.base import run_tool, write_private

MECHANISMS = ("PLAIN", "SCRAM-SHA-512")
BROKER_USER = "poundlock-broker"

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True)
class Security:
    """The users that may connect. They are fixed when the cluster's storage is formatted."""

    users: Mapping[str, str] = field(repr=False)  # name -> password

    def __post_init__(self) -> None:
        for name, password in self.users.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == BROKER_USER:
                raise UsageError(
                    f"{name!r} cannot be a user's name: use letters, digits, - and _, "
                    f"but not {BROKER_USER!r}, which is the brokers' own user"
                )
            if not re.fullmatch(r"[!-~]+", password) or set(password) & set(",[]"):
                raise UsageError(
                    f"the password of {name!r} has a character that Kafka's tools do not accept: use "
                    "ASCII without spaces, commas or square brackets"
                )
        if not self.users:
            raise UsageError("SASL needs at least one user: give users={'name': 'password'}")

    def prepare(self, home: Path) -> None:
        """Create the secrets and the certificates, once."""
        if not (home / "ca.pem").exists():
            write_private(home / "broker.password", secrets.token_hex(16))
            _make_certificates(home)

    def properties(self, home: Path) -> dict[str, str]:
        """Return the properties of the brokers. Only the owner may read that file."""
        password = (home / "broker.password").read_text()
        itself = {"username": BROKER_USER, "password": password, f"user_{BROKER_USER}": password}
        others = {f"user_{name}": password for name, password in self.users.items()}
        return {
            "listener.security.protocol.map": "CLIENT:SASL_SSL,CONTROLLER:SASL_SSL",
            "sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.client.plain.sasl.jaas.config": _jaas(_PLAIN, itself | others),
            "listener.name.client.scram-sha-512.sasl.jaas.config": _jaas(_SCRAM, {}),
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": _jaas(_PLAIN, itself),
            "super.users": f"User:{BROKER_USER}",
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": str(home / "broker.p12"),
            "ssl.keystore.password": password,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(home / "ca.pem"),
        }

    def format_arguments(self) -> list[str]:
        """Return arguments that store the users in the cluster's storage, where SCRAM keeps them."""
        return [
            f"--add-scram=SCRAM-SHA-512=[name={name},password={password}]"
            for name, password in self.users.items()
        ]

    def client_settings(self, home: Path, user: str | None, mechanism: str) -> dict[str, str]:
        """Return settings of librdkafka for a user, by default the first."""
        if mechanism not in MECHANISMS:
            raise UsageError(f"mechanism={mechanism!r}: the brokers offer {', '.join(MECHANISMS)}")
        name = user or next(iter(self.users))
        if name not in self.users:
            raise UsageError(f"there is no user {name!r}; there are: {', '.join(self.users)}")
        return _settings(home, name, self.users[name], mechanism)

    def broker_settings(self, home: Path) -> dict[str, str]:
        """Return settings of librdkafka for a client that has every right."""
        return _settings(home, BROKER_USER, (home / "broker.password").read_text(), "PLAIN")


def _settings(home: Path, user: str, password: str, mechanism: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "ssl.ca.location": str(home / "ca.pem"),
    }


def _jaas(module: str, options: Mapping[str, str]) -> str:
    quoted = [value.replace("\\", "\\\\").replace('"', '\\"') for value in options.values()]
    pairs = [f' {key}="{value}"' for key, value in zip(options, quoted, strict=True)]
    return f"{module} required{''.join(pairs)};"


def _make_certificates(home: Path) -> None:
    """Create `broker.p12` with the brokers' key, and `ca.pem` with the authority that signed it.

    The authority's own key is deleted at the end, so it cannot sign anything else.
    """
    store = home / "broker.p12"
    store.unlink(missing_ok=True)
    key = ("-keyalg", "EC", "-groupname", "secp256r1", "-validity", "3650")
    authority = ("-alias", "ca", "-dname", "CN=poundlock local CA", "-ext", "bc:critical=ca:true")
    broker = ("-alias", "broker", "-dname", "CN=127.0.0.1", "-signer", "ca")
    names = ("-ext", "san=ip:127.0.0.1,dns:localhost")
    _keytool(home, "-genkeypair", *key, *authority, "-ext", "ku:critical=keyCertSign")
    _keytool(home, "-genkeypair", *key, *broker, *names)
    _keytool(home, "-exportcert", "-rfc", "-alias", "ca", "-file", str(home / "ca.pem.new"))
    _keytool(home, "-delete", "-alias", "ca")
    store.chmod(0o600)
    os.replace(home / "ca.pem.new", home / "ca.pem")  # last: it shows that the rest is complete


def _keytool(home: Path, *arguments: str) -> None:
    command = [
        *(str(java.tool("keytool")), "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", *arguments),
        *("-keystore", str(home / "broker.p12"), "-storetype", "PKCS12"),
        *("-storepass:env", "POUNDLOCK_STORE"),  # every user of the machine can read arguments
    ]
    password = (home / "broker.password").read_text()
    run_tool(
        command, f"keytool {arguments[0]} failed", env=os.environ | {"POUNDLOCK_STORE": password}
    )
