"""Deliberate protocol bugs in the code under test. The model must catch each of them.

A surviving mutant shows that the model is too weak: fix the model then, never the mutant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import pytest

from poundlock.core import coordinator as coordinating
from poundlock.core import log as logging
from poundlock.core import protocol
from poundlock.core.commit import BranchKey, CommitProgress
from poundlock.core.coordinator import Coordinator, Job
from poundlock.core.log import FileLog, NumberTaken, TransactionLog
from poundlock.core.model import (
    Compacted,
    Decided,
    Finished,
    Namespace,
    OperatorDecided,
    Receipt,
    Stray,
)
from poundlock.core.protocol import Action, BranchState, LogState, Stage
from poundlock.errors import LogMismatch, Unavailable

from . import families
from .database import Database
from .kafka import KafkaSink
from .schedule import Schedule

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A bug, and the family of schedules that is searched first."""

    name: str
    bug: str
    family: Callable[[], Iterator[Schedule]]
    plant: Callable[[Patch], None]


MUTANTS: list[Mutant] = []


def mutant(
    family: Callable[[], Iterator[Schedule]], bug: str
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(plant.__name__, bug, family, plant))
        return plant

    return add


# The sink and its answers.


def _asked_before(sink: KafkaSink, id_: str, handle: Mapping[str, Any]) -> bool:
    asked = sink.server.__dict__.setdefault("asked", set())
    request = (id_, handle["epoch"])
    again = request in asked
    asked.add(request)
    return again


@mutant(
    families.lost_messages,
    "a commit is repeated with EndTxn 4, whose PRODUCER_FENCED is read as timed out",
)
def retry_with_version_4(patch: Patch) -> None:
    def commit_one(self: KafkaSink, receipt: Receipt) -> BranchState:
        if not _asked_before(self, receipt.id, receipt.handle):
            return original(self, receipt)
        pid, epoch = receipt.handle["pid"], receipt.handle["epoch"]
        answer = self.wire(
            "commit", lambda: self.server.end_txn(receipt.id, pid, epoch, commit=True, version=4)
        )
        return self._seen(receipt) if answer == "NONE" else BranchState.ABORTED

    original = KafkaSink._commit_one
    patch.setattr(KafkaSink, "_commit_one", commit_one)


@mutant(
    families.lost_messages,
    "the first attempt is EndTxn 4, and INVALID_TXN_STATE to a later 5 is trusted unchecked",
)
def version_4_first(patch: Patch) -> None:
    def end(self: KafkaSink, id_: str, handle: Mapping[str, Any], *, commit: bool) -> str:
        version = 5 if _asked_before(self, id_, handle) else 4
        pid, epoch = handle["pid"], handle["epoch"]
        return self.wire(
            "commit" if commit else "abort",
            lambda: self.server.end_txn(id_, pid, epoch, commit=commit, version=version),
        )

    patch.setattr(KafkaSink, "_end", end)
    patch.setattr(KafkaSink, "_contradicted", lambda self, receipt: BranchState.ABORTED)


@mutant(
    families.lost_messages,
    "after a lost answer the producer is initialised again before its outcome is known",
)
def init_before_outcome(patch: Patch) -> None:
    def end(self: KafkaSink, id_: str, handle: Mapping[str, Any], *, commit: bool) -> str:
        if _asked_before(self, id_, handle):
            self.wire("init", lambda: self.server.init_producer_id(id_))
        return original(self, id_, handle, commit=commit)

    original = KafkaSink._end
    patch.setattr(KafkaSink, "_end", end)


@mutant(families.stragglers, "PRODUCER_FENCED counts as success")
def fenced_is_success(patch: Patch) -> None:
    patch.setattr(KafkaSink, "_witness", lambda self, receipt: BranchState.COMMITTED)


@mutant(
    families.late_markers,
    "a commit counts as seen when it was answered, before its markers are written",
)
def unseen_commit(patch: Patch) -> None:
    patch.setattr(KafkaSink, "_seen", lambda self, receipt: BranchState.COMMITTED)


@mutant(families.losses, "42704 counts as committed, and the witness is not asked")
def undefined_is_success(patch: Patch) -> None:
    def commit_one(self: Database, gid: str) -> BranchState:
        self.wire("commit", lambda: self.server.commit_prepared(gid))
        return BranchState.COMMITTED

    patch.setattr(Database, "_commit_one", commit_one)


@mutant(families.races, "a branch whose outcome cannot be proven is written again")
def unproven_is_lost(patch: Patch) -> None:
    _recovery(patch, Stage.DECIDED, BranchState.NO_WITNESS, Action.REPAIR)


