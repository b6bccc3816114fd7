"""A log that is new though its pipeline is known: it was deleted together with its checkpoint."""

from __future__ import annotations

import pytest
from fix_coordinator import Bench, Sink

from poundlock.core.coordinator import Coordinator
from poundlock.core.log import MemoryLog
from poundlock.core.model import Branch, Transaction
from poundlock.errors import LogMismatch


def test_a_new_log_of_a_pipeline_that_has_committed_is_refused() -> None:
    bench = Bench()
    bench.run(0)
    first = bench.coordinator.generation.namespace.identity
    bench.records.clear()
    says = rf"to a, b with another log, {first}, .* set abandon_log=\['{first}'\]"
    with pytest.raises(LogMismatch, match=says):
        bench.restart()
    assert not bench.records  # a refused driver writes nothing


def test_a_pipeline_that_abandons_a_log_is_refused_after_the_next_deletion() -> None:
    bench = Bench()
    bench.run(0)
    first = bench.coordinator.generation.namespace.identity
    bench.records.clear()
    bench.clock.sleep(60)  # identities begin with the time

    def start() -> None:
        bench.coordinator = bench.driver()
        bench.coordinator.take_over(
            "lock", query=lambda: "query-1", owner="here:2", abandoned={first}
        )

    start()
    bench.run(0)
    start()
    bench.run(1)
    second = bench.coordinator.generation.namespace.identity
    bench.records.clear()
    with pytest.raises(LogMismatch, match=rf"abandon_log=\['{first}', '{second}'\]"):
        start()


def test_a_new_log_of_a_pipeline_that_never_committed_is_accepted() -> None:
    bench = Bench()
    bench.coordinator.sinks["a"].begin(
        Branch(Transaction(bench.coordinator.generation.namespace, 1, 0, 1), "a", 0, 0)
    ).prepare()
    bench.records.clear()
    bench.restart()
    bench.run(0)
    other = Coordinator(MemoryLog(), bench.sinks)
    other.take_over("lock-2", query=lambda: None, owner="here:2")


def test_a_log_that_begins_during_a_take_over_is_no_proof_of_a_deleted_one() -> None:
    bench = Bench(("a",))
    sink, asked = bench.sinks["a"], list[str]()
    bench.records.clear()
    late, bench.coordinator = bench.driver(), bench.driver()

    def logs_of(pipeline: str) -> frozenset[str]:
        if not asked:
            asked.append(pipeline)
            bench.take_over()  # another driver begins the log at the same moment
            bench.run(0)
        return Sink.logs_of(sink, pipeline)

    sink.logs_of = logs_of  # type: ignore[method-assign]
    late.take_over("lock", query=lambda: "query-1", owner="there:2")
    assert late.generation.number == 2
