"""An operator's abort, while the driver goes on: never of a branch that a decision names."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest
from fix_coordinator import Bench, Job, plan

from poundlock.cli import txn
from poundlock.core.inspector import Inspector, OpenBranch
from poundlock.core.log import MemoryLog
from poundlock.core.model import Decided, Namespace, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.errors import Fenced, NotAuthorised, PoundlockError, UsageError
from poundlock.sinks.memory import Memory
from poundlock.txn.audit import Trail
from poundlock.txn.resolver import Resolver


class Look(Inspector):
    """The system of a bench's sink, as an operator sees it."""

    system = "Memory"

    def __init__(self, sink: Memory):
        self._sink = sink

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        assert namespace is not None
        return [OpenBranch(namespace, stray) for stray in self._sink.find(namespace)]

    def participant(self, branch: Receipt | Stray) -> Participant:
        return self._sink


class Town:
    """A driver that holds a prepared, undecided branch, and an operator who looks at it."""

    def __init__(self) -> None:
        self.bench = Bench(("a",))
        self.sink = self.bench.sinks["a"]
        self.job = Job(self.bench.sinks, (1,))

    def operator(self) -> Resolver:
        log = MemoryLog(self.bench.records, clock=self.bench.clock)
        return Resolver(log, [Look(self.sink)])

    def run(self, before_decision: Callable[[], None]) -> None:
        """Run a batch, with something that happens when all is prepared."""
        check = self.sink.check

        def checked(receipts: list[Receipt]) -> list[str | None]:
            answer = check(receipts)
            before_decision()
            return answer

        self.sink.check = checked  # type: ignore[method-assign]
        self.bench.coordinator.run(0, plan(0), self.job)

    def states(self) -> list[BranchState]:
        return [it.state for it in self.sink.server.branches.values()]

    def only_id(self) -> str:
        [id_] = self.sink.server.branches
        return id_


@pytest.fixture
def town() -> Town:
    return Town()


def test_a_branch_decided_during_the_question_is_not_aborted(town: Town) -> None:
    operator = list[Resolver]()

    def ask() -> None:
        operator.append(town.operator())
        assert operator[0].abortable(town.only_id()).stray.id == town.only_id()

    def die(receipt: Receipt) -> None:
        raise SystemExit  # after the decision, before the commit

    town.sink.answer = die
    with pytest.raises(SystemExit):
        town.run(ask)
    with pytest.raises(UsageError, match="may not be aborted"):
        operator[0].abort(town.only_id())
    assert town.states() == [BranchState.PREPARED]
    town.sink.answer = lambda receipt: None
    town.bench.restart()
    assert town.states() == [BranchState.COMMITTED]


def test_a_driver_never_decides_for_a_branch_that_is_aborted(town: Town) -> None:
    with pytest.raises(Fenced):
        town.run(lambda: check_aborted(town))
    state = MemoryLog(town.bench.records).load()
    assert (state.batches, state.places) == ({}, town.bench.coordinator.state.places)


def check_aborted(town: Town) -> None:
    assert town.operator().abort(town.only_id()) is BranchState.ABORTED


def test_nothing_is_aborted_if_the_driver_decides_at_that_moment(town: Town) -> None:
    """The decision comes between the operator's last look into the log and the fence."""

    class Raced(MemoryLog):
        decide: Callable[[], None]

        def append(self, record: object) -> None:
            self.decide()
            super().append(record)  # type: ignore[arg-type]

    at = town.bench.coordinator
    votes = town.job.write(at._transaction(0, 1), frozenset(["a"]), {})
    id_ = votes.receipts[0].id
    log = Raced(town.bench.records, clock=town.bench.clock)
    generation = at.generation.number
    log.decide = lambda: at.log.append(
        Decided(0, 1, generation, "hash", votes.receipts, dict(votes.totals))
    )
    operator = Resolver(log, [Look(town.sink)])
    with pytest.raises(Fenced):
        operator.abort(id_)
    assert town.sink.server.branches[id_].state is BranchState.PREPARED
    assert Trail(log).read().acts()[0]["outcome"] == "refused: Fenced"


def test_a_branch_of_an_older_generation_is_aborted_without_a_fence(town: Town) -> None:
    def replace_driver() -> None:
        town.sink.find_error = NotAuthorised("no sweep")
        town.bench.driver().take_over("lock", query=lambda: "query-1", owner="new:1")

    with pytest.raises(PoundlockError):
        town.run(replace_driver)
    town.sink.find_error = None
    before = list(town.bench.records)
    operator = town.operator()
    assert not operator.stops_driver(operator.abortable(town.only_id()))
    assert operator.abort(town.only_id()) is BranchState.ABORTED
    assert list(town.bench.records) == before


def test_the_question_tells_that_a_driver_will_be_stopped(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def confirm(question: str) -> None:
        asked.append(question)
        raise click.Abort

    monkeypatch.setattr(txn, "confirm", confirm)
    monkeypatch.setattr(txn.Where, "resolver", lambda self: town.operator())

    def ask() -> None:
        with pytest.raises(click.Abort):
            txn.abort.main([town.only_id()], standalone_mode=False)

    town.run(ask)
    assert asked[0].endswith("of generation 1? A running driver will be stopped.")


def test_a_commit_is_judged_by_the_newest_log(town: Town) -> None:
    """The batch is finished while the operator thinks, and its id may be in use again."""
    operator = list[Resolver]()

    def answer(receipt: Receipt) -> None:
        if not operator:
            operator.append(town.operator())
            assert operator[0].state.held()

    town.sink.answer = answer
    town.run(lambda: None)
    with pytest.raises(UsageError, match="already finished"):
        operator[0].commit(town.only_id())