@mutant(families.crashes, "the sweep compares names by prefix: `lock` touches `lock-2`")
def sweep_by_prefix(patch: Patch) -> None:
    def find(self: Database, namespace: Namespace) -> list[Stray]:
        gids = self.wire("find", lambda: list(self.server.prepared))
        ours = [gid for gid in gids if gid.startswith(namespace.pipeline)]
        return [Stray(self.name, gid, int(gid.split(".")[2]), "prepared") for gid in ours]

    patch.setattr(Database, "find", find)


# The log.


@mutant(families.machine_crashes, "a record is published without being synced")
def no_sync_of_the_record(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        if not path.endswith(".tmp"):
            original(self, path)

    original = FileLog._sync
    patch.setattr(FileLog, "_sync", sync)


@mutant(families.machine_crashes, "the directory is not synced after a record was linked into it")
def no_sync_of_the_directory(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        if path != self._directory:
            original(self, path)

    original = FileLog._sync
    patch.setattr(FileLog, "_sync", sync)


@mutant(
    families.machine_crashes, "the log's directory is created, but its name is not made durable"
)
def no_sync_above_the_directory(patch: Patch) -> None:
    patch.setattr(
        FileLog, "_make_directory", lambda self: self._disk.make_directory(self._directory)
    )


@mutant(
    families.unsynced_links,
    "a driver relies on records that another driver linked and did not sync",
)
def trusts_found_names(patch: Patch) -> None:
    def create(self: FileLog, number: int, data: bytes) -> None:
        self._names_are_durable = True
        original(self, number, data)

    original = FileLog._create
    patch.setattr(FileLog, "_create", create)


@mutant(
    families.interrupted_links,
    "after an interrupted link the record is found, and counts as durable",
)
def interrupted_link(patch: Patch) -> None:
    def create(self: FileLog, number: int, data: bytes) -> None:
        if self._disk.names(self._directory).count(f"{number:020}.json"):
            raise NumberTaken
        original(self, number, data)

    original = FileLog._create
    patch.setattr(FileLog, "_create", create)


@mutant(families.failed_syncs, "a failed fsync is repeated, and the second answer is trusted")
def fsync_again(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        try:
            self._disk.sync(path)
        except OSError:
            self._disk.sync(path)

    patch.setattr(FileLog, "_sync", sync)


@mutant(families.races, "a create that returns counts as success, and is not read back")
def no_read_back(patch: Patch) -> None:
    def publish(self: TransactionLog, entry: logging.Entry) -> logging.Entry:
        try:
            self._create(entry.number, entry.encode())
        except Exception:  # noqa: BLE001
            return original(self, entry)
        return entry

    original = TransactionLog._publish
    patch.setattr(TransactionLog, "_publish", publish)


@mutant(families.replaced_drivers, "a driver does not check whether its last record still exists")
def no_look_at_the_predecessor(patch: Patch) -> None:
    patch.setattr(TransactionLog, "_owns_predecessor", lambda self: True)


@mutant(families.races, "an append that finds its number used uses the next one")
def next_number(patch: Patch) -> None:
    def settle(self: TransactionLog) -> None:
        while self._pending is not None:
            found = self._publish(self._pending)
            if found.nonce == self._pending.nonce:
                self._pending = None
                self._apply(found)
            else:
                self._pending = replace(self._pending, number=self._pending.number + 1)

    patch.setattr(TransactionLog, "settle", settle)


@mutant(families.woken_in_compaction, "compaction deletes the newest records first")
def compaction_from_the_top(patch: Patch) -> None:
    def compact(self: TransactionLog, keep: int) -> None:
        batch_floor = sorted(self.state.batches)[-keep]
        floor = self._decided_at[batch_floor]
        assert self.state.generation is not None
        self.append(Compacted(floor, batch_floor, self.state.generation))
        for number in sorted(self._numbers(), reverse=True):
            if number < floor:
                self._delete(number)

    patch.setattr(TransactionLog, "compact", compact)


@mutant(families.woken_in_compaction, "compaction deletes without a record that states its floor")
def compaction_without_record(patch: Patch) -> None:
    def compact(self: TransactionLog, keep: int) -> None:
        floor = self._decided_at[sorted(self.state.batches)[-keep]]
        for number in sorted(self._numbers()):
            if number < floor:
                self._delete(number)

    patch.setattr(TransactionLog, "compact", compact)


# The coordinator.


def _recovery(patch: Patch, stage: Stage, state: BranchState, action: Action) -> None:
    table = {**protocol.RECOVERY, stage: {**protocol.RECOVERY[stage], state: action}}
    patch.setattr(protocol, "RECOVERY", table)


@mutant(families.crashes, "branches are committed before the decision is in the log")
def commit_before_decide(patch: Patch) -> None:
    def decide(self: Coordinator, batch: int, offsets: str, job: Job) -> None:
        transaction, votes = self._gather_votes(batch, job)
        for receipt in votes.receipts:
            self.sinks[receipt.sink].commit([receipt])
        self.log.append(_decision(transaction, offsets, votes))

    patch.setattr(Coordinator, "_decide", decide)


def _decision(transaction: Any, offsets: str, votes: Any) -> Decided:
    return Decided(
        transaction.batch,
        transaction.attempt,
        transaction.generation,
        offsets,
        votes.receipts,
        dict(votes.totals),
    )


@mutant(
    families.unknown_appends,
    "an append whose outcome is unknown counts as failed, and the batch is aborted",
)
def abort_after_unknown_append(patch: Patch) -> None:
    def decide(self: Coordinator, batch: int, offsets: str, job: Job) -> None:
        transaction, votes = self._gather_votes(batch, job)
        try:
            self.log.append(_decision(transaction, offsets, votes))
        except Unavailable:
            self.log._pending = None
            for sink in self.sinks.values():
                sink.abort(sink.find(self.generation.namespace))
            raise

    patch.setattr(Coordinator, "_decide", decide)


@mutant(families.losses, "lost branches are replaced without a record in the log")
def repair_without_record(patch: Patch) -> None:
    def repair(self: Coordinator, batch: int, lost: Set[BranchKey], job: Job) -> bool:
        transaction = self._transaction(batch, self.state.batches[batch].decided.attempt + 1)
        for receipt in self._replay(batch, lost, transaction, job):
            self.sinks[receipt.sink].commit([receipt])
        self.log.append(Finished(batch))
        return True

    patch.setattr(Coordinator, "_repair", repair)


@mutant(
    families.tampered_checkpoints, "a batch is skipped by its number, without a look at its offsets"
)
def skip_by_number(patch: Patch) -> None:
    def enter(state: LogState, batch: int, offsets: str, before: str | None) -> Stage:
        history = state.batches.get(batch)
        return original(state, batch, history.decided.offsets if history else offsets)

    original = protocol.enter
    patch.setattr(coordinating, "enter", enter)


@mutant(families.races, "it is not checked whether the checkpoint still holds the executed plan")
def plan_before_unchecked(patch: Patch) -> None:
    patch.setattr(
        coordinating, "enter", lambda state, batch, offsets, _: original(state, batch, offsets)
    )
    original = protocol.enter


@mutant(families.lost_messages, "the sweep does not spare branches that a decision names")
def sweep_decided(patch: Patch) -> None:
    patch.setattr(LogState, "history_of", lambda self, stray: None)


@mutant(families.crashes, "commit is presumed: branches that no decision names are committed")
def presumed_commit(patch: Patch) -> None:
    def abort(self: Database, strays: Sequence[Stray]) -> list[BranchState]:
        for stray in strays:
            self.wire("commit", lambda id_=stray.id: self.server.commit_prepared(id_))
        return [BranchState.ABORTED] * len(strays)

    patch.setattr(Database, "abort", abort)


@mutant(families.lost_messages, "a branch whose system does not answer counts as committed")
def finished_unseen(patch: Patch) -> None:
    _recovery(patch, Stage.DECIDED, BranchState.UNREACHABLE, Action.DONE)


@mutant(families.losses, "a branch that was aborted after the decision counts as done, as in Flink")
def loss_is_logged_only(patch: Patch) -> None:
    _recovery(patch, Stage.DECIDED, BranchState.ABORTED, Action.DONE)


@mutant(families.gone_for_good, "an accepted loss counts only once the branch is lost or unknown")
def accepted_loss_still_waits(patch: Patch) -> None:
    waits = {BranchState.PREPARED: Action.COMMIT, BranchState.UNREACHABLE: Action.RETRY}
    patch.setattr(protocol, "LOSS_ACCEPTED", {**protocol.LOSS_ACCEPTED, **waits})


@mutant(families.gone_for_good, "an operator's decision for one sink counts for all of the batch")
def loss_accepted_for_all(patch: Patch) -> None:
    def apply(self: LogState, record: Any) -> None:
        if isinstance(record, OperatorDecided):
            sinks = {receipt.sink for receipt in self.batches[record.batch].receipts}
            record = replace(record, sinks=tuple(sinks))
        original(self, record)

    original = LogState.apply
    patch.setattr(LogState, "apply", apply)


@mutant(families.losses, "a driver that takes over finishes batches whose branches were lost")
def finished_with_losses(patch: Patch) -> None:
    def complete(self: Coordinator, batch: int) -> CommitProgress:
        progress = original(self, batch)
        if self._swept_at < 0 and progress.lost:
            self.log.append(Finished(batch))
        return progress

    original = Coordinator._complete
    patch.setattr(Coordinator, "_complete", complete)


@mutant(families.races, "a driver takes over without appending its generation")
def no_generation(patch: Patch) -> None:
    def append_generation(self: Coordinator, pipeline: str, query: Any, owner: str) -> None:
        if self.log.load().generation is None:
            original(self, pipeline, query, owner)

    original = Coordinator._append_generation
    patch.setattr(Coordinator, "_append_generation", append_generation)


@mutant(families.losses, "the replay's branches are matched to the lost ones by task number")
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


@mutant(families.losses, "a repair writes every branch of the sink again, even committed ones")
def repair_everything(patch: Patch) -> None:
    patch.setattr(coordinating, "match_lost", lambda recorded, lost, replayed, **_: list(replayed))


@mutant(
    families.replays_that_differ, "the drain does not compare its fingerprint with the decision"
)
def drain_unchecked(patch: Patch) -> None:
    patch.setattr(coordinating, "compare", lambda recorded, replayed: [])


@mutant(
    families.replays_that_differ,
    "a finished batch of a stateful query is skipped without being drained",
)
def no_drain(patch: Patch) -> None:
    patch.setattr(Coordinator, "_drain", lambda self, batch, job: None)


@mutant(families.tampered_checkpoints, "a log found at another address is accepted")
def copy_accepted(patch: Patch) -> None:
    def check(log: TransactionLog, pipeline: str, query: str | None) -> None:
        if log.state.generation is not None:
            log.state.generation = replace(log.state.generation, uri=log.uri)
        original(log, pipeline, query)

    original = coordinating.check_log_matches
    patch.setattr(coordinating, "check_log_matches", check)


@mutant(families.restored_together, "the systems are not asked for what the log does not know")
def restored_log_accepted(patch: Patch) -> None:
    patch.setattr(coordinating, "is_newest", lambda log, sinks: True)


@mutant(families.restored_together, "of what the systems remember only batches are compared")
def repairs_not_compared(patch: Patch) -> None:
    def explains(self: LogState, sink: str, batch: int, id: str | None = None) -> bool:
        return original(self, sink, batch)

    original = LogState.explains
    patch.setattr(LogState, "explains", explains)


@mutant(families.asked_late, "the log is accused without being read again")
def accused_at_once(patch: Patch) -> None:
    def newest(log: TransactionLog, sinks: Mapping[str, Any]) -> bool:
        if any(sink.committed_beyond(log.state) for sink in sinks.values()):
            raise LogMismatch("the log was restored to an older state")
        return True

    patch.setattr(coordinating, "is_newest", newest)


@mutant(families.tombstones, "a tombstone counts as a commit that the log does not know")
def tombstones_accuse(patch: Patch) -> None:
    def beyond(self: Database, state: LogState) -> str | None:
        witness = self.wire("remembered", lambda: dict(self.server.witness))
        named = ((gid, int(gid.split(".")[4].split("-")[0])) for gid in witness)
        return next((gid for gid, b in named if not state.explains(self.name, b, gid)), None)

    patch.setattr(Database, "committed_beyond", beyond)


@mutant(families.races, "a replaced driver reports an error of the systems instead of `Fenced`")
def blames_the_systems(patch: Patch) -> None:
    patch.setattr(Coordinator, "_prefer_fenced", lambda self: contextlib.nullcontext())


@mutant(families.losses, "nothing is swept while a commit waits, even if it waits for a stray")
def waits_behind_strays(patch: Patch) -> None:
    patch.setattr(Coordinator, "_sweep_reachable", lambda self: None)


@mutant(families.losses, "the lost branches' replacements are committed before the log names them")
def commit_before_repaired(patch: Patch) -> None:
    def replay(self: Coordinator, *arguments: Any) -> list[Receipt]:
        chosen = original(self, *arguments)
        for receipt in chosen:
            self.sinks[receipt.sink].commit([receipt])
        return chosen

    original = Coordinator._replay
    patch.setattr(Coordinator, "_replay", replay)
