"""Bugs in the coordinator and in the rules of the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from poundlock.core import coordinator as coordinating
from poundlock.core import former, protocol
from poundlock.core.checkpoint import Plan
from poundlock.core.commit import BranchKey, CommitProgress
from poundlock.core.coordinator import Coordinator, Job
from poundlock.core.log import TransactionLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    OperatorDecided,
    Receipt,
    Stray,
    Withdrawn,
)
from poundlock.core.protocol import Action, BranchState, LogState, Stage
from poundlock.errors import LogMismatch, Unavailable

from .. import families, spark
from ..database import Database
from ..systems import OURS
from .planting import Patch, change_recovery, mutant


@mutant(
    families.crashes,
    "branches are committed before the decision is in the log",
    r"was committed, and no decision names it",
)
def commit_before_decide(patch: Patch) -> None:
    def decide(self: Coordinator, batch: int, plan: Plan, job: Job) -> None:
        transaction, votes = self._gather_votes(batch, job)
        for receipt in votes.receipts:
            self.sinks[receipt.sink].commit([receipt])
        self.log.append(_decision(transaction, plan, votes))

    patch.setattr(Coordinator, "_decide", decide)


def _decision(transaction: Any, plan: Plan, votes: Any) -> Decided:
    return Decided(
        transaction.batch,
        transaction.attempt,
        transaction.generation,
        plan.hash,
        votes.receipts,
        dict(votes.totals),
        plan=plan.text.decode(),
    )


@mutant(
    families.unknown_appends,
    "an append whose outcome is unknown counts as failed, and the batch is aborted",
    r"was aborted, though batch 0 is decided",
)
def abort_after_unknown_append(patch: Patch) -> None:
    def decide(self: Coordinator, batch: int, plan: Plan, job: Job) -> None:
        transaction, votes = self._gather_votes(batch, job)
        try:
            self.log.append(_decision(transaction, plan, votes))
        except Unavailable:
            self.log._pending = None
            for sink in self.sinks.values():
                sink.abort(sink.find(self.generation.namespace))
            raise

    patch.setattr(Coordinator, "_decide", decide)


@mutant(
    families.losses,
    "lost branches are replaced without a record in the log",
    r"was committed, and no decision names it",
)
def repair_without_record(patch: Patch) -> None:
    def repair(self: Coordinator, batch: int, lost: Set[BranchKey], job: Job) -> bool:
        if not lost:
            return original(self, batch, lost, job)
        transaction = self._transaction(batch, self.state.batches[batch].decided.attempt + 1)
        for receipt in self._replay(batch, lost, transaction, job):
            self.sinks[receipt.sink].commit([receipt])
        self.log.append(Finished(batch))
        return True

    original = Coordinator._repair
    patch.setattr(Coordinator, "_repair", repair)


@mutant(
    families.tampered_checkpoints,
    "a batch is skipped by its number, without a look at its offsets",
    r"do not follow each other",
)
def skip_by_number(patch: Patch) -> None:
    def enter(state: LogState, batch: int, offsets: str, before: str | None) -> Stage:
        history = state.batches.get(batch)
        return original(state, batch, history.decided.offsets if history else offsets)

    original = protocol.enter
    patch.setattr(coordinating, "enter", enter)


@mutant(
    families.lost_messages,
    "the sweep does not spare branches that a decision names",
    r"was aborted, though batch 0 is decided",
)
def sweep_decided(patch: Patch) -> None:
    patch.setattr(LogState, "history_of", lambda self, stray: None)


@mutant(
    families.crashes,
    "commit is presumed: branches that no decision names are committed",
    r"was committed, and no decision names it",
)
def presumed_commit(patch: Patch) -> None:
    def abort(self: Database, strays: Sequence[Stray]) -> list[BranchState]:
        for stray in strays:
            self.wire("commit", lambda id_=stray.id: self.server.commit_prepared(id_))
        return [BranchState.ABORTED] * len(strays)

    patch.setattr(Database, "abort", abort)


@mutant(
    families.lost_messages,
    "a branch whose system does not answer counts as committed",
    r"was finished, but .* is open",
)
def finished_unseen(patch: Patch) -> None:
    change_recovery(patch, Stage.DECIDED, BranchState.UNREACHABLE, Action.DONE)


@mutant(
    families.losses,
    "a branch that was aborted after the decision counts as done, as in Flink",
    r"was finished, but .* is aborted",
)
def loss_is_logged_only(patch: Patch) -> None:
    change_recovery(patch, Stage.DECIDED, BranchState.ABORTED, Action.DONE)


@mutant(
    families.gone_for_good,
    "an accepted loss counts only once the branch is lost or unknown",
    r"does not come through",
)
def accepted_loss_still_waits(patch: Patch) -> None:
    waits = {BranchState.PREPARED: Action.COMMIT, BranchState.UNREACHABLE: Action.RETRY}
    patch.setattr(protocol, "LOSS_ACCEPTED", {**protocol.LOSS_ACCEPTED, **waits})


@mutant(
    families.gone_for_good,
    "an operator's decision for one sink counts for all of the batch",
    r"repair of .* which is .*committed",
)
def loss_accepted_for_all(patch: Patch) -> None:
    def apply(self: LogState, record: Any, unread: Any = ()) -> None:
        if isinstance(record, OperatorDecided):
            sinks = {receipt.sink for receipt in self.batches[record.batch].receipts}
            record = replace(record, sinks=tuple(sinks))
        original(self, record, unread)

    original = LogState.apply
    patch.setattr(LogState, "apply", apply)


@mutant(
    families.losses,
    "a driver that takes over finishes batches whose branches were lost",
    r"was finished, but .* is aborted",
)
def finished_with_losses(patch: Patch) -> None:
    def complete(self: Coordinator, batch: int) -> CommitProgress:
        progress = original(self, batch)
        if self._swept_at < 0 and progress.lost:
            self.log.append(Finished(batch))
        return progress

    original = Coordinator._complete
    patch.setattr(Coordinator, "_complete", complete)


@mutant(
    families.races,
    "a driver takes over without appending its generation",
    r"which the protocol aborted",
)
def no_generation(patch: Patch) -> None:
    def append_generation(self: Coordinator, *arguments: Any) -> None:
        if self.log.load().generation is None:
            original(self, *arguments)

    original = Coordinator._append_generation
    patch.setattr(Coordinator, "_append_generation", append_generation)


@mutant(
    families.losses,
    "the replay's branches are matched to the lost ones by task number",
    r"is finished, and rows .* are not in",
)
def repair_by_task(patch: Patch) -> None:
    def match(
        recorded: Sequence[Receipt],
        lost: frozenset[BranchKey],
        replayed: Sequence[Receipt],
        **_: Any,
    ) -> list[Receipt]:
        tasks = {receipt.task for receipt in recorded if (receipt.sink, receipt.id) in lost}
        return [receipt for receipt in replayed if receipt.task in tasks]

    patch.setattr(coordinating, "match_lost", match)


@mutant(
    families.losses,
    "a repair needs only the sink's total to match, though some branches are committed",
    r"more than once",
)
def repair_by_total(patch: Patch) -> None:
    def match(
        recorded: Sequence[Receipt],
        lost: frozenset[BranchKey],
        replayed: Sequence[Receipt],
        **operator_decision: Any,
    ) -> Any:
        result = original(recorded, lost, replayed, **operator_decision)
        same = isinstance(result, protocol.Mismatch) and result.recorded == result.replayed
        return list(replayed)[: len(lost)] if same else result

    original = protocol.match_lost
    patch.setattr(coordinating, "match_lost", match)


@mutant(
    families.losses,
    "a repair writes every branch of the sink again, even committed ones",
    r"more than once",
)
def repair_everything(patch: Patch) -> None:
    patch.setattr(coordinating, "match_lost", lambda recorded, lost, replayed, **_: list(replayed))


@mutant(
    families.replays_that_differ,
    "the drain does not compare its fingerprint with the decision",
    r"state and output of batch 0 differ",
)
def drain_unchecked(patch: Patch) -> None:
    patch.setattr(coordinating, "compare", lambda recorded, replayed: [])


@mutant(
    families.exchanged_sinks,
    "a sink counts as changed if only one side knows it",
    r"its replay computed other rows",
)
def unknown_sinks_compared(patch: Patch) -> None:
    def compare(
        recorded: Mapping[str, Fingerprint], replayed: Mapping[str, Fingerprint]
    ) -> list[protocol.Mismatch]:
        sinks = {*recorded, *replayed}
        before, now = (
            {sink: known.get(sink, Fingerprint()) for sink in sinks}
            for known in (recorded, replayed)
        )
        return original(before, now)

    original = protocol.compare
    patch.setattr(coordinating, "compare", compare)


@mutant(
    families.replays_that_differ,
    "a finished batch of a stateful query is skipped without being drained",
    r"its state is lost",
)
def no_drain(patch: Patch) -> None:
    patch.setattr(Coordinator, "_drain", lambda self, batch, job: None)


@mutant(
    families.tampered_checkpoints,
    "a log found at another address is accepted",
    r"wrote to the copy of a log",
)
def copy_accepted(patch: Patch) -> None:
    def check(log: TransactionLog, pipeline: str, query: str | None) -> None:
        if log.state.generation is not None:
            log.state.generation = replace(log.state.generation, uri=log.uri)
        original(log, pipeline, query)

    original = coordinating.check_log_matches
    patch.setattr(coordinating, "check_log_matches", check)


@mutant(
    families.resized_clusters,
    "a decided batch is cut by the cluster that replays it",
    r"the replay cannot rep",
)
def cut_not_repeated(patch: Patch) -> None:
    patch.setattr(Coordinator, "cut_to_repeat", lambda self: {})


@mutant(
    families.changed_sinks,
    "only the sinks that the pipeline has now are swept",
    r"it goes on for ever",
)
def former_sinks_forgotten(patch: Patch) -> None:
    patch.setattr(coordinating, "stand_ins", lambda log, sinks: [])


@mutant(
    families.changed_sinks,
    "the log does not say where branches may be open",
    r"it goes on for ever",
)
def opening_not_logged(patch: Patch) -> None:
    patch.setattr(Coordinator, "_log_opening", lambda self: None)


@mutant(
    families.changed_sinks,
    "a former sink's branches are aborted, even if they are decided",
    r"was aborted, though batch 0 is decided",
)
def former_sinks_aborted(patch: Patch) -> None:
    def append_generation(self: Coordinator, *given: Any) -> None:
        original(self, *given)
        for sink in self._former:
            sink.abort(sink.find(self.generation.namespace))

    original = Coordinator._append_generation
    patch.setattr(former, "_must_commit", lambda state, sink: False)
    patch.setattr(Coordinator, "_append_generation", append_generation)


@mutant(
    families.restored_together,
    "the systems are not asked for what the log does not know",
    r"more than once",
)
def restored_log_accepted(patch: Patch) -> None:
    patch.setattr(coordinating, "is_newest", lambda log, sinks: True)


@mutant(
    families.restored_together,
    "of what the systems remember only batches are compared",
    r"more than once",
)
def repairs_not_compared(patch: Patch) -> None:
    def explains(self: LogState, sink: str, batch: int, id: str | None = None) -> bool:
        return original(self, sink, batch)

    original = LogState.explains
    patch.setattr(LogState, "explains", explains)


@mutant(
    families.asked_late,
    "the log is accused without being read again",
    r"stopped without a reason: LogMismatch",
)
def accused_at_once(patch: Patch) -> None:
    def newest(log: TransactionLog, sinks: Mapping[str, Any]) -> bool:
        if any(sink.committed_beyond(log.state) for sink in sinks.values()):
            raise LogMismatch("the log was restored to an older state")
        return True

    patch.setattr(coordinating, "is_newest", newest)


@mutant(
    families.tombstones,
    "a tombstone counts as a commit that the log does not know",
    r"stopped without a reason: LogMismatch.*does not know it",
)
def tombstones_accuse(patch: Patch) -> None:
    def beyond(self: Database, state: LogState) -> str | None:
        witness = self.wire("remembered", lambda: dict(self.server.witness))
        ours = [gid for gid in witness if gid.startswith(f"{OURS}.")]
        named = ((gid, int(gid.split(".")[4].split("-")[0])) for gid in ours)
        return next((gid for gid, b in named if not state.explains(self.name, b, gid)), None)

    patch.setattr(Database, "committed_beyond", beyond)


@mutant(
    families.replaced_while_idle,
    "a take-over does not wait for an idle driver to notice",
    r"goes on beside its successor",
)
def takes_over_at_once(patch: Patch) -> None:
    patch.setattr(Coordinator, "_await_end_of", lambda self, before, has_ended: None)


@mutant(
    families.deleted_together,
    "the systems are not asked for earlier logs when a log is new",
    r"more than once",
)
def new_log_accepted(patch: Patch) -> None:
    patch.setattr(coordinating, "is_first", lambda log, sinks, pipeline, abandoned: True)


@mutant(
    families.begun_meanwhile,
    "a new log is accused without being read again",
    r"stopped without a reason: LogMismatch.*is new, but",
)
def new_log_accused_at_once(patch: Patch) -> None:
    def is_first(
        log: TransactionLog, sinks: Mapping[str, Any], pipeline: str, abandoned: Set[str]
    ) -> bool:
        if any(sink.logs_of(pipeline) for sink in sinks.values()):
            raise LogMismatch(f"the log at {log.uri} is new, but a system knows the pipeline")
        return True

    patch.setattr(coordinating, "is_first", is_first)


@mutant(
    families.crashes,
    "the earlier logs of `lock-2` are taken for those of `lock`",
    r"stopped without a reason: LogMismatch.*is new, but",
)
def logs_by_prefix(patch: Patch) -> None:
    def logs_of(self: Database, pipeline: str) -> frozenset[str]:
        witness = self.wire("remembered", lambda: dict(self.server.witness))
        return frozenset(gid.split(".")[1] for gid in witness if gid.startswith(pipeline))

    patch.setattr(Database, "logs_of", logs_of)


@mutant(
    families.races,
    "a replaced driver reports an error of the systems instead of `Fenced`",
    r"stopped without a reason: InDoubt",
)
def blames_the_systems(patch: Patch) -> None:
    patch.setattr(Coordinator, "_prefer_fenced", lambda self: contextlib.nullcontext())


@mutant(
    families.losses,
    "nothing is swept while a commit waits, even if it waits for a stray",
    r"it goes on for ever",
)
def waits_behind_strays(patch: Patch) -> None:
    patch.setattr(Coordinator, "_sweep_reachable", lambda self: None)


@mutant(
    families.losses,
    "the lost branches' replacements are committed before the log names them",
    r"was committed, and no decision names it",
)
def commit_before_repaired(patch: Patch) -> None:
    def replay(self: Coordinator, *arguments: Any) -> list[Receipt]:
        chosen = original(self, *arguments)
        for receipt in chosen:
            self.sinks[receipt.sink].commit([receipt])
        return chosen

    original = Coordinator._replay
    patch.setattr(Coordinator, "_replay", replay)


@mutant(
    families.never_in_time,
    "a batch is decided, however little time its branches have left",
    r"s to be committed",
)
def time_left_unchecked(patch: Patch) -> None:
    patch.setattr(coordinating, "check_time_left", lambda receipts, now, least_s, rate: None)


@mutant(
    families.withdrawn_plans,
    "a driver decides a batch with a plan that an operator has withdrawn",
    r"TornFile|does not come through|do not follow each other",
)
def withdrawn_plan_decided(patch: Patch) -> None:
    def enter(state: LogState, *given: Any) -> Stage:
        state.withdrawn.clear()
        return original(state, *given)

    original = protocol.enter
    patch.setattr(coordinating, "enter", enter)


@mutant(
    families.withdrawn_plans,
    "a plan is moved away, and the log does not say that it was withdrawn",
    r"is not in its checkpoint|TornFile",
)
def plan_moved_without_record(patch: Patch) -> None:
    def append(self: TransactionLog, record: Any) -> None:
        if not isinstance(record, Withdrawn):
            original(self, record)

    original = TransactionLog.append
    patch.setattr(TransactionLog, "append", append)


@mutant(
    families.cut_off_executors,
    "a task that cannot reach a system votes no, and is not run elsewhere",
    r"stopped without a reason: Unavailable",
)
def unreachable_is_refusal(patch: Patch) -> None:
    patch.setattr(spark, "is_refusal", lambda error, *, at_most_once: True)


@mutant(
    families.changed_sinks,
    "a sink that is now below exactly-once does not end what it left open",
    r"goes on for ever|were left open",
)
def downgraded_sinks_not_swept(patch: Patch) -> None:
    def chosen(log: TransactionLog, sinks: Mapping[str, Any]) -> list[Any]:
        return [it for it in original(log, sinks) if it.name not in sinks]

    original = former.stand_ins
    patch.setattr(coordinating, "stand_ins", chosen)
