"""The protocol as tables and pure functions: no clock, no thread, no I/O, no randomness.

Rules of this file: whatever the coordinator may do is decided here, from values alone; every state and
every transition is in a table below, and nowhere else.

Theory of operation. A batch has no record, is decided, or is finished (`Stage`). Each of its branches
stands somewhere in its own system (`BranchState`). `RECOVERY` says what to do for each pair; the
coordinator asks it after a crash and in normal running alike, for a batch that was never interrupted
is only a recovery with nothing to recover from. Abort is presumed: a branch that no decision names
is aborted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    Generation,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Record,
    Repaired,
    Stray,
    total,
)
from poundlock.errors import LogCorrupt, LogMismatch


class Stage(Enum):
    """How far the log knows a batch."""

    NONE = "none"
    DECIDED = "decided"
    FINISHED = "finished"


class BranchState(Enum):
    """Where a branch stands, as its own system proves it."""

    PREPARED = "prepared"
    COMMITTED = "committed"  # the witness says so
    ABORTED = "aborted"  # the witness proves it
    NO_WITNESS = "no witness"  # the system answers, but cannot tell
    UNREACHABLE = "unreachable"


class Action(Enum):
    """What the coordinator does about a branch."""

    ABORT = "abort"
    COMMIT = "commit"
    DONE = "done"  # this branch is finished; the batch is when all are
    REPAIR = "repair"  # lost after the decision
    NOTHING = "nothing"
    RETRY = "retry"
    STOP = "stop"  # cannot be, or cannot be known: a person must look


# The table that recovers. One row per stage, one column per state of the branch.
RECOVERY: Mapping[Stage, Mapping[BranchState, Action]] = {
    Stage.NONE: {
        BranchState.PREPARED: Action.ABORT,
        BranchState.COMMITTED: Action.STOP,
        BranchState.ABORTED: Action.NOTHING,
        BranchState.NO_WITNESS: Action.NOTHING,
        BranchState.UNREACHABLE: Action.RETRY,
    },
    Stage.DECIDED: {
        BranchState.PREPARED: Action.COMMIT,
        BranchState.COMMITTED: Action.DONE,
        BranchState.ABORTED: Action.REPAIR,
        BranchState.NO_WITNESS: Action.STOP,
        BranchState.UNREACHABLE: Action.RETRY,
    },
    Stage.FINISHED: {
        BranchState.PREPARED: Action.STOP,
        BranchState.COMMITTED: Action.NOTHING,
        BranchState.ABORTED: Action.STOP,
        BranchState.NO_WITNESS: Action.NOTHING,
        BranchState.UNREACHABLE: Action.NOTHING,
    },
}

# Which record may follow which in the story of one batch.
FOLLOWS: Mapping[type[Record] | None, frozenset[type[Record]]] = {
    None: frozenset({Decided}),
    Decided: frozenset({Repaired, OperatorDecided, Finished}),
    Repaired: frozenset({Repaired, OperatorDecided, Finished}),
    OperatorDecided: frozenset({Repaired, OperatorDecided, Finished}),
    Finished: frozenset({OperatorDecided}),  # only to accept that a replay computed another state
}


class Step(Enum):
    """The steps of a batch's life that can be watched. Each stands before or after one effect."""

    TAKING_OVER = "taking-over"
    TOOK_OVER = "took-over"
    ENTERED = "entered"
    SWEEPING = "sweeping"
    SWEPT = "swept"
    WRITING = "writing"
    PREPARED = "prepared"
    CHECKED = "checked"
    DECIDING = "deciding"
    DECIDED = "decided"
    COMMITTING = "committing"
    COMMITTED_ONE = "committed-one"
    COMMITTED = "committed"
    REPAIRING = "repairing"
    REPAIRED = "repaired"
    FINISHING = "finishing"
    FINISHED = "finished"
    DRAINING = "draining"
    DRAINED = "drained"
    HANDING_BACK = "handing-back"
    HANDED_BACK = "handed-back"
    RETURNING = "returning"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class BatchHistory:
    """What the log says of one batch."""

    decided: Decided
    receipts: tuple[Receipt, ...]  # as decided, with repaired ones in place of the lost
    last: type[Record] = Decided
    operator_decision: OperatorDecision | None = None

    @property
    def stage(self) -> Stage:
        # A decision over no branch is finished as it is made: an empty batch costs one record.
        done = self.last is Finished or not self.receipts
        return Stage.FINISHED if done else Stage.DECIDED


