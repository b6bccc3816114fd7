"""The systems that a pipeline can write to. Each has a folder, or a file if it fits in one.

The driver of each system is an extra of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from poundlock.errors import UsageError

if TYPE_CHECKING:
    from poundlock.sinks.console import Console
    from poundlock.sinks.delta.sink import Delta
    from poundlock.sinks.files.sink import Files
    from poundlock.sinks.kafka.sink import Kafka
    from poundlock.sinks.memory import Memory
    from poundlock.sinks.mysql.sink import MySQL
    from poundlock.sinks.opensearch.sink import Elasticsearch, OpenSearch
    from poundlock.sinks.postgres.sink import Postgres
    from poundlock.sinks.redis.sink import Redis
    from poundlock.sinks.simple import Simple
    from poundlock.sinks.twophase.sink import TwoPhase
    from poundlock.sinks.writeahead import WriteAhead

# Name to module and extra. A sink is loaded when it is used: the others' drivers may be missing.
_SINKS = {
    "Console": ("console", None),
    "Delta": ("delta.sink", None),
    "Elasticsearch": ("opensearch.sink", "opensearch"),
    "Files": ("files.sink", None),
    "Kafka": ("kafka.sink", "kafka"),
    "Memory": ("memory", None),
    "MySQL": ("mysql.sink", "mysql"),
    "OpenSearch": ("opensearch.sink", "opensearch"),
    "Postgres": ("postgres.sink", "postgres"),
    "Redis": ("redis.sink", "redis"),
    "Simple": ("simple", None),
    "TwoPhase": ("twophase.sink", None),
    "WriteAhead": ("writeahead", None),
}

__all__ = [
    "Console",
    "Delta",
    "Elasticsearch",
    "Files",
    "Kafka",
    "Memory",
    "MySQL",
    "OpenSearch",
    "Postgres",
    "Redis",
    "Simple",
    "TwoPhase",
    "WriteAhead",
]


def __getattr__(name: str) -> Any:
    if name not in _SINKS:
        raise AttributeError(f"module 'poundlock.sinks' has no attribute {name!r}")
    with driver_needed(name):
        return getattr(import_module(f"poundlock.sinks.{_SINKS[name][0]}"), name)


@contextmanager
def driver_needed(name: str) -> Generator[None]:
    """Raise `UsageError` with the cure if an import inside the block fails for want of a driver."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.startswith("poundlock"):
            raise
        raise UsageError(
            f"the {name} sink needs a driver that is not installed ({missing.name}): "
            f"pip install 'poundlock[{_SINKS[name][1]}]'"
        ) from missing
