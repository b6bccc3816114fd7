"""Flows: Flink's operators over a streaming DataFrame.

A flow is a DataFrame with a time, and can be turned back into a DataFrame at any point. Spark runs
what it has an operator for. An operator of `poundlock.stream` on keyed state runs the rest
(`poundlock.spark.stream.keyed`). `explain()` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType, TimestampType

from poundlock.core.sparksql import quoted
from poundlock.errors import OperatorFailed, UsageError
from poundlock.spark.failures import OPERATORS
from poundlock.spark.internals import analyzed_plan, is_column, watermark_delay
from poundlock.spark.plan import keeps_order, read_plan, walk
from poundlock.spark.stream import keyed, rowwise
from poundlock.stream.enrich import check as check_enrich
from poundlock.stream.operator import MAIN, Operator
from poundlock.stream.times import Domain, Duration
from poundlock.stream.watermarks import Ingestion, Watermark, bounded

if TYPE_CHECKING:
    from poundlock.spark.stream.keyedflow import KeyedFlow

WATERMARK_TAG = "spark.watermarkDelayMs"  # how Spark marks the column that a watermark follows
_MARK, _TIME, _ARRIVED = "__poundlock_mark", "__poundlock_time", "ingestion_time"


@dataclass(frozen=True)
class Result:
    """All outputs of an operator, packed."""

    raw: DataFrame
    outputs: keyed.Outputs


@dataclass(frozen=True)
class Flow:
    """A streaming DataFrame with a time. Every method returns a new flow and starts nothing."""

    frame: DataFrame
    time: str | None = None  # the column of event time; None: processing time
    watermark: Watermark | None = None
    position: tuple[str, ...] = ()
    shift: int = 0  # milliseconds from event time to that column; 1 for a window's end
    lost: str = ""  # the operator that passes no event time on
    ordered: bool = True  # no step of the flow changes the source's order
    made: bool = False  # an operator made the rows, which come before the batch's watermark
    result: Result | None = None
    steps: tuple[str, ...] = ()

    @property
    def df(self) -> DataFrame:
        """The flow as a DataFrame. After an operator, its main output."""
        return self.frame

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of all outputs, `main` first."""
        return tuple(self.result.outputs.schemas) if self.result else (MAIN,)

    def side_output(self, name: str) -> DataFrame:
        """Return an output as a DataFrame. To write several at once, use a pipeline of the flow."""
        self._check_output(name)
        if self.result is None:
            return self.frame
        return keyed.output(self.result.raw, name, self.result.outputs)

    @property
    def tagged(self) -> DataFrame:
        """All outputs in one frame, for a pipeline that routes them."""
        assert self.result is not None, "only an operator has several outputs"
        return keyed.tagged(self.result.raw, self.result.outputs)

    def _check_output(self, name: str) -> None:
        if name not in self.outputs:
            raise UsageError(
                f"there is no output {name!r}: this flow has {', '.join(self.outputs)}"
            )

    @property
    def domain(self) -> Domain:
        return Domain.PROCESSING if self.time is None else Domain.EVENT

    def explain(self) -> str:
        """Return, step by step, whether Spark's own operators or keyed state are used, and why."""
        clock = "processing time" if self.time is None else f"event time `{self.time}`"
        return "\n".join([f"flow in {clock}", *self.steps])

    # Stateless steps: Spark's own, or a Python function over Arrow batches.

    def select(self, *columns: str | Column) -> Flow:
        """Select columns and Spark's expressions."""
        chosen = [
            F.expr(each) if isinstance(each, str) and each != "*" else each for each in columns
        ]
        return self._stepped(
            analysed("select", lambda: self.frame.select(*chosen)), "select: Spark"
        )

    def filter(self, condition: str | Column | Callable[[Any], Any]) -> Flow:
        """Keep the rows for which a condition holds: SQL, a Column, or a function of the row."""
        if isinstance(condition, str | Column):
            frame = analysed("filter", lambda: self.frame.where(condition))
            return self._stepped(frame, "filter: Spark")
        step = rowwise.Filter("filter", rowwise.checked(condition, "filter"))
        return self._python(step, self.frame.schema, "filter")

    def map(self, function: Callable[[Any], Any], schema: str | StructType) -> Flow:
        """Map each row by a function. `schema` has the columns of its result."""
        step = rowwise.Map("map", rowwise.checked(function, "map"))
        return self._python(step, parsed(schema, "map"), "map")

    def flat_map(self, function: Callable[[Any], Iterable[Any]], schema: str | StructType) -> Flow:
        """Map each row to any number of rows, by a function that returns or yields them."""
        step = rowwise.FlatMap("flat_map", rowwise.checked(function, "flat_map"))
        return self._python(step, parsed(schema, "flat_map"), "flat_map")

    def enrich(
        self,
        function: Callable[[Any], Any],
        schema: str | StructType,
        *,
        concurrency: int = 100,
        timeout: Duration = "30 seconds",
        ordered: bool = True,
        retries: int = 0,
        on_timeout: str = "fail",
        name: str = "enrich",
    ) -> Flow:
        """Enrich each row with another system's answer, with many calls at a time.

        `function` returns a row or rows. It is an `async def`, or a plain function, which runs in
        threads. A task makes at most `concurrency` calls at once. A replayed batch calls it again.
        """
        options: dict[str, Any] = {
            "concurrency": concurrency,
            "timeout": timeout,
            "on_timeout": on_timeout,
        }
        check_enrich(function, name, **options, retries=retries)
        options |= {"retries": retries, "ordered": ordered}
        made = self._python(rowwise.Enrich(name, function, options), parsed(schema, name), name)
        return replace(made, ordered=self.ordered and ordered)

    def union(self, *others: Flow) -> Flow:
        """Unite flows that have the same columns and the same time."""
        frame = self.frame
        for other in others:
            if other.time != self.time:
                raise UsageError(
                    f"union() cannot combine a flow in {_clock(self)} and one in {_clock(other)}: "
                    "give both the same time column"
                )
            frame = analysed("union", lambda f=frame, o=other: f.unionByName(o.frame))
        made = self.made or any(other.made for other in others)
        return replace(self._stepped(frame, "union: Spark"), made=made)

    def key_by(self, *columns: str | Column) -> KeyedFlow:
        """Key the rows. The next operator applies to each key separately."""
        from poundlock.spark.stream.keyedflow import KeyedFlow

        if not columns:
            raise UsageError("key_by() needs a column: name one, or an expression with an alias")
        frame, names = self.frame, []
        for column in columns:
            expression = F.col(quoted(column)) if isinstance(column, str) else column
            name = analysed("key_by", lambda e=expression, f=frame: f.select(e).columns[0])
            if name not in frame.columns:
                frame = frame.withColumn(name, expression)
            elif not isinstance(column, str) and not is_column(column, name):
                raise UsageError(
                    f"key_by(): there is a column {name!r} already, with another value: give the "
                    "expression another alias"
                )
            names.append(name)
        for name in names:
            kind = frame.schema[name].dataType.simpleString()
            if "map<" in kind or "variant" in kind or "collate" in kind:
                raise UsageError(
                    f"column {name!r} is of type {kind}, which cannot be a key: use one of its fields, "
                    "or convert it to a type that can be compared"
                )
        return KeyedFlow(replace(self, frame=frame, result=None), tuple(names))

    def with_time(self, column: str) -> Flow:
        """Use another column of an operator's rows as event time. The watermark is unchanged."""
        if self.watermark is None:
            raise UsageError(
                "with_time() is for a flow in event time: give flow() a time and watermark"
            )
        _check_time(self.frame, column)
        return replace(self, time=column, shift=0, lost="")

    def _stepped(self, frame: DataFrame, step: str) -> Flow:
        return replace(self, frame=frame, result=None, steps=(*self.steps, step))

    def _python(self, step: rowwise.Step, schema: StructType, name: str) -> Flow:
        frame = rowwise.apply(self.frame, step, schema)
        return self._stepped(frame, f"{name}: a Python function, over Arrow batches")

    # For the keyed operators.

    def require_time(self, operator: str) -> None:
        """Raise `UsageError` if the flow has no event time."""
        self.check_clock(operator)
        if self.time is None:
            raise UsageError(
                f"operator {operator!r} needs event time, but the flow has none: give flow() time= "
                "and watermark="
            )

    def check_clock(self, operator: str) -> None:
        """Raise `UsageError` if an earlier step has dropped the event time."""
        if self.lost:
            cure = (
                "name one with with_time()" if self.watermark else "start from its .df with flow()"
            )
            raise UsageError(
                f"operator {operator!r} comes after {self.lost!r}, which does not pass on event "
                f"time: {cure}"
            )
        if self.time is not None and self.time not in self.frame.columns:
            raise UsageError(
                f"operator {operator!r} needs the time column {self.time!r}, which an earlier step has "
                f"left out: keep it, or name another with with_time(). The columns are "
                f"{', '.join(self.frame.columns)}"
            )

    def input(
        self, key: Sequence[str], operator: str, columns: Sequence[str] | None = None
    ) -> keyed.Input:
        """Return the rows as the input of an operator, with some columns or with all."""
        self.check_clock(operator)
        missing = [name for name in self.position if name not in self.frame.columns]
        if missing:
            raise UsageError(
                f"operator {operator!r} needs the position {', '.join(missing)}, which an earlier step "
                "has left out: keep it, or give the flow no position="
            )
        place = [F.col(quoted(name)) for name in self.position]
        arrival = self.time is None and not place and self.ordered and keeps_order(self.frame)
        micros = F.unix_micros(self._time())
        return keyed.Input(self.frame, key, micros, place, arrival, columns)

    def watermarked(self) -> tuple[DataFrame, str]:
        """Return the frame with a tagged time column, for Spark's own operators, and its name."""
        assert self.time is not None
        assert self.watermark is not None
        time, tag = self._time(), {WATERMARK_TAG: self.watermark.delay}
        # Spark's own operators silently drop rows without a time.
        missing = F.raise_error(F.lit(OPERATORS.text(OperatorFailed(keyed.NO_TIME)))).cast(
            "timestamp"
        )
        time = F.when(time.isNull(), missing).otherwise(time)
        # It replaces the time column, as Spark allows one tag in a frame.
        name = _TIME if self.shift else self.time
        return self.frame.withColumn(name, time.alias(name, metadata=tag)), name

    def _time(self) -> Column:
        if self.time is None:
            return F.current_timestamp()
        time = F.col(quoted(self.time)).cast("timestamp")
        return time - F.expr(f"INTERVAL {self.shift} MILLISECOND") if self.shift else time

    def after(
        self,
        operator: Operator,
        outputs: keyed.Outputs,
        raw: DataFrame,
        step: str,
        time: str | None,
        shift: int,
    ) -> Flow:
        """Return the flow of an operator's results."""
        if time is None:
            time, shift = self.time, self.shift
        # In processing time, Spark's stateful operators pass no watermark on.
        passes = Domain.PROCESSING not in operator.domains and self.watermark is not None
        lost = "" if passes or self.time is None else operator.name
        return Flow(
            frame=keyed.output(raw, MAIN, outputs),
            time=time if passes else None,
            watermark=self.watermark if passes else None,
            shift=shift,
            lost=lost,
            made=True,
            result=Result(raw, outputs),
            steps=(*self.steps, step),
        )