@dataclass(slots=True)
class LogState:
    """What all records of a log say together."""

    generation: Generation | None = None
    query: str | None = None
    batch_floor: int = 0
    batches: dict[int, BatchHistory] = field(default_factory=dict[int, BatchHistory])

    @property
    def unfinished(self) -> list[BatchHistory]:
        """Decided batches that are not finished, oldest first."""
        stories = [self.batches[number] for number in sorted(self.batches)]
        return [history for history in stories if history.stage is Stage.DECIDED]

    def held(self) -> frozenset[tuple[str, str]]:
        """(sink, id) of every branch that a decided, unfinished batch names: never to be aborted."""
        return frozenset(
            (receipt.sink, receipt.id)
            for history in self.unfinished
            for receipt in history.receipts
        )

    def finished_branch(self, stray: Stray) -> int | None:
        """Return the finished batch that this very branch belongs to, if there is one.

        An id may be used again by a later batch, so what the system says of it must agree too.
        """
        for number, history in self.batches.items():
            if history.stage is Stage.FINISHED:
                for receipt in history.receipts:
                    if (receipt.sink, receipt.id) == (stray.sink, stray.id) and all(
                        receipt.handle.get(key) == value for key, value in stray.handle.items()
                    ):
                        return number
        return None

    def apply(self, record: Record) -> None:
        """Take in the next record. Raises `LogCorrupt` if it cannot follow what came before."""
        if getattr(record, "batch", self.batch_floor) < self.batch_floor:
            return  # compacted away: an operator decision on an old batch may stand behind the floor
        match record:
            case Generation():
                self._take(record)
            case Bound(query):
                if self.query not in (None, query):
                    raise LogCorrupt(f"the log is bound to two queries, {self.query} and {query}")
                self.query = query
            case Compacted(_, batch_floor, generation):
                self._take(generation, again=True)
                self.batch_floor = batch_floor
                for number in [n for n in self.batches if n < batch_floor]:
                    del self.batches[number]
            case Decided():
                self._follow(record.batch, Decided)
                self.batches[record.batch] = BatchHistory(record, record.receipts)
            case Repaired():
                history = self._follow(record.batch, Repaired)
                kept = [r for r in history.receipts if (r.sink, r.id) not in record.lost]
                self.batches[record.batch] = BatchHistory(
                    history.decided, (*kept, *record.receipts), Repaired, history.operator_decision
                )
            case OperatorDecided():
                history = self._follow(record.batch, OperatorDecided)
                self.batches[record.batch] = BatchHistory(
                    history.decided,
                    history.receipts,
                    Finished if history.last is Finished else OperatorDecided,
                    record.operator_decision,
                )
            case Finished():
                history = self._follow(record.batch, Finished)
                self.batches[record.batch] = BatchHistory(
                    history.decided, history.receipts, Finished, history.operator_decision
                )

    def _take(self, generation: Generation, *, again: bool = False) -> None:
        before = self.generation
        if before is not None:
            floor = before.number if again else before.number + 1
            if generation.number < floor or generation.namespace != before.namespace:
                raise LogCorrupt(f"generation {generation} cannot follow {before}")
        self.generation = generation
        self.query = generation.query or self.query

    def _follow(self, batch: int, kind: type[Record]) -> BatchHistory:
        history = self.batches.get(batch)
        if kind not in FOLLOWS[history.last if history else None]:
            last = history.last.__name__ if history else "nothing"
            raise LogCorrupt(f"batch {batch}: {kind.__name__} cannot follow {last}")
        # A batch without a story may only be decided, which never reads what is returned here.
        return history  # pyright: ignore[reportReturnType]


def enter(state: LogState, batch: int, offsets: str, before: str | None = None) -> Stage:
    """Say what the log knows of `batch`, whose offsets Spark planned as `offsets`.

    `before` is the plan that the checkpoint holds for the batch before it, if it holds one: where a
    file system lets two drivers write one plan, the batch may have been run by the other. Raises
    `LogMismatch` where log and checkpoint cannot belong together: a batch is never skipped, and never
    run, by its number alone.
    """
    if batch < state.batch_floor:
        raise LogMismatch(
            f"Spark asks for batch {batch}, but the log was compacted up to batch "
            f"{state.batch_floor - 1}: the checkpoint was restored to an older state. Restore the "
            "checkpoint that belongs to this log, or start a new pipeline name and checkpoint"
        )
    for number, planned in ((batch, offsets), (batch - 1, before)):
        history = state.batches.get(number)
        if history is not None and planned not in (None, history.decided.offsets):
            raise LogMismatch(
                f"batch {number} is in the log with other source offsets (hash "
                f"{history.decided.offsets[:12]}) than in Spark's plan ({planned[:12]}): the "
                "checkpoint was restored to an older state, deleted, exchanged, or written to by two "
                "drivers. Restore the checkpoint that belongs to this log, or start a new pipeline "
                "name and checkpoint"
            )
    if batch in state.batches:
        return state.batches[batch].stage
    if state.batches:
        last = max(state.batches)
        unfinished = [history.decided.batch for history in state.unfinished]
        if unfinished or batch != last + 1:
            missing = (
                f"batch {unfinished[0]} is not finished" if unfinished else f"its last is {last}"
            )
            raise LogMismatch(
                f"Spark asks for batch {batch}, but to the log {missing}: log and checkpoint are not "
                "of the same age. Restore the two together, or start a new pipeline name and "
                "checkpoint"
            )
    elif state.batch_floor and batch != state.batch_floor:
        raise LogMismatch(
            f"Spark asks for batch {batch}, but the log goes on at {state.batch_floor}"
        )
    return Stage.NONE


