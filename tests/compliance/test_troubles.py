"""What goes wrong, for every sink: a clear error, the batch aborted, nothing left behind.

After each trouble the batch is tried again without it, and must be there whole.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pytest

from poundlock.core.model import Fingerprint, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Rejected, Unavailable

from . import test_compliance as suite
from .conftest import SUBJECTS
from .subject import Subject
from .test_compliance import DONE, abort, branch, commit, counted, prepare
from .trouble import TROUBLES, Tried

sink = suite.sink  # the fixture


# `conftest` leaves out what cannot befall a sink.


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_excuse_is_explained(name: str) -> None:
    excuses = import_module(f".subject_{name}", __package__).EXCUSED
    assert excuses.keys() <= TROUBLES.keys()
    assert all(reason.endswith(".") for reason in excuses.values())


TRIED = [it for it in TROUBLES if it != "killed_task"]


def documented(label: str) -> dict[str, str]:
    """Read the line of a sink in docs/troubles.md: trouble to the word for what comes of it."""
    text = (Path(__file__).parents[2] / "docs" / "troubles.md").read_text()
    [line] = [it for it in text.splitlines() if it.startswith(f"| {label} |")]
    words = [word.strip() for word in line.strip("|").split("|")][1:]
    return dict(zip(TRIED, words, strict=True))


@pytest.mark.parametrize("name", [name for name, label in SUBJECTS.items() if label])
def test_the_table_shows_what_cannot_befall(name: str) -> None:
    excuses = import_module(f".subject_{name}", __package__).EXCUSED
    line = documented(str(SUBJECTS[name]))
    assert {trouble for trouble, word in line.items() if word == "-"} == set(excuses)


@pytest.mark.parametrize("trouble", TRIED)
def test_a_trouble_is_told_and_leaves_nothing(
    subject: Subject, sink: Participant, trouble: str, request: pytest.FixtureRequest
) -> None:
    innocent = prepare(subject, sink, range(100, 103), task=40)
    with getattr(subject, trouble)(sink) as tried:
        assert isinstance(tried, Tried)
        using = tried.sink or sink
        try:
            error = met(subject, using, tried)
        finally:
            tried.over()
        seen = "goes on" if error is None else type(error).__name__
        label = SUBJECTS[request.node.callspec.params["subject"]]
        assert documented(str(label))[trouble] == seen, f"{error!r}"
        if tried.survived:
            assert error is None, f"{error!r}"
            assert commit(sink, [innocent]) == [DONE]
            assert subject.visible(sink) == counted([*range(10), 100, 101, 102])
            return
        assert isinstance(error, tried.kind), f"{error!r}"
        told = str(error)
        assert re.search(tried.says, told), told
        assert tried.hides not in told and tried.hides not in repr(error.__cause__)
        check_nothing_left(subject, sink)
        check_nothing_left(subject, using)
        receipt = prepare(subject, using, range(10), attempt=2, task_attempt=50)
        assert using.check([receipt]) == [None]
        assert commit(using, [receipt]) == [DONE]
        assert subject.visible(using) == counted(range(10))
        if using is not sink:
            using.close()


def check_nothing_left(subject: Subject, sink: Participant) -> None:
    """Abort the batch as the coordinator does, and look."""
    assert set(abort(sink, found_again(sink))) <= {BranchState.ABORTED}
    assert subject.visible(sink) == Counter()
    assert not subject.open(sink)


def found_again(sink: Participant) -> list[Stray]:
    """Look for what is open as the coordinator does: once more, where the connection was lost."""
    try:
        return sink.find(suite.OURS)
    except Unavailable:
        return sink.find(suite.OURS)


def met(subject: Subject, sink: Participant, tried: Tried) -> PoundlockError | None:
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
    sink: Participant, task: int, batches: Sequence[pa.RecordBatch], tried: Tried
) -> Receipt:
    """Write as a task does: what fails is given up."""
    there: Participant = pickle.loads(pickle.dumps(sink))
    writer = there.begin(branch(sink, task))
    try:
        for number, rows in enumerate(batches):
            writer.write(rows)
            if number == 0 and tried.amid is not None:
                tried.amid()
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
    doomed = subprocess.run(
        [sys.executable, "-m", "tests.compliance.doomed"],
        input=pickle.dumps((sink, branch(sink), subject.rows(range(10)))),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert doomed.returncode == -signal.SIGKILL
    assert subject.open(sink)
    again = prepare(subject, sink, range(10), task_attempt=1, retry=1)
    strays = [stray for stray in sink.find(suite.OURS) if stray.id != again.id]
    if strays:  # what its own retry had to end is gone already
        assert abort(sink, strays) == [BranchState.ABORTED] * len(strays)
    assert commit(sink, [again]) == [DONE]
    assert subject.visible(sink) == counted(range(10))
    assert not subject.open(sink)
