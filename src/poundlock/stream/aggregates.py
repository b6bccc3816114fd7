"""Aggregates, which are updated row by row, so that a window need not keep its rows.

Subclass `Aggregate` or use `Reduce` for your own. `Aggregates` has those of Spark SQL, by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import reduce
from itertools import chain, repeat
from math import sqrt
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream.codec import encode
from poundlock.stream.rows import Row, row_type, shaped

# Twice the digits of Spark's longest decimal: sums stay exact.
EXACT = Context(prec=76, rounding=ROUND_HALF_UP)
_cell = tuple.__getitem__  # faster than that of `Row`, which also takes names


class Aggregate(ABC):
    """Combines rows into one result. An accumulator is plain data, and `add` may change it in place.

    An accumulator of None has no rows, and gives no result.
    """

    @abstractmethod
    def create(self) -> Any:
        """Return the accumulator of no rows."""

    @abstractmethod
    def add(self, accumulator: Any, row: Row) -> Any:
        """Return the accumulator with this row added."""

    @abstractmethod
    def result(self, accumulator: Any) -> Any:
        """Return the result: a value, a tuple, a dictionary or a row.

        Copy a list that `add` changes in place, as more rows may follow.
        """

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """Return the accumulator of the rows of both. `one` has the earlier rows."""

    def add_all(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        """Return the accumulator with these rows added, in order. Override it for speed."""
        for row in rows:
            accumulator = self.add(accumulator, row)
        return accumulator

    def over(self, columns: Sequence[str]) -> Aggregate:
        """Return this aggregate for rows of these columns."""
        return self


@dataclass(frozen=True)
class Reduce(Aggregate):
    """Combines rows two by two: `Reduce(lambda a, b: a if a.v > b.v else b)`."""

    function: Callable[[Row, Row], Any]
    columns: tuple[str, ...] = ()

    def over(self, columns: Sequence[str]) -> Reduce:
        return replace(self, columns=tuple(columns))

    def create(self) -> None:
        return None

    def add(self, accumulator: Any, row: Row) -> Any:
        return list(row) if accumulator is None else self.merge(accumulator, row)

    def merge(self, one: Any, other: Any) -> list[Any]:
        kind = row_type(self.columns)
        return list(shaped(self.function(kind(one), kind(other)), self.columns))

    def result(self, accumulator: Any) -> Row:
        return row_type(self.columns)(accumulator)


class Function(ABC):
    """One of Spark's aggregate functions. Its accumulator is a slot of a list."""

    takes: tuple[int, int] = (1, 1)  # the least and greatest number of columns
    nulls = False  # whether it also gets null values

    @abstractmethod
    def start(self) -> Any:
        """Return the accumulator of no rows."""

    @abstractmethod
    def add(self, slot: Any, *columns: Sequence[Any]) -> Any:
        """Return the accumulator with the values of one or more rows added, by column."""

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """Return the accumulator of both."""

    def result(self, slot: Any) -> Any:
        return slot


class _Total(Function):
    """A function whose accumulator is null until there is a value."""

    def start(self) -> Any:
        return None

    def merge(self, one: Any, other: Any) -> Any:
        if one is None or other is None:
            return other if one is None else one
        return self.add(one, [other])


class Sum(_Total):
    def add(self, slot: Any, *columns: Sequence[Any]) -> Any:
        return _sum(columns[0], slot)


