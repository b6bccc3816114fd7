"""What goes wrong, for every sink: a clear error, the batch aborted, nothing left behind.

After each trouble the batch is tried again without it, and must be there whole.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pytest

from poundlock.compliance import requirements as demands
from poundlock.compliance.fault import FAULTS, FaultCase
from poundlock.compliance.requirements import DONE, abort, branch, commit, counted, prepare, sink
from poundlock.compliance.subject import Subject
from poundlock.core.model import Branch, Fingerprint, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Rejected, Unavailable

__all__ = [  # the tests, and the fixture that they share
    "sink",
    "test_a_task_killed_after_prepare_is_done_again",
    "test_a_trouble_is_told_and_leaves_nothing",
]


TRIED = [it for it in FAULTS if it != "killed_task"]


@pytest.mark.parametrize("trouble", TRIED)
def test_a_trouble_is_told_and_leaves_nothing(
    subject: Subject, sink: Participant, trouble: str
) -> None:
    if is_excused(subject, trouble):
        return
    innocent = prepare(subject, sink, range(100, 103), task=40)
    with getattr(subject, trouble)(sink) as tried:
        assert isinstance(tried, FaultCase)
        using = tried.sink or sink
        try:
            error = met(subject, using, tried)
        finally:
            tried.over()
        subject.outcome(trouble, "goes on" if error is None else type(error).__name__)
        if tried.survived:
            assert error is None, f"{error!r}"
            assert commit(sink, [innocent]) == [DONE]
            assert subject.visible(sink) == counted([*range(10), 100, 101, 102])
            return
        assert isinstance(error, tried.kind), f"{error!r}"
        told = str(error)
        assert re.search(tried.says, told), told
        assert tried.hides not in told
        assert tried.hides not in repr(error.__cause__)
        check_nothing_left(subject, sink)
        check_nothing_left(subject, using)
        receipt = prepare(subject, using, range(10), attempt=2, task_attempt=50)
        assert using.check([receipt]) == [None]
        assert commit(using, [receipt]) == [DONE]
        assert subject.visible(using) == counted(range(10))
        if using is not sink:
            using.close()


def is_excused(subject: Subject, trouble: str) -> bool:
    """Tell whether a trouble cannot befall the sink, which must be explained."""
    if trouble not in subject.not_applicable:
        return False
    assert subject.not_applicable[trouble].endswith("."), "an excuse is a sentence that says why"
    return True


def check_nothing_left(subject: Subject, sink: Participant) -> None:
    """Abort the batch as the coordinator does, and look."""
    assert set(abort(sink, found_again(sink))) <= {BranchState.ABORTED}
    assert subject.visible(sink) == Counter()
    assert not subject.open(sink)


def found_again(sink: Participant) -> list[Stray]:
    """Look for what is open as the coordinator does: once more, where the connection was lost."""
    try:
        return sink.find(demands.OURS)
    except Unavailable:
        return sink.find(demands.OURS)


def met(subject: Subject, sink: Participant, tried: FaultCase) -> PoundlockError | None:
    """Run a batch into the trouble. Return what is said of it, by a task or before the decision."""
    try:
        if tried.make is not None:
            tried.make().close()
            return None
        receipts = [
            written(sink, task, batches, tried)
            for task, batches in enumerate(tried.tasks or [two(subject)])
        ]
        reasons = [reason for reason in sink.check(receipts) if reason]
        if reasons:
            raise Rejected(reasons[0], sink=sink.name)
        if tried.survived:
            assert commit(sink, receipts) == [DONE] * len(receipts)
    except PoundlockError as error:
        return error
    return None


def two(subject: Subject) -> list[pa.RecordBatch]:
    return [subject.rows(range(5)), subject.rows(range(5, 10))]


def written(
    sink: Participant, task: int, batches: Sequence[pa.RecordBatch], tried: FaultCase
) -> Receipt:
    """Write as a task does: what fails is given up."""
    there: Participant = pickle.loads(pickle.dumps(sink))
    writer = there.begin(branch(sink, task))
    try:
        for number, rows in enumerate(batches):
            writer.write(rows)
            if number == 0 and tried.during is not None:
                tried.during()
        prepared = writer.prepare()
    except BaseException:
        writer.abort()
        raise
    assert prepared is not None
    count = sum(rows.num_rows for rows in batches)
    receipt = Receipt(
        sink.name, prepared.id, task, Fingerprint(count, 0), prepared.handle,
        prepared.began_at, prepared.expires_at,
    )  # fmt: skip
    return sink.annotate([receipt])[0]


@pytest.mark.parametrize("trouble", ["killed_task"])
def test_a_task_killed_after_prepare_is_done_again(
    subject: Subject, sink: Participant, trouble: str
) -> None:
    if is_excused(subject, trouble):
        return
    task = multiprocessing.get_context("spawn").Process(
        target=prepare_and_die, args=(sink, branch(sink), subject.rows(range(10)))
    )
    task.start()
    task.join()
    assert task.exitcode == -signal.SIGKILL
    assert subject.open(sink)
    again = prepare(subject, sink, range(10), task_attempt=1, retry=1)
    strays = [stray for stray in sink.find(demands.OURS) if stray.id != again.id]
    if strays:  # what its own retry had to end is gone already
        assert abort(sink, strays) == [BranchState.ABORTED] * len(strays)
    assert commit(sink, [again]) == [DONE]
    assert subject.visible(sink) == counted(range(10))
    assert not subject.open(sink)


def prepare_and_die(sink: Participant, branch: Branch, rows: pa.RecordBatch) -> None:
    """Be a task that is killed before anybody has its receipt."""
    writer = sink.begin(branch)
    writer.write(rows)
    assert writer.prepare() is not None
    os.kill(os.getpid(), signal.SIGKILL)
