"""Spark's aggregate functions by name: nulls, types, and the same result however rows are split."""

from __future__ import annotations

import math
import statistics
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poundlock.errors import UsageError
from poundlock.stream.aggregates import FUNCTIONS, Aggregates, Reduce, function
from poundlock.stream.codec import decode, encode
from poundlock.stream.rows import row_type

Reading = row_type(("v", "w"))
NAN = float("nan")


def of(name, rows, places=0):
    """Return a function's result over rows (or values), through bytes after each row."""
    one = Aggregates([(name, places)])
    accumulator = one.create()
    for row in rows:
        row = row if isinstance(row, tuple) else (row, None)
        accumulator = decode(encode(one.add(accumulator, Reading(row))))
    return one.result(accumulator)[0]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("sum", [1, None, 2], 3),
        ("sum", [2**62, 2**62, 2**62], 3 * 2**62),
        ("sum", [0.5, 0.25], 0.75),
        ("sum", [Decimal("0.10"), Decimal("0.20")], Decimal("0.30")),
        ("sum", [None], None),
        ("sum", [], None),
        ("count", [1, None, 2], 2),
        ("count", [], 0),
        ("count_if", [True, False, None, True], 2),
        ("min", [3, None, 1, 2], 1),
        ("max", ["b", "a", None], "b"),
        ("max", [date(2026, 1, 1), date(2026, 1, 2)], date(2026, 1, 2)),
        ("min", [None], None),
        ("min", [2.0, NAN, 1.0], 1.0),
        ("max", [], None),
        ("avg", [1, 2, None], 1.5),
        ("avg", [None], None),
        ("mean", [0.5, 1.5], 1.0),
        ("first", [None, 1], None),
        ("first", [1, None], 1),
        ("first", [], None),
        ("last", [1, None], None),
        ("last", [1, 2], 2),
        ("any_value", [1, 2], 1),
        ("first_ignore_nulls", [None, 1, 2], 1),
        ("last_ignore_nulls", [1, 2, None], 2),
        ("last_ignore_nulls", [None], None),
        ("collect_list", [2, None, 1, 2], [2, 1, 2]),
        ("collect_list", [], []),
        ("collect_set", [2, None, 1, 2], [2, 1]),
        ("collect_set", [[1], [2], [1]], [[1], [2]]),
        ("collect_set", [], []),
        ("bool_and", [True, None], True),
        ("bool_and", [True, False], False),
        ("bool_or", [False, None], False),
        ("bool_or", [False, True], True),
        ("every", [None], None),
        ("some", [], None),
        ("count_distinct", [1, 1, None, 2], 2),
        ("count_distinct", [NAN, NAN, 1.0, 0.0, -0.0], 3),
        ("count_distinct", [], 0),
        ("sum_distinct", [5, 5, None, 1], 6),
        ("sum_distinct", [None], None),
        ("stddev", [1, 2, 3, 4], statistics.stdev([1, 2, 3, 4])),
        ("stddev_pop", [1, 3], 1.0),
        ("stddev_samp", [5], None),
        ("stddev_pop", [5], 0.0),
        ("variance", [1, None, 3], 2.0),
        ("var_samp", [], None),
        ("var_pop", [Decimal(1), Decimal(3)], 1.0),
    ],
)
def test_aggregate_functions_give_the_results_of_spark(name, values, expected):
    result = of(name, values)
    assert result == expected and type(result) is type(expected)


def test_nan_is_the_greatest_value():
    assert math.isnan(of("max", [1.0, NAN, 2.0]))
    assert math.isnan(of("min", [NAN, NAN]))
    assert of("max_by", [("x", NAN), ("y", 1.0)], (0, 1)) == "x"
    assert of("min_by", [("x", NAN), ("y", 1.0)], (0, 1)) == "y"
    assert len(of("collect_set", [NAN, NAN])) == 1


def test_max_by_and_min_by_return_the_value_of_the_extreme_row():
    rows = [("x", 3), ("y", 5), (None, None), ("z", 5), ("w", 1), (None, 1)]
    assert of("max_by", rows, (0, 1)) == "z"  # of equals the last
    assert of("min_by", rows, (0, 1)) is None
    assert of("max_by", [("x", None)], (0, 1)) is None


