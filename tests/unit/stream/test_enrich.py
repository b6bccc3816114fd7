"""Enrichment with real event loops and threads: concurrency, order, time-outs and errors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.enrich import check, enrich
from poundlock.stream.rows import row_type, shaped

Row = row_type(("n",))
ROWS = [Row((n,)) for n in range(20)]


class UnderWay:
    """Counts the calls in progress."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self._lock:
            self.now -= 1


def test_concurrency_reaches_its_limit_and_does_not_exceed_it():
    under_way = UnderWay()

    async def ask(row):
        with under_way:
            await asyncio.sleep(0.001)
        return (row.n * 2,)

    assert enrich(ROWS, ask, concurrency=4) == [(n * 2,) for n in range(20)]
    assert under_way.most == 4


def test_the_number_of_threads_does_not_exceed_the_limit():
    under_way, together = UnderWay(), threading.Barrier(3)

    def ask(row):
        with under_way:
            together.wait(timeout=30)  # passes only if three are under way
        return row

    assert enrich(ROWS[:18], ask, concurrency=3) == ROWS[:18]
    assert under_way.most == 3


def test_the_order_is_kept_unless_unordered_is_set():
    async def ask(row):
        # Each waits for the next: they are ready in the opposite order.
        if row.n < 4:
            await ready[row.n + 1].wait()
        ready[row.n].set()
        return row

    for ordered, expected in ((True, [0, 1, 2, 3, 4]), (False, [4, 3, 2, 1, 0])):
        ready = [asyncio.Event() for _ in range(5)]
        made = enrich(ROWS[:5], ask, concurrency=5, ordered=ordered)
        assert [row.n for row in made] == expected


def test_a_function_can_return_no_row_one_row_or_several():
    async def ask(row):
        return {0: None, 1: row, 2: [(2,), {"n": 22}], 3: 3}[row.n]

    assert enrich(ROWS[:4], ask) == [(1,), (2,), {"n": 22}, 3]

    def plain(row):
        yield row
        yield threading.current_thread() is threading.main_thread()

    assert enrich(ROWS[:2], plain) == [(0,), False, (1,), False]
    assert enrich([], ask) == []


def test_an_awaitable_result_is_awaited():
    async def later(row):
        return row

    class Client:
        async def __call__(self, row):
            return row

    assert enrich(ROWS, lambda row: later(row)) == ROWS
    assert enrich(ROWS, Client()) == ROWS


async def hang(row):
    if row.n == 1:
        await asyncio.sleep(3600)
    return row


def test_a_time_out_fails_or_returns_the_configured_value():
    with pytest.raises(
        OperatorFailed,
        match=r"operator 'price': no answer within 0\.05 s.*longer timeout.*on_timeout",
    ):
        enrich(ROWS[:3], hang, name="price", timeout=0.05)
    made = enrich(ROWS[:3], hang, timeout=0.05, on_timeout="null")
    assert [shaped(each, ("n",)) for each in made] == [(0,), (None,), (2,)]
    assert shaped(made[1], ("a", "b")) == (None, None)
    made = enrich(ROWS[:3], hang, timeout="50 ms", on_timeout=lambda row: row.replace(n=-row.n))
    assert made == [(0,), (-1,), (2,)]


def test_a_thread_that_hangs_does_not_delay_other_rows():
    release = threading.Event()

    def ask(row):
        if row.n < 3:
            release.wait(timeout=60)
        return row

    try:
        made = enrich(ROWS[:6], ask, concurrency=2, timeout=0.2, on_timeout=lambda row: (-1,))
    finally:
        release.set()
    assert made == [(-1,), (-1,), (-1,), (3,), (4,), (5,)]


def test_a_failed_call_is_retried_up_to_the_limit():
    calls = []

    async def ask(row):
        calls.append(row.n)
        if calls.count(row.n) <= row.n:
            raise ConnectionError("busy")
        return row

    assert enrich(ROWS[:3], ask, retries=2) == ROWS[:3]
    assert sorted(calls) == [0, 1, 1, 2, 2, 2]
    calls.clear()
    with pytest.raises(
        OperatorFailed, match=r"operator 'price' failed 3 times: ConnectionError\. .*start again"
    ):
        enrich(ROWS[3:4], ask, name="price", retries=2)
    assert calls == [3, 3, 3]


def test_a_timeout_error_raised_by_the_function_is_an_ordinary_error():
    async def ask(row):
        raise TimeoutError("mine")

    with pytest.raises(OperatorFailed, match="failed: TimeoutError"):
        enrich(ROWS, ask, timeout=60, on_timeout="null")


def test_the_first_error_cancels_the_other_calls():
    done = []

    async def ask(row):
        if row.n == 0:
            raise ValueError("no")
        await asyncio.sleep(3600)
        done.append(row)

    with pytest.raises(OperatorFailed, match="failed: ValueError") as raised:
        enrich(ROWS, ask)
    assert isinstance(raised.value.__cause__, ValueError) and not done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency=0: give a whole number, 1 or more"),
        ({"retries": -1}, "retries=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": "soon"}, "cannot be read"),
        ({"on_timeout": "skip"}, "give 'fail', 'null' or a function"),
        ({"function": 3}, "of a row"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    with pytest.raises(UsageError, match=message):
        check(**{"function": print, **options})
