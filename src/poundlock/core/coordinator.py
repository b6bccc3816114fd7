"""The coordinator: does what `protocol.py` orders, one effect after the other.

Rules of this file: every effect that matters is durable before the next begins; nothing is committed
before the decision is in the log; nothing is aborted that a decision may name; an answer that is not
known stays unknown. The line that decides and the line that commits are marked so.

Theory of operation. `take_over` makes this driver the owner and finishes what is decided. `run` brings
one batch through both gates, or finds in the log that it has been through already. A crash at any
line leads back to these two, and they look at the log before anything else.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from poundlock.core import operator_decisions as operator_decisions
from poundlock.core.job import Job, Votes
from poundlock.core.log import TransactionLog
from poundlock.core.mismatch import check_log_matches, exchanged, is_newest
from poundlock.core.model import (
    Bound,
    Decided,
    Finished,
    Generation,
    Namespace,
    OperatorDecision,
    Receipt,
    Repaired,
    Transaction,
)
from poundlock.core.operator_decisions import changed_replay, unknown_outcome, unrepairable_loss
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import (
    RECOVERY,
    Action,
    BatchHistory,
    BranchState,
    LogState,
    Mismatch,
    Stage,
    Step,
    compare,
    enter,
    match_lost,
)
from poundlock.core.sweep import sweep_once
from poundlock.errors import (
    BadRow,
    Fenced,
    GuaranteeBroken,
    InDoubt,
    LogMismatch,
    NotAuthorised,
    OperatorFailed,
    OutOfTime,
    PermanentlyRefused,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
    error_context,
)

logger = logging.getLogger("poundlock")

BranchKey = tuple[str, str]  # (sink, id)

# Where nothing hangs on an answer, these are mentioned and passed over.
_NOT_NOW = (Unavailable, NotAuthorised)


@dataclass(frozen=True, slots=True)
class Settings:
    """How patient the coordinator is."""

    tries: int = 3  # attempts at a batch before its error is raised
    keep_batches: int = 100  # at least as many as Spark keeps
    least_time_left_s: float = 10.0  # what a branch must have left when it is decided
    commits_at_once: int = 256
    retry_first_s: float = 0.05
    retry_most_s: float = 5.0
    warn_every_s: float = 30.0
    sweep_every_s: float = 60.0


class Coordinator:
    """One driver's hold on one pipeline. Used from one thread at a time."""

    def __init__(
        self,
        log: TransactionLog,
        sinks: Mapping[str, Participant],
        *,
        settings: Settings | None = None,
        observe: Callable[[Step, Mapping[str, object]], None] = lambda step, facts: None,
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.log = log
        self._names = frozenset(sinks)  # those that write straight through included
        self.sinks = {
            name: sink for name, sink in sinks.items() if sink.semantic is Semantic.EXACTLY_ONCE
        }
        self.settings = settings or Settings()
        self._observe = observe
        self._stopping = stopping
        self._clock = clock
        self._sleep = sleep
        self._swept_at = float("-inf")
        self._warned: set[tuple[str, str, float]] = set()

    @property
    def state(self) -> LogState:
        return self.log.state

    @property
    def generation(self) -> Generation:
        assert self.state.generation is not None, "take_over comes first"
        return self.state.generation

    # Taking over.

    def take_over(self, pipeline: str, *, query: Callable[[], str | None], owner: str) -> None:
        """Become the owner, finish what is decided, sweep the rest.

        `query` reads Spark's id of the checkpoint, None if there is no checkpoint yet. Decided
        branches that were lost stay for `run`, which has the rows to repair them.
        """
        self._append_generation(pipeline, query, owner)
        self.log.drop_unpublished()
        self._step(Step.TOOK_OVER, generation=self.generation.number)
        with self._true_reason():
            for history in self.state.unfinished:
                batch = history.decided.batch
                logger.info("batch %d was decided before this start: committing it", batch)
                if not self._commit(history):
                    self._finish(batch)
            self.sweep()

    def _append_generation(
        self, pipeline: str, query: Callable[[], str | None], owner: str
    ) -> None:
        for last_try in (False, False, False, True):
            state = self.log.load()
            found = query()  # after the log: whatever checkpoint that knows must be there by now
            check_log_matches(self.log, pipeline, found)
            before = state.generation
            if before is not None and not is_newest(self.log, self.sinks):
                if last_try:
                    raise Fenced("other drivers keep taking over this pipeline: run one of them")
                continue
            namespace = before.namespace if before else self._new_namespace(pipeline)
            number = before.number + 1 if before else 1
            bound = found or state.query
            self._step(Step.TAKING_OVER, generation=number)
            try:
                self.log.append(Generation(number, namespace, self.log.uri, bound, owner))
                return
            except Fenced:
                # The driver before us, still alive, appended at the same moment. It is ours to
                # replace it, so look again; but two drivers that start together must not chase
                # each other for ever.
                if last_try:
                    raise

    def _new_namespace(self, pipeline: str) -> Namespace:
        return Namespace.new(pipeline, self._clock(), secrets.randbits(32))

    def bind(self, query: str) -> None:
        """Tie the log to Spark's query, whose id is known only once it runs."""
        if self.state.query is None:
            self.log.append(Bound(query))
        elif self.state.query != query:
            raise exchanged(self.state.query, query)

    # One batch.

    def run(self, batch: int, offsets: str, job: Job, *, before: str | None = None) -> Stage:
        """Bring one batch through both gates. Return how far the log knew it before.

        `offsets` is the hash of Spark's plan for the batch, `before` that of the plan which its
        checkpoint now holds for the batch before. When this returns, the batch is finished in every
        system and in the log.
        """
        with self._true_reason():
            return self._run(batch, offsets, job, before)

    def _run(self, batch: int, offsets: str, job: Job, before: str | None) -> Stage:
        self._step(Step.ENTERED, batch=batch)
        self.log.ensure_owned()
        known = enter(self.state, batch, offsets, before)
        if known is Stage.FINISHED:
            self._drain(self.state.batches[batch], job)
        elif known is Stage.DECIDED:
            history = self.state.batches[batch]
            lost = self._commit(history)
            if lost:
                self._repair(history, lost, job)
            else:
                self._finish(batch)
                self._drain(history, job)
        else:
            self._first_gate(batch, offsets, job)
            self._second_gate(batch, job)
        if len(self.state.batches) > 2 * self.settings.keep_batches:
            self._compact()
        return known

    def _compact(self) -> None:
        self.log.compact(self.settings.keep_batches)
        for sink in self.sinks.values():
            try:
                sink.prune(self.generation.namespace, self.state.batch_floor)
            except _NOT_NOW as error:  # old witnesses only take space: the next time will do
                logger.warning("sink %s: old witnesses were not pruned: %s", sink.name, error)

    @contextlib.contextmanager
    def _true_reason(self) -> Generator[None]:
        """Raise `Fenced` where a driver that was replaced stumbles over what its successor did."""
        try:
            yield
        except (InDoubt, LogMismatch, GuaranteeBroken):
            with contextlib.suppress(Unavailable):
                self.log.ensure_owned()
            raise

    def _first_gate(self, batch: int, offsets: str, job: Job) -> None:
        """Write and prepare until every vote is yes, then decide."""
        if self._clock() - self._swept_at > self.settings.sweep_every_s:
            self.sweep()
        transaction, votes = self._gather_votes(batch, job)
        record = Decided(
            batch=batch,
            attempt=transaction.attempt,
            generation=transaction.generation,
            offsets=offsets,
            receipts=votes.receipts,
            totals=dict(votes.totals),
        )
        self._step(Step.DECIDING, batch=batch)
        self.log.append(record)  # The line that decides. From here the batch is a fact.
        self._step(Step.DECIDED, batch=batch, branches=len(record.receipts), totals=record.totals)

    def _gather_votes(self, batch: int, job: Job) -> tuple[Transaction, Votes]:
        """Run the job until all vote yes, as often as allowed. One no aborts the whole attempt."""
        attempt = 0
        while True:
            attempt += 1
            transaction = self._transaction(batch, attempt)
            try:
                return transaction, self._vote(transaction, job)
            except (Rejected, Unavailable, UsageError) as error:
                self._step(Step.ABORTED, batch=batch, attempt=attempt, reason=str(error))
                hopeless = isinstance(error, BadRow | OperatorFailed | UsageError)
                last = hopeless or self._stopping() or attempt >= self.settings.tries
                # Said before the sweep, which may wait for the very system that is away.
                then = "it stops" if last else "it is run again"
                logger.warning("%s: aborted, and %s: %s", transaction, then, error)
                self._abort_attempt(transaction)
                if last:
                    raise

    def _vote(self, transaction: Transaction, job: Job) -> Votes:
        self._step(Step.WRITING, batch=transaction.batch, attempt=transaction.attempt)
        votes = job.write(transaction, self._names, self._held_ids())
        self._step(Step.PREPARED, batch=transaction.batch, branches=len(votes.receipts))
        with error_context(transaction=transaction):
            votes = Votes(self._annotated(votes.receipts), votes.totals)
            self._check(transaction, votes.receipts)
        self._step(Step.CHECKED, batch=transaction.batch)
        return votes

    def _annotated(self, receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
        annotated = list[Receipt]()
        for name, mine in _by_sink(receipts):
            with error_context(sink=name):
                annotated += self.sinks[name].annotate(mine)
        return tuple(annotated)

    def _second_gate(self, batch: int, job: Job) -> None:
        """Commit what was decided, repair what was lost, finish."""
        history = self.state.batches[batch]
        if history.stage is Stage.FINISHED:
            return
        lost = self._commit(history)
        if lost:
            self._repair(history, lost, job)
        else:
            self._finish(batch)

    def _check(self, transaction: Transaction, receipts: Sequence[Receipt]) -> None:
        """See that every branch is open, ours, and has time enough. Raises `Rejected`."""
        keys = {(receipt.sink, receipt.id) for receipt in receipts}
        if len(keys) != len(receipts):
            raise Rejected("two tasks used one branch id", transaction=str(transaction))
        for name, mine in _by_sink(receipts):
            with error_context(sink=name):
                refusals = self.sinks[name].check(mine)
            for receipt, refusal in zip(mine, refusals, strict=True):
                if refusal is not None:
                    raise Rejected(
                        f"branch {receipt.id}: {refusal}", transaction=str(transaction), sink=name
                    )
        now = self._clock()
        for receipt in receipts:
            if receipt.expires_at is None:
                continue
            left = receipt.expires_at - now
            if left < self.settings.least_time_left_s:
                raise OutOfTime(
                    f"branch {receipt.id} expires in {left:.0f} s, less than the "
                    f"{self.settings.least_time_left_s:.0f} s that a commit may need: the batch took "
                    f"too long. Make batches smaller or the sink's transaction time-out longer",
                    transaction=str(transaction),
                    sink=receipt.sink,
                )

    # The second gate.

    def _commit(self, history: BatchHistory) -> frozenset[BranchKey]:
        """Commit every branch of a decided batch, soonest to expire first. Return the lost ones.

        Remembers the first error, goes on with the others, and raises it at the end.
        """
        batch = history.decided.batch
        self._step(Step.COMMITTING, batch=batch, branches=len(history.receipts))
        waiting = sorted(history.receipts, key=_urgency)
        lost = set[BranchKey]()
        error: PoundlockError | None = None
        delay, warned_at = self.settings.retry_first_s, self._clock()
        while waiting:
            again = list[Receipt]()
            for receipts in self._portions(waiting):
                try:
                    states = self._commit_some(history, receipts)
                except PoundlockError as problem:
                    error = error or problem
                    continue
                for receipt, state in zip(receipts, states, strict=True):
                    match RECOVERY[Stage.DECIDED][state]:
                        case Action.DONE:
                            pass
                        case Action.REPAIR:
                            lost.add((receipt.sink, receipt.id))
                        case Action.COMMIT | Action.RETRY:
                            again.append(receipt)
                        case _ if history.operator_decision is OperatorDecision.ACCEPT_LOSS:
                            lost.add((receipt.sink, receipt.id))
                        case _:
                            error = error or unknown_outcome(self.log.uri, batch, receipt)
                self._step(Step.COMMITTED_ONE, batch=batch, sink=receipts[0].sink)
            waiting = again
            if waiting:
                warned_at = self._be_patient(batch, waiting, warned_at)
                self._clear_the_way()
                self._sleep(delay)
                delay = min(delay * 2, self.settings.retry_most_s)
        if error is not None:
            raise error
        self._step(Step.COMMITTED, batch=batch, lost=len(lost))
        return frozenset(lost)

    def _portions(self, receipts: Sequence[Receipt]) -> Iterable[list[Receipt]]:
        for name, mine in _by_sink(receipts):
            sink = self.sinks.get(name)
            whole = sink is not None and sink.commit_together(mine)
            size = len(mine) if whole else self.settings.commits_at_once
            yield from (mine[start : start + size] for start in range(0, len(mine), size))

    def _commit_some(self, history: BatchHistory, receipts: Sequence[Receipt]) -> list[BranchState]:
        name = receipts[0].sink
        if name not in self.sinks:
            raise LogMismatch(
                f"the log holds decided branches of sink {name!r}, which the pipeline no longer "
                "has. Start it once more with that sink, or finish them with 'poundlock txn commit'",
                sink=name,
            )
        try:
            with error_context(sink=name):
                return self.sinks[name].commit(receipts)  # The line that commits.
        except Unavailable as error:
            logger.warning("sink %s cannot be reached to commit: %s", name, error)
            return [BranchState.UNREACHABLE] * len(receipts)
        except PermanentlyRefused as error:
            if history.operator_decision is OperatorDecision.ACCEPT_LOSS and error.branches:
                refused, others = BranchState.NO_WITNESS, BranchState.PREPARED
                return [refused if r.id in error.branches else others for r in receipts]
            error.args = (
                f"{error.args[0]}. Or go on without what is refused: 'poundlock txn commit --log "
                f"{self.log.uri} --batch {history.decided.batch} --accept-loss'",
            )
            raise
        except PoundlockError:
            raise
        except Exception as error:
            raise InDoubt(
                f"the sink failed while it committed {receipts[0].id} ({type(error).__name__}: "
                f"{error}). The batch is decided and nothing is lost: start the pipeline again",
                sink=name,
            ) from error

    def _be_patient(self, batch: int, waiting: Sequence[Receipt], warned_at: float) -> float:
        """Warn about branches that near their end; give up only when asked to stop."""
        now = self._clock()
        for receipt in waiting:
            if receipt.expires_at is None:
                continue
            share = (now - receipt.began_at) / max(receipt.expires_at - receipt.began_at, 1e-9)
            for mark in (0.5, 0.8):
                key = (receipt.sink, receipt.id, mark)
                if share >= mark and key not in self._warned:
                    self._warned.add(key)
                    logger.warning(
                        "batch %d: branch %s of sink %s is decided but not committed, and %.0f %% of "
                        "its time is over: %.0f s are left",
                        *(batch, receipt.id, receipt.sink, 100 * share, receipt.expires_at - now),
                    )
        if self._stopping():
            raise InDoubt(
                f"batch {batch} is decided, but {len(waiting)} branches cannot be committed now, "
                f"{waiting[0].id} first. Nothing is lost: start the pipeline again when the system "
                "answers",
                sink=waiting[0].sink,
            )
        if now - warned_at > self.settings.warn_every_s:
            names = sorted({receipt.sink for receipt in waiting})
            logger.warning(
                "batch %d: %d branches of %s still wait", batch, len(waiting), ", ".join(names)
            )
            return now
        return warned_at

    def _finish(self, batch: int) -> None:
        if self.state.batches[batch].stage is Stage.FINISHED:
            return
        self._step(Step.FINISHING, batch=batch)
        self.log.append(Finished(batch))
        self._step(Step.FINISHED, batch=batch)

    # Repair, drain, sweep.

    def _repair(self, history: BatchHistory, lost: frozenset[BranchKey], job: Job) -> None:
        """Put the replay's branches in the place of lost ones, until none is lost."""
        batch, attempt = history.decided.batch, history.decided.attempt
        while lost:
            attempt += 1
            self._step(Step.REPAIRING, batch=batch, lost=len(lost))
            names = ", ".join(f"{id_} of sink {sink}" for sink, id_ in sorted(lost)[:3])
            accepted = history.operator_decision is OperatorDecision.ACCEPT_LOSS
            logger.warning(
                "batch %d: %d branches were lost after the decision (%s); %s",
                *(batch, len(lost), names),
                "the loss is accepted" if accepted else "it is run again",
            )
            if accepted:
                chosen = list[Receipt]()
            else:
                chosen = self._replay(history, lost, self._transaction(batch, attempt), job)
            self.log.append(
                Repaired(batch, self.generation.number, tuple(sorted(lost)), tuple(chosen))
            )
            self._step(Step.REPAIRED, batch=batch, branches=len(chosen))
            rows = sum(receipt.fingerprint.rows for receipt in chosen)
            logger.warning("batch %d: %d rows take the place of what was lost", batch, rows)
            history = self.state.batches[batch]
            lost = self._commit(history)
        self._finish(batch)
        self.sweep()  # what was replayed and not chosen
        if history.operator_decision is OperatorDecision.ACCEPT_LOSS:
            self._drain(history, job)  # nothing was replayed, and Spark's state must still be made

    def _replay(
        self, history: BatchHistory, lost: frozenset[BranchKey], transaction: Transaction, job: Job
    ) -> list[Receipt]:
        """Run the batch again and choose what replaces the lost branches. Aborts the rest."""
        sinks = frozenset(sink for sink, _ in lost)
        try:
            votes = job.write(transaction, sinks, self._held_ids())
            chosen, problems = list[Receipt](), list[Mismatch]()
            for sink in sorted(sinks):
                result = match_lost(
                    [r for r in history.receipts if r.sink == sink],
                    lost,
                    [r for r in votes.receipts if r.sink == sink],
                    operator_decision=history.operator_decision,
                )
                if isinstance(result, Mismatch):
                    problems.append(result)
                else:
                    chosen.extend(result)
            if job.stateful and history.operator_decision is None:
                already = {problem.sink for problem in problems}
                differing = compare(history.decided.totals, votes.totals)
                problems.extend(item for item in differing if item.sink not in already)
            if problems:
                raise unrepairable_loss(self.log.uri, history, lost, problems)
            with error_context(transaction=transaction):
                chosen = list(self._annotated(chosen))
                self._check(transaction, chosen)
        except PoundlockError:
            self._abort_attempt(transaction)
            raise
        return chosen

    def _drain(self, history: BatchHistory, job: Job) -> None:
        """Run a batch that is finished already to nowhere, so that Spark keeps its state."""
        if not job.stateful:
            return
        batch = history.decided.batch
        self._step(Step.DRAINING, batch=batch)
        problems = compare(history.decided.totals, job.drain())
        if problems and history.operator_decision is None:
            raise changed_replay(self.log.uri, batch, problems)
        self._step(Step.DRAINED, batch=batch)

    def sweep(self) -> int:
        """Abort every branch of ours that no decision names. No task of ours may be running.

        Return how many there were.
        """
        self._step(Step.SWEEPING)
        self.log.ensure_owned()
        count = 0
        for sink in self.sinks.values():
            delay, warned_at = self.settings.retry_first_s, float("-inf")
            while True:
                aborted, problem = sweep_once(self.state, sink)
                count += aborted
                if problem is None:
                    break
                if self._stopping():
                    raise Unavailable(
                        f"strays could not be swept; the next start will: {problem}", sink=sink.name
                    )
                if self._clock() - warned_at > self.settings.warn_every_s:
                    warned_at = self._clock()
                    logger.warning("sink %s: waiting to abort strays: %s", sink.name, problem)
                self._sleep(delay)
                delay = min(delay * 2, self.settings.retry_most_s)
        self._swept_at = self._clock()
        self._step(Step.SWEPT, count=count)
        return count

    def _clear_the_way(self) -> None:
        """Abort the strays that can be reached: an open one can hide what is committed after it.

        Kafka shows nothing past its oldest open transaction. No task of ours is running when a
        commit waits.
        """
        with contextlib.suppress(*_NOT_NOW):
            self.log.ensure_owned()
            for sink in self.sinks.values():
                sweep_once(self.state, sink)

    def _abort_attempt(self, transaction: Transaction) -> None:
        """Abort what an attempt left. If that fails the next sweep will do it: abort is presumed."""
        try:
            self.sweep()
        except _NOT_NOW as error:
            logger.warning("%s: its branches wait for the next sweep: %s", transaction, error)

    def _held_ids(self) -> dict[str, frozenset[str]]:
        held = self.state.held()
        return {name: frozenset(id_ for sink, id_ in held if sink == name) for name in self.sinks}

    def _transaction(self, batch: int, attempt: int) -> Transaction:
        return Transaction(self.generation.namespace, self.generation.number, batch, attempt)

    def _step(self, step: Step, **facts: object) -> None:
        self._observe(step, facts)


def _urgency(receipt: Receipt) -> tuple[float, str]:
    return (float("inf") if receipt.expires_at is None else receipt.expires_at, receipt.id)


def _by_sink(receipts: Sequence[Receipt]) -> list[tuple[str, list[Receipt]]]:
    names = dict.fromkeys(receipt.sink for receipt in receipts)
    return [(name, [r for r in receipts if r.sink == name]) for name in names]
