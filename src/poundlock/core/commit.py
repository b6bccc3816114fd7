"""The second phase: commits the branches of a decided batch until none is waiting.

Rules of this file: only branches that the log has decided are committed. All branches are tried even
if one fails. An unknown answer stays unknown. An operator's decision for a sink counts whatever state
its branches are in. A comment marks the line that commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from poundlock.core.expiry import CommitRate, ExpiryWarnings, in_order_of_expiry
from poundlock.core.log import TransactionLog
from poundlock.core.model import Receipt
from poundlock.core.operator_decisions import decision_command, unknown_outcome
from poundlock.core.participant import Participant
from poundlock.core.protocol import Action, BatchHistory, BranchState, Step, after_commit
from poundlock.core.surroundings import Surroundings
from poundlock.errors import (
    InDoubt,
    LogMismatch,
    PermanentlyRefused,
    PoundlockError,
    Unavailable,
    error_context,
)

logger = logging.getLogger("poundlock")

BranchKey = tuple[str, str]  # (sink, id)


@dataclass(slots=True)
class CommitProgress:
    """How far the commit of a decided batch has come."""

    waiting: list[Receipt] = field(default_factory=list[Receipt])
    lost: set[BranchKey] = field(default_factory=set[BranchKey])  # aborted by their systems
    let_go: set[BranchKey] = field(default_factory=set[BranchKey])  # an operator accepted the loss
    hidden: bool = False  # an open transaction hides committed rows from readers
    error: PoundlockError | None = None
    away: dict[str, str] = field(default_factory=dict[str, str])  # why sinks did not answer last


class Committer:
    """Commits decided batches. Used by one coordinator."""

    def __init__(self, log: TransactionLog, sinks: Mapping[str, Participant], around: Surroundings):
        self._log = log
        self._sinks = sinks
        self._around = around
        self._expiry_warnings = ExpiryWarnings()
        self.rate = CommitRate()

    def commit(self, history: BatchHistory, *, between: Callable[[], None]) -> CommitProgress:
        """Commit the branches that expire soonest first, until none is waiting.

        The first error is kept while the other branches are committed, and raised at the end.
        """
        batch = history.decided.batch
        self._around.report(Step.COMMITTING, batch=batch, branches=len(history.receipts))
        progress = CommitProgress(in_order_of_expiry(history.receipts))

        def give_up(problem: str) -> PoundlockError:
            return InDoubt(
                f"{problem}. The batch is decided and nothing is lost: start the pipeline again when "
                "the system answers",
                sink=progress.waiting[0].sink,
            )

        self._around.retry(
            lambda: self._round(history, progress),
            give_up,
            warn_after_s=self._around.settings.warn_first_s,
            between=between,
        )
        if progress.error is not None:
            raise progress.error
        self._around.report(Step.COMMITTED, batch=batch, lost=len(progress.lost))
        return progress

    def _round(self, history: BatchHistory, progress: CommitProgress) -> str | None:
        """Try to commit each waiting branch once. Return what still waits, None if nothing does."""
        batch = history.decided.batch
        waiting = list[Receipt]()
        progress.away.clear()
        for receipts in self._groups(progress.waiting):
            try:
                states = self._group(history, receipts, progress)
            except PoundlockError as error:
                progress.error = progress.error or error
                continue
            for receipt, state in zip(receipts, states, strict=True):
                match after_commit(state, history.operator_decisions.get(receipt.sink)):
                    case Action.DONE:
                        pass
                    case Action.SWEEP:
                        progress.hidden = True
                    case Action.REPAIR:
                        progress.lost.add((receipt.sink, receipt.id))
                    case Action.LET_GO:
                        progress.let_go.add((receipt.sink, receipt.id))
                    case Action.COMMIT | Action.RETRY:
                        waiting.append(receipt)
                    case _:
                        unknown = unknown_outcome(self._log.uri, batch, receipt)
                        progress.error = progress.error or unknown
            self._around.report(Step.COMMITTED_ONE, batch=batch, sink=receipts[0].sink)
        progress.waiting = waiting
        if not waiting:
            return None
        self._expiry_warnings.warn(batch, waiting, self._around.clock())
        names = sorted({receipt.sink for receipt in waiting})
        command = decision_command(self._log.uri, batch, names)
        return (
            f"batch {batch}: {len(waiting)} branches of {', '.join(names)} still wait to be committed"
            f"{''.join(f'; {why}' for why in progress.away.values())} (if a system is gone for good: "
            f"stop the pipeline, and run '{command} --accept-loss')"
        )

    def _groups(self, receipts: Sequence[Receipt]) -> Iterable[list[Receipt]]:
        """Yield receipts of one sink each, as many as one call of `commit` takes."""
        for name, mine in by_sink(receipts):
            sink, size = self._sinks.get(name), len(mine)
            if sink is not None and not sink.commit_together(mine):
                size = self._around.settings.commits_at_once or sink.commits_at_once
            yield from (mine[start : start + size] for start in range(0, len(mine), size))

    def _group(
        self, history: BatchHistory, receipts: Sequence[Receipt], progress: CommitProgress
    ) -> list[BranchState]:
        name, batch = receipts[0].sink, history.decided.batch
        if history.accepts_loss(name):
            return self._once(receipts)
        command = decision_command(self._log.uri, batch, [name])
        if name not in self._sinks:
            raise LogMismatch(
                f"the log has decided branches of sink {name!r}, but the pipeline has no such sink. "
                "Start it once with that sink, or finish them with 'poundlock txn commit'. If its "
                f"system is gone for good, run '{command} --accept-loss'",
                sink=name,
            )
        try:
            with error_context(sink=name):
                began = self._around.monotonic()
                states = self._sinks[name].commit(receipts)  # The line that commits.
                if all(state is BranchState.COMMITTED for state in states):
                    self.rate.note(name, len(receipts), self._around.monotonic() - began)
                return states
        except Unavailable as error:
            progress.away[name] = f"{name} cannot be reached: {error.args[0]}"
            return [BranchState.UNREACHABLE] * len(receipts)
        except PermanentlyRefused as error:
            error.args = (
                f"{error.args[0]}. Or go on without the refused rows: '{command} --accept-loss'",
            )
            raise
        except PoundlockError:
            raise
        except Exception as error:
            raise InDoubt(
                f"the sink failed while committing {receipts[0].id} ({type(error).__name__}: "
                f"{error}). The batch is decided and nothing is lost: start the pipeline again",
                sink=name,
            ) from error

    def _once(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Try once to commit branches whose loss an operator has accepted. No error stops the batch."""
        name, left = receipts[0].sink, list(receipts)
        found = dict.fromkeys((receipt.id for receipt in receipts), BranchState.UNREACHABLE)
        while left and name in self._sinks:
            ids = [receipt.id for receipt in left]
            try:
                states = self._sinks[name].commit(left)  # The line that commits, too.
            except PermanentlyRefused as error:
                # The system stores what it does not refuse: try again without the refused branches.
                left = [receipt for receipt in left if receipt.id not in error.branches]
                if len(left) < len(ids):
                    continue
                logger.warning("sink %s: refused, and the loss is accepted: %s", name, error)
            except Exception as error:  # noqa: BLE001 (the operator has decided about any outcome)
                logger.warning(
                    "sink %s: not committed, and the loss is accepted: %s: %s",
                    *(name, type(error).__name__, error),
                )
            else:
                found |= zip(ids, states, strict=True)
            break
        return [found[receipt.id] for receipt in receipts]


def by_sink(receipts: Sequence[Receipt]) -> list[tuple[str, list[Receipt]]]:
    names = dict.fromkeys(receipt.sink for receipt in receipts)
    return [(name, [r for r in receipts if r.sink == name]) for name in names]
