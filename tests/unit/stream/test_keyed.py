"""Rolling aggregates and the interval join, by worked examples."""

from __future__ import annotations

import pickle
from decimal import Decimal
from math import isnan, nan

import pytest

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.keyed import IntervalJoinOperator, RollingOperator, rolling
from poundlock.stream.operator import Event, Page, read_key, read_page
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock

FIELDS = ("id", "v", "note")
Reading = row_type(FIELDS)


class Flow:
    """One operator's page over many batches, stored as bytes between them."""

    def __init__(self, operator):
        self.operator = pickle.loads(pickle.dumps(operator))
        self.data = None

    def run(self, events, watermark=-1):
        keyed = {}
        for event in sorted(events, key=lambda event: event.time):
            keyed.setdefault((event.row[0],), []).append(event)
        done = Page(self.operator, self.data, Clock(watermark, 0)).run(keyed)
        self.data = done.data
        return done.outputs


class Rolling(Flow):
    def __call__(self, *rows):
        events = [Event(n, Reading(row)) for n, row in enumerate(rows)]
        return self.run(events).get("main", [])


ROWS = [("a", 3, "first"), ("a", 1, "second"), ("a", 5, "third"), ("a", 1, "fourth")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", [(3, "first"), (4, "first"), (9, "first"), (10, "first")]),
        ("min", [(3, "first"), (1, "first"), (1, "first"), (1, "first")]),
        ("max", [(3, "first"), (3, "first"), (5, "first"), (5, "first")]),
        ("min_by", [(3, "first"), (1, "second"), (1, "second"), (1, "second")]),
        ("max_by", [(3, "first"), (3, "first"), (5, "third"), (5, "third")]),
    ],
)
def test_a_rolling_aggregate_emits_with_every_row(kind, expected):
    expected = [("a", *rest) for rest in expected]
    assert Rolling(rolling("roll", FIELDS, kind, "v"))(*ROWS) == expected
    one_by_one = Rolling(rolling("roll", FIELDS, kind, "v"))
    assert [made for row in ROWS for made in one_by_one(row)] == expected


def test_each_key_has_its_own_rolling_aggregate():
    flow = Rolling(rolling("roll", FIELDS, "sum", "v"))
    flow(("a", 1, ""), ("b", 10, ""))
    assert flow(("a", 2, ""), ("b", 20, "")) == [("a", 3, ""), ("b", 30, "")]


def test_nulls_are_ignored_and_nan_is_the_greatest():
    rows = [("a", None, "x"), ("a", 2.0, "y"), ("a", None, "z"), ("a", nan, "n"), ("a", 1.0, "w")]
    by = lambda kind: [note for _, _, note in Rolling(rolling("r", FIELDS, kind, "v"))(*rows)]  # noqa: E731
    assert by("min_by") == ["x", "y", "y", "y", "w"]
    assert by("max_by") == ["x", "y", "y", "n", "n"]
    values = lambda kind: [v for _, v, _ in Rolling(rolling("r", FIELDS, kind, "v"))(*rows)]  # noqa: E731
    assert values("min") == [None, 2.0, 2.0, 2.0, 1.0]
    assert values("sum")[:3] == [None, 2.0, 2.0]
    assert values("max")[:3] == [None, 2.0, 2.0] and all(map(isnan, values("max")[3:]))
    first_nan = Rolling(rolling("r", FIELDS, "min_by", "v"))
    assert first_nan(("a", nan, "n"), ("a", 7.0, "y"))[-1] == ("a", 7.0, "y")


def test_decimals_are_added_exactly():
    large, small = Decimal("1" * 37), Decimal("0.1")
    made = Rolling(rolling("r", FIELDS, "sum", "v"))(("a", large, ""), ("a", small, ""))
    assert made[-1][1] == Decimal("1" * 37 + ".1")


def keep_larger(one, other):
    return {"id": one.id, "v": max(one.v, other.v), "note": one.note + other.note}


def test_reduce_takes_rows_and_can_return_any_kind_of_row():
    flow = Rolling(RollingOperator("reduce", FIELDS, keep_larger))
    assert flow(("a", 1, "x"), ("a", 5, "y")) == [("a", 1, "x"), ("a", 5, "xy")]
    assert flow(("a", 2, "z")) == [("a", 5, "xyz")]
    with pytest.raises(OperatorFailed, match="'reduce' failed: TypeError"):
        flow(("a", "text", "z"))


def test_wrong_rolling_aggregates_are_rejected():
    with pytest.raises(
        UsageError,
        match=r"'avg' is not a rolling aggregate: use one of sum, min, max, min_by, max_by",
    ):
        rolling("r", FIELDS, "avg", "v")
    with pytest.raises(UsageError, match="no column 'w': choose from id, v, note"):
        rolling("r", FIELDS, "sum", "w")
    with pytest.raises(UsageError, match="give a function of two rows"):
        RollingOperator("r", FIELDS, "sum")


# --- interval join

LEFT, RIGHT = ("id", "l"), ("rid", "r")
Left, Right = row_type(LEFT), row_type(RIGHT)


def left(time, value=None, key="k"):
    return Event(time, Left((key, time if value is None else value)), 0)


def right(time, value=None, key="k"):
    return Event(time, Right((key, time if value is None else value)), 1)


