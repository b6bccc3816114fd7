"""Runs an operator of `poundlock.stream` inside Spark, on pages of keys.

Spark's `transformWithState` calls Python for each key, and uses a socket several times for its state.
To make fewer calls, keys are grouped in pages by their hash. For Spark, a page is one key:

    rows -> pack -> (page, Arrow bytes) -> transformWithState -> (output, Arrow bytes) -> unpack -> rows

A page's state is one value of bytes, which includes the timers of its keys. Spark has one timer for
each page, for the earliest of them.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row as SparkRow
from pyspark.sql.types import StructType

from poundlock.core.sparksql import quoted
from poundlock.core.taskerrors import Seal
from poundlock.errors import OperatorFailed, PoundlockError, UsageError
from poundlock.spark.columns import OUTPUT_TAG, output_column
from poundlock.spark.failures import OPERATORS
from poundlock.spark.hashing import parts
from poundlock.stream.aggregates import EXACT
from poundlock.stream.operator import Event, Operator, Page
from poundlock.stream.rows import Row, row_type
from poundlock.stream.times import BEGINNING, Clock, Domain

logger = logging.getLogger("poundlock")

PAGES = 1024  # fixed for the life of a checkpoint, as the number of Flink's key groups is
NO_TIME = (
    "a row has no event time (it is null): leave such rows out before the flow, or give them a time"
)
EVERY_PAGE = -1  # the input number of rows that are meant for every page

STATE = "page"  # the name of the state variable, and its columns
STATE_SCHEMA = "data binary, timer long, seen long, pages int"

_PACKED = "page int, input int, rows binary"
_RAW = "output string, rows binary"
_ROWS, _BYTES = 1 << 18, 1 << 26  # how much is packed at a time: bounds a task's memory

_NAN = float("nan")  # one object: it is found by being the same, for it equals nothing

_PAGE, _TIME, _HASH, _PLACE = "__page", "__time", "__hash", "__place"


@dataclass(frozen=True)
class Input:
    """The rows of one input of an operator, and their order."""

    frame: DataFrame
    key: Sequence[str]
    time: Column  # microseconds since 1970: event time, or the batch's own
    place: Sequence[Column] = ()  # where a row stood in its source; content decides between equals
    arrival: bool = False  # the place is where a row stood in its task, before any shuffle
    columns: Sequence[str] | None = None  # what the operator is given of a row; None: everything

    def packed(self, number: int, pages: int) -> DataFrame:
        """Return this input as packets of rows. A packet belongs to one page."""
        columns = self.frame.columns if self.columns is None else self.columns
        order = {f"{_PLACE}{index}": column for index, column in enumerate(self.place)}
        page = F.lit(0)
        if self.key and number != EVERY_PAGE:
            keys = [F.col(quoted(name)) for name in self.key]
            page = F.pmod(F.xxhash64(*keys), F.lit(pages)).cast("int")
        frame = self.frame.select(
            *[F.col(quoted(name)) for name in columns],
            *[column.alias(name) for name, column in order.items()],
            page.alias(_PAGE),
            self.time.alias(_TIME),
            content_hash(self.frame, columns).alias(_HASH),
        )
        packed = frame.mapInArrow(_Pack(number, self.arrival, uuid.uuid4().hex), _PACKED)
        if number == EVERY_PAGE:
            every = F.explode(F.sequence(F.lit(0), F.lit(pages - 1)))
            packed = packed.select(every.alias("page"), "input", "rows")
        return packed


def content_hash(frame: DataFrame, names: Sequence[str]) -> Column:
    """Return a hash of some columns, by which rows of equal time and position are sorted."""
    columns = [
        part
        for field in frame.schema.fields
        if field.name in names
        for part in parts(F.col(quoted(field.name)), field.dataType, nullable=field.nullable)
    ]
    return F.xxhash64(*columns)


@dataclass(frozen=True)
class _Pack:
    """A function for `mapInArrow` that sorts rows by page and splits them into packets."""

    number: int
    arrival: bool
    # Unique, so that Spark does not share the shuffle between operators. An operator that reads from a
    # shared shuffle gets no watermark.
    owner: str
    seal: Seal = OPERATORS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        for batch in self._placed(batches) if self.arrival else batches:
            waiting.append(batch)
            rows, size = sum(b.num_rows for b in waiting), sum(b.nbytes for b in waiting)
            if rows >= _ROWS or size >= _BYTES:
                yield from self._packets(waiting)
                waiting = []
        if waiting:
            yield from self._packets(waiting)

    def _placed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add the number of the partition, and of the row in it."""
        context = TaskContext.get()
        partition, seen = context.partitionId() if context else 0, 0
        for batch in batches:
            rows = batch.num_rows
            task = pa.repeat(pa.scalar(partition, pa.int32()), rows)
            place = pa.array(np.arange(seen, seen + rows))
            yield batch.append_column(f"{_PLACE}0", task).append_column(f"{_PLACE}1", place)
            seen += rows

    def _packets(self, batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches(batches).combine_chunks()
        if not table.num_rows:
            return
        if table[_TIME].null_count:
            with self.seal.on(OperatorFailed):
                raise OperatorFailed(NO_TIME)
        table = _sorted(table, _PAGE)  # a page that has one packet need not be sorted again
        pages = table[_PAGE].to_numpy()
        table = table.drop_columns([_PAGE])
        starts = np.flatnonzero(np.diff(pages, prepend=-1))
        ends = [*starts[1:].tolist(), len(pages)]
        packets = [
            to_bytes(table.slice(start, end - start))
            for start, end in zip(starts.tolist(), ends, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(pages[starts], pa.int32()),
                pa.repeat(pa.scalar(self.number, pa.int32()), len(packets)),
                pa.array(packets, pa.binary()),
            ],
            names=["page", "input", "rows"],
        )


def _places(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if name.startswith(_PLACE)]


def _sorted(table: pa.Table, *first: str) -> pa.Table:
    """Sort rows by these columns, and then by time, position in the source and content."""
    places = _places(table)
    if places:  # of any type
        return table.sort_by([(name, "ascending") for name in (*first, _TIME, *places, _HASH)])
    by = [table[name].to_numpy() for name in (_HASH, _TIME, *first)]  # the last counts most
    return table.take(pa.array(np.lexsort(by)))


@dataclass(frozen=True)
class Outputs:
    """The columns of an operator's outputs, as Spark and as Arrow know them."""

    schemas: Mapping[str, StructType]

    @cached_property
    def arrow(self) -> dict[str, pa.Schema]:
        """The Arrow schemas. They are cached because every page of a batch needs them."""
        return {name: to_arrow_schema(s, timezone="UTC") for name, s in self.schemas.items()}

    def table(self, operator: str, name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        """Return rows as Arrow. Raises an error that names the column that does not fit."""
        arrays: list[pa.Array] = []
        schema = self.arrow[name]
        for field, values in zip(schema, zip(*rows, strict=True), strict=True):
            try:
                arrays.append(pa.array(_fitted(values, field.type), field.type))
                if not field.nullable and arrays[-1].null_count:
                    raise ValueError("null")
            except (pa.ArrowException, TypeError, ValueError, ArithmeticError) as error:
                raise OperatorFailed(
                    f"operator {operator!r} emitted a value for column {field.name!r} of output "
                    f"{name!r} that is not of type {field.type}: {type(error).__name__}. Emit "
                    "another value, or declare another type"
                ) from error
        return pa.Table.from_arrays(arrays, schema=schema)


def _fitted(values: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    """Convert values for Arrow. Decimals are rounded as in Spark, numbers are times in ms."""
    if pa.types.is_decimal(kind):
        step = Decimal(1).scaleb(-kind.scale)
        return [EXACT.quantize(v, step) if isinstance(v, Decimal) else v for v in values]
    if pa.types.is_timestamp(kind):
        # Whole numbers are milliseconds, as in all times that a function gets.
        return [v * 1000 if type(v) is int else v for v in values]
    if pa.types.is_date(kind) and any(type(v) is int for v in values):
        raise TypeError("a number is not a date")
    if pa.types.is_map(kind):
        return [list(v.items()) if isinstance(v, dict) else v for v in values]
    return values


class Processor(StatefulProcessor):
    """Runs pages through an operator. Spark creates one processor for each task."""

    def __init__(
        self,
        operator: Operator,
        outputs: Outputs,
        keys: Sequence[Sequence[str]],
        *,
        pages: int,
        chained: bool,
    ) -> None:
        self._operator = operator
        self._outputs = outputs
        self._keys = keys
        self._pages = pages
        self._chained = chained
        self._mode = time_mode(operator)
        self._seal = OPERATORS

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._state = handle.getValueState(STATE, STATE_SCHEMA)
        with self._seal.on(PoundlockError):
            self._operator.open()

    def close(self) -> None:
        with self._seal.on(PoundlockError):
            self._operator.close()
        if dropped := self._operator.late_dropped:
            logger.warning(
                "operator %s dropped %d late rows: give it an output for late rows to keep them",
                self._operator.name,
                dropped,
            )

    # Spark fixes the names of these methods and of their arguments.

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[Any]:
        packets = [(row.input, row.rows) for row in rows]
        with self._seal.on(PoundlockError):
            yield from self._run(packets, timerValues, firing=None)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: Any,  # noqa: N803
        expiredTimerInfo: Any,  # noqa: N803
    ) -> Iterator[Any]:
        with self._seal.on(PoundlockError):
            yield from self._run([], timerValues, firing=expiredTimerInfo.getExpiryTimeInMs())

    def _run(
        self, packets: Sequence[tuple[int, bytes]], timer_values: Any, firing: int | None
    ) -> Iterator[Any]:
        stored = self._state.get()
        data, timer, seen, pages = stored or (None, None, None, self._pages)
        if pages != self._pages:
            raise UsageError(
                f"operator {self._operator.name!r} has state in {pages} pages, but the flow sets "
                f"{self._pages}: keep with_pages({pages}), or start with a new checkpoint"
            )
        if firing is not None and firing != timer:
            return  # the page ran for its rows in this batch, and has set another timer
        events, broadcast, latest = read_packets(packets, self._keys)
        clock = self._clock(timer_values, latest)
        before = Clock(BEGINNING if seen is None else seen, clock.now) if self._chained else None
        kept = None if data is None else bytes(data)
        done = Page(self._operator, kept, clock, before).run(events, broadcast)
        due = self._due(done.due, clock)
        self._set_timer(timer, due, fired=firing is not None)
        if done.data is None and not self._chained:
            if stored is not None:
                self._state.clear()
        elif done.data is not kept or due != timer or self._chained:
            self._state.update((done.data, due, clock.watermark, self._pages))
        for name, rows in done.outputs.items():
            table = self._outputs.table(self._operator.name, name, rows)
            yield SparkRow(output=name, rows=to_bytes(table))

    def _clock(self, timer_values: Any, latest: int) -> Clock:
        if self._mode == "none":
            return Clock(now=latest)
        # Spark's watermark is zero before the first row. Spark still accepts rows at the watermark,
        # and Flink does not, so Flink's watermark is one less.
        watermark = timer_values.getCurrentWatermarkInMs()
        return Clock(
            watermark - 1 if watermark > 0 else BEGINNING,
            timer_values.getCurrentProcessingTimeInMs(),
        )

    def _due(self, due: Mapping[Domain, int | None], clock: Clock) -> int | None:
        """Return the time of the page's timer in Spark, by the clock of its time mode."""
        event, processing = due[Domain.EVENT], due[Domain.PROCESSING]
        if self._mode == "eventTime":
            return None if event is None else max(event + 1, 1)
        if self._mode == "processingTime" and event is not None:
            return clock.now + 1  # Spark's timers use one clock, so check event time in each batch
        return processing

    def _set_timer(self, old: int | None, new: int | None, *, fired: bool) -> None:
        if old == new:
            return
        if old is not None and not fired:
            self._handle.deleteTimer(old)
        if new is not None:
            self._handle.registerTimer(new)


def read_packets(
    packets: Iterable[tuple[int, bytes]], keys: Sequence[Sequence[str]]
) -> tuple[dict[tuple[Any, ...], list[Event]], list[Event], int]:
    """Return each key's rows in order, the rows for every page, and the latest time."""
    tables: dict[int, list[pa.Table]] = defaultdict(list)
    for number, data in packets:
        tables[number].append(from_bytes(data))
    events: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    broadcast: list[Event] = []
    latest = 0
    for number, packed in sorted(tables.items()):
        table = pa.concat_tables(packed)
        if len(packed) > 1:
            table = _sorted(table)
        places = _places(table)
        times = np.floor_divide(table[_TIME].to_numpy(), 1000).tolist()
        latest = max([latest, *times[-1:]])
        table = table.drop_columns([_TIME, _HASH, *places])
        rows = python_rows(table)
        if number == EVERY_PAGE:
            broadcast += [Event(time, row, 1) for time, row in zip(times, rows, strict=True)]
            continue
        values = zip(*[_key_values(table[name]) for name in keys[number]], strict=True)
        for value, time, row in zip(values, times, rows, strict=True):
            events[value].append(Event(time, row, number))
    if len([number for number in tables if number != EVERY_PAGE]) > 1:
        for several in events.values():
            several.sort(key=itemgetter(0))  # stable: at equal times the first input first
    return events, broadcast, latest


def python_rows(table: pa.Table) -> Iterator[Row]:
    """Return a table's rows for user code."""
    columns = [_python(column) for column in table.columns]
    return map(row_type(tuple(table.column_names)), zip(*columns, strict=True))


def _key_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a key column, which are equal whenever Spark's values are equal."""
    values = _python(column)
    if pa.types.is_floating(column.type):
        return [None if v is None else _NAN if v != v else v + 0.0 for v in values]  # -0.0 is 0.0
    if pa.types.is_nested(column.type):
        return [_frozen(value) for value in values]
    return values


def _frozen(value: Any) -> Any:
    """Return a struct or array as a tuple, which can be a key of a dictionary."""
    if isinstance(value, dict | list):
        return tuple(map(_frozen, value.values() if isinstance(value, dict) else value))
    return (_NAN if value != value else value + 0.0) if isinstance(value, float) else value


def _python(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(column.type) and column.type.tz:
        # The instant is the same in every time zone, and UTC converts fastest.
        column = column.cast(pa.timestamp("us", "UTC"))
    if pa.types.is_map(column.type):
        return [None if value is None else dict(value) for value in column.to_pylist()]
    return column.to_pylist()


def time_mode(operator: Operator) -> str:
    """Return Spark's time mode for the operator's timers."""
    if Domain.PROCESSING in operator.domains:
        return "processingTime"
    return "eventTime" if Domain.EVENT in operator.domains else "none"


def run(
    operator: Operator,
    outputs: Outputs,
    inputs: Mapping[int, Input],
    *,
    pages: int = PAGES,
    chained: bool = False,
) -> DataFrame:
    """Return an operator's results, packed: see `output` and `tagged`."""
    packed = [each.packed(number, pages) for number, each in inputs.items()]
    union = packed[0]
    for frame in packed[1:]:
        union = union.unionByName(frame)
    keys = [inputs[number].key for number in sorted(inputs) if number != EVERY_PAGE]
    processor = Processor(operator, outputs, keys, pages=pages, chained=chained)
    return union.groupBy("page").transformWithState(processor, _RAW, "append", time_mode(operator))


def output(raw: DataFrame, name: str, outputs: Outputs) -> DataFrame:
    """Return the rows of one output."""
    return raw.where(F.col("output") == name).mapInArrow(
        _Unpack({name: outputs.arrow[name]}, tagged=False), outputs.schemas[name]
    )


def tagged(raw: DataFrame, outputs: Outputs) -> DataFrame:
    """Return the rows of all outputs: the output's name, and a struct column for each output."""
    schema = StructType().add(OUTPUT_TAG, "string")
    for name, columns in outputs.schemas.items():
        schema = schema.add(output_column(name), columns)
    return raw.mapInArrow(_Unpack(outputs.arrow, tagged=True), schema)


@dataclass(frozen=True)
class _Unpack:
    schemas: Mapping[str, pa.Schema]
    tagged: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name, data in zip(batch["output"].to_pylist(), batch["rows"], strict=True):
                table = from_bytes(data.as_buffer()).combine_chunks()
                if self.tagged:
                    table = self._tagged(name, table)
                yield from table.to_batches()

    def _tagged(self, name: str, table: pa.Table) -> pa.Table:
        columns: dict[str, pa.Array] = {OUTPUT_TAG: pa.repeat(pa.scalar(name), table.num_rows)}
        for other, schema in self.schemas.items():
            kind = pa.struct(list(schema))
            rows = pa.nulls(table.num_rows, kind)
            if other == name:
                arrays = [column.combine_chunks() for column in table.columns]
                rows = pa.StructArray.from_arrays(arrays, fields=list(schema))
            columns[output_column(other)] = rows
        return pa.table(columns)


def to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: Any) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
