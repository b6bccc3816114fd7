"""Tests of faults for every sink: the error is clear, the batch is aborted, and nothing is left.

After each fault the batch runs again without it, and its output must be complete.
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

from poundlock.compliance import requirements
from poundlock.compliance.fault import FAULTS, FaultCase
from poundlock.compliance.requirements import (
    DONE,
    abort,
    branch,
    commit,
    counted,
    prepare,
    receipt_of,
    sink,
)
from poundlock.compliance.subject import Subject
from poundlock.core.model import Branch, Fingerprint, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Rejected, Unavailable

__all__ = [  # the tests, and the fixture that they share
    "sink",
    "test_a_fault_is_reported_and_leaves_nothing",
    "test_a_task_killed_after_prepare_is_retried",
]


TRIED = [it for it in FAULTS if it != "killed_task"]


@pytest.mark.parametrize("fault", TRIED)
def test_a_fault_is_reported_and_leaves_nothing(
    subject: Subject, sink: Participant, fault: str
) -> None:
    if is_not_applicable(subject, fault):
        return
    other = prepare(subject, sink, range(100, 103), task=40)
    with getattr(subject, fault)(sink) as case:
        assert isinstance(case, FaultCase)
        using = case.sink or sink
        try:
            error = run_into(subject, using, case)
        finally:
            case.over()
        subject.outcome(fault, "goes on" if error is None else type(error).__name__)
        if case.survived:
            assert error is None, f"{error!r}"
            assert commit(sink, [other]) == [DONE]
            assert subject.visible(sink) == counted([*range(10), 100, 101, 102])
            return
        assert isinstance(error, case.kind), f"{error!r}"
        message = str(error)
        assert re.search(case.says, message), message
        assert case.hides not in message
        assert case.hides not in repr(error.__cause__)
        check_nothing_left(subject, sink)
        check_nothing_left(subject, using)
        receipt = prepare(subject, using, range(10), attempt=2, task_attempt=50)
        assert using.check([receipt]) == [None]
        assert commit(using, [receipt]) == [DONE]
        assert subject.visible(using) == counted(range(10))
        if using is not sink:
            using.close()


def is_not_applicable(subject: Subject, fault: str) -> bool:
    """Return whether the subject says that a fault cannot happen to the sink, and why."""
    if fault not in subject.not_applicable:
        return False
    assert subject.not_applicable[fault].endswith("."), "the reason must be a sentence"
    return True


def check_nothing_left(subject: Subject, sink: Participant) -> None:
    """Abort the batch as the coordinator does, and check that nothing is left."""
    assert set(abort(sink, find_strays(sink))) <= {BranchState.ABORTED}
    assert subject.visible(sink) == Counter()
    assert not subject.open(sink)


def find_strays(sink: Participant) -> list[Stray]:
    """Find open branches as the coordinator does. It repeats the call if the connection was lost."""
    try:
        return sink.find(requirements.OURS)
    except Unavailable:
        return sink.find(requirements.OURS)


def run_into(subject: Subject, sink: Participant, case: FaultCase) -> PoundlockError | None:
    """Run a batch into the fault. Return the error of a task or of the check before the decision."""
    try:
        if case.make is not None:
            case.make().close()
            return None
        receipts = [
            write(sink, task, batches, case)
            for task, batches in enumerate(case.tasks or [two_batches(subject)])
        ]
        reasons = [reason for reason in sink.check(receipts) if reason]
        if reasons:
            raise Rejected(reasons[0], sink=sink.name)
        if case.survived:
            assert commit(sink, receipts) == [DONE] * len(receipts)
    except PoundlockError as error:
        return error
    return None


def two_batches(subject: Subject) -> list[pa.RecordBatch]:
    return [subject.rows(range(5)), subject.rows(range(5, 10))]


def write(
    sink: Participant, task: int, batches: Sequence[pa.RecordBatch], case: FaultCase
) -> Receipt:
    """Write as a task does. If it fails, the writer aborts."""
    there: Participant = pickle.loads(pickle.dumps(sink))
    writer = there.begin(branch(sink, task))
    try:
        for number, rows in enumerate(batches):
            writer.write(rows)
            if number == 0 and case.during is not None:
                case.during()
        prepared = writer.prepare()
    except BaseException:
        writer.abort()
        raise
    assert prepared is not None
    count = sum(rows.num_rows for rows in batches)
    return receipt_of(sink, task, prepared, Fingerprint(count, 0))


@pytest.mark.parametrize("fault", ["killed_task"])
def test_a_task_killed_after_prepare_is_retried(
    subject: Subject, sink: Participant, fault: str
) -> None:
    if is_not_applicable(subject, fault):
        return
    task = multiprocessing.get_context("spawn").Process(
        target=prepare_and_die, args=(sink, branch(sink), subject.rows(range(10)))
    )
    task.start()
    task.join()
    assert task.exitcode == -signal.SIGKILL
    assert subject.open(sink)
    again = prepare(subject, sink, range(10), task_attempt=1, retry=1)
    strays = [stray for stray in sink.find(requirements.OURS) if stray.id != again.id]
    if strays:  # unless its own retry has already ended them
        assert abort(sink, strays) == [BranchState.ABORTED] * len(strays)
    assert commit(sink, [again]) == [DONE]
    assert subject.visible(sink) == counted(range(10))
    assert not subject.open(sink)


def prepare_and_die(sink: Participant, branch: Branch, rows: pa.RecordBatch) -> None:
    """Run a task that is killed before its receipt is sent."""
    writer = sink.begin(branch)
    writer.write(rows)
    assert writer.prepare() is not None
    os.kill(os.getpid(), signal.SIGKILL)
