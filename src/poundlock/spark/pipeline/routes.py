"""From a DataFrame to columns for each sink, so that one pass over a batch is enough.

Before the query starts, `output`, `select` and `where` of each sink become one nullable struct column,
or one column for each field if the sink takes every row. Another column has the hash of each row. All
are computed by Spark's generated code: a task needs no cache, no second scan and no loop over rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from poundlock.core.faults import Faults
from poundlock.core.participant import Column, Participant
from poundlock.core.sparksql import quoted
from poundlock.errors import UsageError, error_context
from poundlock.spark.columns import (
    OUTPUT_TAG,
    field_column,
    field_of,
    hash_column,
    output_column,
    rows_column,
)
from poundlock.spark.hashing import parts

_KEPT, _TAKEN, _SELECTED = "__poundlock_kept", "__poundlock_taken", "__poundlock_selected"


@dataclass(frozen=True)
class Route:
    """A sink and the rows that go to it."""

    sink: Participant
    where: str | SparkColumn | None = None
    select: tuple[str | SparkColumn, ...] | None = None
    on_bad_row: str | Participant = "fail"
    output: str | None = None  # of a flow; None if the frame has only one

    @property
    def dead_letters(self) -> Participant | None:
        """The sink for the rows that this one cannot take."""
        return self.on_bad_row if isinstance(self.on_bad_row, Participant) else None

    def describe(self) -> str:
        parts = [self.sink.name]
        if self.output is not None:
            parts.append(f"output {self.output}")
        if self.select is not None:
            parts.append("select " + ", ".join(str(item) for item in self.select))
        if self.where is not None:
            parts.append(f"where {self.where}")
        if self.dead_letters is not None:
            parts.append(f"bad rows to {self.dead_letters.name}")
        elif self.on_bad_row == "skip":
            parts.append("bad rows left out")
        return "; ".join(parts)


def dead_letter_sinks(routes: Sequence[Route]) -> list[Participant]:
    """Return the sinks that take bad rows of other sinks, each once. Checks that they can."""
    found: dict[str, Participant] = {}
    for route in routes:
        if route.dead_letters is not None and route.dead_letters.name not in found:
            route.dead_letters.check_dead_letters()
            found[route.dead_letters.name] = route.dead_letters
    return list(found.values())


def dead_letter_routes(routes: Sequence[Route]) -> dict[str, Participant | None]:
    """Map each sink that leaves bad rows out to the sink that takes them, or to None."""
    return {route.sink.name: route.dead_letters for route in routes if route.on_bad_row != "fail"}


def routed(frame: DataFrame, routes: Sequence[Route]) -> DataFrame:
    """Return a frame with the columns of each route's rows and their hashes (see `spark.columns`).

    Raises `UsageError` with every column and expression that does not fit, and its sink's name.
    """
    base, faults = frame, Faults()
    for index, route in enumerate(routes):
        with faults.gather():
            base = _checked(route, lambda i=index, r=route, b=base: _with_rows(b, frame, i, r))
    faults.raise_any()
    columns: list[SparkColumn] = []
    for index in range(len(routes)):
        own = [field for field in base.schema.fields if field_of(field.name, index) is not None]
        columns += [F.col(field.name) for field in own] or [F.col(rows_column(index))]
        columns.append(_hash(base, index, own).alias(hash_column(index)))
    return base.select(*columns)


def _with_rows(base: DataFrame, frame: DataFrame, index: int, route: Route) -> DataFrame:
    """Add the columns of a route's rows. Spark merges all these projections into one."""
    fields, conditions = frame.schema.fields, []
    if route.output is not None:  # this route sees only the columns of its output
        rows = output_column(route.output)
        fields = frame.schema[rows].dataType.fields  # pyright: ignore[reportAttributeAccessIssue]
        kept = F.struct("*").alias(_KEPT)
        base = base.select(
            kept, (F.col(OUTPUT_TAG) == route.output).alias(_TAKEN), quoted(rows) + ".*"
        )
        conditions = [F.col(_TAKEN)]
    if route.where is not None:
        conditions += [F.expr(route.where) if isinstance(route.where, str) else route.where]
    prefix, names = "", [quoted(field.name) for field in fields]
    if route.select is not None:
        items: list[SparkColumn] = []
        for item in route.select:
            if isinstance(item, str) and item == "*":
                items += [F.col(name) for name in names]
            else:
                items.append(F.expr(item) if isinstance(item, str) else item)
        selected = F.struct(*items)
        for condition in reversed(conditions):  # rows left out are not given to the expressions
            selected = F.when(condition, selected)
        base = base.withColumn(_SELECTED, selected)
        fields = base.schema[_SELECTED].dataType.fields  # pyright: ignore[reportAttributeAccessIssue]
        prefix = f"`{_SELECTED}`."
    columns = {
        field.name: Column(prefix + quoted(field.name), declared(field.dataType))
        for field in fields
    }
    with error_context(sink=route.sink.name):
        wanted = route.sink.project(columns)
    if not conditions:
        # No row is left out, so no struct is needed, which Spark would copy once more.
        fields = [F.expr(sql).alias(field_column(index, name)) for name, sql in wanted.items()]
        return base.select("*", *fields).drop(_SELECTED)
    row = F.struct(*[F.expr(sql).alias(name) for name, sql in wanted.items()])
    for condition in reversed(conditions):
        row = F.when(condition, row)
    if route.output is None:
        return base.withColumn(rows_column(index), row).drop(_SELECTED)
    return base.select(_KEPT + ".*", row.alias(rows_column(index)))


def declared(kind: DataType) -> str:
    """Return a type as `Column` has it: `simpleString` with quoted names, for Spark's parser."""
    if isinstance(kind, ArrayType):
        return f"array<{declared(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{declared(kind.keyType)},{declared(kind.valueType)}>"
    if isinstance(kind, StructType):
        fields = ((field.name, declared(field.dataType)) for field in kind.fields)
        return f"struct<{','.join(f'{_plain(name)}:{inner}' for name, inner in fields)}>"
    return kind.simpleString()


def _plain(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else quoted(name)


def _hash(base: DataFrame, index: int, own: Sequence[StructField]) -> SparkColumn:
    """Return the hash of a route's rows, from its `own` columns or from the fields of its struct."""
    name = rows_column(index)
    if own:
        values = [(F.col(field.name), field) for field in own]
    else:
        fields = base.schema[name].dataType.fields  # pyright: ignore[reportAttributeAccessIssue]
        values = [(F.col(name)[field.name], field) for field in fields]
    hashed = F.xxhash64(
        *[
            part
            for value, field in values
            for part in parts(value, field.dataType, nullable=field.nullable)
        ]
    )
    return hashed if own else F.when(F.col(name).isNotNull(), hashed)


def _checked(route: Route, build):
    try:
        return build()
    except AnalysisException as error:
        problem = str(error).splitlines()[0]
        raise UsageError(f"sink {route.describe()}: {problem}", sink=route.sink.name) from error
