"""The protocol as tables and pure functions: no clock, no thread, no I/O, no randomness.

Rules of this file: what the coordinator may do is decided here, from values alone. Every state and
every transition is in one of the tables below.

Theory of operation. A batch has no record, is decided, or is finished (`Stage`). Each of its branches
has a state in its own system (`BranchState`). `RECOVERY` has the action for each pair. The coordinator
uses it both after a crash and in normal operation: a batch without a crash is a recovery with nothing
to recover. Abort is presumed: a branch that no decision names is aborted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum

from poundlock.core.encoding import BranchIds, last_use_receipt
from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    FinishedBatch,
    Generation,
    Opened,
    OperatorDecided,
    OperatorDecision,
    Place,
    Receipt,
    Record,
    Repaired,
    Scalar,
    Stray,
    Withdrawn,
    total,
)
from poundlock.errors import LogCorrupt, LogMismatch


class Stage(Enum):
    """What the log says of a batch."""

    NONE = "none"
    DECIDED = "decided"
    FINISHED = "finished"


class BranchState(Enum):
    """The state of a branch, as its own system proves it."""

    PREPARED = "prepared"
    COMMITTED = "committed"  # the witness proves it, and readers see its rows
    HIDDEN = "hidden"  # the same, but an open transaction still hides its rows from readers
    ABORTED = "aborted"  # the witness proves it
    NO_WITNESS = "no witness"  # the system answers, but cannot tell
    UNREACHABLE = "unreachable"


class Action(Enum):
    """What the coordinator does about a branch."""

    ABORT = "abort"
    COMMIT = "commit"
    DONE = "done"  # the batch is finished when this is said of all its branches
    SWEEP = "sweep"  # done; then sweep, for the open transaction may be a stray
    REPAIR = "repair"  # lost after the decision
    LET_GO = "let go"  # an operator accepted the loss: the batch no longer waits for it
    NOTHING = "nothing"
    RETRY = "retry"
    STOP = "stop"  # impossible, or impossible to know: an operator must decide


# What to do with a branch: one row for each stage, one column for each state of the branch. A pair
# that is not here is never asked for:
# - An open branch is looked up when a sweep finds it, at any stage (`strays_to_abort`).
# - NONE: what a system answers to an abort (`sweep_once`).
# - DECIDED: what a system answers to a commit (`after_commit`).
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
        BranchState.HIDDEN: Action.SWEEP,
        BranchState.ABORTED: Action.REPAIR,
        BranchState.NO_WITNESS: Action.STOP,
        BranchState.UNREACHABLE: Action.RETRY,
    },
    Stage.FINISHED: {BranchState.PREPARED: Action.STOP},
}

# The same for a decided branch of a sink whose loss an operator has accepted, after one attempt to
# commit it. Only a proven commit still counts. Nothing is waited for, and nothing stops the batch.
LOSS_ACCEPTED: Mapping[BranchState, Action] = {
    BranchState.PREPARED: Action.LET_GO,
    BranchState.COMMITTED: Action.DONE,
    BranchState.HIDDEN: Action.SWEEP,
    BranchState.ABORTED: Action.LET_GO,
    BranchState.NO_WITNESS: Action.LET_GO,
    BranchState.UNREACHABLE: Action.LET_GO,
}

# Which record may follow which in the history of one batch.
FOLLOWS: Mapping[type[Record] | None, frozenset[type[Record]]] = {
    None: frozenset({Decided, Withdrawn}),
    Decided: frozenset({Repaired, OperatorDecided, Finished}),
    Repaired: frozenset({Repaired, OperatorDecided, Finished}),
    OperatorDecided: frozenset({Repaired, OperatorDecided, Finished}),
    Finished: frozenset({OperatorDecided}),  # to accept that a replay computed another state
}


class Step(Enum):
    """The steps of a batch that an observer is called for, each before or after one effect."""

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

    decided: Decided  # without its receipts and its plan
    receipts: tuple[Receipt, ...]  # as decided, the lost ones replaced; none of a finished batch
    last: type[Record] = Decided
    operator_decisions: Mapping[str, OperatorDecision] = field(
        default_factory=dict[str, OperatorDecision]
    )  # by sink

    @property
    def stage(self) -> Stage:
        # A decision without branches is finished at once: an empty batch costs one record.
        done = self.last is Finished or not self.receipts
        return Stage.FINISHED if done else Stage.DECIDED

    def accepts_loss(self, sink: str) -> bool:
        return self.operator_decisions.get(sink) is OperatorDecision.ACCEPT_LOSS


@dataclass(frozen=True, slots=True)
class LastUse:
    """The newest use of a branch id by a batch that was decided."""

    batch: int
    identity: tuple[tuple[str, Scalar], ...]  # `Receipt.identity`

    def may_be(self, stray: Stray) -> bool:
        """Return whether an open branch with this id is this use of it.

        A value that only one of the two has tells nothing.
        """
        return all(stray.handle.get(key, value) == value for key, value in self.identity)


@dataclass(slots=True)
class LogState:
    """The state that all records of a log add up to.

    It holds the receipts of unfinished batches. Of a branch whose batch is finished it holds only the
    last use of its id, because a sweep may find the branch open. So it does of a branch that was let
    go: that one may be open, committed or aborted.
    """

    generation: Generation | None = None
    query: str | None = None
    places: tuple[Place, ...] = ()  # where branches may be open
    withdrawn: dict[int, str] = field(default_factory=dict[int, str])  # plans of undecided batches
    batch_floor: int = 0
    batches: dict[int, BatchHistory] = field(default_factory=dict[int, BatchHistory])
    _uses: dict[str, dict[str, LastUse]] = field(default_factory=dict[str, dict[str, LastUse]])
    _let_go: dict[tuple[str, str], LastUse] = field(default_factory=dict[tuple[str, str], LastUse])
    _unfinished: set[int] = field(default_factory=set[int])

    @property
    def unfinished(self) -> list[BatchHistory]:
        """Decided batches that are not finished, oldest first."""
        return [self.batches[number] for number in sorted(self._unfinished)]

    def ids_of(self, sink: str) -> Iterable[str]:
        """Return the branch ids of a sink that decisions name."""
        return self._uses.get(sink, {}).keys()

    def held(self) -> frozenset[tuple[str, str]]:
        """Return (sink, id) of the branches of decided, unfinished batches: they are never aborted."""
        return frozenset(
            (receipt.sink, receipt.id)
            for history in self.unfinished
            for receipt in history.receipts
        )

    def last_use(self, sink: str, id: str) -> LastUse | None:
        """Return the newest use of a branch id, finished or not, None if no decision names the id."""
        return self._uses.get(sink, {}).get(id)

    def batch_naming(self, id: str) -> int | None:
        """Return the newest batch with a branch of this id in any sink, None if there is none."""
        found = (uses[id].batch for uses in self._uses.values() if id in uses)
        return max(found, default=None)

    def history_of(self, stray: Stray) -> BatchHistory | None:
        """Return the history of the batch that names an open branch, None if no decision does.

        A later batch may use the id of a finished one again, so there the handles must match too.
        """
        use = self.last_use(stray.sink, stray.id)
        if use is None:
            return None
        history = self.batches[use.batch]
        return history if history.stage is Stage.DECIDED or use.may_be(stray) else None

    def explains(self, sink: str, batch: int, id: str | None = None) -> bool:
        """Return whether this log can have committed a branch that its system calls committed.

        Without an id, only the batch is compared. While a batch is unfinished, each branch that was
        committed is among its receipts: a repair drops only aborted ones. An operator may have
        dropped others.
        """
        if batch < self.batch_floor:
            return True
        history = self.batches.get(batch)
        if history is None:
            return False
        settled = history.stage is Stage.FINISHED or sink in history.operator_decisions
        return id is None or settled or any((r.sink, r.id) == (sink, id) for r in history.receipts)

    def first_unexplained(self, sink: str, committed: Iterable[tuple[int, str]]) -> str | None:
        """Return the first branch that its system has committed and this log cannot have, if any.

        `committed` has batch and id of each branch of one sink.
        """
        for batch, id_ in committed:
            if not self.explains(sink, batch, id_):
                return f"branch {id_} of batch {batch}"
        return None

    def newest_finished(self, sink: str) -> int | None:
        """Return the newest finished batch that committed branches in this sink, None if none did.

        A batch whose loss in the sink an operator has accepted does not count.
        """
        uses = self._uses.get(sink, {}).values()
        found = {it.batch: self.batches[it.batch] for it in uses}
        over = (n for n, it in found.items() if it.stage is Stage.FINISHED)
        return max((n for n in over if not found[n].accepts_loss(sink)), default=None)

    def was_let_go(self, stray: Stray) -> bool:
        """Return whether an operator accepted the loss of this open branch."""
        use = self._let_go.get((stray.sink, stray.id))
        return use is not None and use.may_be(stray)

    def check(self, record: Record) -> None:
        """Raise `LogCorrupt` if a record cannot follow the ones before."""
        match record:
            case Generation():
                self._check_generation(record, again=False)
            case Compacted(generation=generation):
                self._check_generation(generation, again=True)
            case Bound(query):
                if self.query not in (None, query):
                    raise LogCorrupt(f"the log is bound to two queries, {self.query} and {query}")
            case Opened():
                pass
            case _ if record.batch >= self.batch_floor:
                history = self.batches.get(record.batch)
                if type(record) not in FOLLOWS[history.last if history else None]:
                    last = history.last.__name__ if history else "nothing"
                    kind = type(record).__name__
                    raise LogCorrupt(f"batch {record.batch}: {kind} cannot follow {last}")
            case _:
                pass

    def apply(self, record: Record, unread: Iterable[BranchIds] = ()) -> None:
        """Apply the next record. Raises `LogCorrupt` if it cannot follow the ones before.

        `unread` are the ids of its receipts if they were left out, because the batch is finished.
        """
        self.check(record)
        match record:
            case Generation():
                self._set_generation(record)
            case Bound(query):
                self.query = query
            case Opened(places):
                self.places = places
            case Compacted():
                self._set_generation(record.generation)
                self._raise_batch_floor(record.batch_floor)
                self.places = record.places
                if record.carried is not None:
                    self._take_carried(record.carried)
            case _ if record.batch < self.batch_floor:
                pass  # an operator decision on a batch that has been compacted away
            case Withdrawn(batch, offsets):
                self.withdrawn[batch] = offsets
            case Decided():
                self.withdrawn.pop(record.batch, None)
                self._add_uses(record.batch, record.receipts, unread)
                decided = replace(record, receipts=(), plan=None)
                self._put(BatchHistory(decided, record.receipts))
            case Repaired():
                history = self.batches[record.batch]
                lost = frozenset(record.lost)
                for sink, id_ in lost:
                    use = self._uses.get(sink, {}).pop(id_, None)
                    if use is not None and history.accepts_loss(sink):
                        self._let_go[sink, id_] = use
                self._add_uses(record.batch, record.receipts, unread)
                kept = (r for r in history.receipts if (r.sink, r.id) not in lost)
                receipts = (*kept, *record.receipts)
                self._put(replace(history, receipts=receipts, last=Repaired))
            case OperatorDecided():
                history = self.batches[record.batch]
                last = Finished if history.last is Finished else OperatorDecided
                decisions = dict.fromkeys(record.sinks, record.operator_decision)
                decisions = {**history.operator_decisions, **decisions}
                self._put(replace(history, last=last, operator_decisions=decisions))
            case Finished():
                self._put(replace(self.batches[record.batch], receipts=(), last=Finished))

    def carried(self, batch_floor: int) -> tuple[FinishedBatch, ...]:
        """Return what is known of batches from `batch_floor` on, all of which are finished."""
        receipts, let_go = (
            defaultdict[int, list[Receipt]](list),
            defaultdict[int, list[Receipt]](list),
        )
        for sink, uses in self._uses.items():
            for id_, use in uses.items():
                receipts[use.batch].append(last_use_receipt(sink, id_, use.identity))
        for (sink, id_), use in self._let_go.items():
            let_go[use.batch].append(last_use_receipt(sink, id_, use.identity))
        return tuple(
            FinishedBatch(
                replace(history.decided, receipts=tuple(receipts[batch])),
                history.operator_decisions,
                tuple(let_go[batch]),
            )
            for batch, history in sorted(self.batches.items())
            if batch >= batch_floor
        )

    def _take_carried(self, carried: Iterable[FinishedBatch]) -> None:
        self.batches, self._uses, self._let_go = {}, {}, {}
        for batch in carried:
            number = batch.decided.batch
            self._add_uses(number, batch.decided.receipts, ())
            decided = replace(batch.decided, receipts=(), plan=None)
            self._put(BatchHistory(decided, (), Finished, batch.operator_decisions))
            for receipt in batch.let_go:
                self._let_go[receipt.sink, receipt.id] = LastUse(number, receipt.identity)

    def _check_generation(self, generation: Generation, *, again: bool) -> None:
        before = self.generation
        if before is not None:
            floor = before.number if again else before.number + 1
            if generation.number < floor or generation.namespace != before.namespace:
                raise LogCorrupt(f"generation {generation} cannot follow {before}")

    def _set_generation(self, generation: Generation) -> None:
        self.generation = generation
        # A log without batches knows nothing of its checkpoint, which may be a new one.
        self.query = generation.query or (self.query if self.batches else None)

    def _put(self, history: BatchHistory) -> None:
        batch = history.decided.batch
        self.batches[batch] = history
        if history.stage is Stage.DECIDED:
            self._unfinished.add(batch)
        else:
            self._unfinished.discard(batch)

    def _add_uses(
        self, batch: int, receipts: Iterable[Receipt], unread: Iterable[BranchIds]
    ) -> None:
        shared = dict[LastUse, LastUse]()  # most systems tell their branches apart by the id alone
        for receipt in receipts:
            use = LastUse(batch, receipt.identity)
            self._uses.setdefault(receipt.sink, {})[receipt.id] = shared.setdefault(use, use)
            self._let_go.pop((receipt.sink, receipt.id), None)
        for part in unread:
            uses = self._uses.setdefault(part.sink, {})
            for id_, identity in part.identities():
                use = LastUse(batch, identity)
                uses[id_] = shared.setdefault(use, use)
                self._let_go.pop((part.sink, id_), None)

    def _raise_batch_floor(self, batch_floor: int) -> None:
        self.batch_floor = batch_floor
        self.batches = {n: it for n, it in self.batches.items() if n >= batch_floor}
        self._unfinished = {number for number in self._unfinished if number >= batch_floor}
        for sink, uses in self._uses.items():
            self._uses[sink] = {id_: use for id_, use in uses.items() if use.batch >= batch_floor}
        self._let_go = {it: use for it, use in self._let_go.items() if use.batch >= batch_floor}


def enter(state: LogState, batch: int, offsets: str, before: str | None = None) -> Stage:
    """Return the stage of `batch` in the log. Spark's plan for it has the hash `offsets`.

    `before` is the hash of the plan that the checkpoint holds for the previous batch, None if it holds
    none: on some file systems two drivers can write one plan, so the other may have run that batch.
    Raises `LogMismatch` if log and checkpoint do not match: a batch is never skipped, and never run,
    because of its number alone.
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
                "checkpoint was restored to an older state, deleted, exchanged, or written by two "
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
                f"batch {unfinished[0]} is not finished" if unfinished else f"the last is {last}"
            )
            raise LogMismatch(
                f"Spark asks for batch {batch}, but in the log {missing}: log and checkpoint are not "
                "of the same age. Restore the two together, or start a new pipeline name and "
                "checkpoint"
            )
    elif state.batch_floor and batch != state.batch_floor:
        raise LogMismatch(
            f"Spark asks for batch {batch}, but the log continues at {state.batch_floor}"
        )
    if state.withdrawn.get(batch) == offsets:
        raise LogMismatch(
            f"an operator has withdrawn Spark's plan of batch {batch}: run 'txn replan' to its end"
        )
    return Stage.NONE


