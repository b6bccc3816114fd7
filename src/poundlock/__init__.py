"""Exactly-once output for Apache Spark Structured Streaming, by two-phase commit.

This module contains only the public names. They are loaded on first use, so that the command line can
read a transaction log without starting Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poundlock.core.guarantee import Guarantee
    from poundlock.core.participant import Participant, Semantic
    from poundlock.core.protocol import Step
    from poundlock.core.surroundings import Settings
    from poundlock.sources.collection import from_collection
    from poundlock.sources.custom import custom
    from poundlock.sources.files import read_files
    from poundlock.sources.kafka import OffsetMode, read_kafka
    from poundlock.sources.socket import read_socket
    from poundlock.spark.pipeline.pipeline import Pipeline, foreach_batch, pipeline
    from poundlock.spark.pipeline.query import Query
    from poundlock.spark.session import configure, session
    from poundlock.spark.stream.flow import Flow, flow
    from poundlock.stream import evictors, triggers
    from poundlock.stream.aggregates import Aggregate
    from poundlock.stream.evictors import Evictor
    from poundlock.stream.pattern import (
        begin,
        no_skip,
        skip_past_last_event,
        skip_to_first,
        skip_to_last,
        skip_to_next,
    )
    from poundlock.stream.process import (
        BroadcastProcessFunction,
        CoProcessFunction,
        ProcessFunction,
    )
    from poundlock.stream.rows import Row
    from poundlock.stream.state import (
        AggregatingState,
        BroadcastState,
        ListState,
        MapState,
        OperatorListState,
        ReducingState,
        ValueState,
    )
    from poundlock.stream.triggers import Trigger, TriggerResult
    from poundlock.stream.watermarks import bounded, ingestion, monotone, punctuated
    from poundlock.stream.windows import count, global_windows, sessions, sliding, tumbling

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "AggregatingState",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CoProcessFunction",
    "Evictor",
    "Flow",
    "Guarantee",
    "ListState",
    "MapState",
    "OffsetMode",
    "OperatorListState",
    "Participant",
    "Pipeline",
    "ProcessFunction",
    "Query",
    "ReducingState",
    "Row",
    "Semantic",
    "Settings",
    "Step",
    "Trigger",
    "TriggerResult",
    "ValueState",
    "begin",
    "bounded",
    "configure",
    "count",
    "custom",
    "evictors",
    "flow",
    "foreach_batch",
    "from_collection",
    "global_windows",
    "ingestion",
    "monotone",
    "no_skip",
    "pipeline",
    "punctuated",
    "read_files",
    "read_kafka",
    "read_socket",
    "session",
    "sessions",
    "skip_past_last_event",
    "skip_to_first",
    "skip_to_last",
    "skip_to_next",
    "sliding",
    "triggers",
    "tumbling",
]

# The module of each name. `stream` has modules that are used by name, as in `triggers.count`.
_NAMES = {
    "core.guarantee": ("Guarantee",),
    "core.participant": ("Participant", "Semantic"),
    "core.protocol": ("Step",),
    "core.surroundings": ("Settings",),
    "sources.collection": ("from_collection",),
    "sources.custom": ("custom",),
    "sources.files": ("read_files",),
    "sources.kafka": ("OffsetMode", "read_kafka"),
    "sources.socket": ("read_socket",),
    "spark.pipeline.pipeline": ("Pipeline", "foreach_batch", "pipeline"),
    "spark.pipeline.query": ("Query",),
    "spark.session": ("configure", "session"),
    "spark.stream.flow": ("Flow", "flow"),
    "stream": ("evictors", "triggers"),
    "stream.aggregates": ("Aggregate",),
    "stream.evictors": ("Evictor",),
    "stream.pattern": (
        "begin",
        "no_skip",
        "skip_past_last_event",
        "skip_to_first",
        "skip_to_last",
        "skip_to_next",
    ),
    "stream.process": ("BroadcastProcessFunction", "CoProcessFunction", "ProcessFunction"),
    "stream.rows": ("Row",),
    "stream.state": (
        "AggregatingState",
        "BroadcastState",
        "ListState",
        "MapState",
        "OperatorListState",
        "ReducingState",
        "ValueState",
    ),
    "stream.triggers": ("Trigger", "TriggerResult"),
    "stream.watermarks": ("bounded", "ingestion", "monotone", "punctuated"),
    "stream.windows": ("count", "global_windows", "sessions", "sliding", "tumbling"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poundlock' has no attribute {name!r}")
    home = f"poundlock.{_HOMES[name]}"
    if _HOMES[name] == "stream":
        return import_module(f"{home}.{name}")
    return getattr(import_module(home), name)
