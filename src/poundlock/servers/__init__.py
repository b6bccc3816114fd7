"""Real local servers without Docker or root, for trying, testing and proving.

    base      what all servers share: home, ports, state, readiness; node: a handle on one
    process   processes that outlive us, and are never mistaken for others
    guard     ends a private server with the program that it belongs to
    kafka     Apache Kafka, one broker or several; kafka_security adds SASL_SSL
    postgres, mariadb, valkey, opensearch      one node each

Each server's module has `up` and, for a private one that ends with the block, `running`. `down` and
`status` need not know what kind of server it is.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from poundlock.errors import UsageError

NAMES = ("kafka", "postgres", "mariadb", "valkey", "opensearch")


def module(name: str) -> ModuleType:
    """The module of a server. Not imported before it is asked for: drivers take time to load."""
    if name not in NAMES:
        raise UsageError(f"There is no server named {name!r}; there are: {', '.join(NAMES)}")
    return import_module(f"poundlock.servers.{name}")
