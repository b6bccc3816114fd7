"""Reads a streaming DataFrame's plan: its sources, and whether it keeps state.

The plan is read from Spark's objects, so any source is recognised, not only sources of Poundlock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from poundlock.errors import UsageError
from poundlock.sources.custom import DECLARED, read_declaration
from poundlock.sources.kafka import SOURCE_OPTION
from poundlock.spark.internals import analyzed_plan

# Nodes that keep no state between batches. All others count as stateful: a drain that is not needed
# costs time, but a missing drain damages the checkpoint.
STATELESS = frozenset(
    {
        "Project",
        "Filter",
        "Generate",
        "SubqueryAlias",
        "View",
        "EventTimeWatermark",
        "Union",
        "MapInArrow",
        "MapInPandas",
        "Repartition",
        "RepartitionByExpression",
        "Sample",
        "ResolvedHint",
        "UnresolvedHint",
        "TypedFilter",
        "MapElements",
        "MapPartitions",
        "DeserializeToObject",
        "SerializeFromObject",
        "StreamingRelation",
        "StreamingRelationV2",
        "StreamingDataSourceV2Relation",
        "CollectMetrics",
    }
)

# Of these, the nodes that keep rows in the order in which a task read them.
ORDERED = STATELESS - {"Repartition", "RepartitionByExpression", "Union"}

# Sources whose batches can be read again from their offsets. Spark has a log of the files it read.
REPLAYABLE = frozenset(
    {"kafka", "rate", "rate-micro-batch", "text", "json", "csv", "parquet", "orc", "avro", "delta"}
)

REPLAY_OPTION = "poundlock.replayable"  # set by a custom source

# Options that make a source skip rows without an error: the value that does so, and which rows.
SILENT: Mapping[str, tuple[str, str]] = {
    "failOnDataLoss": ("false", "rows that Kafka has dropped"),
    "ignoreMissingFiles": ("true", "files that were deleted before they were read"),
    "ignoreCorruptFiles": ("true", "files that cannot be read"),
    "mode": ("dropmalformed", "rows that cannot be parsed"),
}

# The only options that are read. Others may be passwords.
_OPTIONS = (SOURCE_OPTION, REPLAY_OPTION, *SILENT)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a streaming plan."""

    name: str
    options: Mapping[str, str]
    declared: bool | None = None  # the argument of `poundlock.custom`

    @property
    def replayable(self) -> bool:
        if self.declared is not None:
            return self.declared
        option = self.options.get(REPLAY_OPTION)
        if option is not None:
            return option.lower() == "true"
        return self.name in REPLAYABLE


@dataclass(frozen=True, slots=True)
class Plan:
    """The properties of a streaming plan that Poundlock needs."""

    sources: tuple[Source, ...]
    stateful: bool
    volatile: tuple[str, ...]  # functions that give different values in a replay
    polls: bool = False  # has processing-time timers, for which Spark runs empty batches

    @property
    def replayable(self) -> bool:
        return all(source.replayable for source in self.sources)

    @property
    def source_names(self) -> str:
        return ", ".join(source.name for source in self.sources)


_VOLATILE = re.compile(r"\b(rand|randn|uuid|shuffle|monotonically_increasing_id|random)\(")


def read_plan(frame: DataFrame) -> Plan:
    """Read the plan of a streaming frame. Raises `UsageError` for one that does not stream."""
    if not frame.isStreaming:
        raise UsageError(
            "the DataFrame is not streaming: open its source with spark.readStream or with "
            "poundlock.read_kafka"
        )
    return read_analyzed(analyzed_plan(frame))


def read_analyzed(root: Any) -> Plan:
    """Read an analysed logical plan."""
    nodes = list(walk(root))
    streaming = [node for node in nodes if node.isStreaming()]
    sources = tuple(_sources(root))
    stateful = any(node.nodeName() not in STATELESS for node in streaming)
    volatile = tuple(dict.fromkeys(_VOLATILE.findall(root.toString())))
    polls = any(_time_mode(node) == "ProcessingTime" for node in streaming)
    return Plan(sources, stateful, volatile, polls)


def _time_mode(node: Any) -> str | None:
    """Return which timers a node of keyed state has."""
    if not node.nodeName().startswith("TransformWithState"):
        return None
    return str(node.timeMode().toString())


def keeps_order(frame: DataFrame) -> bool:
    """Return whether a frame's rows are in the order of their source, without a shuffle."""
    return all(node.nodeName() in ORDERED for node in walk(analyzed_plan(frame)))


def walk(node: Any) -> Iterator[Any]:
    """Yield a plan's nodes, each before those below it."""
    yield node
    for child in _elements(node.children()):
        yield from walk(child)


def _elements(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a Scala sequence."""
    for index in range(sequence.size()):
        yield sequence.apply(index)


def _sources(node: Any, declaration: tuple[str, bool] | None = None) -> Iterator[Source]:
    """Yield the sources in the plan's order, each with the nearest `poundlock.custom` above it."""
    if "StreamingRelation" in node.nodeName():
        source = _source(node)
        if declaration is not None:
            name, replayable = declaration
            source = Source(name, source.options, replayable)
        yield source
        return
    declaration = _find_declaration(node) or declaration
    for child in _elements(node.children()):
        yield from _sources(child, declaration)


def _find_declaration(node: Any) -> tuple[str, bool] | None:
    """Return the declaration that `poundlock.custom` put into a projection above its source.

    Only aliases count, because a column's metadata is inherited by all nodes above.
    """
    if node.nodeName() != "Project":
        return None
    for column in _elements(node.projectList()):
        if column.nodeName() == "Alias" and column.explicitMetadata().isDefined():
            given = column.explicitMetadata().get()
            if given.contains(DECLARED):
                return read_declaration(given.getString(DECLARED))
    return None


def _source(node: Any) -> Source:
    if node.nodeName() == "StreamingRelationV2":
        given = node.extraOptions()
        found = {name: given.get(name) for name in _OPTIONS}
        name = node.sourceName()
    else:
        source = node.dataSource()
        given = source.options()
        found = {name: _or_none(given.get(name)) for name in _OPTIONS}
        name = source.className()
    options = {option: value for option, value in found.items() if value is not None}
    return Source(name.lower(), options)


def _or_none(option: Any) -> Any:
    """Return the value of a Scala `Option`, None if it is empty."""
    return option.get() if option.isDefined() else None
