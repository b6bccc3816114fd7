"""TLS for connections to MySQL and MariaDB: how much of it is demanded, and what it protects.

The modes have the names and the meaning that they have in MySQL's own clients. Two rules are stricter:

- A CA verifies the host name too, unless `ssl_mode` says otherwise.
- A server that is not verified never gets the password itself, only the answer to a challenge. Not even
  encrypted: the key would be that of whoever answers.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from poundlock.errors import UsageError

OPTIONS = ("ssl_mode", "ssl_ca", "ssl_cert", "ssl_key")

# What each mode protects from, for `poundlock doctor`.
MODES: Mapping[str, str] = {
    "DISABLED": "no TLS: whoever is on the network can read and change everything",
    "PREFERRED": (
        "TLS if the server offers it, and nothing is verified: it protects from listeners only, "
        "and not from somebody on the network who answers in the server's place"
    ),
    "REQUIRED": (
        "TLS always, but nothing is verified: it protects from listeners only, and not from "
        "somebody on the network who answers in the server's place"
    ),
    "VERIFY_CA": (
        "TLS with a certificate of the given CA, for any host: it protects from everybody who has no "
        "certificate of that CA. Use it only with a CA of your own"
    ),
    "VERIFY_IDENTITY": (
        "TLS with a certificate of the given CA for this host: it protects from listeners and from "
        "false servers"
    ),
}
_VERIFIED = ("VERIFY_CA", "VERIFY_IDENTITY")

# Ways to log in that answer a challenge. The others send the password itself.
_CHALLENGES = frozenset({"mysql_native_password", "caching_sha2_password", "client_ed25519"})
_SENT_AT_ONCE = frozenset({"sha256_password", "mysql_clear_password", "dialog"})
_SWITCH, _MORE = b"\xfe", b"\x01"  # the first bytes of a server's demands
_ACCEPTED = b"\x01\x03"  # the password's hash was known to the server


@dataclass(frozen=True)
class Tls:
    """The TLS of a connection, as its address demands it."""

    mode: str = "PREFERRED"
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Tls:
        """Read the options of an address. Refuse those that contradict each other."""
        for name in OPTIONS:
            if options.get(name) == "":
                raise UsageError(f"{name}= in url= is empty: give it a value, or leave it out")
        ca, certificate, key = (options.get(name) for name in OPTIONS[1:])
        given = options.get("ssl_mode")
        if given is None:
            mode = "VERIFY_IDENTITY" if ca else "REQUIRED" if certificate else "PREFERRED"
        else:
            mode = given.upper()
        if mode not in MODES:
            raise UsageError(f"ssl_mode in url= is not known: give one of {', '.join(MODES)}")
        if ca and mode not in _VERIFIED:
            raise UsageError(
                f"ssl_mode={mode} in url= contradicts ssl_ca=, because it verifies no certificate: "
                "leave ssl_mode out, or leave ssl_ca out"
            )
        if mode in _VERIFIED and not ca:
            raise UsageError(
                f"ssl_mode={mode} in url= needs ssl_ca=, the file with the certificate of the CA. For "
                "a public CA give the machine's own file, such as /etc/ssl/certs/ca-certificates.crt"
            )
        if certificate and mode == "DISABLED":
            raise UsageError("ssl_mode=DISABLED in url= contradicts ssl_cert=: leave one out")
        if key and not certificate:
            raise UsageError("ssl_key= in url= needs ssl_cert=: give both, or neither")
        return cls(mode, ca, certificate, key)

    @property
    def required(self) -> bool:
        return self.mode not in ("DISABLED", "PREFERRED")

    @property
    def verified(self) -> bool:
        return self.mode in _VERIFIED

    def context(self) -> ssl.SSLContext | None:
        """Return what the connection is encrypted with; None if TLS is disabled."""
        if self.mode == "DISABLED":
            return None
        # Without the machine's certificates: only the CA that was given counts.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.mode == "VERIFY_IDENTITY"
        context.verify_mode = ssl.CERT_REQUIRED if self.verified else ssl.CERT_NONE
        names = "ssl_ca="
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            names = "ssl_cert= or ssl_key="
            if self.certificate:
                # Without a password OpenSSL would ask on the terminal and wait for ever.
                context.load_cert_chain(self.certificate, self.key, "")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            problem = UsageError(
                f"{names} in url= cannot be used ({type(error).__name__}): check that the files exist "
                "on this machine, are readable PEM without a password, and belong together"
            )
        else:
            return context
        raise problem

    def check_offer(self, offered: bool) -> None:
        """Refuse a server without TLS if TLS is required."""
        if self.required and not offered:
            raise UsageError(
                f"the server offers no TLS, but ssl_mode={self.mode} needs it. Turn TLS on in the "
                "server. If it is on, something on the way pretends to be the server"
            )

    def check_greeting(self, plugin: str) -> None:
        """Refuse a first packet after which the driver would send the password itself."""
        if not self.verified and plugin in _SENT_AT_ONCE:
            raise self._demands_password(plugin)

    def check_demand(self, packet: bytes) -> None:
        """Refuse a packet during login that asks an unverified connection for the password itself."""
        if self.verified:
            return
        if packet[:1] == _SWITCH:
            plugin = packet[1:].partition(b"\0")[0].decode("ascii", "replace")
            if plugin not in _CHALLENGES:
                raise self._demands_password(plugin if plugin.isidentifier() else "another way")
        elif packet[:1] == _MORE and packet != _ACCEPTED:
            raise self._demands_password("caching_sha2_password in full")

    def _demands_password(self, plugin: str) -> UsageError:
        return UsageError(
            f"the server asks for the password itself ({plugin}), but is not verified: it may be a "
            "false one, so it did not get the password. Give ssl_ca= in url=, the certificate of the "
            "CA that has signed the server's. If the server made its own certificates, this is the "
            "file ca.pem among its data, and ssl_mode=VERIFY_CA is needed too, because they name no "
            "host"
        )


def refused_certificate(error: ssl.SSLCertVerificationError, tls: Tls) -> UsageError:
    """Return the error for a server whose certificate was not accepted."""
    return UsageError(
        f"the server's certificate was not accepted: {error.verify_message}. Check that ssl_ca= in "
        "url= is the CA that has signed it, "
        + (
            "and that url= names the host as the certificate does. If it is right, something on the "
            "way pretends to be the server"
            if tls.mode == "VERIFY_IDENTITY"
            else "and that the certificate has not expired"
        )
    )
