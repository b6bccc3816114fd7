"""Stateless steps, which call a Python function for each row of an Arrow batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from poundlock.core.taskerrors import Seal
from poundlock.errors import PoundlockError, UsageError
from poundlock.spark.failures import OPERATORS
from poundlock.spark.stream.keyed import Outputs, python_rows
from poundlock.stream.enrich import enrich
from poundlock.stream.operator import MAIN, operator_error
from poundlock.stream.rows import Row, shaped


@dataclass(frozen=True)
class Step:
    """A function, and how its results become rows."""

    name: str
    function: Callable[[Any], Any]

    def rows(self, rows: Sequence[Row], fields: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        raise NotImplementedError


class Filter(Step):
    """Keeps the rows for which the function returns true."""

    def rows(self, rows: Sequence[Row], fields: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        return [row for row in rows if self.function(row)]


class Map(Step):
    """Makes one row of each."""

    def rows(self, rows: Sequence[Row], fields: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        return [shaped(self.function(row), fields) for row in rows]


class FlatMap(Step):
    """Makes any number of rows of each."""

    def rows(self, rows: Sequence[Row], fields: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        return [shaped(made, fields) for row in rows for made in self.function(row) or ()]


@dataclass(frozen=True)
class Enrich(Step):
    """Makes rows of each row from another system's answers, with many calls at a time."""

    options: Mapping[str, Any]

    def rows(self, rows: Sequence[Row], fields: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        made = enrich(rows, self.function, name=self.name, **self.options)
        return [shaped(each, fields) for each in made]


def checked(function: Any, name: str) -> Any:
    """Return the value if it is a function. Raises `UsageError` if not."""
    if not callable(function):
        raise UsageError(f"operator {name!r} needs a function and was given {function!r}: give one")
    return function


def apply(frame: DataFrame, step: Step, schema: StructType) -> DataFrame:
    """Return the frame of a step's results."""
    outputs = Outputs({MAIN: schema})
    return frame.mapInArrow(_Apply(step, outputs, schema.names), schema)


@dataclass(frozen=True)
class _Apply:
    step: Step
    outputs: Outputs
    fields: Sequence[str]
    seal: Seal = OPERATORS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = list(python_rows(pa.Table.from_batches([batch])))
            with self.seal.on(PoundlockError):
                made = self._made(rows)
                table = self.outputs.table(self.step.name, MAIN, made) if made else None
            if table is not None:
                yield from table.combine_chunks().to_batches()

    def _made(self, rows: Sequence[Row]) -> Sequence[tuple[Any, ...]]:
        try:
            return self.step.rows(rows, self.fields)
        except Exception as error:
            raise operator_error(self.step.name, error) from error
