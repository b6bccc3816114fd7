"""Bugs in how Spark's checkpoint is made durable and mended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from poundlock.core.checkpoint import Checkpoint, FileCheckpoint, Plan
from poundlock.core.log import TransactionLog

from .. import families
from .planting import Patch, mutant


@mutant(
    families.power_losses,
    "a batch begins before Spark's files are durable",
    r"there is no checkpoint beside it|with other source offsets|TornFile",
)
def checkpoint_not_synced(patch: Patch) -> None:
    def sync(self: FileCheckpoint, names: Iterable[str]) -> None:
        pass

    patch.setattr(FileCheckpoint, "_sync", sync)


@mutant(
    families.power_losses,
    "Spark's files are synced, and their names are not",
    r"there is no checkpoint beside it|with other source offsets|TornFile",
)
def names_of_the_checkpoint_not_synced(patch: Patch) -> None:
    patch.setattr(FileCheckpoint, "_above", lambda self, name: ())


@mutant(
    families.power_losses,
    "a lost plan is neither synced before its decision nor restored",
    r"with other source offsets",
)
def plan_neither_synced_nor_restored(patch: Patch) -> None:
    def sync(self: FileCheckpoint, names: Iterable[str]) -> None:
        original(self, [name for name in names if not name.startswith("offsets/")])

    original = FileCheckpoint._sync
    patch.setattr(FileCheckpoint, "_sync", sync)
    patch.setattr(Checkpoint, "_restore_plan", lambda self, log, batch: None)


@mutant(families.forgotten_files, "a lost plan of a decided batch is not restored", r"TornFile")
def plan_not_restored(patch: Patch) -> None:
    patch.setattr(Checkpoint, "_restore_plan", lambda self, log, batch: None)


@mutant(
    families.forgotten_files,
    "a lost plan is restored from the decision of the batch before",
    r"with other source offsets",
)
def plan_of_another_batch(patch: Patch) -> None:
    def plan_of(self: TransactionLog, batch: int) -> str | None:
        return original(self, batch - 1) or original(self, batch)

    original = TransactionLog.plan_of
    patch.setattr(TransactionLog, "plan_of", plan_of)


@mutant(
    families.tampered_checkpoints,
    "a plan is restored into a checkpoint that is much older",
    r"does not come through",
)
def plan_into_an_older_checkpoint(patch: Patch) -> None:
    patch.setattr(Checkpoint, "_committed", lambda self, batch: True)


@mutant(
    families.power_losses,
    "what Spark wrote after the last decision and lost stays as it is",
    r"does not come through",
)
def torn_files_kept(patch: Patch) -> None:
    patch.setattr(Checkpoint, "_drop_what_is_torn", lambda self, log, last: None)


@mutant(
    families.power_losses,
    "what the sources wrote after the last decision and lost stays as it is",
    r"TornFile\('sources",
)
def torn_sources_kept(patch: Patch) -> None:
    patch.setattr(Checkpoint, "_mend_sources", lambda self, log, last: None)


@mutant(
    families.power_losses,
    "a list of files is lost, and the plan that needs it stays",
    r"TornFile\('sources",
)
def plan_without_its_files(patch: Patch) -> None:
    def drop(self: Checkpoint, log: TransactionLog, name: str, data: bytes, why: str) -> None:
        if "lacks files of source" not in why:
            original(self, log, name, data, why)

    original = Checkpoint._drop
    patch.setattr(Checkpoint, "_drop", drop)


@mutant(
    families.power_losses,
    "a batch begins before the files of its sources are durable",
    r"TornFile\('sources",
)
def sources_not_synced(patch: Patch) -> None:
    patch.setattr(FileCheckpoint, "_files_of_sources", lambda self: [])


@mutant(
    families.mended_by_two,
    "a driver that was replaced mends what its successor has written",
    r"does not come through",
)
def mended_without_a_look(patch: Patch) -> None:
    def remove(self: FileCheckpoint, name: str, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self._path(name))

    patch.setattr(FileCheckpoint, "_remove", remove)


@mutant(
    families.power_losses,
    "the lost end of a batch is removed, but not the plan after it",
    r"does not come through",
)
def batch_without_end_passed(patch: Patch) -> None:
    def drop(self: Checkpoint, log: TransactionLog, name: str, data: bytes, why: str) -> None:
        if "is not decided, and batch" not in why:
            original(self, log, name, data, why)

    original = Checkpoint._drop
    patch.setattr(Checkpoint, "_drop", drop)


@mutant(
    families.races,
    "the plan in the checkpoint is decided, though Spark runs another one",
    r"more than once|are not in|which no batch has written|shows \[",
)
def running_plan_unchecked(patch: Patch) -> None:
    patch.setattr(Plan, "check_runs", lambda self, batch, offsets: None)
