"""Rows kept beside the log: truncation is detected, and incomplete branches are swept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from poundlock.core.model import Branch, Json, Namespace, Receipt, Transaction
from poundlock.core.model import Fingerprint as Print
from poundlock.core.naming import BranchName
from poundlock.core.participant import Column, Commitment
from poundlock.core.protocol import BranchState
from poundlock.core.site import LocalSite
from poundlock.errors import InDoubt, LogMismatch, PermanentlyRefused, PoundlockError, Unavailable
from poundlock.sinks.rowstore import StoredBranches, _send

SPACE = Namespace("trial", "00")
ROWS = pa.RecordBatch.from_pydict({"n": list(range(1000))})


class Kept(StoredBranches):
    name, commitment = "kept", Commitment.LOGGED

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.index = "here"
        self.calls: list[int] = []  # tasks
        self.errors: dict[int, PoundlockError] = {}

    def project(self, columns: dict[str, Column]) -> dict[str, str]:  # type: ignore[override]
        return {}

    def target(self) -> dict[str, Json]:
        return {"index": self.index, "cluster": None}

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        self.calls.append(name.task_attempt)
        if name.task_attempt in self.errors:
            raise self.errors[name.task_attempt]
        for part in rows:
            self.sent += part.column("n").to_pylist()


@pytest.fixture
def sink(tmp_path: Path) -> Kept:
    made = Kept()
    made.attach(LocalSite(str(tmp_path)))
    return made


def prepare(sink: Kept, task: int = 0) -> Receipt:
    writer = sink.begin(Branch(Transaction(SPACE, 1, 0, 1), "kept", task, task))
    for _ in range(3):
        writer.write(ROWS)
    prepared = writer.prepare()
    assert prepared is not None
    return Receipt("kept", prepared.id, task, Print(3000, 1), prepared.handle)


def test_a_batch_is_not_divided_between_two_targets(sink: Kept) -> None:
    """The option that names the target was changed after the first branch was sent."""
    receipts = [prepare(sink, task) for task in (0, 1)]
    assert sink.commit(receipts[:1]) == [BranchState.COMMITTED]
    sink.index = "elsewhere"
    with pytest.raises(LogMismatch, match=r"decided for index here.*leads to elsewhere"):
        sink.commit(receipts)
    assert len(sink.calls) == 1
    assert sink.commit(receipts[:1]) == [BranchState.COMMITTED]  # what has ended stays so
    sink.index = "here"
    assert sink.commit(receipts) == [BranchState.COMMITTED] * 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_truncated_rows_are_not_sent(sink: Kept, tmp_path: Path, share: float) -> None:
    receipt = prepare(sink)
    (file,) = (tmp_path / "kept").glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InDoubt, match="are damaged"):
        sink.commit([receipt])
    assert sink.sent == []
    file.unlink()  # as the error advises
    assert sink.commit([receipt]) == [BranchState.ABORTED]


def test_truncation_at_a_message_boundary_is_detected(sink: Kept, tmp_path: Path) -> None:
    receipt = prepare(sink)
    (file,) = (tmp_path / "kept").glob("*.arrow")
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, ROWS.schema) as stream:
        stream.write_batch(ROWS)  # a stream can end after any message; nothing marks it as complete
    with pytest.raises(InDoubt, match="are damaged"):
        sink.commit([receipt])
    assert sink.sent == []


def test_a_sent_branch_is_not_sent_again_when_another_fails(sink: Kept) -> None:
    receipts = [prepare(sink, task) for task in range(4)]
    sink.errors = {1: PermanentlyRefused("never"), 2: Unavailable("busy")}
    for _ in range(2):
        with pytest.raises(Unavailable, match="busy"):  # a transient error is retried first
            sink.commit(receipts)
    del sink.errors[2]
    for _ in range(2):
        with pytest.raises(PermanentlyRefused) as raised:
            sink.commit(receipts)
        assert raised.value.branches == [receipts[1].id]
    assert sink.calls == [0, 1, 2, 3, 1, 2, 1, 2, 1]
    assert len(sink.sent) == 9000
    sink.errors = {}
    assert sink.commit(receipts) == [BranchState.COMMITTED] * 4


def test_a_task_that_died_while_writing_leaves_a_stray(sink: Kept, tmp_path: Path) -> None:
    writer = sink.begin(Branch(Transaction(SPACE, 1, 0, 1), "kept", 7, 7))
    writer.write(ROWS)
    strays = sink.find(SPACE)
    assert [(stray.state, stray.generation) for stray in strays] == [("unfinished", 1)]
    assert sink.abort(strays) == [BranchState.ABORTED]
    assert sink.find(SPACE) == []
    assert {file.suffix for file in (tmp_path / "kept").iterdir()} == {".aborted"}


def test_an_unexpected_exception_is_reported_by_its_type_only() -> None:
    """It is returned and not raised, or the others would be sent again. Its text may contain a row."""
    told = _fails(ZeroDivisionError("secret"))
    assert isinstance(told, InDoubt) and "ZeroDivisionError" in str(told)
    assert "secret" not in str(told)
    assert isinstance(_fails(FileNotFoundError(2, "gone")), Unavailable)


def _fails(error: Exception) -> object:
    def send(*_: object) -> None:
        raise error

    sink: Any = SimpleNamespace(send=send, row_store=SimpleNamespace(read=lambda name: iter(())))
    return _send(sink, "poundlock.p.00.1.out.0.1.0")


def test_dropped_rows_leave_no_witness(sink: Kept, tmp_path: Path) -> None:
    kept, *dropped = [prepare(sink, task).id for task in range(3)]
    sink.row_store.drop(dropped)
    assert list(sink.row_store.states()) == [kept]
    assert len(list((tmp_path / "kept").iterdir())) == 1