def test_count_over_several_columns_skips_rows_with_a_null():
    rows = [(1, 1), (1, None), (1, 1), (2, 1), (None, None)]
    assert of("count", rows, (0, 1)) == 3
    assert of("count_distinct", rows, (0, 1)) == 2
    assert of("count", rows, ()) == 5
    assert of("count_distinct", [(None, 1)], (0, 1)) == 0


def test_decimals_are_exact_and_their_mean_has_four_more_digits():
    large = Decimal("99999999999999999999999999999999.999999")
    assert str(of("sum", [large, large])) == "199999999999999999999999999999999.999998"
    mean = of("avg", [Decimal("1.00"), Decimal("1.00"), Decimal("0.00")])
    assert str(mean) == "0.666667"
    assert str(of("avg", [Decimal("0.1"), Decimal("0.2")])) == "0.15000"
    assert str(of("avg", [Decimal(1), Decimal(2)])) == "1.5000"


TRUTH = {"any", "bool_and", "bool_or", "count_if", "every", "some"}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_can_be_split_and_merged_anywhere(name, data):
    value = st.none() | (st.booleans() if name in TRUTH else st.integers(-5, 5))
    rows = data.draw(st.lists(st.builds(lambda *row: Reading(row), value, value), max_size=8))
    cut = data.draw(st.integers(0, len(rows)))
    least, _ = FUNCTIONS[name].takes
    one = Aggregates([(name, tuple(range(max(1, least))))])

    def more(accumulator, some):
        return one.add_all(decode(encode(accumulator)), some) if some else accumulator

    [expected] = one.result(more(one.create(), rows))
    first, second = more(one.create(), rows[:cut]), more(one.create(), rows[cut:])
    [merged] = one.result(one.merge(decode(encode(first)), decode(encode(second))))
    [continued] = one.result(more(first, rows[cut:]))
    assert merged == pytest.approx(expected) and continued == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_variance_is_numerically_stable(values):
    shifted = [value + 1e9 for value in values]
    one = Aggregates([("var_pop", 0)])
    [result] = one.result(one.add_all(one.create(), [Reading((v, None)) for v in shifted]))
    assert result == pytest.approx(statistics.pvariance(shifted), rel=1e-6, abs=1e-3)


def test_several_functions_are_computed_in_one_pass():
    several = Aggregates([("sum", "w"), ("count", ()), ("max_by", ("v", "w")), ("sum", "v")])
    several = several.over(("v", "w"))
    rows = [Reading((1, 10)), Reading((2, None)), Reading((3, 5))]
    accumulator = several.add_all(several.create(), rows)
    assert accumulator == [15, 3, [10, 1], 6]
    assert several.result(accumulator) == (15, 3, 1, 6)


def test_a_result_does_not_change_when_rows_follow():
    one = Aggregates([("collect_list", 0), ("collect_set", 0)])
    accumulator = one.add(one.create(), Reading((1, None)))
    before = one.result(accumulator)
    one.add(accumulator, Reading((2, None)))
    assert before == ([1], [1])


def test_reduce_takes_and_returns_rows():
    summed = Reduce(lambda a, b: {"v": a.v + b.v, "w": b.w}).over(("v", "w"))
    accumulator = summed.create()
    for row in [(1, "x"), (2, "y"), (3, "z")]:
        accumulator = decode(encode(summed.add(accumulator, Reading(row))))
    assert summed.result(accumulator).v == 6 and summed.result(accumulator).w == "z"
    with pytest.raises(UsageError, match="emitted 1 values for the 2 columns"):
        Reduce(lambda a, b: (1,)).over(("v", "w")).merge([1, 2], [3, 4])


def test_unknown_functions_and_columns_are_rejected():
    assert function("SUM") is FUNCTIONS["sum"]
    with pytest.raises(
        UsageError, match=r"no aggregate function 'median' .* use one of any, any_v"
    ):
        function("median")
    with pytest.raises(UsageError, match="max_by was given 1 columns and takes 2"):
        Aggregates([("max_by", 0)])
    with pytest.raises(UsageError, match="sum was given 0 columns and takes 1"):
        Aggregates([("sum", ())])
    with pytest.raises(UsageError, match="at least one aggregate function"):
        Aggregates([])
    with pytest.raises(UsageError, match="no column 'x' to aggregate: there are v, w"):
        Aggregates([("sum", "x")]).over(("v", "w"))
    with pytest.raises(UsageError, match="no column 2 to aggregate"):
        Aggregates([("sum", 2)]).over(("v", "w"))
