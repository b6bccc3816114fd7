"""Keyed flows: windows, process functions, joins, patterns and rolling aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructField, StructType, TimestampType

from poundlock.errors import UsageError
from poundlock.spark.session import keeps_keyed_state
from poundlock.spark.stream import keyed
from poundlock.spark.stream.flow import Flow, analysed, parsed
from poundlock.spark.stream.joined import IntervalJoin
from poundlock.spark.stream.windowed import WindowedFlow
from poundlock.stream.evictors import Evictor
from poundlock.stream.keyed import RollingOperator, rolling
from poundlock.stream.matching import MatchOperator
from poundlock.stream.operator import MAIN, Operator
from poundlock.stream.pattern import Pattern
from poundlock.stream.process import (
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    CoProcessFunction,
    CoProcessOperator,
    ProcessFunction,
    ProcessOperator,
    declared_outputs,
)
from poundlock.stream.times import Duration, milliseconds
from poundlock.stream.triggers import Trigger
from poundlock.stream.windows import Assigner


@dataclass(frozen=True)
class KeyedFlow:
    """A flow whose rows have a key. Every operation applies to each key separately."""

    flow: Flow
    key: tuple[str, ...]
    pages: int = keyed.PAGES

    @property
    def df(self) -> DataFrame:
        return self.flow.df

    def with_pages(self, pages: int) -> KeyedFlow:
        """Set the number of pages. It is fixed for the life of a checkpoint.

        A page is some keys of an operator, whose state is read and written together. Use more pages if
        there are many keys and a batch touches few of them. Use fewer if small batches must be cheap.
        """
        if not isinstance(pages, int) or pages < 1:
            raise UsageError(f"pages={pages!r}: give a whole number, 1 or more")
        return replace(self, pages=pages)

    def window(
        self,
        windows: Assigner,
        *,
        trigger: Trigger | None = None,
        evictor: Evictor | None = None,
        allowed_lateness: Duration = "0 seconds",
        late_output: str | None = None,
        name: str = "window",
    ) -> WindowedFlow:
        """Assign rows to windows: `tumbling`, `sliding`, `sessions`, `count`, `global_windows`.

        `allowed_lateness`: how long after its end a window still accepts rows. It fires again for them.
        `late_output`: the name of a side output for rows that are later than that.
        """
        if not isinstance(windows, Assigner):
            raise UsageError(
                f"operator {name!r}: {windows!r} is not a kind of window: use one "
                "such as tumbling('1 minute')"
            )
        self.flow.check_clock(name)
        lateness = milliseconds(allowed_lateness, "allowed_lateness")
        if (lateness or late_output) and self.flow.time is None:
            raise UsageError(
                f"operator {name!r}: allowed_lateness= and late_output= need event time: "
                "pass time= and watermark= to flow()"
            )
        return WindowedFlow(self, windows, trigger, evictor, lateness, late_output, name)

    def process(self, function: ProcessFunction, *, name: str | None = None) -> Flow:
        """Run a process function: state, timers and side outputs for each key."""
        operator, outputs = self._prepare(ProcessOperator, function, name)
        return self.run(operator, outputs, {0: self}, "a process function")

    def connect(self, other: KeyedFlow) -> ConnectedFlow:
        """Connect a second flow with the same type of key, for a co-process function."""
        self._check_other(other, "connect")
        return ConnectedFlow(self, other)

    def broadcast(self, rules: Flow) -> BroadcastFlow:
        """Send a second flow's rows to all keys, such as rules that change at run time."""
        if not isinstance(rules, Flow):
            raise UsageError("broadcast() takes a flow without a key: leave its key_by() out")
        if (rules.time is None) != (self.flow.time is None):
            raise UsageError(
                "broadcast() needs both flows in event time, or both in processing time"
            )
        return BroadcastFlow(self, rules)

    def interval_join(
        self,
        other: KeyedFlow,
        *,
        lower: Duration,
        upper: Duration,
        lower_exclusive: bool = False,
        upper_exclusive: bool = False,
        function: Callable[[Any, Any, Any], Any] | None = None,
        schema: str | StructType | None = None,
        left_late_output: str | None = None,
        right_late_output: str | None = None,
        name: str = "interval_join",
    ) -> Flow:
        """Join each row with the other flow's rows that are from `lower` to `upper` later.

        Without `function` a result has the columns of both rows. Spark's own join computes it, unless
        there is an output for late rows. With `function(left, right, ctx)`, the results are the rows
        that it returns.
        """
        self._check_other(other, name)
        self.flow.require_time(name)
        other.flow.require_time(name)
        bounds = (
            milliseconds(lower, "lower", least=-(2**62)),
            milliseconds(upper, "upper", least=-(2**62)),
        )
        join = IntervalJoin(self, other, bounds, lower_exclusive, upper_exclusive, name)
        if (function is None) != (schema is None):
            raise UsageError(f"operator {name!r}: give function= and schema= together")
        late = (left_late_output, right_late_output)
        if function is None and late == (None, None):
            return join.native()
        return join.stateful(function, schema, late)

    def match(
        self,
        pattern: Pattern,
        select: Callable[[Any, Any], Any] | None = None,
        schema: str | StructType | None = None,
        *,
        timed_out: tuple[str, Callable[[Any, Any], Any], str | StructType] | None = None,
        late_output: str | None = None,
        name: str = "match",
    ) -> Flow:
        """Find a pattern in each key's rows.

        `select(match, ctx)` returns the rows for a match, `{stage: [rows]}`. Without it, a result has
        the key, the match's start and end, and a list of rows for each stage. `timed_out` is a side
        output for partial matches that timed out: its name, a function like `select`, and a schema.
        """
        if not isinstance(pattern, Pattern):
            raise UsageError(f"operator {name!r}: start a pattern with begin('name')")
        if (select is None) != (schema is None):
            raise UsageError(f"operator {name!r}: give select and schema together")
        conditions = {sql: f"__condition{at}" for at, sql in enumerate(pattern.expressions())}
        row = StructType(self.flow.frame.schema.fields)
        columns = {column: F.expr(sql).cast("boolean") for sql, column in conditions.items()}
        frame = analysed(name, lambda: self.flow.frame.withColumns(columns))
        stages = [StructField(stage, ArrayType(row)) for stage in pattern.names()]
        times = [
            StructField("match_start", TimestampType()),
            StructField("match_end", TimestampType()),
        ]
        main = StructType([*self.key_fields(), *times, *stages])
        outputs = {MAIN: main if schema is None else parsed(schema, name)}
        if timed_out is not None:
            outputs[timed_out[0]] = parsed(timed_out[2], name)
        if late_output is not None:
            outputs[late_output] = row
        operator = MatchOperator(
            pattern.bind(conditions),
            columns=frame.columns,
            key_fields=self.key,
            select=select,
            fields=None if schema is None else outputs[MAIN].names,
            name=name,
            domain=self.flow.domain,
            timed_out=timed_out and (*timed_out[:2], outputs[timed_out[0]].names),
            late_output=late_output,
        )
        mine = replace(self, flow=replace(self.flow, frame=frame))
        return self.run(operator, outputs, {0: mine}, "a pattern", time="match_end")

    # Rolling aggregates: a result for every row.

    def reduce(self, function: Callable[[Any, Any], Any], *, name: str = "reduce") -> Flow:
        """Combine each row with the result so far, and emit the new result for every row."""
        return self._run_rolling(RollingOperator(name, self.flow.frame.columns, function))

    def sum(self, column: str) -> Flow:
        """Emit, for every row, the key's first row with the sum of a column so far."""
        return self._roll("sum", column)

    def min(self, column: str) -> Flow:
        """Emit, for every row, the key's first row with the least value of a column so far."""
        return self._roll("min", column)

    def max(self, column: str) -> Flow:
        """Emit, for every row, the key's first row with the greatest value of a column so far."""
        return self._roll("max", column)

    def min_by(self, column: str) -> Flow:
        """Emit, for every row, the key's row with the least value of a column so far."""
        return self._roll("min_by", column)

    def max_by(self, column: str) -> Flow:
        """Emit, for every row, the key's row with the greatest value of a column so far."""
        return self._roll("max_by", column)

    def _roll(self, kind: str, column: str) -> Flow:
        return self._run_rolling(rolling(kind, self.flow.frame.columns, kind, column))

    def _run_rolling(self, operator: RollingOperator) -> Flow:
        outputs = {MAIN: StructType(self.flow.frame.schema.fields)}
        return self.run(operator, outputs, {0: self}, "a rolling aggregate")

    # For all operators.

    def key_fields(self) -> list[StructField]:
        """Return the columns of the key, with their types."""
        return [self.flow.frame.schema[name] for name in self.key]

    def _check_other(self, other: Any, name: str) -> None:
        if not isinstance(other, KeyedFlow):
            raise UsageError(
                f"{name}() needs the other flow to have a key: call key_by() on that flow"
            )
        kinds = [field.dataType.simpleString() for field in self.key_fields()]
        others = [field.dataType.simpleString() for field in other.key_fields()]
        if kinds != others:
            raise UsageError(
                f"{name}(): one key is ({', '.join(kinds)}) and the other ({', '.join(others)}): use "
                "keys of the same types"
            )
        if (self.flow.time is None) != (other.flow.time is None):
            raise UsageError(f"{name}() needs both flows in event time, or both in processing time")

    def _prepare(
        self, kind: type[ProcessOperator], function: Any, name: str | None
    ) -> tuple[ProcessOperator, dict[str, StructType]]:
        """Return the operator that runs a process function, and the columns of its outputs."""
        if not name and not isinstance(function, kind.takes):
            hint = " (an instance, not the class)" if isinstance(function, type) else ""
            raise UsageError(
                f"process() takes an instance of a subclass of {kind.takes.__name__}{hint}"
            )
        name = name or type(function).__name__
        outputs = _outputs(function, name)
        fields = {output: schema.names for output, schema in outputs.items()}
        return kind(name, function, fields, self.flow.domain, self.key), outputs

    def run(
        self,
        operator: Operator,
        schemas: Mapping[str, StructType],
        inputs: Mapping[int, KeyedFlow],
        what: str,
        time: str | None = None,
        shift: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Flow:
        """Return the flow of an operator's results."""
        if not keeps_keyed_state(self.df.sparkSession):
            raise UsageError(
                f"operator {operator.name!r} needs the state backend 'rocksdb', the only one that "
                "supports keyed state: open the session with poundlock.session(), without "
                "state_backend="
            )
        rows = {
            number: each.flow.input(each.key, operator.name, columns)
            for number, each in inputs.items()
        }
        outputs = keyed.Outputs(schemas)
        made = any(each.flow.made for each in inputs.values())
        raw = keyed.run(
            operator, outputs, rows, pages=self.pages, chained=made and bool(operator.domains)
        )
        step = f"{operator.name}: {what}, on keyed state"
        return self.flow.after(operator, outputs, raw, step, time, shift)


@dataclass(frozen=True)
class ConnectedFlow:
    """Two flows with the same type of key."""

    first: KeyedFlow
    second: KeyedFlow

    def process(self, function: CoProcessFunction, *, name: str | None = None) -> Flow:
        """Run a co-process function over both, with shared state and timers."""
        operator, outputs = self.first._prepare(CoProcessOperator, function, name)
        inputs = {0: self.first, 1: self.second}
        return self.first.run(operator, outputs, inputs, "a co-process function")


@dataclass(frozen=True)
class BroadcastFlow:
    """A keyed flow, and a flow whose rows are broadcast to all its keys."""

    keyed: KeyedFlow
    rules: Flow

    def process(self, function: BroadcastProcessFunction, *, name: str | None = None) -> Flow:
        """Run a function over both. Each page of keys has a copy of its broadcast state."""
        operator, outputs = self.keyed._prepare(BroadcastProcessOperator, function, name)
        inputs = {0: self.keyed, keyed.EVERY_PAGE: KeyedFlow(self.rules, ())}
        return self.keyed.run(operator, outputs, inputs, "a process function with broadcast state")


def _outputs(function: Any, name: str) -> dict[str, StructType]:
    schemas: dict[str, StructType] = {}
    for output, columns in declared_outputs(function).items():
        if not isinstance(columns, str | StructType):
            raise UsageError(
                f"operator {name!r}: output {output!r} lacks types: write it as 'id string, n long'"
            )
        schemas[output] = parsed(columns, name)
    return schemas
