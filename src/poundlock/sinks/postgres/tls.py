"""What the TLS of a connection to PostgreSQL protects from, according to its `sslmode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from poundlock.sinks.postgres.link import Link

_ANSWERS = "somebody on the network who answers in the server's place"
MODES: Mapping[str, str] = {
    "disable": "no TLS: whoever is on the network can read and change everything",
    "allow": f"TLS only if the server insists on it: it protects from nobody, and not from {_ANSWERS}",
    "prefer": (
        "TLS if the server offers it, and nothing is verified: it protects from listeners only, and "
        f"not from {_ANSWERS}"
    ),
    "require": (
        f"TLS always, but nothing is verified: it protects from listeners only, and not from {_ANSWERS}"
    ),
    "verify-ca": (
        "TLS with a certificate of the CA in sslrootcert, for any host: it protects from everybody who "
        "has no certificate of that CA. Use it only with a CA of your own"
    ),
    "verify-full": (
        "TLS with a certificate of the CA in sslrootcert for this host: it protects from listeners and "
        "from false servers"
    ),
}
_DEFAULT_ROOT = Path(".postgresql") / "root.crt"  # below the home directory


@dataclass(frozen=True)
class Protection:
    """The `sslmode` in force, whether the connection is encrypted, and what the mode protects from."""

    mode: str
    encrypted: bool
    text: str


def protection(link: Link) -> Protection:
    """Tell how a connection is protected, with the settings of the environment and of libpq."""
    found = {option.keyword.decode(): (option.val or b"").decode() for option in link.pgconn.info}
    mode = found.get("sslmode") or "prefer"
    encrypted = bool(link.pgconn.ssl_in_use)
    host = found.get("hostaddr") or found.get("host") or ""
    if not encrypted and (not host or host.startswith(("/", "@"))):
        return Protection(mode, encrypted, "a local socket: nothing crosses the network")
    text = MODES.get(mode, "not known")
    root = Path(found.get("sslrootcert") or Path.home() / _DEFAULT_ROOT)
    if mode == "require" and root.exists():
        text = f"as verify-ca, because {root} exists: {MODES['verify-ca']}"
    return Protection(mode, encrypted, text)
