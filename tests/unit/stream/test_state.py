"""State handles: what they store, how it is encoded, and when it expires."""

from __future__ import annotations

import pickle
from operator import add

import pytest

from poundlock.errors import StateExpired, UsageError
from poundlock.stream.operator import Event, Page, read_key, read_page
from poundlock.stream.process import ProcessFunction, ProcessOperator
from poundlock.stream.rows import row_type
from poundlock.stream.state import (
    AggregatingState,
    BroadcastState,
    ListState,
    MapState,
    OperatorListState,
    ReducingState,
    UnionListState,
    ValueState,
)
from poundlock.stream.times import Clock, Domain

Reading = row_type(("id", "v"))
HOUR = 3_600_000


class Mean:
    def create(self):
        return [0, 0]

    def add(self, accumulator, value):
        return [accumulator[0] + value, accumulator[1] + 1]

    def result(self, accumulator):
        return accumulator[0] / accumulator[1]

    def merge(self, one, other):
        return [one[0] + other[0], one[1] + other[1]]


class Doing(ProcessFunction):
    """Calls each row's value, a function, with itself and the context."""

    def process(self, row, ctx):
        return row.v(self, ctx)


class Flow:
    """A page over many batches, stored as bytes between them."""

    def __init__(self, function, domain=Domain.EVENT):
        self.operator = ProcessOperator("doing", function, {"main": ("x",)}, domain, ("id",))
        self.data = None

    def __call__(self, *dos, at=0, now=0, watermark=-1, key="k"):
        events = {(key,): [Event(at, Reading((key, do))) for do in dos]} if dos else {}
        done = Page(self.operator, self.data, Clock(watermark, now)).run(events)
        self.data = done.data
        return [value for (value,) in done.outputs.get("main", [])]

    @property
    def keys(self):
        """Return each key's state and timers."""
        _, entries = read_page(self.data)
        return [read_key(key, entry)[1:] for key, entry in entries.items()]


def test_every_kind_of_state_survives_encoding():
    class All(Doing):
        value = ValueState(default=0)
        items = ListState()
        entries = MapState()
        total = ReducingState(add)
        mean = AggregatingState(Mean())

    def write(f, ctx):
        f.value.value += 5
        f.items.add((1, "a"))
        f.items.add_all([2, 3])
        f.entries["x"] = 1
        f.entries[(1, 2)] = {"deep": [1]}
        f.total.add(3)
        f.mean.add(4)

    flow = Flow(All())
    flow(write)
    flow(write)

    def read(f, ctx):
        kept = (f.value.value, list(f.items), dict(f.entries), f.total.get(), f.mean.get())
        return [(kept,)]

    expected = (10, [(1, "a"), 2, 3, (1, "a"), 2, 3], {"x": 1, (1, 2): {"deep": [1]}}, 6, 4.0)
    assert flow(read) == [expected]
    assert flow.keys[0][0]["value"] == 10  # nothing but the value is stored
    assert flow(read, key="other") == [(0, [], {}, None, None)]


def test_a_cleared_key_is_removed():
    class All(Doing):
        value = ValueState()
        items = ListState()
        entries = MapState()
        total = ReducingState(add, ttl="1 hour")

    def write(f, ctx):
        f.value.value, f.entries["a"] = 1, 1
        f.items.add(1)
        f.total.add(1)

    def clear(f, ctx):
        f.value.value = None
        f.items.update([])
        f.entries.remove("a")
        f.entries.remove("a")
        f.total.clear()

    flow = Flow(All())
    flow(write)
    assert flow.data
    flow(clear)
    assert flow.data is None


def test_map_state_behaves_like_a_dictionary():
    class Mapped(Doing):
        m = MapState()

    def use(f, ctx):
        m = f.m
        assert not m and len(m) == 0 and m.get("a") is None and "a" not in m
        m["a"], m["b"] = 1, None
        m.update({"c": 3})
        assert "b" in m and m["b"] is None and m.pop("c") == 3 and m.setdefault("a", 9) == 1
        for key in m:  # a loop may change what it goes over
            m.remove(key)
        with pytest.raises(KeyError):
            del m["a"]
        with pytest.raises(KeyError):
            m["a"]
        m["z"] = 26
        return [len(m), *m, *m.keys(), *m.values()]

    flow = Flow(Mapped())
    assert flow(use) == [1, "z", "z", 26]


def test_state_reads_back_what_was_written():
    class Kept(Doing):
        v = ValueState(default=7)

    def use(f, ctx):
        before = f.v.value
        f.v.value = None
        return [before, f.v.value]

    flow = Flow(Kept())
    assert flow(use) == [7, None]
    assert flow(lambda f, ctx: [f.v.value]) == [None]
    assert flow(lambda f, ctx: f.v.clear(), lambda f, ctx: [f.v.value]) == [7]


