"""Real local servers without Docker or root, for trials, tests and the demonstration.

    base      what all servers share: home, ports, state, readiness
    node      a handle on a running server
    process   processes that outlive the program that started them
    demote    runs a server as `nobody` if the program runs as root
    guard     ends a private server together with the program that started it
    kafka     Apache Kafka, one broker or several; kafka_security adds SASL_SSL
    postgres, mariadb, valkey, opensearch      one node each; Valkey can also run as a cluster

Each server's module has `up`, which starts a server that outlives the program, and `running`, a context
manager for a private one. `base.down` and `base.status` work for every kind of server. If root starts a
server other than Kafka, it runs as `nobody`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from poundlock.errors import UsageError

NAMES = ("kafka", "postgres", "mariadb", "valkey", "opensearch")


def module(name: str) -> ModuleType:
    """Import the module of a server. Only this one: client libraries take time to load."""
    if name not in NAMES:
        raise UsageError(f"there is no server named {name!r}; there are: {', '.join(NAMES)}")
    return import_module(f"poundlock.servers.{name}")