def to_sweep(state: LogState, strays: Iterable[Stray]) -> list[Stray]:
    """Choose the strays to abort, given a log read after its tail and no task of ours running.

    Raises `LogMismatch` for a stray of a generation that the log has never seen.
    """
    assert state.generation is not None
    held, chosen = state.held(), list[Stray]()
    for stray in strays:
        if stray.generation > state.generation.number:
            raise LogMismatch(
                f"{stray.id} was opened by generation {stray.generation}, but the log knows only "
                f"{state.generation.number}: the log was restored to an older state or copied. "
                "Restore the log that belongs to this pipeline, or start a new pipeline name",
                sink=stray.sink,
            )
        finished = state.finished_branch(stray)
        if finished is not None and RECOVERY[Stage.FINISHED][BranchState.PREPARED] is Action.STOP:
            raise LogMismatch(
                f"{stray.id} is open, but the log says that batch {finished} with this branch was "
                "finished: the system was restored to an older state. Compare the output with the "
                "input before going on",
                sink=stray.sink,
            )
        if (stray.sink, stray.id) not in held:
            chosen.append(stray)
    return chosen


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a replay may not take the place of what was lost, sink by sink."""

    sink: str
    recorded: Fingerprint
    replayed: Fingerprint
    reason: str

    def __str__(self) -> str:
        return f"{self.sink}: {self.reason} (recorded: {self.recorded}; replayed: {self.replayed})"


def compare(
    recorded: Mapping[str, Fingerprint], replayed: Mapping[str, Fingerprint]
) -> list[Mismatch]:
    """Compare what a replay computed with what was decided, sink by sink."""
    differing: list[Mismatch] = []
    for sink in sorted({*recorded, *replayed}):
        before = recorded.get(sink, Fingerprint())
        now = replayed.get(sink, Fingerprint())
        if before != now:
            differing.append(Mismatch(sink, before, now, "the replay gave other rows"))
    return differing


def match_lost(
    recorded: Sequence[Receipt],
    lost: frozenset[tuple[str, str]],
    replayed: Sequence[Receipt],
    *,
    operator_decision: OperatorDecision | None = None,
) -> list[Receipt] | Mismatch:
    """Choose the replay's receipts that take the place of one sink's lost branches.

    Branches are matched by fingerprint, as a multiset and never by task number, for partitions are not
    stable across replays. Where they do not match one by one, the sink's total must, and then all of
    its branches must have been lost: otherwise rows of a committed branch could be repeated.
    """
    sink = (recorded or replayed)[0].sink
    gone = [receipt for receipt in recorded if (receipt.sink, receipt.id) in lost]
    before = Counter(receipt.fingerprint for receipt in recorded)
    now = Counter(receipt.fingerprint for receipt in replayed)
    if before == now:
        wanted = Counter(receipt.fingerprint for receipt in gone)
        chosen: list[Receipt] = []
        for receipt in replayed:
            if wanted[receipt.fingerprint] > 0:
                wanted[receipt.fingerprint] -= 1
                chosen.append(receipt)
        return chosen
    old, new = total(r.fingerprint for r in recorded), total(r.fingerprint for r in replayed)
    if len(gone) == len(recorded) and (
        old == new or operator_decision is OperatorDecision.ACCEPT_REPLAY
    ):
        return list(replayed)
    if old != new:
        return Mismatch(sink, old, new, "the replay gave other rows")
    return Mismatch(
        sink,
        old,
        new,
        f"the replay cut the same rows into other partitions, and {len(recorded) - len(gone)} of "
        f"{len(recorded)} branches are already committed",
    )
