"""Splits Spark's aggregate expressions into functions that windows on keyed state can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from poundlock.errors import UsageError
from poundlock.spark.internals import analyzed_plan
from poundlock.spark.stream.flow import analysed
from poundlock.stream import aggregates

_COMPARES = {"min", "max", "min_by", "max_by"}
_DISTINCT = {"count": "count_distinct", "sum": "sum_distinct", "min": "min", "max": "max"}


@dataclass(frozen=True)
class Part:
    """One aggregate: the name of Spark's function, its arguments in SQL, and its result."""

    function: str
    of: tuple[str, ...]
    field: StructField


def columns(what: Sequence[str | Column]) -> list[Column]:
    """Return aggregates as Columns."""
    return [F.expr(each) if isinstance(each, str) else each for each in what]


def grouped(
    frame: DataFrame, keys: Sequence[Column], what: Sequence[Column], name: str
) -> DataFrame:
    """Return Spark's own aggregation. Raises `UsageError` if Spark rejects an expression."""
    return analysed(name, lambda: frame.groupBy(*keys).agg(*what))


def parts(frame: DataFrame, what: Sequence[Column], name: str) -> list[Part]:
    """Split aggregate expressions, as Spark's analyzer understands them."""
    made = grouped(frame, [], what, name)
    plan = analyzed_plan(made)
    listed: Any = plan.aggregateExpressions()
    return [
        _part(listed.apply(index), field, name) for index, field in enumerate(made.schema.fields)
    ]


def _part(expression: Any, field: StructField, name: str) -> Part:
    inner = expression.child() if expression.nodeName() == "Alias" else expression
    if inner.nodeName() != "AggregateExpression":
        raise UsageError(
            f"operator {name!r}: {expression.sql()} is not a single aggregate function, which "
            "windows on keyed state need: compute the rest afterwards, on the flow's .df"
        )
    function = inner.aggregateFunction()
    called = str(function.prettyName())
    of = [
        str(function.children().apply(index).sql()) for index in range(function.children().size())
    ]
    if inner.isDistinct():
        if called not in _DISTINCT:
            raise UsageError(
                f"operator {name!r}: {called}(DISTINCT ...) is not supported on keyed state: leave "
                "DISTINCT out"
            )
        called = _DISTINCT[called]
    if called in ("first", "last", "any_value") and bool(function.ignoreNulls()):
        called = f"{'first' if called == 'any_value' else called}_ignore_nulls"
    compared = function.children().apply(function.children().size() - 1)
    kind = str(compared.dataType().typeName())
    if called in _COMPARES and kind in ("struct", "array", "map"):
        raise UsageError(
            f"operator {name!r}: {called} of a {kind} is not supported on keyed state: use "
            "plain columns"
        )
    takes_nulls = aggregates.function(called).nulls
    condition = inner.filter()
    if condition.isDefined() and takes_nulls:
        raise UsageError(
            f"operator {name!r}: {called} with FILTER is not supported on keyed state: filter the rows "
            "before the flow"
        )
    if condition.isDefined():
        chosen = str(condition.get().sql())
        of = [f"CASE WHEN {chosen} THEN {each} END" for each in of]
    if called.startswith(("first", "last", "any_value")):
        of = of[:1]  # the next argument says whether nulls are ignored
    return Part(called, tuple(of), field)
