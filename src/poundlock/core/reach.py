"""Asks addresses whether they take connections at all, before a client waits for them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from poundlock.errors import Unavailable

Address = tuple[str, int]

_LIMIT_S = 1.0  # for one connection; a slower address is left to the client


def require_open(addresses: Sequence[Address]) -> None:
    """Raise `Unavailable` if every address refuses connections at once.

    A client tries again for half a minute, because a server may be starting. An address that takes
    connections, does not answer in a second, or has a name that is not known is left to the client.
    """
    if addresses and all(map(_refuses, addresses)):
        named = ", ".join(dict.fromkeys(f"{host}:{port}" for host, port in addresses))
        verb = "refuse" if "," in named else "refuses"
        raise Unavailable(f"{named} {verb} connections: start the server, or correct the address")


def _refuses(address: Address) -> bool:
    refused = False
    try:
        places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(_LIMIT_S)
                problem = probe.connect_ex(place)
        except OSError:  # a family that this machine does not have
            continue
        if problem == errno.ECONNREFUSED:
            refused = True
        elif problem not in (errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EAFNOSUPPORT):
            return False
    return refused


def parse_address(text: str, default_port: int) -> Address | None:
    """Read `host:port`, `host` or `[address]:port`. None if it is none of these."""
    host, colon, port = text.strip().rpartition(":")
    if text.strip().endswith("]") or not colon:
        host, port = text.strip(), str(default_port)
    if not host or not port.isdecimal() or int(port) > 65_535:
        return None
    return host.strip("[]"), int(port)
