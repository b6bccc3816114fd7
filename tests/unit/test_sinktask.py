"""Bad rows in a task are left out or written as dead letters. Good rows are written once."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Iterator
from unittest.mock import Mock

import pyarrow as pa
import pytest

from poundlock.core.model import Branch, Fingerprint, Namespace, Transaction
from poundlock.core.participant import PreparedBranch, Writer
from poundlock.core.taskerrors import Seal, TaskFailed
from poundlock.errors import BadRow, OutOfTime, PoundlockError, Rejected, Unavailable, UsageError
from poundlock.sinks.memory import Memory, MemorySystem, MemoryWriter
from poundlock.spark.failures import OPERATORS, operator_error
from poundlock.spark.pipeline.sinktask import SinkTask
from poundlock.spark.pipeline.task import WriteTask, read_votes

TRANSACTION = Transaction(Namespace("trial", "00"), 1, 7, 1)


class Picky(Memory):
    """A sink that refuses batches with odd numbers, and may name the bad rows."""

    names_rows = True

    def begin(self, branch: Branch) -> Writer:  # type: ignore[override]
        return PickyWriter(self, branch)


class PickyWriter(MemoryWriter):
    def write(self, rows: pa.RecordBatch) -> None:
        odd = {i: f"{n} is odd" for i, n in enumerate(rows.column("n").to_pylist()) if n % 2}
        if odd:
            assert isinstance(self._sink, Picky)
            raise BadRow("there are odd numbers", rows=odd if self._sink.names_rows else None)
        super().write(rows)


def branch(sink: str, *, tolerant: bool) -> Branch:
    return Branch(TRANSACTION, sink, 0, 0, tolerant=tolerant)


def columns(numbers: list[int | None]) -> tuple[pa.StructArray, pa.Array]:
    rows = [None if n is None else {"n": n} for n in numbers]
    structs = pa.array(rows, pa.struct([("n", pa.int64())]))
    return structs, pa.array([n and n * 1000 for n in numbers], pa.int64())


@pytest.fixture(params=[True, False], ids=["rows-named", "bisected"])
def picky(request: pytest.FixtureRequest) -> Picky:
    made = Picky("picky", MemorySystem())
    made.names_rows = request.param
    return made


def test_one_bad_row_fails_the_branch(picky: Picky) -> None:
    sink_task = SinkTask(picky, branch("picky", tolerant=False))
    with pytest.raises(BadRow) as caught:
        sink_task.take(*columns([2, 3]))
    # The task adds the place, which the sink did not give.
    assert (caught.value.sink, caught.value.transaction) == ("picky", str(TRANSACTION))


def test_an_earlier_error_does_not_count_as_a_bad_row(picky: Picky) -> None:
    def refuse(branch: Branch) -> Writer:
        raise BadRow("the role is gone")  # some drivers raise this error for it

    picky.begin = refuse  # type: ignore[method-assign]
    sink_task = SinkTask(picky, branch("picky", tolerant=True))
    with pytest.raises(BadRow, match="the role is gone"):
        sink_task.take(*columns([2, 4, 6]))
    assert sink_task.bad == 0


def test_bad_rows_are_left_out_and_counted(picky: Picky) -> None:
    sink_task = SinkTask(picky, branch("picky", tolerant=True))
    sink_task.take(*columns([2, 3, None, 4, 5, 6, 7, 8]))
    receipt = sink_task.prepare()
    assert receipt is not None
    assert picky.commit([receipt]) and sorted(r["n"] for r in picky.server.visible) == [2, 4, 6, 8]
    assert sink_task.bad == 3
    assert receipt.fingerprint == Fingerprint(4, 20_000)
    assert sink_task.offered == Fingerprint(7, 35_000), "a drain counts all rows and writes none"


def test_a_sink_can_report_one_bad_row_at_a_time() -> None:
    class First(PickyWriter):
        def write(self, rows: pa.RecordBatch) -> None:
            try:
                super().write(rows)
            except BadRow as error:
                raise BadRow("odd", rows=dict([next(iter(error.rows.items()))])) from None

    picky = Picky("picky", MemorySystem())
    picky.begin = lambda branch: First(picky, branch)  # type: ignore[method-assign]
    sink_task = SinkTask(picky, branch("picky", tolerant=True))
    sink_task.take(*columns([*range(1, 3001, 2), 2]))
    assert (sink_task.bad, sink_task.fingerprint.rows) == (1500, 1)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_task_that_may_run_once_refuses_a_second_run(
    monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    context = Mock(
        stageId=lambda: 0,
        partitionId=lambda: 0,
        taskAttemptId=lambda: 0,
        attemptNumber=lambda: attempt,
    )
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    sink = Memory("out", MemorySystem())
    rows, hashes = columns([1])
    task = WriteTask([sink], {}, TRANSACTION, frozenset({"out"}), at_most_once=True)
    batch = pa.RecordBatch.from_arrays([rows, hashes], names=["rows0", "hash0"])
    votes = [vote for answer in task(iter([batch])) for vote in answer.column(0).to_pylist()]
    if attempt:
        with pytest.raises(Rejected, match="at most once"):
            read_votes(votes)
        assert sink.server.branches == {}
    else:
        assert len(read_votes(votes)[0]) == 1


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_system_that_is_away_fails_the_task_unless_it_may_run_once(
    monkeypatch: pytest.MonkeyPatch, at_most_once: bool
) -> None:
    def begin(branch: Branch) -> Writer:
        raise Unavailable("no route to the host\n\tconnection {refused}")

    context = Mock(
        stageId=lambda: 0, partitionId=lambda: 0, taskAttemptId=lambda: 0, attemptNumber=lambda: 0
    )
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    sink = Memory("out", MemorySystem())
    sink.begin = begin  # type: ignore[method-assign]
    rows, hashes = columns([1])
    batch = pa.RecordBatch.from_arrays([rows, hashes], names=["rows0", "hash0"])
    task = WriteTask([sink], {}, TRANSACTION, frozenset({"out"}), at_most_once=at_most_once)
    if at_most_once:
        votes = [vote for answer in task(iter([batch])) for vote in answer.column(0).to_pylist()]
        with pytest.raises(Unavailable) as caught:
            read_votes(votes)
        error: object = caught.value
    else:
        with pytest.raises(TaskFailed) as failed:
            list(task(iter([batch])))
        text = (
            f"Job aborted: Task 0 failed 4 times: {type(failed.value)}: {failed.value}\n\tat org."
        )
        error = task.seal.find(text, Unavailable)
    assert isinstance(error, Unavailable)
    assert error.args == ("no route to the host\n\tconnection {refused}",)
    assert (error.sink, error.transaction) == ("out", str(TRANSACTION))


@pytest.mark.parametrize("token", ["", "0" * 32])
@pytest.mark.parametrize("kind", ["Unavailable", "UsageError", "InDoubt", "__name__"])
def test_a_row_in_the_text_of_an_error_is_not_taken_for_ours(kind: str, token: str) -> None:
    body = json.dumps({"kind": kind, "message": "run this", "transaction": None, "sink": None})
    seal = Seal()
    rows = (
        f"1\npoundlock-error: {body}\n",
        f"1\npoundlock-error {token} {body}\n",
        "1\npoundlock.errors.UsageError: run this\n",
    )
    for row in rows:
        text = f"cannot cast '{row}' to BIGINT"
        assert seal.find(text, PoundlockError) is None
        assert operator_error(RuntimeError(text)) is None


def test_only_errors_of_the_expected_kinds_are_taken() -> None:
    seal = Seal()
    text = f"Task 0 failed:\n{seal.text(UsageError('a {b} <c>', sink='out'))}\n\tat org."
    assert seal.find(text, Unavailable) is None
    found = seal.find(text, UsageError)
    assert found is not None and (str(found), found.sink) == ("[sink out] a {b} <c>", "out")
    assert Seal().find(text, UsageError) is None


def test_a_seal_is_the_same_in_the_tasks_and_never_shown() -> None:
    sent = pickle.loads(pickle.dumps(OPERATORS))
    assert sent == OPERATORS != Seal()
    assert OPERATORS.token not in repr(OPERATORS) and len(OPERATORS.token) == 32


def test_a_task_that_is_out_of_time_ends_at_once_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = Mock(
        stageId=lambda: 0, partitionId=lambda: 0, taskAttemptId=lambda: 0, attemptNumber=lambda: 0
    )
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    sink = Memory("out", MemorySystem(), clock=lambda: now[0])
    sink.time_out_s = 60.0
    rows, hashes = columns([1, 2])
    batch = pa.RecordBatch.from_arrays([rows, hashes], names=["rows0", "hash0"])
    read: list[float] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(100):
            read.append(now[0])
            yield batch
            now[0] += 20

    task = WriteTask([sink], {}, TRANSACTION, frozenset({"out"}), least_time_left_s=10.0)
    votes = [vote for answer in task(batches()) for vote in answer.column(0).to_pylist()]
    with pytest.raises(OutOfTime) as caught:
        read_votes(votes)
    assert "has taken 60 s for 8 rows so far" in str(caught.value)
    assert "may stay open for 60 s, of which a commit may need 10 s" in str(caught.value)
    assert (caught.value.sink, caught.value.transaction) == ("out", str(TRANSACTION))
    assert len(read) == 4 and sink.server.branches == {}, "the rest is not read"


def test_bad_rows_are_written_as_dead_letters_in_their_own_branch(picky: Picky) -> None:
    dead = Memory("dead", MemorySystem())
    dead_letters = SinkTask(dead, branch("dead", tolerant=False))
    sink_task = SinkTask(picky, branch("picky", tolerant=True), dead_letters)
    sink_task.take(*columns([1, 2, 3]))
    receipts = [sink_task.prepare(), dead_letters.prepare()]
    assert dead.commit([receipts[1]])  # type: ignore[list-item]
    found = sorted(dead.server.visible, key=lambda dead_letter: dead_letter["row"])
    assert [json.loads(dead_letter["row"]) for dead_letter in found] == [{"n": 1}, {"n": 3}]
    assert {(x["pipeline"], x["batch"], x["sink"]) for x in found} == {("trial", 7, "picky")}
    assert all("odd" in dead_letter["error"] for dead_letter in found)
    assert receipts[1].fingerprint == Fingerprint(2, 4000)  # type: ignore[union-attr]
    assert dead_letters.offered == Fingerprint(), "dead letters are known only after writing"


def test_a_branch_with_only_bad_rows_is_not_prepared(picky: Picky) -> None:
    sink_task = SinkTask(picky, branch("picky", tolerant=True))
    sink_task.take(*columns([1, 3]))
    assert sink_task.prepare() is None
    assert picky.server.branches == {}


def test_a_task_without_a_branch_only_counts_rows(picky: Picky) -> None:
    sink_task = SinkTask(picky, None)
    sink_task.take(*columns([1, 2]))
    assert sink_task.prepare() is None
    assert sink_task.offered.rows == 2


# Later than Python's last year.
FAR = pa.scalar(2 * 253_402_300_800_000_000).cast(pa.timestamp("us"))
# Spark does not check that a string is UTF-8.
BROKEN = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())[0]


def nested(value: pa.Scalar) -> pa.Scalar:
    struct = pa.StructArray.from_arrays([pa.array([value], value.type)], names=["t"])
    return pa.ListArray.from_arrays([0, 1], struct)[0]


def in_berlin(microseconds: int) -> pa.Scalar:
    """Return a timestamp. Before 1893, Berlin's offset had seconds, which Arrow does not spell."""
    return pa.scalar(microseconds).cast(pa.timestamp("us", "Europe/Berlin"))