def strays_to_abort(state: LogState, strays: Iterable[Stray]) -> list[Stray]:
    """Choose the strays to abort. The log must have been read to its end, with no task of ours running.

    Raises `LogMismatch` for a stray of a generation that the log does not have, and for one whose
    batch is finished.
    """
    assert state.generation is not None
    chosen = list[Stray]()
    for stray in strays:
        if stray.generation > state.generation.number:
            raise LogMismatch(
                f"{stray.id} was opened by generation {stray.generation}, but the log knows only "
                f"{state.generation.number}: the log was restored to an older state or copied. "
                "Restore the log that belongs to this pipeline, or start a new pipeline name",
                sink=stray.sink,
            )
        history = state.history_of(stray)
        action = RECOVERY[history.stage if history else Stage.NONE][BranchState.PREPARED]
        if history is not None and action is Action.STOP:
            raise LogMismatch(
                f"{stray.id} is open, but the log says that its batch {history.decided.batch} is "
                "finished: the system was restored to an older state. Compare the output with the "
                "input before you go on",
                sink=stray.sink,
            )
        if action is Action.ABORT:
            chosen.append(stray)
    return chosen


def after_commit(state: BranchState, operator_decision: OperatorDecision | None) -> Action:
    """Return what to do about a decided branch after an attempt to commit it."""
    accepted = operator_decision is OperatorDecision.ACCEPT_LOSS
    return (LOSS_ACCEPTED if accepted else RECOVERY[Stage.DECIDED])[state]


