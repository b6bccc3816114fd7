"""The coordinator's manners: what it tries, in which order, how long, and what it says.

That it never loses or repeats a row is proven in `tests/model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import pytest

from poundlock.core.coordinator import Coordinator, Settings
from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import (
    Branch,
    Decided,
    Fingerprint,
    Finished,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Repaired,
    Stray,
    Transaction,
)
from poundlock.core.participant import Semantic
from poundlock.core.protocol import BranchState, Stage, Step
from poundlock.errors import (
    BadRow,
    Fenced,
    GuaranteeBroken,
    InDoubt,
    LogMismatch,
    NotAuthorised,
    OutOfTime,
    PermanentlyRefused,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.memory import Memory, MemorySystem


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        assert len(self.slept) < 1000, "it waits for ever"


class Sink(Memory):
    """The reference sink, with answers that a test can prescribe."""

    def __init__(self, name: str, clock: Clock, *, time_out_s: float | None = None):
        super().__init__(name, MemorySystem(), time_out_s=time_out_s, clock=clock)
        self.asked: list[str] = []  # ids, in the order of the commits
        self.swept: list[str] = []
        self.answer: Callable[[Receipt], BranchState | PoundlockError | None] = lambda receipt: None
        self.refuse: str | None = None
        self.find_error: PoundlockError | None = None

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return [self.refuse] * len(receipts) if self.refuse else super().check(receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        states: list[BranchState] = []
        for receipt in receipts:
            self.asked.append(receipt.id)
            answer = self.answer(receipt)
            if isinstance(answer, PoundlockError):
                raise answer
            states.append(answer or super()._commit_one(receipt))
        return states

    def find(self, namespace: object) -> list[Stray]:
        if self.find_error is not None:
            raise self.find_error
        return super().find(namespace)  # type: ignore[arg-type]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        self.swept += [stray.id for stray in strays]
        return super().abort(strays)


class Job:
    """Writes the same rows to every sink, one task a row."""

    def __init__(self, sinks: Mapping[str, Memory], rows: Sequence[int], *, stateful: bool = False):
        self._sinks, self.rows, self._stateful = sinks, rows, stateful
        self.written: list[Transaction] = []
        self.drained = 0
        self.fail: Callable[[int], PoundlockError | None] = lambda attempt: None

    @property
    def stateful(self) -> bool:
        return self._stateful

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        self.written.append(transaction)
        receipts: list[Receipt] = []
        for name in sorted(sinks):
            for task, row in enumerate(self.rows):
                number = 100 * len(self.written) + task
                writer = self._sinks[name].begin(Branch(transaction, name, task, number))
                writer.write([row])
                prepared = writer.prepare()
                if prepared is not None:
                    receipts.append(
                        Receipt(
                            name,
                            prepared.id,
                            task,
                            Fingerprint(1, row),
                            prepared.handle,
                            prepared.began_at,
                            prepared.expires_at,
                        )
                    )
        error = self.fail(len(self.written))
        if error is not None:
            raise error
        return Votes(tuple(receipts), self._totals())

    def drain(self) -> Mapping[str, Fingerprint]:
        self.drained += 1
        return self._totals()

    def _totals(self) -> dict[str, Fingerprint]:
        return {name: Fingerprint(len(self.rows), sum(self.rows)) for name in self._sinks}


class Bench:
    """A coordinator over sinks `a` and `b`, taken over and ready."""

    def __init__(self, names: Sequence[str] = ("a", "b"), **settings: float):
        self.clock = Clock()
        self.sinks = {name: Sink(name, self.clock) for name in names}
        self.records: dict[int, bytes] = {}
        self.stopping = False
        self.steps: list[Step] = []
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.coordinator = self.driver()
        self.take_over()

    def driver(self) -> Coordinator:
        return Coordinator(
            MemoryLog(self.records, clock=self.clock),
            self.sinks,
            settings=self.settings,
            observe=lambda step, facts: self.steps.append(step),
            stopping=lambda: self.stopping,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def take_over(self) -> None:
        self.coordinator.take_over("lock", query=lambda: "query-1", owner="here:1")

    def restart(self) -> None:
        self.coordinator = self.driver()
        self.take_over()

    def run(self, batch: int = 0, rows: Sequence[int] = (1, 2), **kind: bool) -> Job:
        job = Job(self.sinks, rows, **kind)
        self.coordinator.run(batch, f"hash-{batch}", job)
        return job

    def kinds(self) -> list[type[object]]:
        log = MemoryLog(self.records)
        return [type(entry.record) for entry in log.entries()][1:]


# The good case.


def test_a_batch_goes_through_both_gates() -> None:
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


def test_an_empty_batch_costs_one_record() -> None:
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


def test_a_sink_that_writes_straight_through_is_written_and_never_committed() -> None:
    bench = Bench()
    bench.sinks["b"].semantic = Semantic.AT_LEAST_ONCE
    bench.restart()
    bench.run()
    assert bench.sinks["b"].server.visible == [1, 2] and not bench.sinks["b"].asked


# The first gate: tries.


def test_a_no_is_tried_again_and_what_it_left_is_aborted() -> None:
    bench = Bench()
    job = Job(bench.sinks, (1, 2))
    job.fail = lambda attempt: Rejected("no") if attempt < 3 else None
    bench.coordinator.run(0, "hash-0", job)
    assert [transaction.attempt for transaction in job.written] == [1, 2, 3]
    assert len(bench.sinks["a"].swept) == 4
    assert bench.sinks["a"].server.visible == [1, 2]


@pytest.mark.parametrize("error", [Rejected("no"), Unavailable("silent")])
def test_the_error_is_raised_when_all_tries_are_used(error: PoundlockError) -> None:
    bench = Bench(tries=2)
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: error
    with pytest.raises(type(error)):
        bench.coordinator.run(0, "hash-0", job)
    assert len(job.written) == 2 and bench.kinds() == []
    assert len(bench.sinks["a"].swept) == 2
    bench.run()  # and nothing is in the way of the next start


@pytest.mark.parametrize("error", [BadRow("too long"), UsageError("no such topic")])
def test_what_cannot_help_is_not_tried_again(error: PoundlockError) -> None:
    bench = Bench()
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: error
    with pytest.raises(type(error)):
        bench.coordinator.run(0, "hash-0", job)
    assert len(job.written) == 1 and len(bench.sinks["a"].swept) == 1


def test_a_stop_ends_the_tries() -> None:
    bench = Bench()
    bench.stopping = True
    job = Job(bench.sinks, (1,))
    job.fail = lambda attempt: Rejected("no")
    with pytest.raises(Rejected):
        bench.coordinator.run(0, "hash-0", job)
    assert len(job.written) == 1


def test_a_branch_that_is_no_longer_open_votes_no() -> None:
    bench = Bench(tries=1)
    bench.sinks["a"].refuse = "it is gone"
    with pytest.raises(Rejected, match="it is gone") as caught:
        bench.run()
    assert caught.value.sink == "a" and "batch 0 attempt 1" in str(caught.value)
    assert bench.kinds() == []


def test_a_branch_without_time_enough_votes_no() -> None:
    bench = Bench(tries=1, least_time_left_s=10.0)
    bench.sinks["b"].time_out_s = 9.0
    with pytest.raises(OutOfTime, match="expires in 9 s, less than the 10 s") as caught:
        bench.run()
    assert caught.value.sink == "b" and bench.kinds() == []
    bench.sinks["b"].time_out_s = 10.0
    bench.run()


def test_two_tasks_with_one_branch_vote_no(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tries=1)
    write = Job.write
    monkeypatch.setattr(Job, "write", lambda *given: Votes(write(*given).receipts[:1] * 2, {}))
    with pytest.raises(Rejected, match="two tasks used the same branch id"):
        bench.run()


# The second gate: order, patience, errors.


def test_an_error_says_whose_it_is() -> None:
    bench = Bench()
    bench.sinks["b"].answer = lambda receipt: InDoubt("cannot")
    with pytest.raises(InDoubt) as caught:
        bench.run()
    assert caught.value.sink == "b"
    bench.sinks["b"].find_error = LogMismatch("no")
    with pytest.raises(LogMismatch) as parted:
        bench.coordinator.sweep()
    assert parted.value.sink == "b"


def test_the_first_error_is_remembered_and_the_others_go_on() -> None:
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


def test_a_sink_that_fails_in_its_own_words_does_not_hold_up_the_others() -> None:
    bench = Bench()

    def answer(receipt: Receipt) -> None:
        raise ConnectionResetError("peer went away")

    bench.sinks["a"].answer = answer
    with pytest.raises(InDoubt, match="ConnectionResetError: peer went away") as caught:
        bench.run()
    assert caught.value.sink == "a"
    assert bench.sinks["b"].server.visible == [1, 2]


def test_the_soonest_to_expire_is_committed_first() -> None:
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
    # Sink b has the two that expire first; within each sink, too, the later task comes first.
    assert order == ["b1", "b0", "a1", "a0"]


def test_batches_are_finished_oldest_first() -> None:
    bench = Bench(("a",))
    bench.run(0)
    log = MemoryLog(bench.records)
    log.load()
    for batch in (2, 1):  # as no driver would: the order of records must not matter
        ids = tuple(Receipt("a", f"feed/a/1.{batch}.1.{n}", n, Fingerprint(1, n)) for n in range(1))
        log.append(Decided(batch, 1, 1, f"hash-{batch}", ids, {}))
    bench.sinks["a"].asked.clear()
    bench.sinks["a"].answer = lambda receipt: BranchState.COMMITTED
    bench.restart()
    assert bench.sinks["a"].asked == ["feed/a/1.1.1.0", "feed/a/1.2.1.0"]


def test_an_unreachable_system_is_waited_for_and_the_others_are_not() -> None:
    bench = Bench(retry_first_s=1.0, retry_most_s=4.0)
    silent = iter([Unavailable("down")] * 5)
    bench.sinks["a"].answer = lambda receipt: next(silent, None)
    bench.run()
    assert bench.clock.slept == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert len(bench.sinks["b"].asked) == 2  # once each
    assert bench.sinks["a"].server.visible == [1, 2]


def test_a_stop_ends_the_waiting_and_nothing_is_lost() -> None:
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


def test_warnings_at_one_half_and_at_four_fifths() -> None:
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


def test_a_long_wait_is_mentioned_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(("a",), retry_first_s=10.0, retry_most_s=10.0, warn_every_s=30.0)
    silent = iter([Unavailable("down")] * 20)
    bench.sinks["a"].answer = lambda receipt: next(silent, None)
    with caplog.at_level(logging.WARNING, "poundlock"):
        bench.run(rows=(1,))
    assert len([m for m in caplog.messages if "still wait" in m]) == 4


def test_strays_are_swept_while_a_commit_waits() -> None:
    bench = Bench()
    orphan: list[str] = []

    def answer(receipt: Receipt) -> BranchState | None:
        if not orphan:  # a task that lost leaves a branch, behind which the commit is hidden
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
    assert bench.kinds() == [Decided, Finished] * 2  # hidden is committed
    assert len(bench.sinks["a"].asked) == 4  # and is not committed again


def test_what_cannot_be_proven_stops_and_is_not_guessed() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt, match="cannot be proven"):
        bench.run()
    assert bench.kinds() == [Decided] and bench.sinks["b"].server.visible == [1, 2]


def test_decided_branches_of_a_sink_that_is_gone_stop_the_start() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run()
    del bench.sinks["a"]
    with pytest.raises(LogMismatch, match="the pipeline has no such sink"):
        bench.restart()


# Repair, drain and rulings.


def lose_first(bench: Bench, name: str = "a", count: int = 1) -> None:
    """Let the system abort the first branches that are to be committed in sink `name`."""
    sink, done = bench.sinks[name], list[str]()

    def answer(receipt: Receipt) -> BranchState | None:
        if len(done) < count and receipt.id not in done:
            done.append(receipt.id)
            sink.server.branches[receipt.id].state = BranchState.ABORTED
        return None

    sink.answer = answer


def test_a_lost_branch_is_written_again_and_only_that() -> None:
    bench = Bench()
    lose_first(bench)
    job = bench.run(rows=(1, 2))
    assert bench.kinds() == [Decided, Repaired, Finished]
    assert sorted(bench.sinks["a"].server.visible) == [1, 2]
    assert bench.sinks["b"].server.visible == [1, 2]
    assert len(job.written) == 2 and len(bench.sinks["b"].asked) == 4
    assert len(bench.sinks["a"].swept) == 1  # the replayed branch that nobody needs


def test_a_branch_that_is_lost_again_is_repaired_again() -> None:
    bench = Bench(("a",))
    lose_first(bench, count=3)
    bench.run(rows=(1,))
    assert bench.kinds() == [Decided, Repaired, Repaired, Repaired, Finished]
    assert bench.sinks["a"].server.visible == [1]


class OtherRows(Job):
    """A query that is not deterministic: each run gives other rows."""

    def write(self, *given: object) -> Votes:  # type: ignore[override]
        self.rows = [row + 10 for row in self.rows]
        return super().write(*given)  # type: ignore[arg-type]

    def drain(self) -> Mapping[str, Fingerprint]:
        self.rows = [row + 10 for row in self.rows]
        return super().drain()


def broken(bench: Bench, *, count: int, stateful: bool = False) -> OtherRows:
    lose_first(bench, count=count)
    job = OtherRows(bench.sinks, (1, 2), stateful=stateful)
    with pytest.raises(GuaranteeBroken, match="--accept-replay"):
        bench.coordinator.run(0, "hash-0", job)
    return job


def test_other_rows_do_not_replace_lost_ones() -> None:
    bench = Bench()
    broken(bench, count=2)
    assert bench.kinds() == [Decided] and bench.sinks["a"].server.visible == []
    assert len(bench.sinks["a"].swept) == 2  # the replay's branches are not left behind


def ruled(bench: Bench, operator_decision: OperatorDecision) -> None:
    log = MemoryLog(bench.records)
    log.load()
    log.append(OperatorDecided(0, operator_decision, "me"))
    bench.restart()


def test_a_person_may_accept_the_replay() -> None:
    bench = Bench()
    job = broken(bench, count=2)
    ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    bench.coordinator.run(0, "hash-0", job)
    assert bench.sinks["a"].server.visible == job.rows
    assert bench.kinds()[-2:] == [Repaired, Finished]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_person_may_accept_the_loss(stateful: bool) -> None:
    bench = Bench()
    job = broken(bench, count=1, stateful=stateful)
    ruled(bench, OperatorDecision.ACCEPT_LOSS)
    written = len(job.written)
    bench.coordinator.run(0, "hash-0", job)
    assert bench.sinks["a"].server.visible == [12]  # of 11 and 12
    assert bench.kinds()[-2:] == [Repaired, Finished]
    assert len(job.written) == written and job.drained == stateful


def test_accepting_the_loss_ends_what_cannot_be_proven() -> None:
    bench = Bench()
    bench.sinks["a"].server.forgets = True
    crashed = iter([InDoubt("the driver dies after the commit")])

    def answer(receipt: Receipt) -> PoundlockError | None:
        bench.sinks["a"]._commit_one(receipt)
        return next(crashed, None)

    bench.sinks["a"].answer = answer
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    bench.sinks["a"].answer = lambda receipt: None
    with pytest.raises(InDoubt, match="cannot be proven"):
        bench.restart()
    ruled(bench, OperatorDecision.ACCEPT_LOSS)
    bench.run(rows=(1,))
    assert bench.sinks["a"].server.visible == [1]
    assert bench.coordinator.state.batches[0].stage is Stage.FINISHED


def test_accepting_the_loss_ends_what_is_refused_for_good_and_nothing_else() -> None:
    bench = Bench(("a",))
    sink, silent = bench.sinks["a"], iter([Unavailable("down")] * 3)

    def answer(receipt: Receipt) -> PoundlockError | None:
        if receipt.task == 1:
            return PermanentlyRefused("1 row is too long", branches=[receipt.id])
        return next(silent, None) if receipt.task == 2 else None

    sink.answer = answer
    with pytest.raises(PermanentlyRefused, match=r"too long\. Or .* --batch 0 --accept-loss"):
        bench.run(rows=(1, 2, 3))
    with pytest.raises(PermanentlyRefused):
        ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    ruled(bench, OperatorDecision.ACCEPT_LOSS)
    bench.run(rows=(1, 2, 3))
    assert sink.server.visible == [1, 3] and next(silent, None) is None
    assert bench.kinds()[-2:] == [Repaired, Finished]
    assert len(sink.swept) == 1


def test_accepting_a_replay_proves_nothing() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt):
        bench.run()
    with pytest.raises(InDoubt):
        ruled(bench, OperatorDecision.ACCEPT_REPLAY)


def test_a_replay_that_computed_another_state_stops() -> None:
    bench = Bench()
    job = OtherRows(bench.sinks, (1, 2), stateful=True)
    bench.coordinator.run(0, "hash-0", job)
    with pytest.raises(GuaranteeBroken, match="does not belong to the output"):
        bench.coordinator.run(0, "hash-0", job)
    ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    bench.coordinator.run(0, "hash-0", job)


# Taking over, sweeping, being replaced.


def test_a_start_finishes_what_is_decided_and_sweeps_the_rest() -> None:
    bench = Bench()
    for sink in bench.sinks.values():
        sink.answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    writer = bench.sinks["a"].begin(Branch(bench.coordinator._transaction(1, 1), "a", 0, 77))
    writer.prepare()
    for sink in bench.sinks.values():
        sink.answer = lambda receipt: None
    bench.restart()
    assert bench.coordinator.state.batches[0].stage is Stage.FINISHED
    assert len(bench.sinks["a"].swept) == 1 and bench.sinks["a"].server.visible == [1]


def test_a_start_leaves_lost_branches_for_the_batch() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    lose_first(bench)
    bench.restart()
    assert bench.coordinator.state.batches[0].stage is Stage.DECIDED
    bench.run(rows=(1,))
    assert bench.sinks["a"].server.visible == [1]


def test_a_driver_that_was_replaced_stops_with_the_true_reason() -> None:
    bench = Bench()
    old = bench.coordinator
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    bench.sinks["a"].answer = lambda receipt: None
    bench.restart()
    with pytest.raises(Fenced):
        old.run(1, "hash-1", Job(bench.sinks, (3,)))
    with pytest.raises(Fenced):
        old.sweep()

    def replaced_meanwhile(receipt: Receipt) -> BranchState:
        bench.coordinator = bench.driver()
        bench.sinks["a"].answer = lambda receipt: None
        bench.take_over()
        return BranchState.NO_WITNESS

    current = bench.coordinator
    bench.sinks["a"].answer = replaced_meanwhile
    with pytest.raises(Fenced):
        current.run(1, "hash-1", Job(bench.sinks, (3,)))


def test_the_sweep_waits_for_a_system_and_gives_up_only_when_told() -> None:
    bench = Bench(retry_first_s=1.0)
    bench.sinks["a"].find_error = Unavailable("down")
    bench.stopping = True
    with pytest.raises(Unavailable, match="the next start will"):
        bench.coordinator.sweep()


def test_whom_the_sweep_waits_for_is_told_before_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    job = Job(bench.sinks, [1])
    job.fail = lambda attempt: Unavailable("the cable is out") if attempt == 1 else None
    bench.sinks["a"].find_error = Unavailable("the cable is still out")
    told: list[str] = []

    def wait(seconds: float) -> None:
        told[:] = caplog.messages
        bench.sinks["a"].find_error = None

    bench.coordinator._sleep = wait
    bench.coordinator.run(0, "hash-0", job)
    assert [line.split(": ", 1)[1] for line in told] == [
        "aborted, and it is run again: the cable is out",
        "waiting to abort strays: [sink a] the cable is still out",
    ]


def test_what_aborted_an_attempt_is_raised_though_it_cannot_be_swept() -> None:
    bench = Bench()
    job = Job(bench.sinks, [1])
    job.fail = lambda attempt: BadRow("a null")
    bench.sinks["a"].find_error = NotAuthorised("may not look")
    with pytest.raises(BadRow, match="a null"):
        bench.coordinator.run(0, "hash-0", job)


def test_a_stray_that_somebody_committed_stops_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    writer = bench.sinks["a"].begin(Branch(bench.coordinator._transaction(0, 1), "a", 0, 77))
    writer.prepare()
    monkeypatch.setattr(Sink, "abort", lambda self, strays: [BranchState.COMMITTED] * len(strays))
    with pytest.raises(LogMismatch, match="no decision names it"):
        bench.coordinator.sweep()


def test_two_drivers_do_not_chase_each_other_for_ever() -> None:
    bench = Bench()
    original = MemoryLog.append

    class Chased(MemoryLog):
        def append(self, record: object) -> None:
            other = MemoryLog(self.records)
            before = other.load().generation
            assert before is not None
            original(other, type(before)(
                before.number + 1, before.namespace, before.uri, before.query, "other"
            ))  # fmt: skip
            super().append(record)  # type: ignore[arg-type]

    chased = Coordinator(Chased(bench.records), bench.sinks)
    with pytest.raises(Fenced):
        chased.take_over("lock", query=lambda: "query-1", owner="here:2")


@pytest.mark.parametrize(
    ("pipeline", "query", "uri", "reason"),
    [
        ("other", "query-1", "memory:", "belongs to pipeline 'lock'"),
        ("lock", "query-2", "memory:", "exchanged"),
        ("lock", None, "memory:", "the checkpoint was deleted"),
        ("lock", "query-1", "elsewhere:", "moved or copied"),
    ],
)
def test_a_log_that_does_not_belong_here_is_refused(
    pipeline: str, query: str | None, uri: str, reason: str
) -> None:
    bench = Bench()
    bench.run()
    found = Coordinator(MemoryLog(bench.records, uri=uri), bench.sinks)
    with pytest.raises(LogMismatch, match=reason):
        found.take_over(pipeline, query=lambda: query, owner="here:2")
    assert bench.kinds() == [Decided, Finished]  # and nothing was written


def test_a_log_is_bound_to_its_query_once() -> None:
    bench = Bench()
    new = Coordinator(MemoryLog(), bench.sinks)
    new.take_over("lock", query=lambda: None, owner="here:1")
    new.bind("query-1")
    new.bind("query-1")
    assert len(new.log.entries()) == 2
    with pytest.raises(LogMismatch, match="exchanged"):
        new.bind("query-2")


def test_the_log_is_compacted_now_and_then() -> None:
    bench = Bench(("a",), keep_batches=2)
    for batch in range(6):
        bench.run(batch, rows=(batch,))
    assert set(bench.coordinator.state.batches) == {3, 4, 5}
    with pytest.raises(LogMismatch, match="restored to an older state"):
        bench.run(2)
