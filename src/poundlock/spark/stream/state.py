"""Reads the state of a query's operators from its checkpoint."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from poundlock.errors import UsageError
from poundlock.spark.internals import root_cause, start_state_coordinator
from poundlock.spark.stream.keyed import STATE
from poundlock.stream.operator import read_key, read_page
from poundlock.stream.times import Domain

_HINT = "Give the checkpoint_location of a query with state that has finished a batch"


@dataclass(frozen=True)
class OperatorState:
    """One stateful operator of a query."""

    number: int
    kind: str  # Spark's name for it
    partitions: int
    batches: tuple[int, int]  # the first and the last batch whose state exists

    @property
    def ours(self) -> bool:
        return self.kind.startswith("transformWithState")


@dataclass(frozen=True)
class Entry:
    """The state and timers of one key."""

    key: tuple[Any, ...]
    state: dict[str, Any]
    timers: dict[str, list[int]]  # by domain, in milliseconds
    page: int


def operators(spark: SparkSession, checkpoint: str) -> list[OperatorState]:
    """Return the stateful operators of the query with this checkpoint."""
    found: dict[int, list[Any]] = {}
    with _reading(checkpoint):
        for row in spark.read.format("state-metadata").load(checkpoint).collect():
            found.setdefault(row.operatorId, []).append(row)
    if not found:
        raise UsageError(f"there is no state in {checkpoint}. {_HINT}")
    return [
        OperatorState(
            number,
            rows[0].operatorName,
            rows[0].numPartitions,
            (rows[0].minBatchId, rows[0].maxBatchId),
        )
        for number, rows in sorted(found.items())
    ]


def entries(
    spark: SparkSession, checkpoint: str, operator: int = 0, batch: int | None = None
) -> Iterator[Entry]:
    """Yield the keys of one of Poundlock's operators, after the last batch or after `batch`."""
    with _reading(checkpoint):
        reader = _reader(spark, operator, batch).option("stateVarName", STATE)
        pages = reader.load(checkpoint).select("key.page", "value.data").toLocalIterator()
        for row in pages:
            for key, rest in read_page(None if row.data is None else bytes(row.data))[1].items():
                value, state, timers = read_key(key, rest)
                due = zip(Domain, timers, strict=True)
                times = {domain.value: [timer[0] for timer in each] for domain, each in due if each}
                yield Entry(value, state, times, row.page)


def rows(
    spark: SparkSession, checkpoint: str, operator: int, batch: int | None, limit: int
) -> list[Row]:
    """Return some of the state of one of Spark's own operators, as pairs of key and value."""
    with _reading(checkpoint):
        return _reader(spark, operator, batch).load(checkpoint).limit(limit).collect()


def _reader(spark: SparkSession, operator: int, batch: int | None) -> Any:
    start_state_coordinator(spark)
    reader = spark.read.format("statestore").option("operatorId", operator)
    return reader if batch is None else reader.option("batchId", batch)


@contextmanager
def _reading(checkpoint: str) -> Generator[None]:
    """Raise `UsageError` with Spark's reason if the state cannot be read."""
    try:
        yield
    except PySparkException as error:
        problem = str(error).strip().splitlines()[0]
        raise UsageError(f"the state in {checkpoint} cannot be read: {problem}. {_HINT}") from error
    except Py4JJavaError as error:  # of a task
        problem = root_cause(error)
        raise UsageError(f"the state in {checkpoint} cannot be read: {problem}. {_HINT}") from error
