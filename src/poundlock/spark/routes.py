"""From a frame to one column per sink: what makes a single pass over a batch possible.

Before the query starts, each sink's `select` and `where` become one nullable struct column, and the
hash of each row one more, computed by Spark's own generated code. A task then needs no cache, no second
scan and no loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from poundlock.core.participant import Column, Participant
from poundlock.errors import UsageError
from poundlock.spark.task import hash_column, rows_column

Expression = "str | SparkColumn"


@dataclass(frozen=True)
class Route:
    """A sink and the rows that go to it."""

    sink: Participant
    where: str | SparkColumn | None = None
    select: tuple[str | SparkColumn, ...] | None = None
    on_bad_row: str | Participant = "fail"

    @property
    def letters(self) -> Participant | None:
        """The sink that takes the rows which this one cannot."""
        return self.on_bad_row if isinstance(self.on_bad_row, Participant) else None

    def describe(self) -> str:
        parts = [self.sink.name]
        if self.select is not None:
            parts.append("select " + ", ".join(str(item) for item in self.select))
        if self.where is not None:
            parts.append(f"where {self.where}")
        if self.letters is not None:
            parts.append(f"bad rows to {self.letters.name}")
        elif self.on_bad_row == "skip":
            parts.append("bad rows left out")
        return "; ".join(parts)


def taking_letters(routes: Sequence[Route]) -> list[Participant]:
    """Return the sinks that take other sinks' bad rows, each once, and see that they can."""
    found: dict[str, Participant] = {}
    for route in routes:
        if route.letters is not None and route.letters.name not in found:
            route.letters.check_letters()
            found[route.letters.name] = route.letters
    return list(found.values())


def letters_of(routes: Sequence[Route]) -> dict[str, Participant | None]:
    """Return the sinks that leave bad rows out, and to each the sink that takes them, if any."""
    return {route.sink.name: route.letters for route in routes if route.on_bad_row != "fail"}


def routed(frame: DataFrame, routes: Sequence[Route]) -> DataFrame:
    """Return the frame with a struct column of rows and a hash column for each route.

    Raises `UsageError` that names the sink for a column or an expression that does not fit.
    """
    base = frame
    for index, route in enumerate(routes):
        if route.select is not None:
            base = _checked(route, lambda i=index, r=route, b=base: _with_selection(b, i, r))
    rows = [
        _checked(route, lambda i=index, r=route: _rows(frame, base, i, r)).alias(rows_column(index))
        for index, route in enumerate(routes)
    ]
    structs = _checked(routes[0], lambda: base.select(*rows))
    hashes = [_hash(structs, index).alias(hash_column(index)) for index in range(len(routes))]
    return structs.select("*", *hashes)


def _with_selection(base: DataFrame, index: int, route: Route) -> DataFrame:
    items = [F.expr(item) if isinstance(item, str) and item != "*" else item
             for item in route.select or ()]  # fmt: skip
    return base.withColumn(_selection(index), F.struct(*items))


def _rows(frame: DataFrame, base: DataFrame, index: int, route: Route) -> SparkColumn:
    if route.select is None:
        fields, prefix = frame.schema.fields, ""
    else:
        fields = base.schema[_selection(index)].dataType.fields  # pyright: ignore[reportAttributeAccessIssue]
        prefix = f"`{_selection(index)}`."
    columns = {
        field.name: Column(prefix + _quoted(field.name), field.dataType.simpleString())
        for field in fields
    }
    wanted = route.sink.project(columns)
    row = F.struct(*[F.expr(sql).alias(name) for name, sql in wanted.items()])
    if route.where is None:
        return row
    condition = F.expr(route.where) if isinstance(route.where, str) else route.where
    return F.when(condition, row)


def _hash(structs: DataFrame, index: int) -> SparkColumn:
    name = rows_column(index)
    fields = structs.schema[name].dataType.fields  # pyright: ignore[reportAttributeAccessIssue]
    # Spark's hash passes over nulls: without a mark for them (null, x) and (x, null) would be equal.
    nulls = [F.col(name)[field.name].isNull() for field in fields if field.nullable]
    rows = [F.col(name)]
    if "map<" in structs.schema[name].dataType.simpleString():
        # Spark does not hash maps, for equal ones may differ in their order. A replay's does not.
        rows = [F.to_json(F.struct(F.col(name)[field.name])) for field in fields]
    return F.when(F.col(name).isNotNull(), F.xxhash64(*rows, *nulls))


def _checked(route: Route, build):
    try:
        return build()
    except AnalysisException as error:
        problem = str(error).splitlines()[0]
        raise UsageError(f"route {route.describe()}: {problem}", sink=route.sink.name) from error


def _selection(index: int) -> str:
    return f"__poundlock_select_{index}"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
