"""The interval join against two oracles: all pairs of rows in time, and Flink's own rules."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from poundlock.stream.keyed import IntervalJoinOperator
from poundlock.stream.operator import Event, Page
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock

Left, Right = row_type(("k", "l")), row_type(("rk", "r"))

# Times near the watermark, so that rows join, are late, or are at the watermark itself.
bounds = st.tuples(st.integers(-4, 4), st.integers(-4, 4)).map(sorted)
arrivals = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(-1, 5)), max_size=8)
batches = st.lists(st.tuples(st.sampled_from([0, 0, 1, 2, 4]), arrivals), min_size=1, max_size=6)


def joined(lower, upper, plan):
    """Run batches of (watermark, [(key, side, time, number)]). Return pairs, late rows and bytes."""
    operator = IntervalJoinOperator(
        "join", lower, upper, ("k", "l"), ("rk", "r"), left_late="late_l", right_late="late_r"
    )
    pairs, late, data = Counter(), Counter(), None
    for watermark, rows in plan:
        events = {}
        for key, side, time, number in sorted(rows, key=lambda row: row[2]):
            row = (Right if side else Left)((key, number))
            events.setdefault((key,), []).append(Event(time, row, side))
        done = Page(operator, data, Clock(watermark, 0)).run(events)
        data = done.data
        pairs.update((left, right) for _, left, _, right in done.outputs.get("main", ()))
        for name in ("late_l", "late_r"):
            late.update(number for _, number in done.outputs.get(name, ()))
    return pairs, late, data


def numbered(batches):
    """Give each batch a rising watermark, and each row its time and a number."""
    watermark, numbers, plan = 0, count(), []
    for step, rows in batches:
        watermark += step
        plan.append((watermark, [(*row, watermark + at, next(numbers)) for *row, at in rows]))
    return plan


def fits(one, other, lower, upper):
    """Say whether a left row and a right one belong together."""
    return one[0] == other[0] and lower <= other[2] - one[2] <= upper


@settings(max_examples=150, deadline=None)
@given(bounds, batches)
def test_rows_in_time_join_with_every_matching_row(bounds, batches):
    lower, upper = bounds
    plan = [
        (watermark, [row for row in rows if row[2] > watermark])
        for watermark, rows in numbered(batches)
    ]
    rows = [row for _, rows in plan for row in rows]
    expected = Counter(
        (one[3], other[3])
        for one in rows
        if one[1] == 0
        for other in rows
        if other[1] == 1 and fits(one, other, lower, upper)
    )
    pairs, late, data = joined(lower, upper, [*plan, (1000, [])])
    assert pairs == expected and not late
    assert data is None  # nothing is kept forever


@settings(max_examples=150, deadline=None)
@given(bounds, batches)
def test_late_rows_are_treated_as_in_flink(bounds, batches):
    lower, upper = bounds
    plan = numbered(batches)
    expected, late, here = Counter(), Counter(), []
    for watermark, rows in plan:
        # A row is removed when the watermark reaches the last time that could join it.
        here = [
            (row, seen)
            for row, seen in here
            if watermark == seen or watermark < row[2] + max(-lower if row[1] else upper, 0)
        ]
        for row in sorted(rows, key=lambda row: row[2]):
            if row[2] < watermark:
                late[row[3]] += 1
                continue
            for other, _ in here:
                one, two = (other, row) if row[1] else (row, other)
                if other[1] != row[1] and fits(one, two, lower, upper):
                    expected[one[3], two[3]] += 1
            here.append((row, watermark))
    pairs, found_late, data = joined(lower, upper, [*plan, (1000, [])])
    assert pairs == expected and found_late == late and data is None
