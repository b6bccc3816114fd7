"""Windows over a keyed flow: Spark's own windows if they suffice, else windows on keyed state.

They differ for rows that are late by less than a batch. Spark's own windows still accept those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

from poundlock.core.sparksql import quoted
from poundlock.errors import UsageError
from poundlock.spark.stream import aggregation
from poundlock.spark.stream.flow import Flow, parsed
from poundlock.stream.aggregates import Aggregate, Aggregates, Reduce
from poundlock.stream.evictors import Evictor
from poundlock.stream.operator import MAIN
from poundlock.stream.triggers import Trigger
from poundlock.stream.windowing import WindowOperator
from poundlock.stream.windows import Assigner, SessionWindows, TimeWindows

if TYPE_CHECKING:
    from poundlock.spark.stream.keyedflow import KeyedFlow

_WINDOW = [StructField("window_start", TimestampType()), StructField("window_end", TimestampType())]


@dataclass(frozen=True)
class WindowedFlow:
    """A keyed flow with windows, on which a computation can be called."""

    keyed: KeyedFlow
    windows: Assigner
    trigger: Trigger | None
    evictor: Evictor | None
    lateness: int
    late_output: str | None
    name: str

    def aggregate(
        self,
        *what: str | Column | Aggregate,
        schema: str | StructType | None = None,
        process: Callable[..., Any] | None = None,
        side_outputs: Mapping[str, str | StructType] | None = None,
    ) -> Flow:
        """Aggregate each window row by row. Only the accumulators are kept.

        `what` is Spark's expressions (`F.avg("celsius").alias("mean")`, or SQL), or one `Aggregate` of
        your own with `schema`, the columns of its result. A result has the key, `window_start`,
        `window_end` and the results. With `process(key, window, result, ctx)`, the results are the rows
        that this function returns, and `schema` has their columns.
        """
        if not what:
            raise UsageError(
                f"operator {self.name!r}: aggregate() needs an argument: give an expression"
            )
        own = [each for each in what if isinstance(each, Aggregate)]
        if own:
            if len(what) > 1 or schema is None:
                raise UsageError(
                    f"operator {self.name!r}: give one Aggregate and the schema of its result"
                )
            return self._by_aggregate(own[0], parsed(schema, self.name), process, side_outputs)
        self._check_schema(process, schema)
        columns = aggregation.columns([each for each in what if not isinstance(each, Aggregate)])
        reason = self._not_native(process)
        if reason is None:
            return self._native(columns)
        return self._stateful(columns, reason, process, schema, side_outputs)

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        *,
        process: Callable[..., Any] | None = None,
        schema: str | StructType | None = None,
    ) -> Flow:
        """Combine the rows of each window, two by two. A result has all columns, and the window's."""
        self._check_schema(process, schema)
        rest = [f for f in self._frame.schema.fields if f.name not in self.keyed.key]
        chosen = StructType(rest) if schema is None else parsed(schema, self.name)
        return self._by_aggregate(Reduce(function), chosen, process, None)

    def process(
        self,
        function: Callable[..., Any],
        schema: str | StructType,
        *,
        side_outputs: Mapping[str, str | StructType] | None = None,
    ) -> Flow:
        """Pass each window's rows to `function(key, window, rows, ctx)`, which returns rows.

        All rows of a window are kept until it fires. `aggregate` keeps less.
        """
        if not callable(function):
            raise UsageError(f"operator {self.name!r}: process() needs a function: give one")
        made = parsed(schema, self.name)
        return self._run(self._frame, made, None, function, side_outputs, "a window function")

    def _check_schema(self, process: Any, schema: Any) -> None:
        if (process is None) != (schema is None):
            raise UsageError(f"operator {self.name!r}: give process= and schema= together")

    @property
    def _frame(self) -> DataFrame:
        return self.keyed.flow.frame

    def _not_native(self, process: Any) -> str | None:
        """Return why Spark's own windows do not suffice; None: they do."""
        windows, flow = self.windows, self.keyed.flow
        reasons = {
            "Spark has no such windows": not isinstance(windows, TimeWindows | SessionWindows)
            or (isinstance(windows, TimeWindows) and windows.slide > windows.size)
            or (isinstance(windows, SessionWindows) and not isinstance(windows.gap, int)),
            "the flow goes by processing time": flow.time is None,
            "a trigger is given": self.trigger is not None,
            "an evictor is given": self.evictor is not None,
            "late rows are still taken": self.lateness > 0,
            "late rows have an output": self.late_output is not None,
            "a function is given each result": process is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _native(self, columns: Sequence[Column]) -> Flow:
        frame, time = self.keyed.flow.watermarked()
        windows = self.windows
        if isinstance(windows, TimeWindows):
            start = windows.offset % windows.slide
            window = F.window(time, _ms(windows.size), _ms(windows.slide), _ms(start))
        else:
            assert isinstance(windows, SessionWindows)
            window = F.session_window(time, _ms(windows.gap))  # pyright: ignore[reportArgumentType]
        key = [F.col(quoted(name)) for name in self.keyed.key]
        made = aggregation.grouped(frame, [window.alias("__window"), *key], columns, self.name)
        names = [name for name in made.columns if name not in ("__window", *self.keyed.key)]
        result = made.select(
            *key,
            F.col("__window.start").alias("window_start"),
            F.col("__window.end").alias("window_end"),
            *[F.col(quoted(name)) for name in names],
        )
        flow = self.keyed.flow
        step = f"{self.name}: Spark's own window operator"
        return Flow(
            result, "window_end", flow.watermark, shift=1, made=True, steps=(*flow.steps, step)
        )

    def _stateful(
        self, columns: Sequence[Column], reason: str, process: Any, schema: Any, sides: Any
    ) -> Flow:
        parts = aggregation.parts(self._frame, columns, self.name)
        frame, used, extra = self._frame, [], 0
        for part in parts:
            places: list[str] = []
            for sql in part.of:
                plain = sql.strip("`")
                if plain not in frame.columns:
                    plain = f"__value{extra}"
                    frame, extra = self._with(frame, plain, sql), extra + 1
                places.append(plain)
            used.append((part.function, places))
        given: Sequence[str] = frame.columns
        own_gaps = isinstance(self.windows, SessionWindows) and callable(self.windows.gap)
        if not (self.late_output or self.trigger or self.evictor or own_gaps):
            used_by = [place for _, places in used for place in places]
            given, extra = list(dict.fromkeys([*self.keyed.key, *used_by])), 0
        results = (
            StructType([part.field for part in parts])
            if schema is None
            else parsed(schema, self.name)
        )
        what = f"windows, because {reason}"
        return self._run(frame, results, Aggregates(used), process, sides, what, given, extra)

    def _with(self, frame: DataFrame, column: str, sql: str) -> DataFrame:
        try:
            return frame.withColumn(column, F.expr(sql))
        except AnalysisException as error:
            raise UsageError(
                f"operator {self.name!r}: {sql} cannot be computed here: make it a column before "
                "the flow"
            ) from error

    def _by_aggregate(self, aggregate: Any, schema: StructType, process: Any, sides: Any) -> Flow:
        what = "windows, because the aggregate is a Python one"
        return self._run(self._frame, schema, aggregate, process, sides, what)

    def _run(
        self,
        frame: DataFrame,
        schema: StructType,
        aggregate: Aggregate | None,
        function: Any,
        sides: Mapping[str, str | StructType] | None,
        what: str,
        given: Sequence[str] | None = None,
        extra: int = 0,
    ) -> Flow:
        columns = frame.columns if given is None else given
        mine = replace(self.keyed, flow=replace(self.keyed.flow, frame=frame))
        side_schemas = {name: parsed(each, self.name) for name, each in (sides or {}).items()}
        operator = WindowOperator(
            self.name,
            self.windows,
            domain=mine.flow.domain,
            columns=columns,
            keys=mine.key,
            fields=schema.names,
            aggregate=aggregate,
            function=function,
            trigger=self.trigger,
            evictor=self.evictor,
            allowed_lateness=self.lateness,
            late=self.late_output,
            hidden=extra,
            sides={name: each.names for name, each in side_schemas.items()},
        )
        main = schema
        if function is None:
            window = _WINDOW if self.windows.timed else []
            main = StructType([*mine.key_fields(), *window, *schema.fields])
        outputs = {MAIN: main, **side_schemas}
        if self.late_output is not None:
            outputs[self.late_output] = StructType(self._frame.schema.fields)
        ends = function is None and self.windows.timed
        time = "window_end" if ends and self.keyed.flow.time is not None else None
        shift = 1 if time else 0
        return mine.run(operator, outputs, {0: mine}, what, time, shift, columns)


def _ms(duration: int) -> str:
    return f"{duration} milliseconds"
