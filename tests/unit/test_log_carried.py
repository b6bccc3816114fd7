"""A compaction that drops the records of all batches carries what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_log import decided, finished_batches, generation, opened, written

from poundlock.core.model import (
    Bound,
    Decided,
    Fingerprint,
    Finished,
    Json,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Repaired,
    Stray,
)
from poundlock.core.protocol import LastUse


def receipt(id_: str, **handle: Json) -> Receipt:
    return Receipt("out", id_, 0, Fingerprint(1, 1), handle)


def test_a_compaction_carries_the_batches_of_a_long_log(tmp_path: Path) -> None:
    """Records of starts between the batches would stay for ever otherwise."""
    log = written(tmp_path, generation(), Bound("query-1"), *finished_batches(4))
    log.append(OperatorDecided(3, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))
    empty = Decided(4, 1, 1, "hash-4", (), {"out": Fingerprint()})
    twice = (receipt("a"), receipt("b", epoch=7, written=[1]))
    for record in (
        empty,
        replace(decided(5), receipts=twice),
        OperatorDecided(5, OperatorDecision.ACCEPT_LOSS, ("out",), "me"),
        Repaired(5, 1, (("out", "a"),), ()),
        Finished(5),
    ):
        log.append(record)
    for number in range(2, 9):
        log.append(generation(number))
    before = {batch: log.state.batches[batch] for batch in (3, 4, 5)}
    assert log.compact(keep=3, most_records=10)
    assert (log.length, len(list(tmp_path.glob("*.json")))) == (1, 1)
    again = opened(tmp_path)
    assert again.state == log.state
    assert again.state.batches == {
        batch: replace(history, last=Finished) for batch, history in before.items()
    }
    assert again.state.last_use("out", "b") == LastUse(5, (("epoch", 7),))
    assert again.state.was_let_go(Stray("out", "a", 1, "open"))
    assert (again.state.batch_floor, again.state.query) == (3, "query-1")
    for record in (decided(6), Finished(6), decided(7), Finished(7)):
        again.append(record)
    assert again.compact(keep=2)
    assert set(opened(tmp_path).state.batches) == {6, 7}


def test_an_unfinished_batch_is_not_carried(tmp_path: Path) -> None:
    log = written(tmp_path, generation(), *finished_batches(2), decided(2), generation(2))
    log.compact(keep=3, most_records=1)
    (unfinished,) = opened(tmp_path).state.unfinished
    assert unfinished.receipts == decided(2).receipts
    log.append(Finished(2))
    assert log.compact(keep=3, most_records=1)
    assert opened(tmp_path).state.unfinished == []
    assert set(opened(tmp_path).state.batches) == {0, 1, 2}


@pytest.mark.parametrize("again", [False, True])
def test_the_plan_of_the_newest_batch_is_carried(tmp_path: Path, again: bool) -> None:
    """It may still be lost from the checkpoint. The plans before it are not asked for any more."""
    log = written(tmp_path, generation())
    for batch in range(3):
        log.append(replace(decided(batch), plan=f"plan of {batch}"))
        log.append(Finished(batch))
    for number in range(2, 6):
        log.append(generation(number))
    assert log.compact(keep=3, most_records=5)
    if again:
        log = opened(tmp_path)
        for number in range(6, 12):
            log.append(generation(number))
        assert log.compact(keep=3, most_records=5)
    for reader in (log, opened(tmp_path)):
        assert [reader.plan_of(batch) for batch in range(4)] == [None, None, "plan of 2", None]
        assert all(history.decided.plan is None for history in reader.state.batches.values())
    log.append(replace(decided(3), plan="plan of 3"))
    assert opened(tmp_path).plan_of(3) == "plan of 3"
