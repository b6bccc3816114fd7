"""Exactly-once output for Apache Spark Structured Streaming, by two-phase commit.

This module contains only the public names. They are loaded on first use, so that the command line can
read a transaction log without starting Spark.
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

_HOMES = {
    "Aggregate": "stream.aggregates",
    "AggregatingState": "stream.state",
    "BroadcastProcessFunction": "stream.process",
    "BroadcastState": "stream.state",
    "CoProcessFunction": "stream.process",
    "Evictor": "stream.evictors",
    "Flow": "spark.stream.flow",
    "Guarantee": "core.guarantee",
    "ListState": "stream.state",
    "MapState": "stream.state",
    "OffsetMode": "sources.kafka",
    "OperatorListState": "stream.state",
    "Participant": "core.participant",
    "Pipeline": "spark.pipeline.pipeline",
    "ProcessFunction": "stream.process",
    "Query": "spark.pipeline.query",
    "ReducingState": "stream.state",
    "Row": "stream.rows",
    "Semantic": "core.participant",
    "Settings": "core.coordinator",
    "Trigger": "stream.triggers",
    "TriggerResult": "stream.triggers",
    "ValueState": "stream.state",
    "begin": "stream.pattern",
    "bounded": "stream.watermarks",
    "configure": "spark.session",
    "count": "stream.windows",
    "custom": "sources.custom",
    "evictors": "stream",
    "flow": "spark.stream.flow",
    "foreach_batch": "spark.pipeline.pipeline",
    "from_collection": "sources.collection",
    "global_windows": "stream.windows",
    "ingestion": "stream.watermarks",
    "monotone": "stream.watermarks",
    "no_skip": "stream.pattern",
    "pipeline": "spark.pipeline.pipeline",
    "punctuated": "stream.watermarks",
    "read_files": "sources.files",
    "read_kafka": "sources.kafka",
    "read_socket": "sources.socket",
    "session": "spark.session",
    "sessions": "stream.windows",
    "skip_past_last_event": "stream.pattern",
    "skip_to_first": "stream.pattern",
    "skip_to_last": "stream.pattern",
    "skip_to_next": "stream.pattern",
    "sliding": "stream.windows",
    "triggers": "stream",
    "tumbling": "stream.windows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poundlock' has no attribute {name!r}")
    home = f"poundlock.{_HOMES[name]}"
    if (
        _HOMES[name] == "stream"
    ):  # a module whose names are used with its own, as in `triggers.count`
        return import_module(f"{home}.{name}")
    return getattr(import_module(home), name)
