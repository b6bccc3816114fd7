"""The same tests for every sink, with its real server. The server's own view checks the results.

The classes are the five requirements that two-phase commit makes of a sink.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pytest

from poundlock.compliance.subject import Subject
from poundlock.core.model import (
    Branch,
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    Receipt,
    Stray,
    Transaction,
)
from poundlock.core.participant import Participant, PreparedBranch
from poundlock.core.protocol import BranchState, LogState
from poundlock.errors import Unavailable

__all__ = [  # the tests, and the fixture that they share
    "TestCommitsItIdempotently",
    "TestHoldsItPendingUntilTheDecision",
    "TestOpensATransactionForTheIntervalBetweenCheckpoints",
    "TestRestoresItAfterAFailure",
    "TestSurvivesItsOwnTimeOut",
    "sink",
    "test_a_copy_of_a_sink_carries_no_connection",
    "test_a_sink_ends_what_it_left_under_another_name",
    "test_rows_are_arrow_batches",
]

# Each test gets new ones from `sink`, because systems remember them.
OURS = SIMILAR = COPIED = Namespace("trial", "00")

DONE, LOST = BranchState.COMMITTED, BranchState.ABORTED


def branch(
    sink: Participant,
    task: int = 0,
    *,
    namespace: Namespace | None = None,
    generation: int = 1,
    batch: int = 0,
    attempt: int = 1,
    retry: int = 0,
    tolerant: bool = False,
    task_attempt: int | None = None,
) -> Branch:
    transaction = Transaction(namespace or OURS, generation, batch, attempt)
    number = task if task_attempt is None else task_attempt
    return Branch(transaction, sink.name, task, number, retry, tolerant=tolerant)


def prepare(
    subject: Subject, sink: Participant, numbers: Sequence[int], **where: object
) -> Receipt:
    """Write and prepare one branch as a task does, with a copy of the sink."""
    there: Participant = pickle.loads(pickle.dumps(sink))
    into = branch(sink, **where)  # pyright: ignore[reportArgumentType]
    writer = there.begin(into)
    half = len(numbers) // 2
    for part in (numbers[:half], numbers[half:]):
        if part:
            writer.write(subject.rows(part))
    prepared = writer.prepare()
    assert isinstance(prepared, PreparedBranch)
    receipt = receipt_of(sink, into.task, prepared, Fingerprint(len(numbers), sum(numbers)))
    # What the log keeps must be enough.
    return Receipt.from_json(receipt.to_json())  # type: ignore[arg-type]


def receipt_of(
    sink: Participant, task: int, prepared: PreparedBranch, fingerprint: Fingerprint
) -> Receipt:
    """Make the receipt of a prepared branch, as the driver does."""
    receipt = Receipt(
        sink=sink.name,
        id=prepared.id,
        task=task,
        fingerprint=fingerprint,
        handle=prepared.handle,
        began_at=prepared.began_at,
        expires_at=prepared.expires_at,
        system=sink.system,
    )
    return sink.annotate([receipt])[0]


def decision(batch: int, *receipts: Receipt) -> Decided:
    return Decided(batch, 1, 1, "", receipts, {})


def commit(sink: Participant, receipts: Sequence[Receipt]) -> list[BranchState]:
    """Commit as the coordinator does. It repeats the call until every branch has an outcome.

    A hidden branch is committed too. Readers see its rows when the transaction before it has ended.
    """
    states = _repeat(lambda: sink.commit(receipts))
    return [DONE if state is BranchState.HIDDEN else state for state in states]


def abort(sink: Participant, strays: Sequence[Stray]) -> list[BranchState]:
    return _repeat(lambda: sink.abort(strays))


def _repeat(act: Callable[[], list[BranchState]]) -> list[BranchState]:
    deadline = time.monotonic() + 60
    while {BranchState.PREPARED, BranchState.UNREACHABLE} & set(states := act()):
        assert time.monotonic() < deadline, states
        time.sleep(0.1)
    return states


def again(subject: Subject, sink: Participant) -> Participant:
    """Return another sink with the same target. The fixture closes it after the test."""
    _opened.append(subject.again(sink))
    return _opened[-1]


_opened: list[Participant] = []


def counted(numbers: Sequence[int]) -> Counter[int]:
    return Counter(numbers)


@pytest.fixture
def sink(subject: Subject) -> Iterator[Participant]:
    """A sink with an empty target, in a namespace that is new to its system."""
    global OURS, SIMILAR, COPIED
    OURS = Namespace.new("trial", time.time(), secrets.randbits(32))
    SIMILAR = Namespace("trial-2", OURS.identity)  # the same prefix and the same identity
    COPIED = Namespace("trial", OURS.identity + "0")
    made = subject.sink()
    yield made
    left = made.find(OURS)
    if left:
        abort(made, left)
    made.close()
    while _opened:
        _opened.pop().close()


class TestOpensATransactionForTheIntervalBetweenCheckpoints:
    def test_nothing_is_seen_before_the_commit(self, subject: Subject, sink: Participant) -> None:
        writer = sink.begin(branch(sink))
        writer.write(subject.rows(range(10)))
        assert subject.visible(sink) == Counter()
        assert writer.prepare() is not None
        assert subject.visible(sink) == Counter()
        assert subject.open(sink)

    def test_a_commit_shows_every_row_once(self, subject: Subject, sink: Participant) -> None:
        receipts = [
            prepare(subject, sink, range(10), task=0),
            prepare(subject, sink, range(10, 25), task=1),
        ]
        assert sink.check(receipts) == [None, None]
        assert commit(sink, receipts) == [DONE, DONE]
        assert subject.visible(sink) == counted(range(25))
        assert not subject.open(sink)

    def test_an_aborted_writer_leaves_nothing(self, subject: Subject, sink: Participant) -> None:
        writer = sink.begin(branch(sink))
        writer.write(subject.rows(range(10)))
        writer.abort()
        found = sink.find(OURS)
        if found:  # a task need not abort, because the sweep does
            abort(sink, found)
        assert subject.visible(sink) == Counter()
        assert not subject.open(sink)

    def test_successive_batches_are_committed(self, subject: Subject, sink: Participant) -> None:
        for batch in range(3):
            receipt = prepare(subject, sink, range(batch * 10, batch * 10 + 10), batch=batch)
            assert commit(sink, [receipt]) == [DONE]
        assert subject.visible(sink) == counted(range(30))


class TestHoldsItPendingUntilTheDecision:
    def test_a_branch_survives_its_writer(self, subject: Subject, sink: Participant) -> None:
        receipt = prepare(subject, sink, range(10))
        sink.close()
        assert again(subject, sink).check([receipt]) == [None]

    def test_a_branch_survives_a_killed_server(self, subject: Subject, sink: Participant) -> None:
        if not subject.has_server:
            assert sink.check([prepare(subject, sink, range(3))]) == [None]
            return
        receipt = prepare(subject, sink, range(10))
        with subject.killed():
            sink.close()
        later = again(subject, sink)
        assert later.check([receipt]) == [None]
        assert commit(later, [receipt]) == [DONE]
        assert subject.visible(later) == counted(range(10))

    def test_a_server_that_is_down_gives_no_answer(
        self, subject: Subject, sink: Participant
    ) -> None:
        if not subject.has_server:
            assert sink.find(OURS) == []
            return
        receipt = prepare(subject, sink, range(10))
        with subject.killed():
            try:
                states = sink.commit([receipt])
            except Unavailable:
                states = [BranchState.UNREACHABLE]
            assert states == [BranchState.UNREACHABLE]
            if subject.finds_without_server:
                assert [stray.id for stray in sink.find(OURS)] == [receipt.id]
            else:
                with pytest.raises(Unavailable):
                    sink.find(OURS)
        assert commit(again(subject, sink), [receipt]) == [DONE]
        assert subject.visible(sink) == counted(range(10))


class TestRestoresItAfterAFailure:
    def test_another_process_commits_by_the_receipt(
        self, subject: Subject, sink: Participant
    ) -> None:
        receipt = prepare(subject, sink, range(10))
        later = again(subject, sink)
        assert commit(later, [receipt]) == [DONE]
        assert subject.visible(later) == counted(range(10))

    def test_only_our_own_strays_are_found(self, subject: Subject, sink: Participant) -> None:
        mine = prepare(subject, sink, range(3))
        other = subject.sink("out-2")
        _opened.append(other)
        foreign = [
            prepare(subject, sink, range(10, 13), namespace=SIMILAR, task=1),
            prepare(subject, sink, range(20, 23), namespace=COPIED, task=2),
            prepare(subject, other, range(30, 33), task=3),
        ]
        found = sink.find(OURS)
        assert [(stray.id, stray.generation, stray.sink) for stray in found] == [
            (mine.id, 1, sink.name)
        ]
        assert abort(sink, found) == [LOST]
        assert sink.find(OURS) == []
        assert commit(sink, foreign[:1]) == [DONE]
        assert commit(sink, foreign[1:2]) == [DONE]
        assert commit(other, foreign[2:]) == [DONE]
        assert subject.visible(sink) == counted([10, 11, 12, 20, 21, 22])

    def test_a_retried_task_is_not_blocked_by_its_previous_attempt(
        self, subject: Subject, sink: Participant
    ) -> None:
        first = prepare(subject, sink, range(10), task_attempt=0)
        second = prepare(subject, sink, range(10), task_attempt=1, retry=1)
        assert first.id != second.id
        strays = [stray for stray in sink.find(OURS) if stray.id != second.id]
        if strays:
            assert abort(sink, strays) == [LOST]
        assert commit(sink, [second]) == [DONE]
        assert subject.visible(sink) == counted(range(10))
        assert not subject.open(sink)

    def test_the_newest_generation_is_remembered(self, subject: Subject, sink: Participant) -> None:
        assert sink.newest_generation(OURS) == 0
        old = prepare(subject, sink, range(3), generation=4)
        commit(sink, [old])
        assert again(subject, sink).newest_generation(OURS) == 4
        assert sink.newest_generation(SIMILAR) == 0

    def test_a_commit_that_the_log_does_not_know_is_reported(
        self, subject: Subject, sink: Participant
    ) -> None:
        log = LogState()
        log.apply(Generation(1, OURS, "file:/log", None, "here"))
        assert sink.committed_beyond(log) is None
        first = prepare(subject, sink, range(3))
        log.apply(decision(0, first))
        assert commit(sink, [first]) == [DONE]
        assert sink.committed_beyond(log) is None, "the batch is decided"
        log.apply(Finished(0))
        assert sink.committed_beyond(log) is None, "the batch is finished"
        prepare(subject, sink, range(3, 6), batch=1)
        assert sink.committed_beyond(log) is None, "the branch is open"
        assert abort(sink, sink.find(OURS)) == [LOST]
        assert sink.committed_beyond(log) is None, "the branch was aborted"
        second = prepare(subject, sink, range(3, 6), batch=1, attempt=2)
        assert commit(sink, [second]) == [DONE]
        assert again(subject, sink).committed_beyond(log) is not None
        log.apply(decision(1, second))
        assert sink.committed_beyond(log) is None
        foreign = LogState()
        foreign.apply(Generation(1, SIMILAR, "file:/log", None, "here"))
        assert sink.committed_beyond(foreign) is None

    def test_the_newest_commit_shows_whether_the_system_was_restored(
        self, subject: Subject, sink: Participant
    ) -> None:
        def newest() -> int | None:
            return again(subject, sink).newest_batch(OURS)

        assert newest() is None
        for batch in (0, 1):
            receipt = prepare(subject, sink, range(3 * batch, 3 * batch + 3), batch=batch)
            assert newest() == (0 if subject.remembers and batch else None), "the branch is open"
            assert commit(sink, [receipt]) == [DONE]
            assert newest() == (batch if subject.remembers else None)
        prepare(subject, sink, range(6, 9), batch=2)
        assert abort(sink, sink.find(OURS)) == [LOST]
        assert newest() == (1 if subject.remembers else None), "the branch was aborted"
        sink.prune(OURS, 1)
        assert newest() == (1 if subject.remembers else None), "the log still has batch 1"
        sink.prune(OURS, 100)
        assert newest() == (1 if subject.remembers else None), "the newer branch was aborted"
        assert again(subject, sink).newest_batch(SIMILAR) is None

    def test_each_log_of_a_pipeline_that_has_committed_is_remembered(
        self, subject: Subject, sink: Participant
    ) -> None:
        pipeline = f"logs-{secrets.token_hex(4)}"  # systems remember those of other tests
        ours = Namespace(pipeline, OURS.identity)
        later = Namespace.new(pipeline, time.time(), secrets.randbits(32))
        similar = Namespace.new(f"{pipeline}-2", time.time(), secrets.randbits(32))
        other = subject.sink("out-2")
        _opened.append(other)
        assert sink.logs_of(pipeline) == set()
        prepare(subject, sink, range(3), namespace=ours)
        assert abort(sink, sink.find(ours)) == [LOST]
        assert again(subject, sink).logs_of(pipeline) == set(), "the branch was aborted"
        foreign = prepare(subject, sink, range(3, 6), namespace=similar, task=1)
        assert commit(sink, [foreign]) == [DONE]
        assert sink.logs_of(pipeline) == set(), "it is another pipeline"
        for number, namespace in enumerate((ours, later), start=2):
            one = prepare(subject, sink, [3 * number], namespace=namespace, task=number, attempt=2)
            assert commit(sink, [one]) == [DONE]
        prepare(subject, sink, range(20, 23), namespace=ours, task=4, attempt=3)
        assert abort(sink, sink.find(ours)) == [LOST]
        known = {ours.identity, later.identity}
        assert again(subject, sink).logs_of(pipeline) == known
        sink.prune(ours, 100)
        assert sink.logs_of(pipeline) == known, "also if the sink had no rows for a long time"
        assert other.logs_of(pipeline) == set()


class TestCommitsItIdempotently:
    def test_a_second_commit_changes_nothing(self, subject: Subject, sink: Participant) -> None:
        receipt = prepare(subject, sink, range(10))
        assert commit(sink, [receipt]) == [DONE]
        assert commit(sink, [receipt]) == [DONE]
        assert commit(again(subject, sink), [receipt]) == [DONE]
        assert subject.visible(sink) == counted(range(10))

    def test_a_second_abort_changes_nothing(self, subject: Subject, sink: Participant) -> None:
        prepare(subject, sink, range(10))
        strays = sink.find(OURS)
        assert abort(sink, strays) == [LOST]
        assert abort(sink, strays) == [LOST]
        assert subject.visible(sink) == Counter()
        assert not subject.open(sink)

    def test_a_committed_branch_is_not_aborted(self, subject: Subject, sink: Participant) -> None:
        receipt = prepare(subject, sink, range(10))
        strays = sink.find(OURS)
        assert commit(sink, [receipt]) == [DONE]
        assert abort(sink, strays) == [DONE]
        assert subject.visible(sink) == counted(range(10))

    def test_the_witness_distinguishes_committed_from_aborted_branches(
        self, subject: Subject, sink: Participant
    ) -> None:
        committed = prepare(subject, sink, range(3), task=0)
        aborted = prepare(subject, sink, range(3, 6), task=1)
        assert commit(sink, [committed]) == [DONE]
        assert abort(sink, sink.find(OURS)) == [LOST]
        later = again(subject, sink)
        assert commit(later, [committed]) == [DONE]
        expected = BranchState.NO_WITNESS if subject.forgets_aborted else LOST
        assert commit(later, [aborted]) == [expected]
        assert subject.visible(sink) == counted(range(3))


class TestSurvivesItsOwnTimeOut:
    def test_a_branch_undone_by_an_operator_is_proven_lost(
        self, subject: Subject, sink: Participant
    ) -> None:
        if not subject.can_lose:
            pytest.fail("the subject must implement lose(), or explain why can_lose is false")
        first = prepare(subject, sink, range(10), task=0)
        subject.lose(sink, first)
        assert sink.check([first]) != [None]
        assert commit(sink, [first]) == [LOST]
        # It stays lost, because the witness is final. A replay replaces it.
        assert commit(again(subject, sink), [first]) == [LOST]
        replay = prepare(subject, sink, range(10), task=0, attempt=2, task_attempt=7)
        assert commit(sink, [replay]) == [DONE]
        assert subject.visible(sink) == counted(range(10))

    def test_old_witnesses_are_pruned_and_new_ones_are_kept(
        self, subject: Subject, sink: Participant
    ) -> None:
        receipts = [
            prepare(subject, sink, [number], batch=number, task=number) for number in range(4)
        ]
        for receipt in receipts:
            assert commit(sink, [receipt]) == [DONE]
        sink.prune(OURS, 2)
        assert commit(sink, receipts[2:]) == [DONE, DONE]
        # The log never asks for pruned branches. If it did, no witness would answer.
        remembered = DONE in commit(sink, receipts[:2])
        assert remembered != subject.prunes
        sink.prune(OURS, 100)
        assert sink.newest_generation(OURS) == 1, "also for a sink that had no rows for a long time"
        assert subject.visible(sink) == counted(range(4))


def test_a_sink_ends_what_it_left_under_another_name(subject: Subject, sink: Participant) -> None:
    """It was renamed while it had a branch open."""
    former = again(subject, sink).standing_in("former")
    _opened.append(former)
    assert (sink.open_place() != "", former.open_place()) == (subject.has_place, sink.open_place())
    if not subject.has_place:
        return
    left, kept = prepare(subject, former, [1, 2]), prepare(subject, sink, [3])
    stand_in = sink.standing_in("former")
    _opened.append(stand_in)
    strays = stand_in.find(OURS)
    assert [(stray.sink, stray.id) for stray in strays] == [("former", left.id)]
    assert abort(stand_in, strays) == [LOST]
    assert stand_in.find(OURS) == []
    assert commit(former, [left]) == [LOST]
    assert commit(sink, [kept]) == [DONE]
    assert subject.visible(sink) == counted([3])


def test_a_copy_of_a_sink_carries_no_connection(subject: Subject, sink: Participant) -> None:
    sink.find(OURS)
    copy: Participant = pickle.loads(pickle.dumps(sink))
    _opened.append(copy)
    assert copy.name == sink.name
    assert copy.find(OURS) == []


def test_rows_are_arrow_batches(subject: Subject) -> None:
    assert isinstance(subject.rows([1]), pa.RecordBatch)
