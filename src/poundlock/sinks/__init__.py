"""The systems that a pipeline can write to: one file each, its driver an extra of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poundlock.errors import UsageError

if TYPE_CHECKING:
    from poundlock.sinks.console import Console
    from poundlock.sinks.delta import Delta
    from poundlock.sinks.files import Files
    from poundlock.sinks.kafka import Kafka
    from poundlock.sinks.memory import Memory
    from poundlock.sinks.mysql import MySQL
    from poundlock.sinks.opensearch import Elasticsearch, OpenSearch
    from poundlock.sinks.postgres import Postgres
    from poundlock.sinks.redis import Redis
    from poundlock.sinks.simple import Simple
    from poundlock.sinks.twophase import TwoPhase
    from poundlock.sinks.writeahead import WriteAhead

# Name to module and extra. A sink is loaded when it is asked for: the others' drivers may be missing.
_SINKS = {
    "Console": ("console", None),
    "Delta": ("delta", None),
    "Elasticsearch": ("opensearch", "opensearch"),
    "Files": ("files", None),
    "Kafka": ("kafka", "kafka"),
    "Memory": ("memory", None),
    "MySQL": ("mysql", "mysql"),
    "OpenSearch": ("opensearch", "opensearch"),
    "Postgres": ("postgres", "postgres"),
    "Redis": ("redis", "redis"),
    "Simple": ("simple", None),
    "TwoPhase": ("twophase", None),
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
    module, extra = _SINKS[name]
    try:
        return getattr(import_module(f"poundlock.sinks.{module}"), name)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.startswith("poundlock"):
            raise
        raise UsageError(
            f"the {name} sink needs a driver that is not installed ({missing.name}): "
            f"pip install 'poundlock[{extra}]'"
        ) from missing