def flow(
    frame: DataFrame,
    *,
    time: str | Ingestion | None = None,
    watermark: Duration | Watermark | None = None,
    position: str | Sequence[str] = (),
) -> Flow:
    """Begin a flow over a streaming DataFrame.

    Args:
        time: The column of event time, or `ingestion()`. Default: processing time.
        watermark: How long to wait for late rows: a duration, `bounded`, `monotone` or `punctuated`.
            Leave it out if the DataFrame has a watermark already.
        position: Columns with the position of a row in its source, such as Kafka's `partition` and
            `offset`. Rows of a key with equal times are processed in this order, by default in an
            order that depends only on their content. In both cases a replay gives the same result.
    """
    if not isinstance(frame, DataFrame) or not frame.isStreaming:
        raise UsageError(
            "flow() takes a streaming DataFrame: open the source with spark.readStream, or with a "
            "function such as poundlock.read_kafka"
        )
    if isinstance(time, Ingestion):
        frame = frame.withColumn(_ARRIVED, F.current_timestamp())
        time, watermark = _ARRIVED, watermark or Watermark(0)
    if time is None:
        if watermark is not None:
            raise UsageError("watermark= is for event time: give time= as well")
        return Flow(frame, position=_positions(frame, position))
    _check_time(frame, time)
    existing = _existing_watermark(frame)
    if watermark is None and existing is None:
        raise UsageError(
            f"flow(time={time!r}) needs a watermark: say how late rows may come, for example "
            "watermark='10 seconds'"
        )
    if watermark is None:
        # A stateful operator's rows come before the watermark at which it emitted them.
        made = read_plan(frame).stateful
        return Flow(frame, time, existing, _positions(frame, position), made=made)
    if existing is not None:
        raise UsageError("the frame has a watermark already: leave watermark= out")
    chosen = watermark if isinstance(watermark, Watermark) else bounded(watermark)
    followed = time
    if chosen.mark is not None:
        mark = F.expr(chosen.mark).cast("timestamp")
        frame = analysed("punctuated", lambda: frame.withColumn(_MARK, mark))
        followed = _MARK
    tracked = frame.withWatermark(followed, f"{chosen.delay} milliseconds")
    if followed == _MARK:
        tracked = tracked.drop(_MARK)
    return Flow(tracked, time, chosen, _positions(frame, position))


