"""Bugs in the log."""

from __future__ import annotations

from dataclasses import replace

from poundlock.core import log as logging
from poundlock.core.log import Entry, FileLog, NumberTaken, TransactionLog
from poundlock.core.model import Compacted
from poundlock.core.protocol import LogState
from poundlock.errors import Rejected

from .. import families
from .planting import Patch, mutant


@mutant(
    families.machine_crashes,
    "a record is published without being synced",
    r"kept half of a published record",
)
def no_sync_of_the_record(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        if not path.endswith(".tmp"):
            original(self, path)

    original = FileLog._sync
    patch.setattr(FileLog, "_sync", sync)


@mutant(
    families.machine_crashes,
    "the directory is not synced after a record was linked into it",
    r"it goes on for ever",
)
def no_sync_of_the_directory(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        if path != self._directory:
            original(self, path)

    original = FileLog._sync
    patch.setattr(FileLog, "_sync", sync)


@mutant(
    families.machine_crashes,
    "the log's directory is created, but its name is not made durable",
    r"it goes on for ever",
)
def no_sync_above_the_directory(patch: Patch) -> None:
    patch.setattr(
        FileLog, "_make_directory", lambda self: self._disk.make_directory(self._directory)
    )


@mutant(
    families.unsynced_links,
    "a driver relies on records that another driver linked and did not sync",
    r"kept a record but not the one before",
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
    r"the disk forgot the decision",
)
def interrupted_link(patch: Patch) -> None:
    def create(self: FileLog, number: int, data: bytes) -> None:
        if self._disk.names(self._directory).count(f"{number:020}.json"):
            raise NumberTaken
        original(self, number, data)

    original = FileLog._create
    patch.setattr(FileLog, "_create", create)


@mutant(
    families.failed_syncs,
    "a failed fsync is repeated, and the second answer is trusted",
    r"the disk forgot the decision",
)
def fsync_again(patch: Patch) -> None:
    def sync(self: FileLog, path: str) -> None:
        try:
            self._disk.sync(path)
        except OSError:
            self._disk.sync(path)

    patch.setattr(FileLog, "_sync", sync)


@mutant(
    families.races,
    "a create that returns counts as success, and is not read back",
    r"was committed, and no decision names it",
)
def no_read_back(patch: Patch) -> None:
    def publish(self: TransactionLog, entry: logging.Entry) -> str:
        try:
            self._create(entry.number, entry.encode())
        except Exception:  # noqa: BLE001
            return original(self, entry)
        return entry.nonce

    original = TransactionLog._publish
    patch.setattr(TransactionLog, "_publish", publish)


@mutant(
    families.replaced_drivers,
    "a driver does not check whether its record is the newest",
    r"was committed, and no decision names it",
)
def no_look_at_other_records(patch: Patch) -> None:
    patch.setattr(TransactionLog, "_is_newest", lambda self, number: True)


@mutant(
    families.woken_writers,
    "a driver trusts its last record, which was deleted and came again",
    r"was committed, and no decision names it",
)
def only_a_look_at_the_predecessor(patch: Patch) -> None:
    def is_newest(self: TransactionLog, number: int) -> bool:
        last = self._last
        if last is None:
            return all(other <= number for other in self._numbers())
        with self._reachable():
            data = self._read(last.number)
        return data is not None and Entry.nonce_in(last.number, data, self.uri) == last.nonce

    patch.setattr(TransactionLog, "_is_newest", is_newest)


@mutant(
    families.races,
    "an append that finds its number used uses the next one",
    r"a generation came twice",
)
def next_number(patch: Patch) -> None:
    def settle(self: TransactionLog) -> None:
        while self._pending is not None:
            entry = self._pending
            if self._publish(entry) == entry.nonce:
                self._pending = None
                self._apply(entry)
            else:
                self._pending = replace(entry, number=entry.number + 1)

    patch.setattr(TransactionLog, "settle", settle)


@mutant(
    families.woken_in_compaction,
    "compaction deletes without a record that states its floor",
    r"leaves a gap",
)
def compaction_without_record(patch: Patch) -> None:
    def compact(self: TransactionLog, keep: int, most_records: int) -> bool:
        if len(self.state.batches) < keep:
            return False
        floor = self._decided_at[sorted(self.state.batches)[-keep]]
        for number in sorted(self._numbers()):
            if number < floor:
                self._delete(number)
        return True

    patch.setattr(TransactionLog, "compact", compact)


@mutant(
    families.crowded_logs,
    "a compaction that drops all records does not carry what they say",
    r"are carried of",
)
def nothing_carried(patch: Patch) -> None:
    patch.setattr(LogState, "carried", lambda self, batch_floor: ())


@mutant(
    families.forgotten_files,
    "a compaction drops the plan of the newest batch",
    r"TornFile|with other source offsets",
)
def plan_not_carried(patch: Patch) -> None:
    patch.setattr(TransactionLog, "_with_plan", lambda self, carried: carried)


@mutant(
    families.crowded_logs,
    "a compaction carries a batch before it is finished",
    r"was carried unfinished",
)
def unfinished_carried(patch: Patch) -> None:
    def compact(self: TransactionLog, keep: int, most_records: int) -> bool:
        number, floor = self._next, min(self.state.batches, default=0)
        assert self.state.generation is not None
        carried = self.state.carried(floor)
        record = Compacted(number, floor, self.state.generation, self.state.places, carried)
        self.append(record)
        self._delete_below(number)
        return True

    patch.setattr(TransactionLog, "compact", compact)


@mutant(
    families.refused_deletes,
    "a record that cannot be deleted stops the batch",
    r"an old record cannot be deleted",
)
def refused_delete_stops(patch: Patch) -> None:
    def delete_below(self: TransactionLog, floor: int) -> None:
        try:
            original(self, floor)
        except OSError as error:
            raise Rejected("an old record cannot be deleted") from error

    original = TransactionLog._delete_below
    patch.setattr(TransactionLog, "_delete_below", delete_below)