class Join(Flow):
    def __init__(self, lower, upper, **options):
        super().__init__(IntervalJoinOperator("join", lower, upper, LEFT, RIGHT, **options))

    def __call__(self, *events, watermark=-1):
        """Return the pairs, each as the values of both sides."""
        self.out = self.run(events, watermark)
        return [(row[1], row[3]) for row in self.out.get("main", [])]

    @property
    def kept(self):
        """Return the stored times of both sides, and the number of timers."""
        [(key, entry)] = read_page(self.data)[1].items()
        _, state, timers = read_key(key, entry)
        return [state.get(side, [[]])[0] for side in ("left", "right")], len(timers[0])


def test_a_pair_has_the_columns_of_both_sides_whichever_comes_first():
    flow = Join(-10, 20)
    assert flow(left(100), right(89), right(90), right(91, key="other")) == [(100, 90)]
    assert flow(right(120), right(121), left(130)) == [(100, 120), (130, 120), (130, 121)]
    assert flow.out["main"][0] == ("k", 100, "k", 120)


def test_bounds_can_be_exclusive():
    rights = [right(time) for time in (90, 91, 119, 120)]
    assert len(Join(-10, 20)(left(100), *rights)) == 4
    assert [r for _, r in Join(-10, 20, lower_inclusive=False)(left(100), *rights)] == [
        91,
        119,
        120,
    ]
    assert [r for _, r in Join(-10, 20, upper_inclusive=False)(left(100), *rights)] == [90, 91, 119]


def test_each_of_several_equal_rows_joins():
    assert Join(0, 0)(left(5, "a"), left(5, "b"), right(5, "x"), right(5, "x")) == [
        ("a", "x"),
        ("b", "x"),
        ("a", "x"),
        ("b", "x"),
    ]


@pytest.mark.parametrize(
    ("lower", "upper", "left_until", "right_until"),
    [(-10, 20, 120, 110), (5, 20, 120, 100), (-20, -5, 100, 120), (0, 0, 100, 100)],
)
def test_rows_are_kept_as_long_as_flink_keeps_them(lower, upper, left_until, right_until):
    for event, until in ((left(100), left_until), (right(100), right_until)):
        flow = Join(lower, upper)
        flow(event)
        flow(watermark=until - 1)
        assert flow.data is not None
        flow(watermark=until)
        assert flow.data is None


def test_a_key_has_one_timer_for_all_its_rows():
    flow = Join(0, 10)
    flow(*[left(time) for time in range(50)], right(30))
    assert flow.kept == ([[*range(50)], [30]], 1)
    flow(left(12, "late comer"), watermark=12)
    assert flow.kept == ([[*range(3, 13), 12, *range(13, 50)], [30]], 1)
    flow(watermark=30)
    assert flow.kept == ([[*range(21, 50)], []], 1)
    earlier = Join(0, 10)
    earlier(left(60))
    earlier(left(50))
    assert earlier.kept == ([[50, 60], []], 1)


def test_rows_before_the_watermark_are_late():
    flow = Join(-10, 10)
    flow(right(100), watermark=95)
    # One at the very watermark is not, as in Flink.
    assert flow(left(99), left(100), right(98), watermark=100) == [(100, 100)]
    assert flow.operator.late_dropped == 2
    told = Join(-10, 10, left_late="late_l", right_late="late_r")
    assert told(left(99), right(98), watermark=100) == []
    assert told.out == {"late_l": [("k", 99)], "late_r": [("k", 98)]}
    assert told.operator.late_dropped == 0 and told.data is None


def test_a_row_at_the_watermark_is_kept_until_the_watermark_advances():
    flow = Join(0, 0)
    flow(left(100), watermark=100)
    assert flow(right(100), watermark=100) == [(100, 100)]
    flow(watermark=101)
    assert flow.data is None


def spread(one, other, ctx):
    ctx.emit((one.l, "seen"), "side")
    if other.r != "skip":
        yield {"gap": ctx.right_timestamp - ctx.left_timestamp, "at": ctx.timestamp}


def test_a_function_can_turn_a_pair_into_any_rows():
    operator = IntervalJoinOperator(
        "join",
        -9,
        9,
        LEFT,
        RIGHT,
        function=spread,
        outputs={"main": ("gap", "at"), "side": ("l", "what")},
    )
    flow = Flow(operator)
    assert flow.run([right(3), left(5), right(6, "skip")]) == {
        "main": [(-2, 5)],
        "side": [(5, "seen"), (5, "seen")],
    }


@pytest.mark.parametrize(
    ("bounds", "options", "message"),
    [
        ((5, 4), {}, "no time is between 5 ms and 4 ms"),
        ((0, 0), {"upper_inclusive": False}, "no time is between"),
        ((0, 1), {"right": LEFT}, "both inputs have a column 'id': rename one"),
        ((0, 1), {"outputs": {"main": ("a",)}}, "names 1 columns, but a pair has 4"),
        ((0, 1), {"function": spread}, "the columns that its function returns have no names"),
        (
            (0, 1),
            {"left_late": "late", "right_late": "late"},
            "columns of output 'late' are not those",
        ),
        ((0, 1), {"left_late": "main"}, "columns of output 'main' are not those"),
    ],
)
def test_wrong_joins_are_rejected(bounds, options, message):
    with pytest.raises(UsageError, match=message):
        IntervalJoinOperator("join", *bounds, **{"left": LEFT, "right": RIGHT, **options})
