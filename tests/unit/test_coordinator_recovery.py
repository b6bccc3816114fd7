"""The coordinator after a loss or a restart: repair, operator decisions, take-over and sweep.

That it never loses or repeats a row is proven in `tests/model`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fix_coordinator import Bench, Job, Sink, plan

from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import (
    Branch,
    Decided,
    Fingerprint,
    Finished,
    Generation,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Repaired,
    Transaction,
)
from poundlock.core.protocol import LOSS_ACCEPTED, Action, BranchState, LogState, Stage
from poundlock.errors import (
    BadRow,
    Fenced,
    GuaranteeBroken,
    InDoubt,
    LogMismatch,
    NotAuthorised,
    PermanentlyRefused,
    PoundlockError,
    Unavailable,
)

# Repair, drain and operator decisions.


def lose_first(bench: Bench, name: str = "a", count: int = 1) -> None:
    """Let the system abort the next branches that sink `name` commits."""
    sink, done = bench.sinks[name], list[str]()

    def answer(receipt: Receipt) -> BranchState | None:
        if len(done) < count and receipt.id not in done:
            done.append(receipt.id)
            sink.server.branches[receipt.id].state = BranchState.ABORTED
        return None

    sink.answer = answer


def test_only_the_lost_branch_is_written_again() -> None:
    bench = Bench()
    lose_first(bench)
    job = bench.run(rows=(1, 2))
    assert bench.kinds() == [Decided, Repaired, Finished]
    assert sorted(bench.sinks["a"].server.visible) == [1, 2]
    assert bench.sinks["b"].server.visible == [1, 2]
    assert len(job.written) == 2 and len(bench.sinks["b"].asked) == 4
    assert len(bench.sinks["a"].swept) == 1  # the replayed branch that is not needed


def test_a_branch_that_is_lost_again_is_repaired_again() -> None:
    bench = Bench(("a",))
    lose_first(bench, count=3)
    bench.run(rows=(1,))
    assert bench.kinds() == [Decided, Repaired, Repaired, Repaired, Finished]
    assert bench.sinks["a"].server.visible == [1]


class OtherRows(Job):
    """A nondeterministic query: each run gives other rows."""

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        self.rows = [row + 10 for row in self.rows]
        return super().write(transaction, sinks, held_ids)

    def drain(self) -> Mapping[str, Fingerprint]:
        self.rows = [row + 10 for row in self.rows]
        return super().drain()


def broken(bench: Bench, *, count: int, stateful: bool = False) -> OtherRows:
    lose_first(bench, count=count)
    job = OtherRows(bench.sinks, (1, 2), stateful=stateful)
    with pytest.raises(GuaranteeBroken, match="--accept-replay"):
        bench.coordinator.run(0, plan(0), job)
    return job


def test_other_rows_do_not_replace_lost_ones() -> None:
    bench = Bench()
    broken(bench, count=2)
    assert bench.kinds() == [Decided] and bench.sinks["a"].server.visible == []
    assert len(bench.sinks["a"].swept) == 2  # the replay's branches are swept


def ruled(
    bench: Bench, operator_decision: OperatorDecision, sinks: tuple[str, ...] = ("a", "b")
) -> None:
    log = MemoryLog(bench.records)
    log.load()
    log.append(OperatorDecided(0, operator_decision, sinks, "me"))
    bench.restart()


def test_an_operator_can_accept_the_replay() -> None:
    bench = Bench()
    job = broken(bench, count=2)
    ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    bench.coordinator.run(0, plan(0), job)
    assert bench.sinks["a"].server.visible == job.rows
    assert bench.kinds()[-2:] == [Repaired, Finished]


@pytest.mark.parametrize("stateful", [False, True])
def test_an_operator_can_accept_the_loss(stateful: bool) -> None:
    bench = Bench()
    job = broken(bench, count=1, stateful=stateful)
    ruled(bench, OperatorDecision.ACCEPT_LOSS)
    written = len(job.written)
    bench.coordinator.run(0, plan(0), job)
    assert bench.sinks["a"].server.visible == [12]  # of 11 and 12
    assert bench.kinds()[-2:] == [Repaired, Finished]
    assert len(job.written) == written and job.drained == stateful


def test_accepting_the_loss_settles_an_unknown_outcome() -> None:
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


def test_accepting_the_loss_drops_only_permanently_refused_branches() -> None:
    bench = Bench(("a",))
    sink = bench.sinks["a"]

    def answer(receipt: Receipt) -> PoundlockError | None:
        refused = PermanentlyRefused("1 row is too long", branches=[receipt.id])
        return refused if receipt.task == 1 else None

    sink.answer = answer
    with pytest.raises(PermanentlyRefused, match=r"too long\. Or .* --sink a --accept-loss"):
        bench.run(rows=(1, 2, 3))
    with pytest.raises(PermanentlyRefused):
        ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    ruled(bench, OperatorDecision.ACCEPT_LOSS)
    bench.run(rows=(1, 2, 3))
    assert sink.server.visible == [1, 3]
    assert bench.kinds()[-2:] == [Repaired, Finished]
    assert len(sink.swept) == 1


NOT_COMMITTED: dict[str, BranchState | Exception] = {
    **{it.value: it for it in BranchState if LOSS_ACCEPTED[it] is Action.LET_GO},
    "Unavailable": Unavailable("down for good"),
    "InDoubt": InDoubt("cannot tell"),
    "refused": PermanentlyRefused("too long"),
    "an unexpected error": ConnectionResetError("peer went away"),
}


@pytest.mark.parametrize("answer", NOT_COMMITTED.values(), ids=NOT_COMMITTED)
@pytest.mark.parametrize("stateful", [False, True])
def test_an_accepted_loss_ends_the_batch_whatever_the_state_of_its_branches(
    answer: BranchState | Exception, stateful: bool
) -> None:
    bench = Bench()
    job = decided_only(bench, stateful=stateful)

    def gone(receipt: Receipt) -> BranchState | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    bench.sinks["a"].answer = gone
    asked = len(bench.sinks["a"].asked)
    ruled(bench, OperatorDecision.ACCEPT_LOSS, ("a",))
    assert bench.kinds() == [Decided, OperatorDecided, Generation, Repaired, Finished]
    assert 1 <= len(bench.sinks["a"].asked) - asked <= 2  # one attempt
    bench.coordinator.run(0, plan(0), job)
    assert bench.sinks["b"].server.visible == [1, 2]
    assert job.drained == stateful
    assert len(bench.sinks["a"].swept) == 2  # what was left behind


def decided_only(bench: Bench, *, stateful: bool = False) -> Job:
    """Decide batch 0, then let the driver die."""
    job = Job(bench.sinks, (1, 2), stateful=stateful)
    for sink in bench.sinks.values():
        sink.answer = lambda receipt: InDoubt("the driver dies")
    with pytest.raises(InDoubt):
        bench.coordinator.run(0, plan(0), job)
    for sink in bench.sinks.values():
        sink.answer = lambda receipt: None
    return job


def test_a_sink_that_was_removed_blocks_until_its_loss_is_accepted() -> None:
    bench = Bench()
    decided_only(bench)
    removed = bench.sinks.pop("a")
    with pytest.raises(LogMismatch, match=r"'poundlock txn commit .* --sink a --accept-loss'"):
        bench.restart()
    ruled(bench, OperatorDecision.ACCEPT_LOSS, ("a",))
    assert bench.kinds()[-2:] == [Repaired, Finished]
    assert bench.sinks["b"].server.visible == [1, 2] and removed.server.visible == []
    bench.sinks["a"] = removed
    bench.restart()
    assert len(removed.swept) == 2


def test_accepting_the_loss_of_one_sink_does_not_give_up_another() -> None:
    bench = Bench()
    decided_only(bench)
    bench.sinks["b"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt, match="--sink b --accept-loss"):
        ruled(bench, OperatorDecision.ACCEPT_LOSS, ("a",))
    assert bench.kinds()[-1] is Generation and bench.sinks["a"].server.visible == [1, 2]


def test_a_branch_that_was_let_go_may_turn_out_to_be_committed() -> None:
    bench = Bench(("a",))
    decided_only(bench)
    bench.sinks["a"].answer = lambda receipt: BranchState.PREPARED
    sink, abort = bench.sinks["a"], Sink.abort
    found = iter([BranchState.UNREACHABLE, BranchState.COMMITTED])
    sink.abort = lambda strays: [next(found, None) or abort(sink, [it])[0] for it in strays]  # type: ignore[method-assign]
    ruled(bench, OperatorDecision.ACCEPT_LOSS, ("a",))
    bench.coordinator.sweep()
    assert next(found, None) is None and bench.coordinator.state.unfinished == []


def test_what_waits_says_how_to_go_on_without_it() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: BranchState.PREPARED
    bench.stopping = True
    with pytest.raises(InDoubt, match=r"'poundlock txn commit .* --sink a --accept-loss'"):
        bench.run()


def test_accepting_a_replay_does_not_settle_an_unknown_outcome() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt):
        bench.run()
    with pytest.raises(InDoubt):
        ruled(bench, OperatorDecision.ACCEPT_REPLAY)


def test_a_replay_that_computes_another_state_stops_the_pipeline() -> None:
    bench = Bench()
    job = OtherRows(bench.sinks, (1, 2), stateful=True)
    bench.coordinator.run(0, plan(0), job)
    with pytest.raises(GuaranteeBroken, match="no longer match the output"):
        bench.coordinator.run(0, plan(0), job)
    ruled(bench, OperatorDecision.ACCEPT_REPLAY)
    bench.coordinator.run(0, plan(0), job)


# Take-over, sweep, replaced drivers.


def test_a_start_finishes_decided_batches_and_sweeps_other_branches() -> None:
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


def test_a_start_leaves_lost_branches_to_the_replay() -> None:
    bench = Bench()
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    lose_first(bench)
    bench.restart()
    assert bench.coordinator.state.batches[0].stage is Stage.DECIDED
    bench.run(rows=(1,))
    assert bench.sinks["a"].server.visible == [1]


def test_a_replaced_driver_stops_with_fenced() -> None:
    bench = Bench()
    old = bench.coordinator
    bench.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        bench.run(rows=(1,))
    bench.sinks["a"].answer = lambda receipt: None
    bench.restart()
    with pytest.raises(Fenced):
        old.run(1, plan(1), Job(bench.sinks, (3,)))
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
        current.run(1, plan(1), Job(bench.sinks, (3,)))


def test_the_sweep_waits_for_a_system_until_it_is_stopped() -> None:
    bench = Bench(retry_first_s=1.0)
    bench.sinks["a"].find_error = Unavailable("down")
    bench.stopping = True
    with pytest.raises(Unavailable, match="the next start will"):
        bench.coordinator.sweep()


def test_the_sweep_logs_its_sink_before_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    job = Job(bench.sinks, [1])
    job.fail = lambda attempt: Unavailable("the cable is out") if attempt == 1 else None
    bench.sinks["a"].find_error = Unavailable("the cable is still out")
    told: list[str] = []

    def wait(seconds: float) -> None:
        told[:] = caplog.messages
        bench.sinks["a"].find_error = None

    bench.clock.sleep = wait
    bench.coordinator.run(0, plan(0), job)
    assert [line.split(": ", 1)[1] for line in told] == [
        "aborted, and it is run again: the cable is out",
        "waiting to abort strays: [sink a] the cable is still out",
    ]


def test_the_error_of_an_attempt_is_raised_even_if_the_sweep_fails() -> None:
    bench = Bench()
    job = Job(bench.sinks, [1])
    job.fail = lambda attempt: BadRow("a null")
    bench.sinks["a"].find_error = NotAuthorised("may not look")
    with pytest.raises(BadRow, match="a null"):
        bench.coordinator.run(0, plan(0), job)


def test_a_committed_stray_stops_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    writer = bench.sinks["a"].begin(Branch(bench.coordinator._transaction(0, 1), "a", 0, 77))
    writer.prepare()
    monkeypatch.setattr(Sink, "abort", lambda self, strays: [BranchState.COMMITTED] * len(strays))
    with pytest.raises(LogMismatch, match="no decision names it"):
        bench.coordinator.sweep()


def test_two_drivers_do_not_replace_each_other_forever() -> None:
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
def test_a_log_of_another_pipeline_or_place_is_refused(
    pipeline: str, query: str | None, uri: str, reason: str
) -> None:
    bench = Bench()
    bench.run()
    found = Coordinator(MemoryLog(bench.records, uri=uri), bench.sinks)
    with pytest.raises(LogMismatch, match=reason):
        found.take_over(pipeline, query=lambda: query, owner="here:2")
    assert bench.kinds() == [Decided, Finished]  # nothing was written


def test_a_log_without_batches_follows_a_new_checkpoint() -> None:
    """The one before was deleted, and with it nothing that the log knows."""
    bench = Bench(("a",))
    bench.coordinator.bind("query-1")

    def start(query: str | None) -> None:
        bench.coordinator = bench.driver()
        bench.coordinator.take_over("lock", query=lambda: query, owner="here:2")

    with pytest.raises(LogMismatch, match="exchanged"):
        start("query-2")  # it may have batches
    start(None)
    bench.restart()  # the driver died before its first batch; the checkpoint is query-1's again
    start(None)
    bench.coordinator.bind("query-2")
    bench.run()
    with pytest.raises(LogMismatch, match="the checkpoint was deleted"):
        start(None)
    start("query-2")
    assert bench.coordinator.state.query == "query-2"


def test_a_log_is_bound_to_its_query_once() -> None:
    bench = Bench()
    new = Coordinator(MemoryLog(), bench.sinks)
    new.take_over("lock", query=lambda: None, owner="here:1")
    new.bind("query-1")
    new.bind("query-1")
    assert len(new.log.entries()) == 2
    with pytest.raises(LogMismatch, match="exchanged"):
        new.bind("query-2")


def test_the_log_is_compacted_regularly() -> None:
    bench = Bench(("a",), keep_batches=2)
    for batch in range(6):
        bench.run(batch, rows=(batch,))
    assert set(bench.coordinator.state.batches) == {3, 4, 5}
    with pytest.raises(LogMismatch, match="restored to an older state"):
        bench.run(2)


def test_starts_without_a_batch_leave_few_records() -> None:
    bench = Bench(("a",), most_records=100)
    bench.run(0, rows=(1,))
    bench.run(1, rows=(2,))
    for _ in range(1500):
        bench.restart()
        assert len(bench.records) <= 101
    assert bench.coordinator.generation.number == 1501
    assert not bench.run(1).written, "it is known to be finished"
    bench.run(2, rows=(3,))
    assert bench.sinks["a"].server.visible == [1, 2, 3]


def test_starts_before_the_first_batch_leave_few_records() -> None:
    bench = Bench(("a",), most_records=10)
    for _ in range(50):
        bench.restart()
        assert len(bench.records) <= 11
    bench.run(0, rows=(1,))
    assert bench.sinks["a"].server.visible == [1]


# A log that was restored to an older state.


def test_a_log_restored_within_one_generation_is_refused() -> None:
    bench = Bench()
    bench.run(0)
    older = dict(bench.records)
    bench.run(1)
    newest = dict(bench.records)
    bench.records.clear()
    bench.records.update(older)
    with pytest.raises(LogMismatch, match=r"committed branch .* batch 1.* older state") as caught:
        bench.restart()
    assert caught.value.sink == "a"
    assert bench.records == older  # a refused driver writes nothing

    bench.records.update(newest)
    bench.restart()
    bench.run(2)


def test_a_log_restored_to_before_a_repair_is_refused() -> None:
    bench = Bench(("a",))
    lose_first(bench)
    bench.run(rows=(1, 2))
    kinds = [type(entry.record) for entry in MemoryLog(bench.records).entries()]
    for number in [n for n in bench.records if n >= kinds.index(Repaired)]:
        del bench.records[number]
    with pytest.raises(LogMismatch, match="older state"):
        bench.restart()


def test_a_driver_that_decides_during_a_take_over_is_no_proof_of_an_older_log() -> None:
    bench = Bench(("a",))
    bench.run(0)
    sink, asked = bench.sinks["a"], list[LogState]()

    def beyond(state: LogState) -> str | None:
        if not asked:
            bench.run(1)  # the driver before is still at work
        asked.append(state)
        return Sink.committed_beyond(sink, state)

    sink.committed_beyond = beyond  # type: ignore[method-assign]
    other = bench.driver()
    other.take_over("lock", query=lambda: "query-1", owner="there:2")
    assert len(asked) == 1 and max(other.state.batches) == 1


def test_a_system_restored_to_an_older_state_is_refused_until_its_loss_is_accepted() -> None:
    bench = Bench()
    bench.run(0)
    server = bench.sinks["a"].server
    backup = dict(server.branches)
    bench.run(1)
    server.branches.clear()
    server.branches.update(backup)
    written = dict(bench.records)
    with pytest.raises(LogMismatch, match=r"finished batch 1, .* has is 0: the system") as caught:
        bench.restart()
    assert caught.value.sink == "a"
    assert "--batch 1 --sink a --accept-loss" in str(caught.value)
    assert bench.records == written
    log = MemoryLog(bench.records)
    log.load()
    log.append(OperatorDecided(1, OperatorDecision.ACCEPT_LOSS, ("a",), by="operator"))
    bench.restart()
    bench.run(2)
    bench.restart()


def test_a_system_that_knows_nothing_was_not_restored() -> None:
    bench = Bench()
    bench.run(0)
    bench.sinks["a"].server.branches.clear()  # or the sink now writes to another system
    bench.restart()
    bench.run(1)


def test_an_operator_who_accepted_a_loss_may_have_dropped_a_committed_branch() -> None:
    bench = Bench(("a",))
    bench.sinks["a"].answer = lambda receipt: BranchState.NO_WITNESS
    with pytest.raises(InDoubt):
        bench.run(rows=(1, 2))
    log = MemoryLog(bench.records)
    log.load()
    log.append(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("a",), by="operator"))
    for held in bench.sinks["a"].server.branches.values():
        held.state = BranchState.COMMITTED  # it had been, and nobody could tell
    bench.restart()
    bench.run(rows=(1, 2))
    bench.restart()