class Extreme(_Total):
    """The least or the greatest value. As in Spark, NaN is greater than every number."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        self._choose = choose

    def add(self, slot: Any, *columns: Sequence[Any]) -> Any:
        values = columns[0] if slot is None else [slot, *columns[0]]
        if isinstance(values[0], float):
            numbers = [value for value in values if value == value]
            if len(numbers) < len(values):
                if not numbers or self._choose is max:
                    return float("nan")
                values = numbers
        return self._choose(values)


class Every(_Total):
    """Whether all values are true, or any value is."""

    def __init__(self, over: Callable[[Iterable[Any]], bool]) -> None:
        self._over = over

    def add(self, slot: Any, *columns: Sequence[Any]) -> Any:
        return self._over(columns[0] if slot is None else chain([slot], columns[0]))


class Count(Function):
    takes = (0, 99)

    def start(self) -> int:
        return 0

    def add(self, slot: int, *columns: Sequence[Any]) -> int:
        return slot + len(columns[0])

    def merge(self, one: int, other: int) -> int:
        return one + other


class CountIf(Count):
    takes = (1, 1)

    def add(self, slot: int, *columns: Sequence[Any]) -> int:
        return slot + sum(columns[0])


class Average(Function):
    def start(self) -> list[Any]:
        return [0, None]

    def add(self, slot: list[Any], *columns: Sequence[Any]) -> list[Any]:
        return [slot[0] + len(columns[0]), _sum(columns[0], slot[1])]

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        totals = [total for _, total in (one, other) if total is not None]
        return [one[0] + other[0], _sum(totals, None) if totals else None]

    def result(self, slot: list[Any]) -> Any:
        rows, total = slot
        if not rows:
            return None
        if isinstance(total, Decimal):
            # Spark's result type has four more digits after the point.
            scale = max(0, -int(total.as_tuple().exponent)) + 4
            return EXACT.quantize(EXACT.divide(total, Decimal(rows)), Decimal((0, (1,), -scale)))
        return total / rows


class Variance(Function):
    """Keeps the count, the mean and the sum of squared distances from it: stable and mergeable."""

    def __init__(self, *, sample: bool, root: bool) -> None:
        self._sample = sample
        self._root = root

    def start(self) -> list[Any]:
        return [0, 0.0, 0.0]

    def add(self, slot: list[Any], *columns: Sequence[Any]) -> list[Any]:
        values = [float(value) for value in columns[0]]
        mean = sum(values) / len(values)
        return self.merge(slot, [len(values), mean, sum((v - mean) * (v - mean) for v in values)])

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        if not one[0] or not other[0]:
            return one if one[0] else other
        rows, apart = one[0] + other[0], other[1] - one[1]
        mean = one[1] + apart * other[0] / rows
        return [rows, mean, one[2] + other[2] + apart * apart * one[0] * other[0] / rows]

    def result(self, slot: list[Any]) -> float | None:
        rows, _, squares = slot
        among = rows - 1 if self._sample else rows
        if among < 1:
            return None
        return sqrt(squares / among) if self._root else squares / among


class First(Function):
    """The value of the first or the last row. `nulls`: whether a null counts."""

    def __init__(self, place: int, *, nulls: bool = True) -> None:
        self._place = place
        self.nulls = nulls

    def start(self) -> list[Any]:
        return []

    def add(self, slot: list[Any], *columns: Sequence[Any]) -> list[Any]:
        return slot if slot and self._place == 0 else [columns[0][self._place]]

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        return (one or other) if self._place == 0 else (other or one)

    def result(self, slot: list[Any]) -> Any:
        return slot[0] if slot else None


class ExtremeBy(Function):
    """The value of one column where another is least or greatest. The last one, of equals."""

    takes = (2, 2)
    nulls = True

    def __init__(self, choose: Callable[..., Any]) -> None:
        self._extreme = Extreme(choose)

    def start(self) -> list[Any]:
        return []

    def add(self, slot: list[Any], *columns: Sequence[Any]) -> list[Any]:
        for value, by in zip(*columns, strict=True):
            if by is not None and (not slot or _same(self._extreme.add(slot[0], [by]), by)):
                slot = [by, value]
        return slot

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        return self.add(one, [other[1]], [other[0]]) if other else one

    def result(self, slot: list[Any]) -> Any:
        return slot[1] if slot else None


class Collected(Function):
    def start(self) -> list[Any]:
        return []

    def add(self, slot: list[Any], *columns: Sequence[Any]) -> list[Any]:
        slot.extend(columns[0])
        return slot

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        return one + other

    def result(self, slot: list[Any]) -> list[Any]:
        return list(slot)


class Distinct(Function):
    """Each value once, in order of their first rows: {value: None}.

    A value that cannot be a key of a dictionary is kept as {substitute key: value}.
    """

    def __init__(self, of: Callable[[list[Any]], Any], most: int = 1) -> None:
        self._of = of
        self.takes = (1, most)

    def start(self) -> dict[Any, Any]:
        return {}

    def add(self, slot: dict[Any, Any], *columns: Sequence[Any]) -> dict[Any, Any]:
        values = columns[0] if len(columns) == 1 else zip(*columns, strict=True)
        for value in values:
            if value != value:
                slot[()] = value  # NaN, which is never equal to itself
            elif isinstance(value, list | tuple | dict):
                slot[encode(value)] = value
            else:
                slot[value] = None
        return slot

    def merge(self, one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        return one | other

    def result(self, slot: dict[Any, Any]) -> Any:
        return self._of([key if value is None else value for key, value in slot.items()])


def _sum(values: Sequence[Any], start: Any) -> Any:
    if start is None:
        start, values = values[0], values[1:]
    if isinstance(start, Decimal):
        return reduce(EXACT.add, values, start)
    return sum(values, start)


def _same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)


FUNCTIONS: dict[str, Function] = {
    "any": Every(any),
    "any_value": First(0),
    "array_agg": Collected(),
    "avg": Average(),
    "bool_and": Every(all),
    "bool_or": Every(any),
    "collect_list": Collected(),
    "collect_set": Distinct(list),
    "count": Count(),
    "count_distinct": Distinct(len, most=99),
    "count_if": CountIf(),
    "every": Every(all),
    "first": First(0),
    "first_ignore_nulls": First(0, nulls=False),
    "first_value": First(0),
    "last": First(-1),
    "last_ignore_nulls": First(-1, nulls=False),
    "last_value": First(-1),
    "max": Extreme(max),
    "max_by": ExtremeBy(max),
    "mean": Average(),
    "min": Extreme(min),
    "min_by": ExtremeBy(min),
    "some": Every(any),
    "std": Variance(sample=True, root=True),
    "stddev": Variance(sample=True, root=True),
    "stddev_pop": Variance(sample=False, root=True),
    "stddev_samp": Variance(sample=True, root=True),
    "sum": Sum(),
    "sum_distinct": Distinct(lambda values: _sum(values, None) if values else None),
    "var_pop": Variance(sample=False, root=False),
    "var_samp": Variance(sample=True, root=False),
    "variance": Variance(sample=True, root=False),
}


def function(name: str) -> Function:
    """Return one of Spark's aggregate functions by its name in SQL."""
    try:
        return FUNCTIONS[name.lower()]
    except KeyError:
        raise UsageError(
            f"there is no aggregate function {name!r} for windows on keyed state: use one of "
            f"{', '.join(FUNCTIONS)}, or write an Aggregate"
        ) from None


