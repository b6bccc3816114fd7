"""Interval joins of two flows: by Spark's own join, or on keyed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from poundlock.core.sparksql import quoted
from poundlock.errors import UsageError
from poundlock.spark.stream.flow import Flow, parsed
from poundlock.stream.keyed import IntervalJoinOperator
from poundlock.stream.operator import MAIN
from poundlock.stream.rows import Row

if TYPE_CHECKING:
    from poundlock.spark.stream.keyedflow import KeyedFlow


@dataclass(frozen=True)
class IntervalJoin:
    """An interval join of two flows."""

    left: KeyedFlow
    right: KeyedFlow
    bounds: tuple[int, int]
    lower_exclusive: bool
    upper_exclusive: bool
    name: str

    def _columns(self) -> StructType:
        """Return the columns of both flows, with the key once."""
        left = self.left.flow.frame.schema.fields
        right = [f for f in self.right.flow.frame.schema.fields if f.name not in self.right.key]
        both = {field.name for field in left} & {field.name for field in right}
        if both:
            raise UsageError(
                f"operator {self.name!r}: both flows have a column {min(both)!r}: rename one of them, "
                "or give function="
            )
        return StructType([*left, *right])

    def native(self) -> Flow:
        columns = self._columns()
        left, left_time = self.left.flow.watermarked()
        right, right_time = self.right.flow.watermarked()
        renamed = {name: f"__right{at}" for at, name in enumerate(self.right.key)}
        right = right.withColumnsRenamed(renamed)
        condition = F.lit(True)
        for mine, theirs in zip(self.left.key, renamed.values(), strict=True):
            condition &= left[quoted(mine)].eqNullSafe(right[theirs])
        low = left[left_time] + F.expr(f"INTERVAL {self.bounds[0]} MILLISECOND")
        high = left[left_time] + F.expr(f"INTERVAL {self.bounds[1]} MILLISECOND")
        time = right[right_time]
        condition &= time > low if self.lower_exclusive else time >= low
        condition &= time < high if self.upper_exclusive else time <= high
        joined = left.join(right, condition).select(*[quoted(name) for name in columns.names])
        step = f"{self.name}: Spark's own join"
        flow = self.left.flow
        return replace(flow, frame=joined, result=None, made=True, steps=(*flow.steps, step))

    def stateful(self, function: Any, schema: Any, late: tuple[str | None, str | None]) -> Flow:
        frames = [self.left.flow.frame, self.right.flow.frame]
        main = self._columns() if schema is None else parsed(schema, self.name)
        outputs = {MAIN: main}
        for name, frame in zip(late, frames, strict=True):
            if name is not None:
                outputs[name] = StructType(frame.schema.fields)
        operator = IntervalJoinOperator(
            self.name,
            *self.bounds,
            *[frame.columns for frame in frames],
            function=function or _Both(frames[1].columns, self.right.key),
            outputs={MAIN: main.names},
            lower_inclusive=not self.lower_exclusive,
            upper_inclusive=not self.upper_exclusive,
            left_late=late[0],
            right_late=late[1],
        )
        inputs = {0: self.left, 1: self.right}
        why = "a function is given" if function else "late rows have an output"
        made = self.left.run(operator, outputs, inputs, f"an interval join, because {why}")
        # The time of a pair is the later one of both rows, which no column has.
        return replace(made, lost=self.name)


class _Both:
    """Combines two rows: all columns of the left one, and those of the right one without its key."""

    def __init__(self, columns: Sequence[str], key: Sequence[str]) -> None:
        self._places = [at for at, name in enumerate(columns) if name not in key]

    def __call__(self, left: Row, right: Row, ctx: Any) -> tuple[Any, ...]:
        return (*left, *[right[at] for at in self._places])
