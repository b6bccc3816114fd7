"""Transactional ids: a bounded set, without those that a decided batch still holds."""

from __future__ import annotations

import pytest

from poundlock.core.model import Branch, Namespace, Transaction
from poundlock.errors import NoFreeId
from poundlock.sinks.kafka.branches import parse_transactional_id, transactional_id

WHERE = Transaction(Namespace("p", "00ff"), 3, 7, 1)


def ids(held_ids: frozenset[str] = frozenset(), tasks: int = 20, bound: int = 8) -> list[str]:
    return [
        transactional_id(Branch(WHERE, "out", task, task, held_ids=held_ids), bound)
        for task in range(tasks)
    ]


def test_tasks_of_a_batch_have_different_ids_while_enough_are_free() -> None:
    assert len(set(ids(tasks=8))) == 8
    assert len(set(ids(tasks=20))) == 8
    assert {parse_transactional_id(id_) for id_ in ids()} == {(Namespace("p", "00ff"), 3, "out")}


def test_an_id_that_a_decided_batch_holds_is_never_opened_again() -> None:
    """Opening it would abort a decided branch."""
    held = frozenset(ids(tasks=8)[:6])
    chosen = ids(held)
    assert len(set(chosen)) == 2
    assert not held & set(chosen)


def test_a_lack_of_free_ids_is_reported_with_four_remedies() -> None:
    with pytest.raises(NoFreeId) as caught:
        ids(frozenset(ids(tasks=8)))
    message = str(caught.value)
    for cure in ("Let those finish", "raise transactional_ids=", "fewer tasks", "commits faster"):
        assert cure in message
    assert "[p batch 7" in message or str(WHERE) in message
