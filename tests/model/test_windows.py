"""Windows against a simple oracle: all rows that arrived, each with its watermark."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from poundlock.stream import triggers
from poundlock.stream.aggregates import Aggregates
from poundlock.stream.evictors import Evictor
from poundlock.stream.operator import Event, Page
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock, Domain, from_datetime
from poundlock.stream.windowing import WindowOperator
from poundlock.stream.windows import CountWindows, SessionWindows, TimeWindows, count

COLUMNS = ("id", "n", "gap")
Reading = row_type(COLUMNS)
FOREVER = 10**9


class Arrival(NamedTuple):
    """An arriving row; `n` identifies it."""

    key: str
    time: int
    n: int
    gap: int


class Batch(NamedTuple):
    watermark: int
    rows: list[Arrival]


@st.composite
def histories(draw) -> list[Batch]:
    """Batches with a watermark that never falls, and rows around it, early and late."""
    watermark, n, batches = draw(st.integers(-5, 20)), 0, []
    for _ in range(draw(st.integers(1, 6))):
        rows = []
        for _ in range(draw(st.integers(0, 6))):
            time = max(0, watermark) + draw(st.integers(-25, 25))
            rows.append(Arrival(draw(st.sampled_from("ab")), time, n, draw(st.integers(1, 9))))
            n += 1
        batches.append(Batch(watermark, sorted(rows, key=lambda row: row.time)))
        watermark += draw(st.integers(0, 25))
    return batches


class ByHand(triggers.EventTime):
    """The default trigger as another class, so that the general code path runs."""


def operator(assigner, *, lateness=0, how="aggregate", domain=Domain.EVENT):
    timed = assigner.timed
    given = {
        "aggregate": Aggregates([("collect_list", "n")]),
        "fields": ["ns"],
        "allowed_lateness": lateness,
        "late": "late" if timed and domain is Domain.EVENT else None,
    }
    if how == "trigger":
        given["trigger"] = ByHand()
    if how == "evictor":
        given["evictor"] = Evictor()  # which removes nothing
    if isinstance(how, triggers.Trigger):
        given["trigger"] = how
    if how == "function":
        given["aggregate"] = None
        given["fields"] = ["id", "window_start", "window_end", "ns"] if timed else ["id", "ns"]
        given["function"] = lambda key, window, rows, context: [
            (*key, *((window.start, window.end) if timed else ()), [row.n for row in rows])
        ]
    return WindowOperator("windows", assigner, domain=domain, columns=COLUMNS, keys=["id"], **given)


def run(windows, batches, *, turn=lambda rows: rows, now=lambda watermark: 0):
    """Return each batch's firings and late rows by key, and the state that is left at the end."""
    data, seen = None, []
    for watermark, rows in batches:
        events = defaultdict(list)
        for row in turn(rows):
            events[(row.key,)].append(Event(row.time, Reading((row.key, row.n, row.gap))))
        done = Page(windows, data, Clock(watermark, now(watermark))).run(events)
        data = data if done.data == b"" else done.data
        fired, late = defaultdict(list), defaultdict(list)
        for key, *times, ns in done.outputs.get("main", ()):
            times = [time if isinstance(time, int) else from_datetime(time) for time in times]
            fired[key].append((*times, sorted(ns)))
        for key, n, _ in done.outputs.get("late", ()):
            late[key].append(n)
        seen.append((dict(fired), dict(late)))
    return seen, data


