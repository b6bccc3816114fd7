"""The coordinator's two phases: what it tries, in which order, how long, and what it reports.

That it never loses or repeats a row is proven in `tests/model`.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fix_coordinator import Bench, Clock, Job, Sink, plan

from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import Branch, Decided, Fingerprint, Finished, Receipt
from poundlock.core.owner import NOTICED_AFTER_S
from poundlock.core.participant import Semantic
from poundlock.core.protocol import BranchState, Step
from poundlock.core.surroundings import Settings
from poundlock.errors import (
    BadRow,
    InDoubt,
    LogMismatch,
    OutOfTime,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.memory import Memory

# The good case.


def test_a_batch_passes_both_gates() -> None:
    bench = Bench()
    bench.run()
    assert bench.kinds() == [Decided, Finished]
    assert all(sink.server.visible == [1, 2] for sink in bench.sinks.values())
    history = [
        Step.ENTERED, Step.WRITING, Step.PREPARED, Step.CHECKED, Step.DECIDING, Step.DECIDED,
        Step.COMMITTING, Step.COMMITTED_ONE, Step.COMMITTED_ONE, Step.COMMITTED, Step.FINISHING,
        Step.FINISHED,
    ]  # fmt: skip
    assert bench.steps[bench.steps.index(Step.ENTERED) :] == history


def test_an_empty_batch_writes_one_record() -> None:
    bench = Bench()
    bench.run(rows=())
    assert bench.kinds() == [Decided]
    bench.run(1)


def test_a_finished_batch_is_not_run_again() -> None:
    bench = Bench()
    bench.run()
    job = bench.run()
    assert not job.written and not job.drained
    assert bench.run(stateful=True).drained == 1
    assert bench.sinks["a"].server.visible == [1, 2]


def test_a_sink_without_transactions_is_written_and_never_committed() -> None:
    bench = Bench()
    bench.sinks["b"].semantic = Semantic.AT_LEAST_ONCE
    bench.restart()
    bench.run()
    assert bench.sinks["b"].server.visible == [1, 2] and not bench.sinks["b"].asked


# The first gate: attempts.


def test_a_batch_is_retried_after_a_no_vote_and_its_branches_are_aborted() -> None:
    bench = Bench()
    job = Job(bench.sinks, (1, 2))
    job.fail = lambda attempt: Rejected("no") if attempt < 3 else None
    bench.coordinator.run(0, plan(0), job)
    assert [transaction.attempt for transaction in job.written] == [1, 2, 3]
    assert len(bench.sinks["a"].swept) == 4
    assert bench.sinks["a"].server.visible == [1, 2]


def test_a_run_that_may_have_left_a_task_behind_is_the_last_of_its_lane() -> None:
    bench = Bench()
    bench.sinks["a"].reuses_ids = True
    failing, repeated = Job(bench.sinks, (1, 2)), Job(bench.sinks, (3,))
    failing.fail = lambda attempt: Rejected("no") if attempt == 1 else None
    repeated.settled = False
    jobs = [bench.run(0), bench.run(1), failing, repeated]
    for batch, job in enumerate(jobs[2:], 2):
        bench.coordinator.run(batch, plan(batch), job)
    jobs.append(bench.run(4))
    numbers = [[it.lane.number for it in job.written if it.lane] for job in jobs]
    assert numbers == [[0], [1], [0, 2], [3], [4]]


def test_a_batch_never_uses_the_ids_that_show_the_batch_before() -> None:
    bench = Bench()
    bench.sinks["a"].reuses_ids = True
    lanes = [bench.run(batch).written[0].lane for batch in range(3)]
    empty = Job(bench.sinks, ())
    bench.coordinator.run(3, plan(3), empty)  # the ids of batch 2 still show it
    lanes.append(bench.run(4).written[0].lane)
    assert [it.number for it in lanes if it] == [0, 1, 0, 1]


@pytest.mark.parametrize("error", [Rejected("no"), Unavailable("silent")])
def test_the_error_is_raised_after_the_last_attempt(error: PoundlockError) -> None:
    bench = Bench(tries=2)
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: error
    with pytest.raises(type(error)):
        bench.coordinator.run(0, plan(0), job)
    assert len(job.written) == 2 and bench.kinds() == []
    assert len(bench.sinks["a"].swept) == 2
    bench.run()  # nothing prevents the next start


@pytest.mark.parametrize("error", [BadRow("too long"), UsageError("no such topic")])
def test_a_permanent_error_is_not_retried(error: PoundlockError) -> None:
    bench = Bench()
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: error
    with pytest.raises(type(error)):
        bench.coordinator.run(0, plan(0), job)
    assert len(job.written) == 1 and len(bench.sinks["a"].swept) == 1


def test_a_stop_ends_the_retries() -> None:
    bench = Bench()
    bench.stopping = True
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: Rejected("no")
    with pytest.raises(Rejected):
        bench.coordinator.run(0, plan(0), job)
    assert len(job.written) == 1


def test_a_branch_that_is_no_longer_open_votes_no() -> None:
    bench = Bench(tries=1)
    bench.sinks["a"].refuse = "it is gone"
    with pytest.raises(Rejected, match="it is gone") as caught:
        bench.run()
    assert caught.value.sink == "a" and "batch 0 attempt 1" in str(caught.value)
    assert bench.kinds() == []


def test_a_branch_without_enough_time_votes_no() -> None:
    bench = Bench(tries=1, least_time_left_s=10.0)
    bench.sinks["b"].time_out_s = 9.0
    with pytest.raises(OutOfTime, match="expires in 9 s, less than the 10 s") as caught:
        bench.run()
    assert caught.value.sink == "b" and bench.kinds() == []
    bench.sinks["b"].time_out_s = 10.0
    bench.run()


def slow(bench: Bench, name: str, seconds: float) -> None:
    """Let each commit of a branch of this sink take a while."""

    def answer(receipt: Receipt) -> None:
        bench.clock.now += seconds

    bench.sinks[name].answer = answer


def test_the_time_that_must_be_left_grows_with_the_branches_that_are_committed_before() -> None:
    """At 0.2 s a branch, the last of 200 has its turn after 40 s."""
    bench = Bench(["a"], tries=1)
    slow(bench, "a", 0.2)
    bench.sinks["a"].time_out_s = 900.0
    bench.run(0, range(200))
    bench.sinks["a"].time_out_s = 60.0
    # The turn of the 48th comes after 10 s, and twice what 48 commits took.
    job = Job(bench.sinks, range(200))
    write = job.write

    def late(*given: Any) -> Votes:
        votes = write(*given)
        bench.clock.now += 31.0
        return votes

    job.write = late  # type: ignore[method-assign]
    with pytest.raises(OutOfTime, match="expires in 29 s, less than the 29 s"):
        bench.coordinator.run(1, plan(1), job)
    assert bench.kinds().count(Decided) == 1
    # A few branches have enough time.
    few = Job(bench.sinks, range(20))
    write = few.write
    few.write = late  # type: ignore[method-assign]
    bench.coordinator.run(1, plan(1), few)
    assert bench.kinds().count(Decided) == 2


def test_a_system_that_was_slow_once_does_not_keep_later_batches_from_being_decided() -> None:
    bench = Bench(["a"], tries=1)
    slow(bench, "a", 5.0)
    bench.sinks["a"].time_out_s = 60.0
    bench.run(0, range(40))
    slow(bench, "a", 0.0)
    for batch in range(1, 12):
        bench.run(batch, range(40))  # each has all of its 60 s, more than half
    assert check_rate(bench) < 0.1


def check_rate(bench: Bench) -> float:
    return bench.coordinator._committer.rate.seconds("a")


def test_what_was_not_committed_at_once_is_no_measure() -> None:
    """A system that was away would seem to take minutes for each branch."""
    bench = Bench(["a"], tries=1)
    before = check_rate(bench)
    left = [1]

    def answer(receipt: Receipt) -> PoundlockError | None:
        bench.clock.now += 100.0
        return Unavailable("away") if left and left.pop() else None

    bench.sinks["a"].answer = answer
    bench.run(0, range(31))
    assert check_rate(bench) == before


def test_two_tasks_with_one_branch_vote_no(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tries=1)
    write = Job.write
    monkeypatch.setattr(Job, "write", lambda *given: Votes(write(*given).receipts[:1] * 2, {}))
    with pytest.raises(Rejected, match="two tasks used the same branch id"):
        bench.run()


# The second gate: order, waiting, errors.


def test_an_error_names_its_sink() -> None:
    bench = Bench()
    bench.sinks["b"].answer = lambda receipt: InDoubt("cannot")
    with pytest.raises(InDoubt) as caught:
        bench.run()
    assert caught.value.sink == "b"
    bench.sinks["b"].find_error = LogMismatch("no")
    with pytest.raises(LogMismatch) as parted:
        bench.coordinator.sweep()
    assert parted.value.sink == "b"


def test_the_first_error_is_raised_after_all_branches_are_tried() -> None:
    bench = Bench(("a", "b", "c"))
    bench.sinks["a"].answer = lambda receipt: InDoubt("first")
    bench.sinks["b"].answer = lambda receipt: InDoubt("second")
    with pytest.raises(InDoubt, match="first"):
        bench.run()
    assert bench.sinks["c"].server.visible == [1, 2]
    assert bench.kinds() == [Decided]
    for sink in bench.sinks.values():
        sink.answer = lambda receipt: None
    bench.run()
    assert bench.kinds() == [Decided, Finished]
    assert bench.sinks["c"].server.visible == [1, 2]


def test_an_unexpected_exception_in_one_sink_does_not_stop_the_others() -> None:
    bench = Bench()

    def answer(receipt: Receipt) -> None:
        raise ConnectionResetError("peer went away")

    bench.sinks["a"].answer = answer
    with pytest.raises(InDoubt, match="ConnectionResetError: peer went away") as caught:
        bench.run()
    assert caught.value.sink == "a"
    assert bench.sinks["b"].server.visible == [1, 2]


def test_the_branch_that_expires_first_is_committed_first() -> None:
    bench = Bench(("a", "b"), commits_at_once=1)
    times = iter((500.0, 400.0, 300.0, 200.0))

    def begin(sink: Sink, branch: Branch) -> object:
        sink.time_out_s = next(times)
        return Memory.begin(sink, branch)

    for sink in bench.sinks.values():
        sink.begin = lambda branch, sink=sink: begin(sink, branch)  # type: ignore[method-assign]
    order: list[str] = []
    for name, sink in bench.sinks.items():
        sink.answer = lambda receipt, name=name: order.append(name + receipt.id[-1])  # type: ignore
    bench.run()
    # The two branches of sink b expire first. Within each sink the later task expires first.
    assert order == ["b1", "b0", "a1", "a0"]


@pytest.mark.parametrize(("asked", "calls"), [(None, [700]), (300, [300, 300, 100])])
def test_a_sink_says_how_many_branches_are_committed_in_one_call(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, calls: list[int]
) -> None:
    bench, seen = Bench(("a",)), list[int]()
    bench.settings = Settings(commits_at_once=asked)
    bench.restart()
    sink = bench.sinks["a"]
    commit, sink.commits_at_once = sink.commit, 1000
    monkeypatch.setattr(sink, "commit", lambda mine: seen.append(len(mine)) or commit(mine))
    bench.run(rows=range(700))
    assert seen == calls


def test_the_oldest_batch_is_finished_first() -> None:
    bench = Bench(("a",))
    bench.run(0)
    log = MemoryLog(bench.records)
    log.load()
    for batch in (2, 1):  # no driver writes them so, but their order must not matter
        ids = tuple(Receipt("a", f"feed/a/1.{batch}.1.{n}", n, Fingerprint(1, n)) for n in range(1))
        log.append(Decided(batch, 1, 1, f"hash-{batch}", ids, {}))
    bench.sinks["a"].asked.clear()
    bench.sinks["a"].answer = lambda receipt: BranchState.COMMITTED
    bench.restart()
    assert bench.sinks["a"].asked == ["feed/a/1.1.1.0", "feed/a/1.2.1.0"]


def test_an_unreachable_system_does_not_delay_the_others() -> None:
    bench = Bench(retry_first_s=1.0, retry_most_s=4.0)
    silent = iter([Unavailable("down")] * 5)
    bench.sinks["a"].answer = lambda receipt: next(silent, None)
    bench.run()
    assert bench.clock.slept == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert len(bench.sinks["b"].asked) == 2  # once each
    assert bench.sinks["a"].server.visible == [1, 2]


def test_a_stop_ends_the_wait_and_loses_nothing() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: Unavailable("down")
    bench.stopping = True
    with pytest.raises(InDoubt, match="start the pipeline again") as caught:
        bench.run()
    assert caught.value.sink == "a" and bench.kinds() == [Decided]
    bench.stopping = False
    bench.sinks["a"].answer = lambda receipt: None
    bench.restart()
    assert bench.kinds()[-1] is Finished and bench.sinks["a"].server.visible == [1, 2]


def test_a_branch_causes_warnings_at_half_and_four_fifths_of_its_time() -> None:
    bench = Bench(("a",), retry_first_s=1.0, retry_most_s=1.0, warn_every_s=1e9)
    bench.sinks["a"].time_out_s = 100.0
    began = bench.clock.now
    marks: list[float] = []

    class Marks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "of its time is over" in record.getMessage():
                marks.append(bench.clock.now - began)

    handler = Marks()
    logging.getLogger("poundlock").addHandler(handler)
    bench.sinks["a"].answer = lambda r: (
        Unavailable("down") if bench.clock.now - began < 95 else None
    )
    bench.run(rows=(1,))
    logging.getLogger("poundlock").removeHandler(handler)
    assert marks == [50.0, 80.0]  # each once


def test_a_long_wait_is_logged_repeatedly(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(("a",), retry_first_s=10.0, retry_most_s=10.0, warn_every_s=30.0)
    silent = iter([Unavailable("down")] * 20)
    bench.sinks["a"].answer = lambda receipt: next(silent, None)
    with caplog.at_level(logging.WARNING, "poundlock"):
        bench.run(rows=(1,))
        told = [m for m in caplog.messages if "still wait" in m]
    assert len(told) == 7  # after 10 s, then every 30 s
    assert all("a cannot be reached: down" in message for message in told)
    assert len(caplog.messages) == 7


def test_strays_are_swept_while_a_commit_waits() -> None:
    bench = Bench()
    orphan: list[str] = []

    def answer(receipt: Receipt) -> BranchState | None:
        if not orphan:  # a losing task leaves a branch that hides the commit
            transaction = bench.coordinator._transaction(0, 1)
            writer = bench.sinks["b"].begin(Branch(transaction, "b", 9, 999))
            prepared = writer.prepare()
            assert prepared is not None
            orphan.append(prepared.id)
        return None if orphan[0] in bench.sinks["b"].swept else BranchState.PREPARED

    bench.sinks["a"].answer = answer
    bench.run()
    assert bench.sinks["b"].swept == orphan


def test_a_stray_that_hides_committed_rows_is_swept_after_the_batch() -> None:
    bench = Bench()
    bench.run()
    assert Step.SWEPT not in bench.steps[bench.steps.index(Step.ENTERED) :]

    def hidden(receipt: Receipt) -> BranchState:
        assert bench.sinks["a"]._commit_one(receipt) is BranchState.COMMITTED
        return BranchState.HIDDEN

    bench.sinks["a"].answer = hidden
    bench.run(1)
    finished = len(bench.steps) - bench.steps[::-1].index(Step.FINISHED)
    assert bench.steps[finished:] == [Step.SWEEPING, Step.SWEPT]
    assert bench.kinds() == [Decided, Finished] * 2  # a hidden branch is committed
    assert len(bench.sinks["a"].asked) == 4  # and it is not committed again


def test_an_unknown_outcome_stops_the_pipeline() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt, match="cannot be proven"):
        bench.run()
    assert bench.kinds() == [Decided] and bench.sinks["b"].server.visible == [1, 2]


def test_decided_branches_of_a_removed_sink_stop_the_start() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run()
    del bench.sinks["a"]
    with pytest.raises(LogMismatch, match="the pipeline has no such sink"):
        bench.restart()


def test_a_clock_that_is_set_back_makes_nothing_wait_longer() -> None:
    bench = Bench(("a",), retry_first_s=1.0, retry_most_s=1.0, sweep_every_s=60.0)
    bench.run(0)

    def wait(seconds: float) -> None:
        bench.clock.set_back_s = 3600.0
        Clock.sleep(bench.clock, seconds)

    bench.clock.sleep = wait  # type: ignore[method-assign]
    bench.coordinator = bench.driver()
    bench.coordinator.take_over(
        "lock", query=lambda: "query-1", owner="here:2", has_ended=lambda owner: False
    )
    assert sum(bench.clock.slept) == NOTICED_AFTER_S
    bench.clock.set_back_s, bench.clock.now = 7200.0, bench.clock.now + 61
    swept = bench.steps.count(Step.SWEPT)
    bench.run(1)
    assert bench.steps.count(Step.SWEPT) == swept + 1