# Later than the last year that Arrow can spell.
FARTHEST = pa.scalar(2**63 - 1).cast(pa.timestamp("us"))
NESTED_FARTHEST = nested(FARTHEST.cast(pa.timestamp("us", "Europe/Berlin")))
NESTED_FAR, NESTED_BROKEN = nested(FAR), nested(BROKEN)
# A null struct of a field that is never null, as Spark has it.
NO_STRUCT = pa.StructArray.from_arrays(
    [pa.array([None], pa.int32())],
    fields=[pa.field("n", pa.int32(), nullable=False)],
    mask=pa.array([True]),
)[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (pa.scalar(b"abc"), "abc"),
        (pa.scalar(b"\xff"), "base64:/w=="),
        (pa.scalar(1.5), 1.5),
        (NO_STRUCT, None),
        (nested(NO_STRUCT), [{"t": None}]),
        (NESTED_FAR, [{"t": "18029-12-31 00:00:00.000000"}]),
        (BROKEN, "base64:/w=="),
        (NESTED_BROKEN, [{"t": "base64:/w=="}]),
        (FAR, "18029-12-31 00:00:00.000000"),
        (in_berlin(1_800_000_000_000_000), "2027-01-15 09:00:00.000000+0100"),
        (in_berlin(-3_786_825_599_999_999), "1850-01-01 00:00:00.000001Z"),
        (nested(in_berlin(-3_786_825_599_999_999)), [{"t": "1850-01-01 00:00:00.000001Z"}]),
        (FARTHEST, "294247-01-10 04:00:54.775807"),
        (NESTED_FARTHEST, [{"t": "294247-01-10 04:00:54.775807Z"}]),
        (pa.scalar(2**31 - 1, pa.int32()).cast(pa.date32()), "5881580-07-11"),
        (pa.scalar(-(2**31), pa.int32()).cast(pa.date32()), "-5877641-06-23"),
        (pa.scalar(datetime.date(2026, 1, 31)), "2026-01-31"),
    ],
)
def test_a_dead_letter_contains_any_value(value: pa.Scalar, text: object) -> None:
    dead, sink = Memory("dead", MemorySystem()), Refusing("refusing", MemorySystem())
    dead_letters = SinkTask(dead, branch("dead", tolerant=False))
    sink_task = SinkTask(sink, branch("refusing", tolerant=True), dead_letters)
    rows = pa.StructArray.from_arrays([pa.array([value], value.type)], names=["v"])
    sink_task.take(rows, pa.array([1]))
    assert dead_letters.prepare() is not None
    found = next(iter(dead.server.branches.values())).rows
    assert json.loads(found[0]["row"]) == {"v": text}


class Refusing(Memory):
    def begin(self, branch: Branch) -> Writer:  # type: ignore[override]
        return Refuses()


class Refuses(Writer):
    def write(self, rows: pa.RecordBatch) -> None:
        raise BadRow("no")

    def prepare(self) -> PreparedBranch | None:
        raise AssertionError

    def abort(self) -> None:
        pass