def test_rows_in_state_keep_their_declared_names():
    class Rows(Doing):
        one = ValueState(fields=("id", "n"))
        many = ListState(fields=("id", "n"))
        by = MapState(fields=("id", "n"))
        bare = ValueState()

    row = row_type(("id", "n"))(("a", 1))

    def write(f, ctx):
        f.one.value = row
        f.many.add({"n": 2, "id": "b"})
        f.by["x"] = ("c", 3)

    flow = Flow(Rows())
    read = lambda f, ctx: [(f.one.value.n, [r.id for r in f.many], f.by["x"].as_dict())]  # noqa: E731
    flow(write)
    assert flow(lambda f, ctx: [(x,) for x in read(f, ctx)]) == [(1, ["b"], {"id": "c", "n": 3})]
    assert flow.keys[0][0]["one"] == ["a", 1]

    def wrong(f, ctx):
        f.bare.value = row

    with pytest.raises(UsageError, match=r"'doing': state 'bare' .* fields=\('id', 'n'\)"):
        flow(wrong)


def test_instances_share_no_state_and_one_can_serve_two_operators():
    class Declared(Doing):
        shared = ValueState(default=0)

        def __init__(self, start):
            self.own = ValueState(default=start)

    one = Declared(1)
    flows = [Flow(one), Flow(one), Flow(Declared(2))]

    def count(f, ctx):
        f.shared.value += 1
        f.own.value += 10
        return [f.shared.value, f.own.value]

    assert flows[0](count) == [1, 11] and flows[0](count) == [2, 21]
    assert flows[1](count) == [1, 11] and flows[2](count) == [1, 12]
    assert flows[0](count) == [3, 31]
    assert set(flows[0].keys[0][0]) == {"shared", "own"}


class Travels(ProcessFunction):
    last = ValueState(fields=("id", "v"), ttl="1 hour")

    def process(self, row, ctx):
        before, self.last.value = self.last.value, row
        return before and (before.v,)


def test_an_operator_can_be_pickled():
    flow = Flow(Travels())
    flow.operator = pickle.loads(pickle.dumps(flow.operator))
    assert flow(1) == [] and flow(2) == [1]


def test_operator_list_state_belongs_to_the_page():
    class Listed(Doing):
        seen = OperatorListState()

    flow = Flow(Listed())

    def note(f, ctx):
        f.seen.add(ctx.key.id)
        return [len(f.seen)]

    assert flow(note, key="a") == [1] and flow(note, key="b") == [2]
    assert flow(lambda f, ctx: f.seen, key="c") == ["a", "b"]
    flow(lambda f, ctx: f.seen.clear())
    assert flow.data is None


# --- time to live


def test_a_value_expires_by_processing_time():
    class Short(Doing):
        v = ValueState(default="none", ttl="1 hour")

    def write(f, ctx):
        f.v.value = "kept"

    read = lambda f, ctx: [f.v.value]  # noqa: E731
    flow = Flow(Short())
    flow(write, now=1000)
    assert flow(read, now=1000 + HOUR - 1) == ["kept"]
    assert flow(read, now=1000 + HOUR) == ["none"]  # as in Flink: it lives until then, exclusive
    assert flow.data is None


def test_the_clock_alone_expires_the_state_of_an_idle_key():
    for time in ("processing", "event"):

        class Short(Doing):
            value = ValueState(ttl="1 hour", time=time)
            items = ListState(ttl="2 hours", time=time)
            entries = MapState(ttl="1 hour", time=time)
            total = ReducingState(add, ttl="1 hour", time=time)
            mean = AggregatingState(Mean(), ttl="1 hour", time=time)

        def write(f, ctx):
            f.value.value = f.entries["x"] = 1
            f.items.add(1)
            f.total.add(1)
            f.mean.add(1)

        def clock(at, time=time):
            return {"now": at} if time == "processing" else {"watermark": at, "at": at}

        flow = Flow(Short())
        flow(write, **clock(10))
        [(_, timers)] = flow.keys
        assert sum(map(len, timers)) == 1  # one timer a key, however many states
        flow(**clock(10 + HOUR - 1))
        assert set(flow.keys[0][0]) == {"value", "items", "entries", "total", "mean"}
        flow(**clock(10 + HOUR))
        assert set(flow.keys[0][0]) == {"items"}
        flow(**clock(10 + 2 * HOUR))
        assert flow.data is None


def test_the_earliest_expiry_wakes_the_key_whatever_the_write_order():
    class Two(Doing):
        long = ValueState(ttl="10 hours")
        short = ValueState(ttl="1 hour")

    def write_long(f, ctx):
        f.long.value = 1

    def write_short(f, ctx):
        f.short.value = 1

    together, apart = Flow(Two()), Flow(Two())
    together(write_long, write_short)
    apart(write_long)
    apart(write_short)
    for flow in (together, apart):
        [(_, timers)] = flow.keys
        assert timers == [[], [[HOUR, "__ttl__"]]]
        flow(now=HOUR)
        [(state, timers)] = flow.keys
        assert set(state) == {"long"} and timers == [[], [[10 * HOUR, "__ttl__"]]]