Places = int | str | Sequence[int | str]


class Aggregates(Aggregate):
    """Several of Spark's functions in one pass: `Aggregates([("sum", "celsius"), ("count", ())])`.

    Each part is a function's name and its columns, by name or position. The result is a tuple.
    """

    def __init__(self, parts: Iterable[tuple[str, Places]]) -> None:
        self.parts = [
            (name, [places] if isinstance(places, int | str) else list(places))
            for name, places in parts
        ]
        if not self.parts:
            raise UsageError("give at least one aggregate function, such as ('count', ())")
        self._functions = [function(name) for name, _ in self.parts]
        for (name, places), each in zip(self.parts, self._functions, strict=True):
            least, most = each.takes
            if not least <= len(places) <= most:
                raise UsageError(
                    f"{name} was given {len(places)} columns and takes "
                    + (f"{least}" if least == most else f"{least} or more")
                )
        # The columns that each function gets. Without `nulls`, rows with a null are left out.
        self._plan = [
            (at, each, tuple(places), each.nulls)
            for at, (each, (_, places)) in enumerate(zip(self._functions, self.parts, strict=True))
        ]

    def over(self, columns: Sequence[str]) -> Aggregates:
        """Return these aggregates with their columns by position among these."""
        return Aggregates(
            (name, [_position(place, columns) for place in places]) for name, places in self.parts
        )

    def create(self) -> list[Any]:
        return [each.start() for each in self._functions]

    def add(self, accumulator: list[Any], row: Row) -> list[Any]:
        return self.add_all(accumulator, (row,))

    def add_all(self, accumulator: list[Any], rows: Sequence[Row]) -> list[Any]:
        read: dict[Any, list[Sequence[Any]]] = {}
        for at, each, places, nulls in self._plan:
            columns = read.get((places, nulls))
            if columns is None:
                columns = read[places, nulls] = list(_columns(rows, places, nulls))
            if columns[0]:
                accumulator[at] = each.add(accumulator[at], *columns)
        return accumulator

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        return [
            each.merge(mine, theirs)
            for each, mine, theirs in zip(self._functions, one, other, strict=True)
        ]

    def result(self, accumulator: list[Any]) -> tuple[Any, ...]:
        return tuple(
            each.result(slot) for each, slot in zip(self._functions, accumulator, strict=True)
        )


def _columns(rows: Sequence[Row], places: tuple[Any, ...], nulls: bool) -> Iterator[Sequence[Any]]:
    """Yield the values at each place. Without places, yield the rows themselves, for `count`."""
    if not places:
        yield rows
    elif len(places) == 1 and not nulls:
        yield [value for value in map(_cell, rows, repeat(places[0])) if value is not None]
    else:
        whole = [list(map(_cell, rows, repeat(place))) for place in places]
        if not nulls:
            full = [each for each in zip(*whole, strict=True) if None not in each]
            whole = [list(column) for column in zip(*full, strict=True)] or [[] for _ in places]
        yield from whole


def _position(place: int | str, columns: Sequence[str]) -> int:
    if isinstance(place, str) and place in columns:
        return columns.index(place)
    if isinstance(place, int) and 0 <= place < len(columns):
        return place
    raise UsageError(f"there is no column {place!r} to aggregate: there are {', '.join(columns)}")
