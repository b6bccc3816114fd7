"""Drivers whose lives overlap: a fast one is replaced, and nothing of a replaced one stays open."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from fix_coordinator import Bench, Job, plan

from poundlock.core.job import Votes
from poundlock.core.model import Namespace, Repaired, Transaction
from poundlock.core.protocol import BranchState
from poundlock.errors import Fenced
from poundlock.spark.pipeline import batch as batching


def test_a_driver_that_writes_all_the_time_can_be_replaced() -> None:
    """It finishes batches while the systems are asked, so no answer is in time for its log."""
    bench = Bench(("a",))
    old, sink, batches = bench.coordinator, bench.sinks["a"], 0

    def run_one() -> None:
        nonlocal batches
        old.run(batches, plan(batches), Job(bench.sinks, (batches,)))
        batches += 1

    newest_generation, committed_beyond = sink.newest_generation, sink.committed_beyond

    def asked_slowly(namespace: Namespace) -> int:
        run_one()
        return newest_generation(namespace)

    sink.newest_generation = asked_slowly  # type: ignore[method-assign]
    sink.committed_beyond = lambda state: (run_one(), committed_beyond(state))[1]  # type: ignore
    run_one()
    bench.restart()
    assert bench.coordinator.generation.number == 2
    with pytest.raises(Fenced):
        run_one()


class Paused(Job):
    """A job whose tasks are paused while another driver takes over."""

    def __init__(self, bench: Bench):
        super().__init__(bench.sinks, (1, 2))
        self._bench = bench

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        self._bench.restart()
        return super().write(transaction, sinks, held_ids)


def test_an_idle_driver_aborts_what_the_driver_before_prepares_late() -> None:
    bench = Bench(("a",))
    with pytest.raises(Fenced):
        bench.coordinator.run(0, plan(0), Paused(bench))
    branches = bench.sinks["a"].server.branches.values()
    assert {held.state for held in branches} == {BranchState.PREPARED}
    bench.coordinator.idle()
    assert {held.state for held in branches} == {BranchState.PREPARED}, "it has just swept"
    bench.clock.now += bench.settings.sweep_every_s + 1
    bench.coordinator.idle()
    assert {held.state for held in branches} == {BranchState.ABORTED}


def test_a_close_does_not_sweep_while_a_batch_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be about to decide: then the sweep would abort what it decides."""
    monkeypatch.setattr(batching, "_LAST_BATCH_S", 0.0)
    bench = Bench(("a",))
    batches = batching.Batches(
        name="lock",
        coordinator=bench.coordinator,
        checkpoint=None,  # type: ignore[arg-type]
        sinks=[],
        dead_letters={},
        sources=[],
        stateful=False,
        prepare_timeout_s=None,
        observe=lambda step, facts: None,
        gate=None,  # type: ignore[arg-type]
    )
    checking, closed = threading.Event(), threading.Event()
    sink = bench.sinks["a"]
    check = sink.check

    def answered_late(receipts: object) -> list[str | None]:
        answer = check(receipts)  # type: ignore[arg-type]
        checking.set()
        assert closed.wait(60)
        return answer

    sink.check = answered_late  # type: ignore[method-assign,assignment]

    def run() -> None:
        with batches._busy:
            bench.run(0)

    thread = threading.Thread(target=run)
    thread.start()
    assert checking.wait(60)
    batches.close(sweep=True)
    closed.set()
    thread.join(60)
    assert sink.server.visible == [1, 2]
    assert Repaired not in bench.kinds()
