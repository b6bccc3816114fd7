"""The coordinator: carries out what `protocol.py` decides, one effect after the other.

Rules of this file:

- Every effect that matters is durable before the next one begins.
- Nothing is committed before the decision is in the log.
- Nothing is aborted that a decision may name.
- An unknown answer stays unknown.

A comment marks the line that decides. The line that commits is in `commit.py`.

Theory of operation. `take_over` makes this driver the owner and finishes what is decided. `run` takes
one batch through both phases, or finds in the log that this has been done. After a crash at any line
the next driver starts with these two functions, and both read the log first.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import replace

from poundlock.core.checkpoint import Plan
from poundlock.core.commit import BranchKey, CommitProgress, Committer, by_sink
from poundlock.core.expiry import check_time_left
from poundlock.core.former import opening, places_of, stand_ins
from poundlock.core.job import Job, Votes
from poundlock.core.lanes import Lanes
from poundlock.core.log import TransactionLog
from poundlock.core.mismatch import check_log_matches, is_first, is_newest, query_mismatch
from poundlock.core.model import (
    Bound,
    Decided,
    Finished,
    Generation,
    Namespace,
    Opened,
    Receipt,
    Repaired,
    Transaction,
)
from poundlock.core.operator_decisions import changed_replay, unrepairable_loss, with_way_out
from poundlock.core.owner import NOTICED_AFTER_S
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import LogState, Mismatch, Stage, Step, compare, enter, match_lost
from poundlock.core.surroundings import Settings, Surroundings
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
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
    error_context,
)

logger = logging.getLogger("poundlock")

# Logged and ignored where a later sweep or compaction repeats the step.
_CAN_WAIT = (Unavailable, NotAuthorised)


class Coordinator:
    """Runs the protocol for one pipeline in one driver. Used from one thread at a time."""

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
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.log = log
        self._all = dict(sinks)  # includes sinks below exactly-once
        self.sinks = {
            name: sink for name, sink in sinks.items() if sink.semantic is Semantic.EXACTLY_ONCE
        }
        limits = settings or Settings()
        self._around = Surroundings(limits, observe, stopping, clock, sleep, monotonic)
        self._committer = Committer(log, self.sinks, self._around)
        self._swept_at = self._idle_swept_at = float("-inf")
        self._lanes = Lanes()
        self._in_hand = False  # a batch has begun, and its run has not ended well
        self._former: list[Participant] = []  # they sweep for sinks that the pipeline no longer has
        self._opened = False  # the log says where this driver's branches may be open

    @property
    def state(self) -> LogState:
        return self.log.state

    @property
    def generation(self) -> Generation:
        assert self.state.generation is not None, "take_over comes first"
        return self.state.generation

    # Taking over.

    def take_over(
        self,
        pipeline: str,
        *,
        query: Callable[[], str | None],
        owner: str,
        abandoned: Set[str] = frozenset(),
        has_ended: Callable[[str], bool] = lambda owner: True,
    ) -> None:
        """Become the owner, finish what is decided, and sweep the rest.

        `query` reads Spark's query id from the checkpoint; None if there is no checkpoint yet.
        `abandoned` are the identities of logs that a new one may follow. `has_ended` says whether the
        owner before is known to run no more. Lost branches of a decided batch are left to `run`, which
        has the rows to repair them.
        """
        before = self._append_generation(pipeline, query, owner, abandoned)
        if before is not None:
            self._await_end_of(before, has_ended)
        self.log.drop_unpublished()
        self._around.report(Step.TOOK_OVER, generation=self.generation.number)
        with self._prefer_fenced():
            for history in self.state.unfinished:
                batch = history.decided.batch
                logger.info("batch %d was decided before this start: committing it", batch)
                self._complete(batch)
            self.sweep()
            self._compact()

    def _append_generation(
        self, pipeline: str, query: Callable[[], str | None], owner: str, abandoned: Set[str]
    ) -> Generation | None:
        """Append the next generation. Return the one before."""
        for last_try in (False, False, False, True):
            state = self.log.load()
            found = query()  # read after the log: a checkpoint that the log knows must exist by now
            check_log_matches(self.log, pipeline, found)
            before = state.generation
            if before is None:
                unchanged = is_first(self.log, self.sinks, pipeline, abandoned)
            else:
                unchanged = is_newest(self.log, self.sinks)
            reached = places_of(self._all.values()) if unchanged and state.places else []
            if not (unchanged and self._read_on(state)):
                if last_try:
                    raise Fenced("other drivers keep taking over this pipeline: run one of them")
                continue
            self._former = stand_ins(self.log, self._all, reached)
            namespace = before.namespace if before else self._new_namespace(pipeline)
            number = before.number + 1 if before else 1
            bound = found or (self.state.query if self.state.batches else None)
            self._around.report(Step.TAKING_OVER, generation=number)
            try:
                self.log.append(Generation(number, namespace, self.log.uri, bound, owner))
                return before
            except Fenced:
                # The previous driver is still alive and appended at the same moment. Read the log
                # again and replace it. The tries are limited, so that two drivers that start
                # together do not replace each other for ever.
                if last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    def _read_on(self, state: LogState) -> bool:
        """Read what the driver before has written while the systems were asked.

        A driver with fast batches writes all the time, and no answer of a system would come in time.
        Return whether what was found out for `state` still holds.
        """
        try:
            self.log.ensure_owned()
        except Fenced:
            now = self.log.load()
            return (now.generation, now.places) == (state.generation, state.places)
        return True

    def _await_end_of(self, before: Generation, has_ended: Callable[[str], bool]) -> None:
        """Wait until the driver before has noticed that it was replaced, if it may still run.

        Spark's checkpoint has no owner. If two drivers plan the same batch, Spark stops one of them,
        perhaps this one. An idle driver looks into the log at intervals, and stops.
        """
        ends = self._around.monotonic() + NOTICED_AFTER_S

        def attempt() -> str | None:
            if has_ended(before.owner) or self._around.monotonic() >= ends:
                return None
            return (
                f"took over from driver {before.owner} (generation {before.number}), which may still "
                f"run: waiting until it has stopped, for {NOTICED_AFTER_S:.0f} s at most"
            )

        def give_up(problem: str) -> PoundlockError:
            return Unavailable(f"stopped before the first batch: {problem}")

        self._around.retry(attempt, give_up)

    def _new_namespace(self, pipeline: str) -> Namespace:
        return Namespace.new(pipeline, self._around.clock(), secrets.randbits(32))

    def bind(self, query: str) -> None:
        """Bind the log to Spark's query. Its id is known only when the query runs."""
        if self.state.query is None:
            self.log.append(Bound(query))
        elif self.state.query != query:
            raise query_mismatch(self.state.query, query)

    # One batch.

    def run(self, batch: int, plan: Plan, job: Job) -> Stage:
        """Take one batch through both phases. Return its stage in the log before this call.

        `plan` is Spark's, and durable. When this returns, the batch is finished in every system and in
        the log.
        """
        self._in_hand = True
        with self._prefer_fenced():
            known = self._run(batch, plan, job)
        self._in_hand = False
        return known

    def _run(self, batch: int, plan: Plan, job: Job) -> Stage:
        self._around.report(Step.ENTERED, batch=batch)
        self.log.ensure_owned()
        known = enter(self.state, batch, plan.hash, plan.hash_before)
        if known is Stage.NONE:
            self._decide(batch, plan, job)
        commit = self._complete(batch)
        replayed = self._repair(batch, commit.lost, job)
        if commit.hidden:
            self.sweep()
        if commit.let_go:
            self._sweep_reachable()
        if known is not Stage.NONE and not replayed:
            self._drain(batch, job)
        self._compact()
        return known

    def _compact(self) -> None:
        """Shorten the log if it has become long, by batches or by starts without any."""
        settings = self._around.settings
        long = self.log.length > settings.most_records
        if not long and len(self.state.batches) <= 2 * settings.keep_batches:
            return
        if not self.log.compact(settings.keep_batches, settings.most_records // 2):
            return
        for sink in self.sinks.values():
            try:
                sink.prune(self.generation.namespace, self.state.batch_floor)
            except _CAN_WAIT as error:
                # Old witnesses only take space: the next compaction prunes them.
                logger.warning("sink %s: old witnesses were not pruned: %s", sink.name, error)

    @contextlib.contextmanager
    def _prefer_fenced(self) -> Generator[None]:
        """Raise `Fenced` instead of an error that the work of a newer driver has caused."""
        try:
            yield
        except (InDoubt, LogMismatch, GuaranteeBroken):
            with contextlib.suppress(Unavailable):
                self.log.ensure_owned()
            raise

    def _decide(self, batch: int, plan: Plan, job: Job) -> None:
        """Write and prepare until every vote is yes, then append the decision."""
        if self._around.monotonic() - self._swept_at > self._around.settings.sweep_every_s:
            self.sweep()
        self._log_opening()
        transaction, votes = self._gather_votes(batch, job)
        record = Decided(
            batch=batch,
            attempt=transaction.attempt,
            generation=transaction.generation,
            offsets=plan.hash,
            receipts=votes.receipts,
            totals=dict(votes.totals),
            cut=dict(votes.cut),
            plan=plan.text.decode(),
        )
        self._around.report(Step.DECIDING, batch=batch)
        self._take_turns(record.receipts)
        self.log.append(record)  # The line that decides. From here the batch is a fact.
        self._around.report(
            Step.DECIDED, batch=batch, branches=len(record.receipts), totals=record.totals
        )

    def _gather_votes(self, batch: int, job: Job) -> tuple[Transaction, Votes]:
        """Run the job until all votes are yes, at most `Settings.tries` times.

        One no vote aborts the whole attempt.
        """
        attempt = 0
        while True:
            attempt += 1
            transaction = self._transaction(batch, attempt)
            try:
                return transaction, self._vote(transaction, job)
            except (Rejected, Unavailable, UsageError) as error:
                self._around.report(Step.ABORTED, batch=batch, attempt=attempt, reason=str(error))
                permanent = isinstance(error, BadRow | OperatorFailed | UsageError)
                last = (
                    permanent or self._around.stopping() or attempt >= self._around.settings.tries
                )
                # Logged before the sweep, which may wait for the system that caused the error.
                if last:  # the reason is in the error, which is raised
                    logger.warning("%s: aborted, and the pipeline stops", transaction)
                else:
                    logger.warning("%s: aborted, and it is run again: %s", transaction, error)
                self._abort_attempt(transaction)
                if last and isinstance(error, OutOfTime):
                    raise with_way_out(error, self.log.uri, batch) from error.__cause__
                if last:
                    raise

    def _vote(self, transaction: Transaction, job: Job) -> Votes:
        self._around.report(Step.WRITING, batch=transaction.batch, attempt=transaction.attempt)
        votes = self._write(transaction, frozenset(self._all), job)
        self._around.report(Step.PREPARED, batch=transaction.batch, branches=len(votes.receipts))
        with error_context(transaction=transaction):
            votes = replace(votes, receipts=self._annotate(votes.receipts))
            self._check(votes.receipts)
        self._around.report(Step.CHECKED, batch=transaction.batch)
        return votes

    def _write(self, transaction: Transaction, sinks: frozenset[str], job: Job) -> Votes:
        """Run the job. Leave its lanes afterwards, unless each of its tasks ran once and has ended."""
        settled = False
        try:
            votes = job.write(transaction, sinks, self._held_ids())
            settled = votes.settled
        finally:
            if not settled:
                self._lanes.left_task = True
                self._lanes.leave_pair()
        return votes

    def _take_turns(self, receipts: Sequence[Receipt]) -> None:
        """Keep the lane of these branches as evidence until other branches have been decided.

        Called before the record: its outcome may stay unknown for a while.
        """
        if any(self.sinks[receipt.sink].reuses_ids for receipt in receipts):
            self._lanes.take_turns()

    def _log_opening(self) -> None:
        """Log where branches may be open, before the first is. The next drivers sweep there."""
        if not self._opened:
            record = opening(self.state, self.sinks.values())
            if record is not None:
                self.log.append(record)
            self._opened = True

    def _annotate(self, receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
        annotated = list[Receipt]()
        for name, mine in by_sink(receipts):
            with error_context(sink=name):
                annotated += self.sinks[name].annotate(mine)
        return tuple(annotated)

    def _check(self, receipts: Sequence[Receipt]) -> None:
        """Check that every branch is open, is ours, and has enough time. Raises `Rejected`."""
        keys = {(receipt.sink, receipt.id) for receipt in receipts}
        if len(keys) != len(receipts):
            raise Rejected("two tasks used the same branch id")
        for name, mine in by_sink(receipts):
            with error_context(sink=name):
                refusals = self.sinks[name].check(mine)
            for receipt, refusal in zip(mine, refusals, strict=True):
                if refusal is not None:
                    raise Rejected(f"branch {receipt.id}: {refusal}", sink=name)
        now, least_s = self._around.clock(), self._around.settings.least_time_left_s
        check_time_left(receipts, now, least_s, self._committer.rate)

    # Commit.

    def _complete(self, batch: int) -> CommitProgress:
        """Commit every branch of a decided batch. Finish the batch if no branch is lost.

        What an operator has accepted as lost, and is not proven to be committed, leaves the batch.
        """
        history = self.state.batches[batch]
        if history.stage is Stage.FINISHED:
            return CommitProgress()
        commit = self._committer.commit(history, between=self._sweep_reachable)
        if commit.let_go:
            names = ", ".join(sorted({sink for sink, _ in commit.let_go}))
            logger.warning(
                "batch %d: %d branches of %s are not proven to be committed, and the loss is accepted",
                *(batch, len(commit.let_go), names),
            )
            accepted = tuple(sorted(commit.let_go))
            self.log.append(Repaired(batch, self.generation.number, accepted, ()))
        if not commit.lost and self.state.batches[batch].stage is Stage.DECIDED:
            self._around.report(Step.FINISHING, batch=batch)
            self.log.append(Finished(batch))
            self._around.report(Step.FINISHED, batch=batch)
        return commit

    # Repair, drain, sweep.

    def cut_to_repeat(self) -> Mapping[str, str]:
        """Return what cut the rows of the decided batch that must run again; empty if none must."""
        unfinished = self.state.unfinished
        return unfinished[0].decided.cut if unfinished else {}

    def _repair(self, batch: int, lost: Set[BranchKey], job: Job) -> bool:
        """Replace lost branches until none is lost. Return whether the batch was replayed."""
        attempt = self.state.batches[batch].decided.attempt
        replayed = bool(lost)
        if lost:
            self._log_opening()
        while lost:
            attempt += 1
            self._around.report(Step.REPAIRING, batch=batch, lost=len(lost))
            names = ", ".join(f"{id_} of sink {sink}" for sink, id_ in sorted(lost)[:3])
            logger.warning(
                "batch %d: %d branches were lost after the decision (%s); the batch is run again",
                *(batch, len(lost), names),
            )
            self._lanes.leave_pair()  # its ids show what the batches before have committed
            chosen = self._replay(batch, lost, self._transaction(batch, attempt), job)
            self._take_turns(chosen)
            self.log.append(
                Repaired(batch, self.generation.number, tuple(sorted(lost)), tuple(chosen))
            )
            self._around.report(Step.REPAIRED, batch=batch, branches=len(chosen))
            rows = sum(receipt.fingerprint.rows for receipt in chosen)
            logger.warning("batch %d: %d rows replace the lost ones", batch, rows)
            lost = self._complete(batch).lost
        if replayed:
            self.sweep()  # the replayed branches that were not chosen
        return replayed

    def _replay(
        self, batch: int, lost: Set[BranchKey], transaction: Transaction, job: Job
    ) -> list[Receipt]:
        """Run the batch again and choose the branches that replace the lost ones."""
        history = self.state.batches[batch]
        sinks = frozenset(sink for sink, _ in lost)
        try:
            votes = self._write(transaction, sinks, job)
            chosen, problems = list[Receipt](), list[Mismatch]()
            for sink in sorted(sinks):
                result = match_lost(
                    [r for r in history.receipts if r.sink == sink],
                    lost,
                    [r for r in votes.receipts if r.sink == sink],
                    operator_decision=history.operator_decisions.get(sink),
                )
                if isinstance(result, Mismatch):
                    problems.append(result)
                else:
                    chosen.extend(result)
            if job.stateful:
                already = {*history.operator_decisions, *(problem.sink for problem in problems)}
                differing = compare(history.decided.totals, votes.totals)
                problems.extend(item for item in differing if item.sink not in already)
            if problems:
                raise unrepairable_loss(self.log.uri, history, lost, problems, votes.cut)
            with error_context(transaction=transaction):
                chosen = list(self._annotate(chosen))
                self._check(chosen)
        except PoundlockError:
            self._abort_attempt(transaction)
            raise
        return chosen

    def _drain(self, batch: int, job: Job) -> None:
        """Run a finished batch without writing its rows, so that Spark keeps its state."""
        if not job.stateful:
            return
        history = self.state.batches[batch]
        self._around.report(Step.DRAINING, batch=batch)
        differing = compare(history.decided.totals, job.drain())
        problems = [it for it in differing if it.sink not in history.operator_decisions]
        if problems:
            raise changed_replay(self.log.uri, batch, problems)
        self._around.report(Step.DRAINED, batch=batch)

    def sweep(self) -> int:
        """Abort every branch of this pipeline that no decision names, and return their number.

        No task of this pipeline may be running.
        """
        self._around.report(Step.SWEEPING)
        self.log.ensure_owned()
        count = sum(self._sweep_sink(sink) for sink in self._swept_sinks())
        self._swept_at = self._around.monotonic()
        self._around.report(Step.SWEPT, count=count)
        return count

    def idle(self) -> None:
        """Raise `Fenced` if another driver has taken over. Sweep now and then. No batch may be running.

        A task of the driver before may outlive its driver, and prepare a branch after the last sweep.
        """
        self.log.ensure_owned()
        now = self._around.monotonic()
        if now - max(self._swept_at, self._idle_swept_at) > self._around.settings.sweep_every_s:
            # The next batch sweeps all the same: what this sweep cannot explain stops that one.
            self._idle_swept_at = now
            self._sweep_reachable()

    def end(self, *, copies: bool = False) -> None:
        """Sweep for the last time. If nothing can be open any more, log that.

        The pipeline may then continue without any of its sinks. `copies` tells that copies of tasks
        may still run, of which no vote tells.
        """
        self.sweep()
        # Tasks that may still run, and open branches after this sweep.
        stragglers = self._lanes.left_task or self._in_hand or copies
        if self.state.places and not stragglers and not self.state.unfinished:
            self.log.append(Opened(()))
            self._opened = False

    def close(self) -> None:
        """Close the driver's connections. They may be opened again."""
        for sink in (*self.sinks.values(), *self._former):
            sink.close()

    def _sweep_sink(self, sink: Participant) -> int:
        count = 0

        def attempt() -> str | None:
            nonlocal count
            aborted, problem = sweep_once(self.state, sink)
            count += aborted
            return problem and f"sink {sink.name}: waiting to abort strays: {problem}"

        def give_up(problem: str) -> PoundlockError:
            return Unavailable(f"{problem}; the next start will abort them", sink=sink.name)

        self._around.retry(attempt, give_up)
        return count

    def _sweep_reachable(self) -> None:
        """Abort strays in the systems that answer: an open one can hide later commits.

        Kafka's readers see nothing past its oldest open transaction. No task is running while a
        commit waits.
        """
        with contextlib.suppress(*_CAN_WAIT):
            self.log.ensure_owned()
            for sink in self._swept_sinks():
                with contextlib.suppress(*_CAN_WAIT):
                    sweep_once(self.state, sink)

    def _swept_sinks(self) -> list[Participant]:
        return [*self.sinks.values(), *self._former]

    def _abort_attempt(self, transaction: Transaction) -> None:
        """Abort the branches of an attempt. If that fails, the next sweep aborts them."""
        try:
            self.sweep()
        except _CAN_WAIT as error:
            logger.warning("%s: the next sweep aborts its branches: %s", transaction, error)

    def _held_ids(self) -> dict[str, frozenset[str]]:
        held = self.state.held()
        return {name: frozenset(id_ for sink, id_ in held if sink == name) for name in self.sinks}

    def _transaction(self, batch: int, attempt: int) -> Transaction:
        generation = self.generation
        lane = self._lanes.current(generation.number)
        return Transaction(generation.namespace, generation.number, batch, attempt, lane)
