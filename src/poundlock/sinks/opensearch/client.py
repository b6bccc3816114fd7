"""A connection to OpenSearch, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from opensearchpy import OpenSearch as Driver
from opensearchpy import exceptions

from poundlock.errors import InDoubt, NotAuthorised, PoundlockError, Unavailable, UsageError
from poundlock.secret import is_cut, resolve, resolve_within

REASON_CHARACTERS = 200  # of the server's words in an error


def connect(url: str, settings: Mapping[str, Any], timeout: float, sink: str) -> Driver:
    """Create a client. The addresses lose user and password, because errors show addresses."""
    options: dict[str, Any] = {k: resolve_within(k, value) for k, value in settings.items()}
    hosts: list[str] = []
    for address in resolve("url", url).split(","):
        try:
            parts = urlsplit("" if is_cut(address) else address.strip())
            port = parts.port or (443 if parts.scheme == "https" else 9200)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                "url is not a valid address: write https://user:password@host:9200, several with "
                "commas, and percent-encode / ? # @ inside its parts, such as / as %2F in a password",
                sink=sink,
            )
        if parts.username:
            login = unquote(parts.username), unquote(parts.password or "")
            options.setdefault("http_auth", login)
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        hosts.append(urlunsplit((parts.scheme, f"{name}:{port}", parts.path, "", "")))
    # `Sender` knows which documents to send again. The driver's own retries do not.
    return Driver(hosts, timeout=timeout, max_retries=0, retry_on_timeout=False, **options)


def translate_error(error: exceptions.TransportError, doing: str, sink: str) -> PoundlockError:
    """Return our error for a request that failed as a whole."""
    status = error.status_code
    reason = str(error.error)[:REASON_CHARACTERS]
    if status in (401, 403) and "cluster_block" not in str(error.error):
        return NotAuthorised(
            f"{doing}: the server refuses the user or the password ({status}). The sink needs to read "
            "the index's mapping and to write to it",
            sink=sink,
        )
    if isinstance(error, exceptions.SSLError):
        return UsageError(
            f"{doing}: no secure connection: {reason}. Name the authority that signed the server's "
            "certificate: settings={'ca_certs': 'file.pem'}",
            sink=sink,
        )
    disconnected = isinstance(error, exceptions.ConnectionError)  # includes time-outs
    if disconnected or status in (403, 408, 429) or (isinstance(status, int) and status >= 500):
        kind = type(error).__name__ if disconnected else status
        return Unavailable(f"{doing}: {kind} {reason}", sink=sink)
    return InDoubt(f"{doing}: {status} {reason}", sink=sink)