def test_elements_and_entries_expire_one_by_one():
    class Short(Doing):
        items = ListState(ttl="10 s", time="event")
        entries = MapState(ttl="10 s", time="event")

    def write(f, ctx):
        f.items.add(ctx.timestamp)
        f.entries[ctx.timestamp] = "x"
        return [(list(f.items),), ([*f.entries],)]

    flow = Flow(Short())
    flow(write, at=0)
    flow(write, at=5000)
    # A row that is late enough sees it expire, whatever the watermark: batches make no difference.
    assert flow(write, at=10_000) == [[5000, 10_000], [5000, 10_000]]
    flow(watermark=15_000)
    assert flow.keys[0][0]["items"] == [[10_000, 10_000]]
    assert flow.keys[0][0]["entries"] == {10_000: [10_000, "x"]}
    flow(watermark=20_000)
    assert flow.data is None


def test_a_read_refreshes_the_time_to_live_only_if_configured():
    for refresh, expected in (("on_write", [None]), ("on_read_and_write", ["kept"])):

        class Short(Doing):
            v = ValueState(ttl="10 s", refresh=refresh)

        def write(f, ctx):
            f.v.value = "kept"

        read = lambda f, ctx: [f.v.value]  # noqa: E731
        flow = Flow(Short())
        flow(write, now=0)
        assert flow(read, now=9_000) == ["kept"]
        assert flow(read, now=18_000) == expected
        flow(now=40_000)
        assert flow.data is None


def test_a_write_starts_a_new_time_to_live():
    class Short(Doing):
        total = ReducingState(add, ttl="10 s")

    plus = lambda f, ctx: f.total.add(1)  # noqa: E731
    flow = Flow(Short())
    flow(plus, now=0)
    flow(plus, now=9_000)
    assert flow(lambda f, ctx: [f.total.get()], now=18_000) == [2]
    flow(plus, now=30_000)
    assert flow(lambda f, ctx: [f.total.get()], now=31_000) == [1]


def test_an_expired_value_can_raise_an_error_that_names_state_and_operator():
    class Told(Doing):
        v = ValueState(ttl="10 s", expired="error")
        items = ListState(ttl="10 s", expired="error")
        total = ReducingState(add, ttl="10 s", expired="error")

    def write(f, ctx):
        f.v.value = 1
        f.items.add(1)
        f.total.add(1)

    flow = Flow(Told())
    flow(write, now=0)
    for read in (
        lambda f, ctx: f.v.value,
        lambda f, ctx: list(f.items),
        lambda f, ctx: f.total.get(),
    ):
        with pytest.raises(StateExpired, match=r"operator 'doing': state '\w+' .* 1000 ms after"):
            flow(read, now=11_000)

    def replace(f, ctx):
        f.v.value = 2
        f.items.update([2])
        f.total.add(2)
        return [f.v.value, *f.items, f.total.get()]

    assert flow(replace, now=11_000) == [2, 2, 2]


def test_the_expiry_timer_is_hidden_from_the_user():
    class Timed(Doing):
        v = ValueState(ttl="10 s", time="event")
        timers = "event"

        def on_timer(self, time, ctx):
            yield f"mine at {time}"

    def write(f, ctx):
        f.v.value = 1
        ctx.set_event_timer(10_000)
        ctx.delete_event_timer(10_000)
        ctx.set_event_timer(12_000)

    flow = Flow(Timed())
    flow(write, at=0)
    assert flow(watermark=11_000) == [] and flow(watermark=12_000) == ["mine at 12000"]
    assert flow.data is None


# --- wrong use


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": "-1 hour"}, "ttl="),
        ({"ttl": "soon"}, "cannot be read"),
        ({"refresh": "never"}, "refresh="),
        ({"expired": "show"}, "expired="),
        ({"time": "wall"}, "time="),
        ({"default": []}, "use ListState"),
        ({"fields": ("a", "a")}, "same name"),
    ],
)
def test_wrong_options_are_rejected_immediately(options, message):
    with pytest.raises(UsageError, match=message):
        ValueState(**options)


def test_unavailable_state_is_rejected_with_the_reason():
    with pytest.raises(UsageError, match=r"only its own list\. Use BroadcastState"):
        UnionListState()
    with pytest.raises(UsageError, match="function that takes two arguments"):
        ReducingState(3)
    with pytest.raises(UsageError, match="has no create"):
        AggregatingState(object())
    with pytest.raises(TypeError):
        BroadcastState(ttl="1 hour")


def test_state_without_a_key_raises_a_clear_error():
    class Early(Doing):
        v = ValueState(default=1)
        m = MapState(ttl="1 s")

        def open(self, runtime):
            self.m["x"] = 1

    with pytest.raises(UsageError, match="no key"):
        _ = Early().v.value
    flow = Flow(Early())
    with pytest.raises(Exception, match=r"Early\.open failed.*no key"):
        flow.operator.open()


def test_event_time_to_live_needs_a_flow_with_event_time():
    class Short(Doing):
        v = ValueState(ttl="1 hour", time="event")

    with pytest.raises(UsageError, match=r"'doing': Short uses event time, but the flow has none"):
        Flow(Short(), Domain.PROCESSING)
    assert Flow(Short()).operator.domains == {Domain.EVENT}