def aligned(size, slide, offset, lateness, batches):
    """Return what windows of one size do: check every window for every row."""
    came = defaultdict(list)  # the numbers in each (key, start)
    before, expected = -(10**9), []
    for watermark, rows in batches:
        fired, late = defaultdict(list), defaultdict(list)
        for key, start in sorted(came, key=lambda each: each[1]):
            if before < start + size - 1 <= watermark:
                fired[key].append((start, start + size, sorted(came[key, start])))
        for row in rows:
            # Far more starts than can matter, the latest first.
            starts = [offset + slide * k for k in range(200 // slide, -200 // slide, -1)]
            starts = [start for start in starts if start <= row.time < start + size]
            live = [start for start in starts if start + size - 1 + lateness > watermark]
            for start in live:
                came[row.key, start].append(row.n)
                if start + size - 1 <= watermark:
                    fired[row.key].append((start, start + size, sorted(came[row.key, start])))
            if not live and row.time + lateness <= watermark:
                late[row.key].append(row.n)
        expected.append((dict(fired), dict(late)))
        before = watermark
    return expected


def sessions(gap_of, lateness, batches):
    """Return what sessions do: the kept rows, regrouped whenever a row arrives."""

    def groups(rows):
        found = []
        for row in sorted(rows, key=lambda row: row.time):
            if found and row.time <= max(each.time + gap_of(each) for each in found[-1]):
                found[-1].append(row)
            else:
                found.append([row])
        return found

    def shown(rows):
        return (rows[0].time, end(rows), sorted(row.n for row in rows))

    def end(rows):
        return max(row.time + gap_of(row) for row in rows)

    kept = defaultdict(list)
    before, expected = -(10**9), []
    for watermark, rows in batches:
        fired, late = defaultdict(list), defaultdict(list)
        for key in kept:
            for group in sorted(groups(kept[key]), key=end):
                if before < end(group) - 1 <= watermark:
                    fired[key].append(shown(group))
                if end(group) - 1 + lateness <= watermark:
                    kept[key] = [row for row in kept[key] if row not in group]
        for row in rows:
            [group] = [each for each in groups([*kept[row.key], row]) if row in each]
            if end(group) - 1 + lateness <= watermark:
                late[row.key].append(row.n)
                continue
            kept[row.key].append(row)
            if end(group) - 1 <= watermark:
                fired[row.key].append(shown(group))
        expected.append((dict(fired), dict(late)))
        before = watermark
    return expected


WAYS = st.sampled_from(["aggregate", "function", "trigger", "evictor"])
quick = settings(max_examples=120, deadline=None)


@quick
@given(histories(), st.integers(1, 20), st.integers(1, 20), st.data(), st.integers(0, 20), WAYS)
def test_time_windows_agree_with_the_oracle(batches, size, slide, data, lateness, how):
    offset = data.draw(st.integers(1 - slide, slide - 1))
    batches = [*batches, Batch(FOREVER, [])]
    windows = operator(TimeWindows(size, slide, offset), lateness=lateness, how=how)
    seen, left = run(windows, batches)
    assert seen == aligned(size, slide, offset, lateness, batches)
    assert left is None


@quick
@given(histories(), st.integers(1, 20), st.integers(0, 20))
def test_every_row_is_in_one_tumbling_window_or_late(batches, size, lateness):
    batches = [*batches, Batch(FOREVER, [])]
    seen, _ = run(operator(TimeWindows(size, size), lateness=lateness), batches)
    last = {}  # the last firing of a window has all its rows
    late = []
    for fired, dropped in seen:
        for key, firings in fired.items():
            last.update({(key, start): ns for start, _, ns in firings})
        late += [n for ns in dropped.values() for n in ns]
    within = [n for ns in last.values() for n in ns]
    assert sorted(within + late) == list(range(sum(len(rows) for _, rows in batches)))


@quick
@given(histories(), st.sampled_from([TimeWindows(7, 7), SessionWindows(5)]), st.integers(0, 20))
def test_purged_rows_do_not_fire_again(batches, assigner, lateness):
    """Every row fires once or is late."""
    batches = [*batches, Batch(FOREVER, [])]
    how = triggers.purging(triggers.event_time())
    seen, left = run(operator(assigner, lateness=lateness, how=how), batches)
    fired = [n for fired, _ in seen for firings in fired.values() for *_, ns in firings for n in ns]
    late = [n for _, dropped in seen for ns in dropped.values() for n in ns]
    assert sorted(fired + late) == list(range(sum(len(rows) for _, rows in batches)))
    assert left is None


ANY = st.recursive(
    st.sampled_from(
        [
            triggers.event_time(),
            triggers.processing_time(),
            triggers.on_count(2),
            triggers.count_or_timeout(3, "7 ms"),
            triggers.count_or_timeout(3, "7 ms", Domain.EVENT),
            triggers.continuous("6 ms"),
            triggers.continuous("6 ms", Domain.PROCESSING),
        ]
    ),
    lambda inner: (
        st.builds(triggers.purging, inner)
        | st.builds(triggers.early_and_late, st.none() | inner, st.none() | inner)
    ),
    max_leaves=3,
)


@quick
@given(
    histories(),
    st.sampled_from([TimeWindows(7, 7), TimeWindows(9, 4), SessionWindows(5)]),
    st.integers(0, 20),
    ANY,
)
def test_every_trigger_fires_valid_rows_and_leaves_no_state(batches, assigner, lateness, trigger):
    """The rows of a firing arrived, are in its window and occur once; no state is left at the end."""
    batches = [*batches, Batch(FOREVER, [])]
    times = {row.n: (row.key, row.time) for _, rows in batches for row in rows}
    windows = operator(assigner, lateness=lateness, how=trigger)
    seen, left = run(windows, batches, now=lambda watermark: min(1000, max(0, watermark)))
    for fired, _ in seen:
        for key, firings in fired.items():
            for start, end, ns in firings:
                assert ns and len(set(ns)) == len(ns)
                assert all(times[n][0] == key and start <= times[n][1] < end for n in ns)
    assert left is None


@quick
@given(histories(), st.none() | st.integers(1, 15), st.integers(0, 20), WAYS)
def test_sessions_agree_with_the_oracle(batches, gap, lateness, how):
    batches = [*batches, Batch(FOREVER, [])]
    assigner = SessionWindows(gap or (lambda row: f"{row.gap} ms"))
    seen, left = run(operator(assigner, lateness=lateness, how=how), batches)
    assert seen == sessions(lambda row: gap or row.gap, lateness, batches)
    assert left is None


@quick
@given(histories(), st.integers(1, 5), st.none() | st.integers(1, 5), st.booleans())
def test_count_windows_agree_with_the_oracle(batches, size, slide, function):
    seen, _ = run(
        operator(count(size, slide), how="function" if function else "aggregate"), batches
    )
    for key in "ab":
        rows = [row.n for _, rows in batches for row in rows if row.key == key]
        every = slide or size
        ends = range(every, len(rows) + 1, every)
        expected = [(sorted(rows[max(0, end - size) : end]),) for end in ends]
        assert [each for fired, _ in seen for each in fired.get(key, ())] == expected


@quick
@given(
    histories(),
    st.sampled_from([TimeWindows(7, 7), TimeWindows(10, 4, 1), SessionWindows(5)]),
    st.integers(0, 10),
    WAYS,
)
def test_single_rows_give_the_same_result_as_batches(batches, assigner, lateness, how):
    """A batch can be split anywhere under the same watermark, although rows are handled in runs."""
    whole, left = run(operator(assigner, lateness=lateness, how=how), batches)
    cut = [Batch(watermark, [row]) for watermark, rows in batches for row in rows or [None]]
    cut = [Batch(each.watermark, [row for row in each.rows if row]) for each in cut]
    pieces, also_left = run(operator(assigner, lateness=lateness, how=how), cut)

    def joined(parts):
        firings, dropped = defaultdict(list), defaultdict(list)
        for fired, late in parts:
            for key, each in fired.items():
                firings[key] += each
            for key, each in late.items():
                dropped[key] += each
        return firings, dropped

    assert (joined(whole), left is None) == (joined(pieces), also_left is None)


@quick
@given(
    histories(),
    st.sampled_from([TimeWindows(7, 7), SessionWindows(5), CountWindows(3, 3)]),
    st.randoms(use_true_random=False),
)
def test_the_arrival_order_within_a_batch_does_not_matter(batches, assigner, chance):
    def turned(rows):
        return sorted(chance.sample(rows, len(rows)), key=lambda row: (row.time, row.n))

    assert run(operator(assigner), batches, turn=turned) == run(
        operator(assigner), batches, turn=lambda rows: sorted(rows, key=lambda r: (r.time, r.n))
    )


@quick
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.sampled_from("ab"), max_size=4)), max_size=8
    ),
    st.sampled_from([TimeWindows(5, 5), TimeWindows(10, 4, 1)]),
)
def test_processing_time_windows_depend_only_on_the_clock(steps, assigner):
    """The same oracle, with the clock as every row's time and nothing ever late."""
    now, n, data, fired, rows = 0, 0, None, [], []
    windows = operator(assigner, domain=Domain.PROCESSING)
    for pause, keys in [*steps, (FOREVER, [])]:
        now += pause
        events = defaultdict(list)
        for key in keys:
            # A row's own time means nothing here.
            events[(key,)].append(Event(n % 3, Reading((key, n, 0))))
            rows.append(Arrival(key, now, n, 0))
            n += 1
        done = Page(windows, data, Clock(FOREVER, now)).run(events)
        data = data if done.data == b"" else done.data
        fired += [
            (key, from_datetime(start), from_datetime(end), sorted(ns))
            for key, start, end, ns in done.outputs.get("main", ())
        ]
    # A window whose last millisecond is a batch's own time fires there, and again in a next batch of
    # that time: its pieces together are the window.
    pieces = defaultdict(list)
    for key, start, end, ns in fired:
        pieces[key, start, end] += ns
    everything = [Batch(-FOREVER, rows), Batch(FOREVER, [])]
    [_, (expected, _)] = aligned(assigner.size, assigner.slide, assigner.offset, 0, everything)
    assert {window: sorted(ns) for window, ns in pieces.items()} == {
        (key, start, end): ns for key, firings in expected.items() for start, end, ns in firings
    }
    assert data is None
