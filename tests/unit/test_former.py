"""Sinks that the log knows and the pipeline no longer has: swept by another sink, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_coordinator import Bench, Job, Sink, plan

from poundlock.core.log import FileLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    Opened,
    OperatorDecided,
    OperatorDecision,
    Place,
    Receipt,
)
from poundlock.core.participant import Semantic
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, LogMismatch, NotAuthorised, UsageError
from poundlock.sinks.memory import MemorySystem
from poundlock.txn.resolver import Resolver


class Died(Exception):
    """The driver is no more."""


class Placed(Sink):
    """A sink whose open branches are in the way of others."""

    refused = False

    def open_place(self) -> str:
        if self.refused:
            raise NotAuthorised("may not look")
        return f"server {id(self.server)}"


class Town(Bench):
    """Sinks `a` and `b` on one server, and `c` on another."""

    def __init__(self) -> None:
        super().__init__(())
        one, other = MemorySystem(), MemorySystem()
        self.servers = {"a": one, "b": one, "c": other}
        self.rename()
        self.restart()

    def rename(self, **names: str) -> None:
        """Give the sinks other names; an empty one removes the sink."""
        self.sinks.clear()
        for name, server in self.servers.items():
            if new := names.get(name, name):
                self.sinks[new] = Placed(new, self.clock)
                self.sinks[new].server = server

    def crash(self) -> None:
        """Die before the decision, with a branch open in each sink."""
        job = Job(self.sinks, (1,))
        self.coordinator._annotate = _die  # type: ignore[method-assign]
        with pytest.raises(Died):
            self.coordinator.run(0, plan(0), job)
        assert self.open() == sorted(self.sinks)

    def open(self) -> list[str]:
        """Return the sinks that have branches open, by the names that they had then."""
        servers = {id(server): server for server in self.servers.values()}.values()
        return sorted(
            id_.split("/")[1]
            for server in servers
            for id_, held in server.branches.items()
            if held.state is BranchState.PREPARED
        )


def _die(*given: object) -> list[Receipt]:
    raise Died


@pytest.mark.parametrize("new", ["d", ""], ids=["renamed", "removed"])
def test_a_former_sink_is_swept_by_another_of_its_place(new: str) -> None:
    town = Town()
    town.crash()
    town.rename(a=new)
    town.restart()
    assert town.open() == []
    town.run(rows=(1,))
    assert town.kinds().count(Decided) == 1


def test_a_downgraded_sink_sweeps_what_its_stronger_mode_left() -> None:
    town = Town()
    town.crash()
    town.sinks["c"].semantic = Semantic.AT_LEAST_ONCE
    town.restart()
    assert town.open() == []


def test_a_former_sink_that_no_other_reaches_is_refused() -> None:
    town = Town()
    town.crash()
    town.rename(c="")
    before = len(town.records)
    with pytest.raises(LogMismatch, match="sink 'c' may have left branches open") as refused:
        town.restart()
    assert "poundlock txn forget --log memory: --sink c" in str(refused.value)
    assert len(town.records) == before, "the former driver is not fenced"
    # Put back for one start:
    town.rename()
    town.restart()
    town.coordinator.end()
    town.rename(c="")
    town.restart()
    assert town.open() == []


def test_a_sink_that_may_not_look_and_opens_nothing_reaches_no_place() -> None:
    town = Town()
    town.crash()
    town.rename(c="d")
    assert isinstance(town.sinks["d"], Placed)
    town.sinks["d"].refused, town.sinks["d"].semantic = True, Semantic.NONE
    with pytest.raises(LogMismatch, match="sink 'c'"):
        town.restart()


def test_a_sink_that_now_leads_elsewhere_is_a_former_one() -> None:
    town = Town()
    town.crash()
    town.sinks["a"].server = MemorySystem()
    town.restart()
    assert town.open() == [], "b swept for it"
    town.sinks["c"].server = MemorySystem()
    with pytest.raises(LogMismatch, match="sink 'c'"):
        town.restart()


def test_former_sinks_are_swept_again_while_this_driver_runs() -> None:
    """A task of the former driver may open a branch after the first sweep."""
    town = Town()
    town.crash()
    town.rename(a="")
    town.restart()
    late = next(held for id_, held in town.servers["a"].branches.items() if "/a/" in id_)
    late.state = BranchState.PREPARED
    town.coordinator.sweep()
    assert town.open() == []


def test_a_driver_that_dies_after_its_take_over_leaves_the_former_sinks_to_the_next() -> None:
    town = Town()
    town.crash()
    town.rename(a="")
    town.restart()
    late = next(held for id_, held in town.servers["a"].branches.items() if "/a/" in id_)
    late.state = BranchState.PREPARED
    town.restart()
    assert town.open() == []


def test_branches_of_a_former_sink_that_a_decision_names_are_not_aborted() -> None:
    town = Town()
    town.sinks["a"].answer = lambda receipt: InDoubt("later")
    with pytest.raises(InDoubt):
        town.run(rows=(1,))
    town.rename(a="d")
    with pytest.raises(LogMismatch, match="the pipeline has no such sink"):
        town.restart()
    assert town.open() == ["a"]
    town.rename()
    town.restart()
    assert town.servers["a"].visible == [1, 1]


def test_the_places_are_logged_before_the_first_branch_and_once() -> None:
    town = Town()
    town.run(0, rows=(1,))
    town.run(1, rows=(2,))
    assert town.kinds() == [Generation, Opened, Decided, Finished, Decided, Finished]
    assert {place.sink for place in town.coordinator.state.places} == {"a", "b", "c"}
    town.restart()
    town.run(2, rows=(3,))
    assert town.kinds().count(Opened) == 1, "the log says it already"


def test_after_a_clean_end_any_sink_may_go() -> None:
    town = Town()
    town.run(rows=(1,))
    town.coordinator.end()
    town.coordinator.end()
    assert town.kinds().count(Opened) == 2 and town.coordinator.state.places == ()
    town.rename(a="", c="")
    town.restart()
    town.run(1, rows=(2,))


def test_after_a_failed_job_the_end_is_not_clean() -> None:
    """Its tasks may still run, and open branches after the last sweep."""
    town = Town()
    town.sinks["a"].refuse = "no"
    job = Job(town.sinks, (1,))
    job.fail = lambda attempt: UsageError("broken")
    with pytest.raises(UsageError):
        town.coordinator.run(0, plan(0), job)
    town.coordinator.end()
    assert {place.sink for place in town.coordinator.state.places} == {"a", "b", "c"}


def test_after_a_driver_that_may_still_run_the_end_is_not_clean() -> None:
    """Its tasks may open branches after the last sweep. The driver after that one ends cleanly."""
    town = Town()
    town.crash()
    alive = {"has_ended": lambda owner: False}
    town.coordinator = town.driver()
    town.coordinator.take_over("lock", query=lambda: "query-1", owner="there:2", **alive)
    town.coordinator.end()
    assert {place.sink for place in town.coordinator.state.places} == {"a", "b", "c"}
    town.restart()
    town.coordinator.end()
    assert town.coordinator.state.places == ()


def test_a_compaction_keeps_the_places() -> None:
    town = Town()
    town.settings = type(town.settings)(keep_batches=1)
    town.restart()
    for batch in range(5):
        town.run(batch, rows=(1,))
    before = town.coordinator.state.places
    assert town.coordinator.log.load().places == before != ()


# The operator says that it is over.


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    log = FileLog(str(tmp_path / "log"))
    log.append(Generation(1, Namespace("lock", "feed"), log.uri, "query", "here:1"))
    log.append(Opened((Place("a", "Memory", "1"), Place("c", "Memory", "2"))))
    return log


def test_an_operator_forgets_a_sink(log: FileLog) -> None:
    Resolver(log).forget("c")
    assert log.load().places == (Place("a", "Memory", "1"),)
    assert Resolver(log).audit().acts()[-1]["action"] == "forget"
    with pytest.raises(UsageError, match=r"knows no sink 'c' .* it knows a"):
        Resolver(log).forget("c")


def test_a_sink_with_decided_branches_is_not_forgotten(log: FileLog) -> None:
    receipt = Receipt("c", "branch", 0, Fingerprint(1, 1))
    log.append(Decided(0, 1, 1, "hash", (receipt,), {"c": Fingerprint(1, 1)}))
    with pytest.raises(UsageError, match=r"batch 0 is decided.*--sink c --accept-loss"):
        Resolver(log).forget("c")


def test_a_sink_whose_loss_was_accepted_can_be_forgotten(log: FileLog) -> None:
    """Its system is gone for good, so its decided branches are never committed."""
    receipt = Receipt("c", "branch", 0, Fingerprint(1, 1))
    log.append(Decided(0, 1, 1, "hash", (receipt,), {"c": Fingerprint(1, 1)}))
    log.append(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("c",), "operator"))
    Resolver(log).forget("c")
    assert log.load().places == (Place("a", "Memory", "1"),)
