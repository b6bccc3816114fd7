"""Exactly-once output for Apache Spark Structured Streaming, by two-phase commit.

This module holds the public names and nothing else. They are loaded when asked for, so that the command
line can look at a transaction log without starting Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poundlock.core.coordinator import Settings
    from poundlock.core.guarantee import Guarantee
    from poundlock.core.participant import Participant, Semantic
    from poundlock.sources.collection import from_collection
    from poundlock.sources.custom import custom
    from poundlock.sources.files import read_files
    from poundlock.sources.kafka import OffsetMode, read_kafka
    from poundlock.sources.socket import read_socket
    from poundlock.spark.pipeline import Pipeline, foreach_batch, pipeline
    from poundlock.spark.query import Query
    from poundlock.spark.session import configure, session

__version__ = "0.1.0"

__all__ = [
    "Guarantee",
    "OffsetMode",
    "Participant",
    "Pipeline",
    "Query",
    "Semantic",
    "Settings",
    "configure",
    "custom",
    "foreach_batch",
    "from_collection",
    "pipeline",
    "read_files",
    "read_kafka",
    "read_socket",
    "session",
]

_HOMES = {
    "Guarantee": "core.guarantee",
    "OffsetMode": "sources.kafka",
    "Participant": "core.participant",
    "Pipeline": "spark.pipeline",
    "Query": "spark.query",
    "Semantic": "core.participant",
    "Settings": "core.coordinator",
    "configure": "spark.session",
    "custom": "sources.custom",
    "foreach_batch": "spark.pipeline",
    "from_collection": "sources.collection",
    "pipeline": "spark.pipeline",
    "read_files": "sources.files",
    "read_kafka": "sources.kafka",
    "read_socket": "sources.socket",
    "session": "spark.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poundlock' has no attribute {name!r}")
    return getattr(import_module(f"poundlock.{_HOMES[name]}"), name)