def after_abort(state: LogState, stray: Stray, found: BranchState) -> Action:
    """Return what to do about a stray after an attempt to abort it.

    A branch that was let go may have been committed: the commit was attempted, and its outcome
    accepted unseen.
    """
    if found is BranchState.COMMITTED and state.was_let_go(stray):
        return Action.DONE
    return RECOVERY[Stage.NONE][found]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a replay cannot replace the lost branches of a sink."""

    sink: str
    recorded: Fingerprint
    replayed: Fingerprint
    reason: str

    @property
    def only_cut(self) -> bool:
        """Whether the rows are the same, and only their division into branches differs."""
        return self.recorded == self.replayed

    def __str__(self) -> str:
        return f"{self.sink}: {self.reason} (recorded: {self.recorded}; replayed: {self.replayed})"


def compare(
    recorded: Mapping[str, Fingerprint], replayed: Mapping[str, Fingerprint]
) -> list[Mismatch]:
    """Compare the totals of a replay with the recorded ones. Return the sinks that differ.

    Both have a total for each sink of their pipeline. A sink that only one of them knows was added or
    removed since the decision: it tells nothing of the rows that the query computed.
    """
    return [
        Mismatch(sink, recorded[sink], replayed[sink], "the replay gave different rows")
        for sink in sorted(recorded.keys() & replayed.keys())
        if recorded[sink] != replayed[sink]
    ]


def match_lost(
    recorded: Sequence[Receipt],
    lost: Set[tuple[str, str]],
    replayed: Sequence[Receipt],
    *,
    operator_decision: OperatorDecision | None = None,
) -> list[Receipt] | Mismatch:
    """Choose the receipts of the replay that replace one sink's lost branches.

    Branches are matched by fingerprint, as a multiset. Task numbers are not used, because partitions
    differ between replays. If the branches do not match one by one, the sink's total must match, and
    all of its branches must be lost: otherwise rows of a committed branch could be repeated.
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
        return Mismatch(sink, old, new, "the replay gave different rows")
    return Mismatch(
        sink,
        old,
        new,
        f"the replay has the same rows in different partitions, and {len(recorded) - len(gone)} of "
        f"{len(recorded)} branches are already committed",
    )
