"""Bugs in how a sink asks its system and reads the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Job, Votes
from poundlock.core.lanes import Lanes
from poundlock.core.model import Branch, Namespace, Receipt, Stray, Transaction
from poundlock.core.protocol import Action, BranchState, LogState, Stage

from .. import families
from ..database import Database
from ..kafka import KafkaSink
from ..systems import OURS
from .planting import Patch, change_recovery, mutant


def _asked_before(sink: KafkaSink, id_: str, handle: Mapping[str, Any]) -> bool:
    asked = sink.server.__dict__.setdefault("asked", set())
    request = (id_, handle["epoch"])
    again = request in asked
    asked.add(request)
    return again


@mutant(
    families.lost_messages,
    "a commit is repeated with EndTxn 4, whose PRODUCER_FENCED is read as timed out",
    r"repair of .* which is",
)
def retry_with_version_4(patch: Patch) -> None:
    def commit_one(self: KafkaSink, receipt: Receipt) -> BranchState:
        if not _asked_before(self, receipt.id, receipt.handle):
            return original(self, receipt)
        handle: Mapping[str, Any] = receipt.handle
        pid, epoch = handle["pid"], handle["epoch"]
        answer = self.wire(
            "commit", lambda: self.server.end_txn(receipt.id, pid, epoch, commit=True, version=4)
        )
        return self._seen(receipt) if answer == "NONE" else BranchState.ABORTED

    original = KafkaSink._commit_one
    patch.setattr(KafkaSink, "_commit_one", commit_one)


@mutant(
    families.lost_messages,
    "the first attempt is EndTxn 4, and INVALID_TXN_STATE to a later 5 is trusted unchecked",
    r"repair of .* which is",
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
    r"was aborted, though batch 0 is decided",
)
def init_before_outcome(patch: Patch) -> None:
    def end(self: KafkaSink, id_: str, handle: Mapping[str, Any], *, commit: bool) -> str:
        if _asked_before(self, id_, handle):
            self.wire("init", lambda: self.server.init_producer_id(id_))
        return original(self, id_, handle, commit=commit)

    original = KafkaSink._end
    patch.setattr(KafkaSink, "_end", end)


@mutant(
    families.crashes,
    "ids are counted modulo a bound, and other jobs count too",
    r"two tasks used the same branch id",
)
def ids_modulo_a_bound(patch: Patch) -> None:
    def id_of(self: KafkaSink, branch: Branch) -> str:
        ids = [self.id_with(branch.transaction, f"0.0.{number}") for number in range(7)]
        free = [id_ for id_ in ids if id_ not in branch.held_ids]
        return free[branch.task_attempt % len(free)]

    patch.setattr(KafkaSink, "id_of", id_of)


@mutant(
    families.late_opens,
    "a run uses the ids of an earlier run that left a task behind",
    r"though batch \d is decided|which the protocol aborted",
)
def lane_kept(patch: Patch) -> None:
    def write(
        self: Coordinator, transaction: Transaction, sinks: frozenset[str], job: Job
    ) -> Votes:
        return job.write(transaction, sinks, self._held_ids())

    patch.setattr(Coordinator, "_write", write)


@mutant(
    families.stragglers, "PRODUCER_FENCED counts as success", r"was finished, but .* is aborted"
)
def fenced_is_success(patch: Patch) -> None:
    patch.setattr(KafkaSink, "_witness", lambda self, receipt: BranchState.COMMITTED)


@mutant(
    families.late_markers,
    "a commit counts as seen when it was answered, before its markers are written",
    r"was finished, but .* is committing",
)
def unseen_commit(patch: Patch) -> None:
    patch.setattr(KafkaSink, "_seen", lambda self, receipt: BranchState.COMMITTED)


@mutant(
    families.losses,
    "42704 counts as committed, and the witness is not asked",
    r"was finished, but .* is aborted",
)
def undefined_is_success(patch: Patch) -> None:
    def commit_one(self: Database, gid: str) -> BranchState:
        self.wire("commit", lambda: self.server.commit_prepared(gid))
        return BranchState.COMMITTED

    patch.setattr(Database, "_commit_one", commit_one)


@mutant(
    families.races,
    "a branch whose outcome cannot be proven is written again",
    r"repair of .* which is",
)
def unproven_is_lost(patch: Patch) -> None:
    change_recovery(patch, Stage.DECIDED, BranchState.NO_WITNESS, Action.REPAIR)


@mutant(
    families.crashes,
    "the sweep compares names by prefix: `lock` touches `lock-2`",
    r"another pipeline's branch",
)
def sweep_by_prefix(patch: Patch) -> None:
    def find(self: Database, namespace: Namespace) -> list[Stray]:
        gids = self.wire("find", lambda: list(self.server.prepared))
        ours = [gid for gid in gids if gid.startswith(namespace.pipeline)]
        return [Stray(self.name, gid, int(gid.split(".")[2]), "prepared") for gid in ours]

    patch.setattr(Database, "find", find)


@mutant(
    families.restored_together,
    "each batch uses the ids of the batch before, and hides that it was committed",
    r"more than once",
)
def one_lane(patch: Patch) -> None:
    patch.setattr(Lanes, "take_turns", lambda self: None)


@mutant(
    families.restored_together,
    "a repair opens the ids that show the batch before its own",
    r"more than once",
)
def repaired_in_the_same_pair(patch: Patch) -> None:
    def repair(self: Coordinator, *given: Any) -> bool:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Lanes, "leave_pair", lambda self: None)
            return original(self, *given)

    original = Coordinator._repair
    patch.setattr(Coordinator, "_repair", repair)


@mutant(
    families.restored_together,
    "Kafka's epochs are not compared with those in the log",
    r"more than once",
)
def epochs_not_compared(patch: Patch) -> None:
    patch.setattr(KafkaSink, "committed_beyond", lambda self, state: None)


@mutant(
    families.crashes,
    "an id of Kafka's accuses the log, though its transaction is not committed",
    r"stopped without a reason: LogMismatch.*does not know it",
)
def open_ids_accuse(patch: Patch) -> None:
    def beyond(self: KafkaSink, state: LogState) -> str | None:
        known = set(state.ids_of(self.name))
        return next((id_ for id_ in self._list(OURS) if id_ not in known), None)

    patch.setattr(KafkaSink, "committed_beyond", beyond)


@mutant(
    families.deleted_together,
    "Kafka is not asked for earlier logs",
    r"more than once|goes on for ever",
)
def ids_of_deleted_logs_ignored(patch: Patch) -> None:
    patch.setattr(KafkaSink, "logs_of", lambda self, pipeline: frozenset())
