"""Transactional ids: no two attempts of one batch share one, whatever else the Spark context runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from poundlock.core.model import Branch, Lane, Namespace, Transaction
from poundlock.sinks.kafka.branches import parse_transactional_id, transactional_id

LANES = (Lane(1), Lane(1, 1), Lane(1, 12), Lane(3))
WHERE = Transaction(Namespace("p", "00ff"), 3, 7, 1)


def ids(
    tasks: Iterable[int],
    *,
    held_ids: Iterable[str] = (),
    retry: int = 0,
    transaction: Transaction = WHERE,
) -> list[str]:
    """Return the ids of tasks. Other jobs took 999 ids of task attempts between each two of them."""
    held = frozenset(held_ids)
    return [
        transactional_id(Branch(transaction, "out", task, 1000 * task, retry, held))
        for task in tasks
    ]


def test_tasks_of_a_busy_context_have_different_ids() -> None:
    assert len(set(ids(range(3000)))) == 3000


def test_each_attempt_at_a_task_has_an_id_of_its_own() -> None:
    attempts = [ids(range(100), retry=retry) for retry in range(4)]
    assert len(set().union(*attempts)) == 400


def test_a_batch_uses_the_ids_of_the_batch_before() -> None:
    """So Kafka remembers few ids, and what was left open under one is aborted."""
    assert ids(range(10)) == ids(range(10), transaction=replace(WHERE, batch=8))


def test_no_id_of_an_earlier_lane_is_used() -> None:
    lanes = [ids(range(12), transaction=replace(WHERE, lane=lane)) for lane in LANES]
    assert len(set().union(*lanes)) == 48


@pytest.mark.parametrize("retry", [0, 1])
def test_a_repair_never_opens_an_id_that_a_decision_names(retry: int) -> None:
    """Opening it would abort the branch."""
    decided = ids(range(600)) + ids(range(600, 700), retry=1)
    replayed = ids(range(700), held_ids=decided, retry=retry)
    assert len(set(replayed)) == 700
    assert not {*replayed} & {*decided}
    assert not {*replayed} & {*ids(range(700), held_ids=decided, retry=1 - retry)}


def test_an_id_names_its_owner() -> None:
    (id_,) = ids([5], retry=2)
    assert parse_transactional_id(id_) == (Namespace("p", "00ff"), Lane(3), "out")
    assert id_ == "poundlock.p.00ff.3.out.0.5.2"
    assert parse_transactional_id(id_.removeprefix("poundlock")) is None
