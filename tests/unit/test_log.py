"""The transaction log on a real disk."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fix_log import SpoiledDisk, decided, file_of, finished_batches, generation, opened, written

from poundlock.core import log as module
from poundlock.core.log import Disk, Entry, FileLog, MemoryLog, NumberTaken
from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Json,
    Namespace,
    OperatorDecided,
    OperatorDecision,
    Receipt,
)
from poundlock.errors import Fenced, LogCorrupt, Unavailable, UsageError

EIO = OSError(errno.EIO, "Input/output error")


# Appending and reading.


def test_appended_records_are_read_again(tmp_path: Path) -> None:
    records = [generation(), Bound("query-1"), decided(0), Finished(0)]
    log = written(tmp_path, *records)
    assert [entry.record for entry in opened(tmp_path).entries()] == records
    assert [entry.number for entry in log.entries()] == [0, 1, 2, 3]
    assert opened(tmp_path).state == log.state


def test_an_empty_log_has_no_records(tmp_path: Path) -> None:
    log = opened(tmp_path / "new")
    assert log.state.generation is None and not log.entries()


def test_a_driver_continues_after_the_records_it_loaded(tmp_path: Path) -> None:
    written(tmp_path, generation(1))
    written(tmp_path, generation(2))
    state = opened(tmp_path).state
    assert state.generation is not None and state.generation.number == 2


def test_a_record_is_synced_before_it_is_published(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation(1))
    disk.calls.clear()
    log.append(generation(2))
    # Written aside and synced, published and synced, then read back. Nothing is newer, and the record
    # before is still the driver's own.
    assert disk.calls == ["write", "sync", "link", "sync", "read", "names", "read"]


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint" / "log"
    written(path, generation())
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(path, 0).stat().st_mode) == 0o600


def test_the_directories_above_the_log_are_synced(tmp_path: Path) -> None:
    synced: list[str] = []

    class Watched(Disk):
        def sync(self, path: str) -> None:
            synced.append(path)
            super().sync(path)

    FileLog(tmp_path / "checkpoint" / "log", disk=Watched())
    assert synced[:2] == [str(tmp_path / "checkpoint"), str(tmp_path)]


def test_reading_creates_no_file(tmp_path: Path) -> None:
    FileLog(tmp_path / "nowhere", create=False).load()
    assert not (tmp_path / "nowhere").exists()


def test_a_record_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    log = written(tmp_path, generation())
    with pytest.raises(LogCorrupt, match="cannot follow"):
        log.append(OperatorDecided(7, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))
    assert len(opened(tmp_path).entries()) == 1
    log.append(decided(0))


def test_notes_are_kept_beside_the_records(tmp_path: Path) -> None:
    log = written(tmp_path, generation())
    log.put_note("audit-1", b"a note")
    with pytest.raises(NumberTaken):
        log.put_note("audit-1", b"another")
    assert log.notes() == {"audit-1": b"a note"} and len(opened(tmp_path).entries()) == 1


# Two drivers.


def test_an_existing_number_fences_the_driver(tmp_path: Path) -> None:
    old = written(tmp_path, generation(1))
    new = written(tmp_path, generation(2))
    for _ in range(2):  # it stays fenced
        with pytest.raises(
            Fenced, match=r"driver here:1 took over .* UTC, as generation 2 \(record"
        ):
            old.append(decided(0))
    with pytest.raises(Fenced):
        old.ensure_owned()
    new.ensure_owned()
    new.append(decided(0))


def test_two_drivers_can_start_at_once(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.append(generation(1))
    with pytest.raises(Fenced):
        second.append(generation(1))
    second.load()
    second.append(generation(2))


def test_success_is_never_concluded_from_a_call_that_returned() -> None:
    class Swallowing(MemoryLog):
        def _create(self, number: int, data: bytes) -> None:
            self.records.setdefault(number, data)  # the loser gets no error

    records: dict[int, bytes] = {}
    winner, loser = Swallowing(records), Swallowing(records)
    winner.append(generation(1))
    with pytest.raises(Fenced):
        loser.append(generation(1))


def _race(path: str, start: Any, wins: Any) -> None:
    start.wait()
    for _ in range(400):
        log = FileLog(path)
        state = log.load()
        number = state.generation.number + 1 if state.generation else 1
        if number > 60:
            return
        try:
            log.append(generation(number))
            wins.put((os.getpid(), number))
        except Fenced:
            pass


def test_two_processes_race_and_exactly_one_wins_each_number(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of other threads
    start, wins = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=(str(tmp_path), start, wins)) for _ in range(2)]
    for racer in racers:
        racer.start()
    start.set()
    won = [wins.get(timeout=300) for _ in range(60)]
    for racer in racers:
        racer.join(300)
        assert racer.exitcode == 0
    assert wins.empty()
    assert sorted(number for _, number in won) == list(range(1, 61))
    numbers = [
        e.record.number for e in opened(tmp_path).entries() if isinstance(e.record, Generation)
    ]
    assert numbers == list(range(1, 61))


# Damage.


def damage_json(data: bytes) -> bytes:
    return data[:-20]


def damage_content(data: bytes) -> bytes:
    return data.replace(b"query-1", b"query-2")


def damage_number(data: bytes) -> bytes:
    return Entry(7, "nonce", 0.0, Bound("query-1")).encode()


def with_body(data: bytes, **fields: object) -> bytes:
    text, rest = module._unseal(data)
    return module._seal(module._canonical(json.loads(text) | fields), rest)


def damage_format(data: bytes) -> bytes:
    return with_body(data, format=99)


def damage_kind(data: bytes) -> bytes:
    return with_body(data, record={"kind": "Unheard"})


@pytest.mark.parametrize(
    "damage",
    [damage_json, damage_content, damage_number, damage_format, damage_kind, lambda data: b""],
)
def test_a_damaged_record_stops_everything(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    log = written(tmp_path, generation(), Bound("query-1"))
    path = file_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LogCorrupt, match="record 1"):
        opened(tmp_path)
    with pytest.raises(LogCorrupt):  # the running driver checks its predecessor too
        log.append(decided(0))


@pytest.mark.parametrize("part", [b'"task"', b'"ids"'])
def test_damaged_receipts_stop_everything_even_if_their_batch_is_finished(
    tmp_path: Path, part: bytes
) -> None:
    written(tmp_path, generation(), decided(0), Finished(0))
    data = file_of(tmp_path, 1).read_bytes()
    file_of(tmp_path, 1).write_bytes(data.replace(part, part.upper()))
    with pytest.raises(LogCorrupt, match=r"record 1 .* checksum"):
        opened(tmp_path)


def test_a_load_reads_no_receipts_of_finished_batches(tmp_path: Path) -> None:
    handle: dict[str, Json] = {"pid": 7, "written": [["t", 0, 17]]}
    receipts = tuple(
        Receipt("out", f"b{task}", task, Fingerprint(task, 1), handle) for task in (1, 2)
    )
    decisions = [Decided(batch, 1, 1, "hash", receipts, {}) for batch in (0, 1)]
    written(tmp_path, generation(), decisions[0], Finished(0), decisions[1])
    # Receipts that cannot be read, under a checksum that is right.
    path = file_of(tmp_path, 1)
    path.write_bytes(module._seal(module._unseal(path.read_bytes())[0], b"not JSON"))
    log = opened(tmp_path)
    assert not log.state.batches[0].receipts
    assert log.state.batches[1].receipts == receipts
    log.append(Finished(1))
    use = log.state.last_use("out", "b2")
    assert use is not None and use.batch == 1
    assert opened(tmp_path).state == log.state


def test_the_records_that_name_a_branch_are_read_whole(tmp_path: Path) -> None:
    log = written(tmp_path, generation(), *finished_batches(3), decided(3))
    assert [entry.record for entry in log.naming("b")] == [decided(batch) for batch in range(4)]
    assert log.naming("other") == []


def test_a_missing_record_stops_everything(tmp_path: Path) -> None:
    written(tmp_path, generation(), Bound("query-1"), decided(0))
    file_of(tmp_path, 1).unlink()
    with pytest.raises(LogCorrupt, match="gap"):
        opened(tmp_path)


def test_a_log_that_begins_in_the_middle_stops_everything(tmp_path: Path) -> None:
    written(tmp_path, generation(), Bound("query-1"))
    file_of(tmp_path, 0).unlink()
    with pytest.raises(LogCorrupt, match="gap"):
        opened(tmp_path)


def test_an_unpublished_record_never_counts(tmp_path: Path) -> None:
    log = written(tmp_path, generation())
    (tmp_path / ".0123.tmp").write_bytes(b"half a rec")
    assert len(opened(tmp_path).entries()) == 1
    log.drop_unpublished()
    assert [path.name for path in tmp_path.iterdir()] == [file_of(tmp_path, 0).name]


def test_no_temporary_file_remains(tmp_path: Path) -> None:
    written(tmp_path, generation(), *finished_batches(3))
    assert not list(tmp_path.glob(".*"))


# Compaction.


def test_compaction_keeps_the_newest_batches(tmp_path: Path) -> None:
    log = written(tmp_path, generation(), Bound("query-1"), *finished_batches(5))
    log.compact(keep=2)
    again = opened(tmp_path)
    assert set(again.state.batches) == {3, 4} and again.state.batch_floor == 3
    assert again.state.query == "query-1" and again.state.generation is not None
    assert isinstance(again.entries()[-1].record, Compacted)
    assert not file_of(tmp_path, 7).exists() and file_of(tmp_path, 8).exists()
    log.append(decided(5))


def test_compaction_keeps_unfinished_batches(tmp_path: Path) -> None:
    records = finished_batches(4)
    records.remove(Finished(1))
    log = written(tmp_path, generation(), *records)
    log.compact(keep=1)
    assert set(opened(tmp_path).state.batches) == {1, 2, 3}


def test_a_log_without_batches_is_not_compacted(tmp_path: Path) -> None:
    log = written(tmp_path, generation())
    log.compact(keep=1)
    assert len(log.entries()) == 1


def test_a_record_that_reappears_is_ignored(tmp_path: Path) -> None:
    log = written(tmp_path, generation(), *finished_batches(3))
    old = {number: file_of(tmp_path, number).read_bytes() for number in range(4)}
    log.compact(keep=1)
    for number in (1, 3):
        file_of(tmp_path, number).write_bytes(old[number])
    file_of(tmp_path, 2).write_bytes(b"rubbish")
    assert set(opened(tmp_path).state.batches) == {2}
    log.append(decided(3))


@pytest.mark.parametrize("refused", [0, 3])
def test_a_record_that_cannot_be_deleted_is_deleted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    written(tmp_path, generation(), *finished_batches(4))
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    kept_one, no = str(file_of(tmp_path, refused)), PermissionError(errno.EPERM, "not permitted")
    disk.fail = lambda call, path: no if (call, path) == ("unlink", kept_one) else None
    log.compact(keep=1)
    kept = [number for number in range(9) if file_of(tmp_path, number).exists()]
    assert kept == [*range(refused, 9)], "the oldest go first, and none after a failure"
    assert "were not deleted, and only take space" in caplog.text
    for record in (decided(4), Finished(4)):
        log.append(record)
    assert set(opened(tmp_path).state.batches) == {3, 4}
    disk.fail = lambda call, path: None
    log.compact(keep=1)
    assert not any(file_of(tmp_path, number).exists() for number in range(9))


def test_an_operator_decision_on_an_old_batch_survives_compaction(tmp_path: Path) -> None:
    log = written(tmp_path, generation(), *finished_batches(3))
    log.append(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))
    log.append(decided(3))
    log.append(Finished(3))
    log.compact(keep=2)
    again = opened(tmp_path)
    assert set(again.state.batches) == {2, 3}
    again.append(decided(4))


def test_a_driver_that_wakes_after_compaction_is_fenced(tmp_path: Path) -> None:
    old = written(tmp_path, generation(1))
    new = written(tmp_path, generation(2), *finished_batches(4))
    new.compact(keep=1)
    assert not file_of(tmp_path, 1).exists()  # its number is free again
    with pytest.raises(Fenced):
        old.ensure_owned()
    with pytest.raises(Fenced):
        old.append(decided(0))
    assert file_of(tmp_path, 1).exists()  # it was written, but does not count
    assert opened(tmp_path).state == new.state
    new.append(decided(4))


def test_a_driver_that_wakes_before_its_first_record_is_fenced(tmp_path: Path) -> None:
    old = opened(tmp_path)
    new = written(tmp_path, generation(1), *finished_batches(3))
    new.compact(keep=1)
    with pytest.raises(Fenced):
        old.append(generation(1))


# Failures of the disk.


def test_a_failed_fsync_is_fatal_and_not_repeated(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation())
    disk.fail = lambda call, path: EIO if call == "sync" else None
    with pytest.raises(LogCorrupt, match="failed to make the log durable"):
        log.append(decided(0))
    disk.fail = lambda call, path: None
    disk.calls.clear()
    with pytest.raises(LogCorrupt, match="failed to make the log durable"):
        log.append(decided(0))
    assert disk.calls == []  # nothing was written or synced again
    opened(tmp_path).append(generation(2))  # a new driver can continue


def test_a_temporary_file_that_another_driver_deleted_is_written_again(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    dropped: list[str] = []

    def drop(call: str, path: str) -> None:
        if call == "sync" and path.endswith(".tmp") and not dropped:
            dropped.append(path)
            Path(path).unlink()

    disk.fail = drop
    log.append(generation())
    assert dropped and len(opened(tmp_path).entries()) == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_append_with_a_lost_answer_is_read_back(tmp_path: Path, after: bool) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    disk.after = after
    disk.fail = lambda call, path: EIO if call == "link" and disk.calls.count("link") == 1 else None
    log.append(generation())
    assert len(opened(tmp_path).entries()) == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_outcome_blocks_until_it_is_settled(tmp_path: Path, after: bool) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation())
    disk.after = after
    disk.fail = lambda call, path: EIO if call in ("link", "read") else None
    with pytest.raises(Unavailable, match="its fate is unknown"):
        log.append(decided(0))
    for blocked in (log.settle, log.ensure_owned, lambda: log.append(Finished(0))):
        with pytest.raises(Unavailable):
            blocked()
    assert not log.state.batches
    disk.fail = lambda call, path: None
    log.settle()
    assert set(log.state.batches) == {0}
    log.append(Finished(0))
    assert [e.record for e in opened(tmp_path).entries()] == [generation(), decided(0), Finished(0)]


def test_an_append_with_an_unknown_outcome_can_be_lost(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation())
    disk.fail = lambda call, path: EIO if call in ("link", "read") else None
    with pytest.raises(Unavailable):
        log.append(decided(0))
    written(tmp_path, generation(2))  # another driver wins the number
    disk.fail = lambda call, path: None
    with pytest.raises(Fenced):
        log.settle()
    log.settle()  # nothing is pending any more
    assert not log.state.batches


def test_an_interrupted_append_becomes_durable_when_it_is_found(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation())

    def interrupt(call: str, path: str) -> None:
        if call == "sync" and path == str(tmp_path):
            raise KeyboardInterrupt

    disk.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        log.append(decided(0))
    disk.fail = lambda call, path: None
    disk.calls.clear()
    log.settle()
    assert disk.calls.count("sync") == 2  # the second copy, and the directory
    assert set(log.state.batches) == {0}


@pytest.mark.parametrize("call", ["read", "names"])
def test_an_unreadable_disk_is_reported(tmp_path: Path, call: str) -> None:
    written(tmp_path, generation())
    disk = SpoiledDisk()
    disk.fail = lambda made, path: EIO if made == call else None
    with pytest.raises(Unavailable, match="cannot be read"):
        opened(tmp_path, disk)


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    log.append(generation())
    disk.fail = lambda call, path: OSError(errno.ENOSPC, "full") if call == "write" else None
    with pytest.raises(Unavailable, match="full"):
        log.append(decided(0))
    assert len(opened(tmp_path).entries()) == 1


def test_a_disk_without_hard_links_is_refused(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    log = opened(tmp_path, disk)
    disk.fail = lambda call, path: PermissionError() if call == "link" else None
    with pytest.raises(UsageError, match="hard links"):
        log.append(generation())


def test_a_gap_from_a_concurrent_compaction_is_read_again(tmp_path: Path) -> None:
    owner = written(tmp_path, generation(), *finished_batches(4))
    disk = SpoiledDisk()
    compacted: list[bool] = []

    def compact_meanwhile(call: str, path: str) -> None:
        if call == "read" and not compacted:
            compacted.append(True)
            owner.compact(keep=1)

    disk.fail = compact_meanwhile
    assert set(opened(tmp_path, disk).state.batches) == {3}


def test_a_number_created_again_after_a_compaction_is_read_again(tmp_path: Path) -> None:
    """A driver that slept since the log was empty creates the first record of another identity."""
    owner, late = written(tmp_path, generation(1)), opened(tmp_path / "late")
    owner.append(generation(2))
    late.append(Generation(1, Namespace("lock", "other"), "file:///log", None, "late:1"))
    first, disk = file_of(tmp_path, 0), SpoiledDisk()
    reads: list[str] = []

    def compact_meanwhile(call: str, path: str) -> None:
        if call != "read":
            return
        reads.append(path)
        if len(reads) == 2:
            for record in finished_batches(4):
                owner.append(record)
            owner.compact(keep=1)
            first.write_bytes(file_of(tmp_path / "late", 0).read_bytes())

    disk.fail = compact_meanwhile
    assert set(opened(tmp_path, disk).state.batches) == {3}
    assert first.exists()


def test_the_log_in_memory_keeps_the_same_rules() -> None:
    records: dict[int, bytes] = {}
    old, new = MemoryLog(records), MemoryLog(records)
    old.append(generation(1))
    new.load()
    new.append(generation(2))
    with pytest.raises(Fenced):
        old.append(decided(0))
    with pytest.raises(NumberTaken):
        old._create(0, b"")