def parsed(schema: str | StructType, operator: str) -> StructType:
    """Return a schema that may be given as text."""
    if isinstance(schema, StructType):
        return schema
    try:
        found = StructType.fromDDL(schema)
    except Exception as error:
        problem = str(error).strip().splitlines()[0]
        raise UsageError(
            f"operator {operator!r}: the schema {schema!r} cannot be read: {problem}. Write it as 'id "
            "string, total double'"
        ) from error
    if not isinstance(found, StructType):
        raise UsageError(
            f"operator {operator!r}: the schema {schema!r} has no column names: write it as 'id "
            "string, total double'"
        )
    return found


def _clock(flow: Flow) -> str:
    return "processing time" if flow.time is None else f"event time {flow.time!r}"


def _positions(frame: DataFrame, position: str | Sequence[str]) -> tuple[str, ...]:
    names = (position,) if isinstance(position, str) else tuple(position)
    for name in names:
        if name not in frame.columns:
            raise UsageError(
                f"position={name!r} is not a column: the columns are {', '.join(frame.columns)}"
            )
    return names


def _check_time(frame: DataFrame, time: Any) -> None:
    if not isinstance(time, str) or time not in frame.columns:
        raise UsageError(
            f"time={time!r} is not a column: the columns are {', '.join(frame.columns)}"
        )
    kind = frame.schema[time].dataType
    if not isinstance(kind, TimestampType):
        raise UsageError(
            f"time={time!r} is of type {kind.simpleString()}: make it a timestamp first, for example "
            f"with timestamp_seconds({time})"
        )


def _existing_watermark(frame: DataFrame) -> Watermark | None:
    """Return the watermark in the frame's plan, if there is one."""
    for node in walk(analyzed_plan(frame)):
        if node.nodeName() == "EventTimeWatermark":
            return Watermark(watermark_delay(node))
    return None


def analysed(step: str, build: Callable[[], Any]) -> Any:
    """Return the result of `build`. Spark's error becomes a `UsageError` that names the operator."""
    try:
        return build()
    except AnalysisException as error:
        problem = str(error).splitlines()[0]
        raise UsageError(f"operator {step!r}: {problem}") from error
