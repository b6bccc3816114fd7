"""What a streaming frame's plan says: its sources, and whether it keeps state.

The plan is read through Spark's own objects, so a frame stays an ordinary DataFrame and any source is
recognised, not only those opened through Poundlock.
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

# Nodes known to keep nothing from one batch to the next. Whatever is not here counts as stateful,
# for a needless drain costs time, and a missing one costs the checkpoint.
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

# Of those, the ones that leave rows in the order in which a task read them.
ORDERED = STATELESS - {"Repartition", "RepartitionByExpression", "Union"}

# Sources whose batches can be read again from their offsets. Files by Spark's own log of them.
REPLAYABLE = frozenset(
    {"kafka", "rate", "rate-micro-batch", "text", "json", "csv", "parquet", "orc", "avro", "delta"}
)
NOT_REPLAYABLE = frozenset({"socket", "textsocket"})

REPLAY_OPTION = "poundlock.replayable"  # what a custom source says of itself

# Options by which a source passes over rows in silence, the value that has it do so, and which rows.
SILENT: Mapping[str, tuple[str, str]] = {
    "failOnDataLoss": ("false", "rows that Kafka has dropped"),
    "ignoreMissingFiles": ("true", "files that were deleted before they were read"),
    "ignoreCorruptFiles": ("true", "files that cannot be read"),
    "mode": ("dropmalformed", "rows that cannot be parsed"),
}

# The options that are looked at. The others stay where they are: passwords are among them.
_OPTIONS = (SOURCE_OPTION, REPLAY_OPTION, *SILENT)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a streaming plan."""

    name: str
    options: Mapping[str, str]
    declared: bool | None = None  # what `poundlock.custom` was told

    @property
    def replayable(self) -> bool:
        if self.declared is not None:
            return self.declared
        said = self.options.get(REPLAY_OPTION)
        if said is not None:
            return said.lower() == "true"
        return self.name in REPLAYABLE


@dataclass(frozen=True, slots=True)
class Plan:
    """What we need to know of a streaming plan."""

    sources: tuple[Source, ...]
    stateful: bool
    volatile: tuple[str, ...]  # expressions that a replay computes differently
    polls: bool = False  # has timers of processing time, for which Spark runs batches without rows

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
            "the frame is not a streaming one: open its source with spark.readStream or with "
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
    """Say whether a frame's rows come in the order of their source: nothing has shuffled them."""
    return all(node.nodeName() in ORDERED for node in walk(analyzed_plan(frame)))


def walk(node: Any) -> Iterator[Any]:
    """Yield a plan's nodes, each before those below it."""
    yield node
    children = node.children()
    for index in range(children.size()):
        yield from walk(children.apply(index))


def _sources(node: Any, told: tuple[str, bool] | None = None) -> Iterator[Source]:
    """Yield the sources in the plan's order, each as the nearest `poundlock.custom` above it tells."""
    if "StreamingRelation" in node.nodeName():
        source = _source(node)
        yield source if told is None else Source(told[0], source.options, told[1])
        return
    told = _told(node) or told
    children = node.children()
    for index in range(children.size()):
        yield from _sources(children.apply(index), told)


def _told(node: Any) -> tuple[str, bool] | None:
    """Return what a projection that `poundlock.custom` made says of the sources below it.

    Only where a name is given anew, for what it is given goes on with the column to all nodes above.
    """
    if node.nodeName() != "Project":
        return None
    columns = node.projectList()
    for index in range(columns.size()):
        column = columns.apply(index)
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
    """Return what is in an `Option` of Scala's."""
    return option.get() if option.isDefined() else None
