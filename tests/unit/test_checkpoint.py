"""Spark's checkpoint on a real disk: durable before a batch, and mended after a loss of power."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fix_log import SpoiledDisk, decided, generation, written

from poundlock.core.checkpoint import FileCheckpoint, Plan
from poundlock.core.log import FileLog
from poundlock.core.model import Bound, Finished, Record, Withdrawn
from poundlock.errors import LogCorrupt, LogMismatch, Unavailable

METADATA = b'{"id":"query"}'
END = b'v1\n{"nextBatchWatermarkMs":0}'


def plan(batch: int) -> bytes:
    return b'v1\n{"batchWatermarkMs":0,"conf":{}}\n{"topic":{"0":%d}}\n-' % batch


def checkpoint_in(directory: Path, files: Mapping[str, bytes]) -> FileCheckpoint:
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return FileCheckpoint(str(directory))


def log_of(directory: Path, *records: Record) -> FileLog:
    return written(directory / "log", generation(), Bound("query"), *records)


def decision(batch: int) -> Record:
    return replace(decided(batch), plan=plan(batch).decode())


def files_in(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    files = {str(path.relative_to(directory)): path.read_bytes() for path in found}
    return {name: data for name, data in files.items() if not name.startswith("log/")}


FINISHED = (decision(0), Finished(0), decision(1), Finished(1))
WHOLE: dict[str, bytes] = {
    "metadata": METADATA,
    "offsets/0": plan(0),
    "commits/0": END,
    "offsets/1": plan(1),
}


@pytest.mark.parametrize("left", [None, b"", plan(1)[:30], plan(1)[:30] + bytes(20)])
@pytest.mark.parametrize("records", [FINISHED[:3], FINISHED])
def test_a_lost_plan_is_restored(
    tmp_path: Path, left: bytes | None, records: tuple[Record, ...]
) -> None:
    """Hadoop's checksum of the lost file is removed, because it does not match."""
    torn = {"offsets/1": left, "offsets/.1.crc": b"torn"}
    files = {name: data for name, data in (WHOLE | torn).items() if data is not None}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *records))
    assert files_in(tmp_path) == WHOLE


@pytest.mark.parametrize(
    ("records", "files"),
    [
        (FINISHED, WHOLE),
        (FINISHED, WHOLE | {"commits/1": END}),
        (FINISHED, WHOLE | {"commits/1": END, "offsets/2": plan(2)}),
        # Another plan, an older checkpoint, a newer one, and one whose query ran without a log.
        (FINISHED, WHOLE | {"offsets/1": plan(7)}),
        (FINISHED, {"metadata": METADATA, "offsets/0": plan(0)}),
        (FINISHED, WHOLE | {"offsets/2": plan(2), "offsets/3": b""}),
        ((), WHOLE | {"commits/1": b""}),
        # A source may write an offset in a form of its own.
        (FINISHED, WHOLE | {"commits/1": END, "offsets/2": b"v1\n{}\nshard-7"}),
    ],
)
def test_what_matches_or_is_refused_later_is_not_touched(
    tmp_path: Path, records: tuple[Record, ...], files: Mapping[str, bytes]
) -> None:
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *records))
    assert files_in(tmp_path) == files


def test_a_record_of_an_older_release_has_no_plan(tmp_path: Path) -> None:
    files = WHOLE | {"offsets/1": b""}
    old = (decided(0), Finished(0), decided(1))
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *old))
    assert files_in(tmp_path) == files


@pytest.mark.parametrize("end", [None, b"", b"v1", b"v1\n{", bytes(len(END))])
def test_a_batch_whose_end_was_lost_is_the_next_to_run(tmp_path: Path, end: bytes | None) -> None:
    """Spark runs its newest plan, so the plan of the batch after it, which is not decided, goes too."""
    lost = {"commits/1": end, "offsets/2": plan(2)}
    files = {name: data for name, data in (WHOLE | lost).items() if data is not None}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *FINISHED))
    assert files_in(tmp_path) == WHOLE


def list_of_files(number: int) -> bytes:
    return b'v1\n{"path":"file:///in/%d.json","timestamp":1,"batchId":%d}' % (number, number)


def plan_of_files(number: int) -> bytes:
    return b'v1\n{"batchWatermarkMs":0,"conf":{}}\n-\n{"logOffset":%d}' % number


KAFKA = b'\0v1\n{"topic":{"0":0}}'
FILES: dict[str, bytes] = {
    "metadata": METADATA,
    "offsets/0": plan_of_files(0),
    "commits/0": END,
    "sources/1/0": list_of_files(0),
}
NEXT: dict[str, bytes] = {"offsets/1": plan_of_files(1), "sources/1/1": list_of_files(1)}
TORN = [b"", b"v1", list_of_files(1)[:30], list_of_files(1)[:30] + bytes(20), bytes(60)]


def finished_files(number: int) -> tuple[Record, ...]:
    text = plan_of_files(number)
    record = replace(decided(0), offsets=Plan(text).hash, plan=text.decode())
    return record, Finished(0)


@pytest.mark.parametrize("plan", [None, b"", plan_of_files(1)])
@pytest.mark.parametrize("left", TORN)
def test_a_torn_list_of_files_that_no_decision_needs_is_removed(
    tmp_path: Path, left: bytes, plan: bytes | None
) -> None:
    """And the plan that needs it: Spark lists the files and plans the batch again."""
    torn = {"sources/1/1": left, "sources/1/.1.crc": b"torn", "offsets/1": plan}
    files = {name: data for name, data in (FILES | torn).items() if data is not None}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *finished_files(0)))
    assert files_in(tmp_path) == FILES


def test_a_plan_whose_list_of_files_is_missing_is_removed(tmp_path: Path) -> None:
    files = FILES | {"offsets/1": plan_of_files(1), "sources/1/.1.crc": b"left"}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *finished_files(0)))
    assert files_in(tmp_path) == FILES


def test_lists_after_a_torn_one_are_removed_too(tmp_path: Path) -> None:
    """Spark wants no gap. It compacts its lists now and then."""
    later = {"sources/1/1": b"v1", "sources/1/2": list_of_files(2), "sources/1/9.compact": b""}
    checkpoint_in(tmp_path, FILES | later).mend(log_of(tmp_path, *finished_files(0)))
    assert files_in(tmp_path) == FILES


@pytest.mark.parametrize("left", [b"", b"\0", bytes(30), KAFKA[:2], KAFKA[:12]])
def test_a_torn_first_position_of_an_undecided_query_is_removed(
    tmp_path: Path, left: bytes
) -> None:
    """Without it, Spark would read the first batch from another position than it planned."""
    files = {"metadata": METADATA, "offsets/0": plan(0), "sources/0/0": left}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path))
    assert files_in(tmp_path) == {"metadata": METADATA}


def test_a_plan_whose_first_position_is_missing_is_removed(tmp_path: Path) -> None:
    checkpoint_in(tmp_path, {"metadata": METADATA, "offsets/0": plan(0)}).mend(log_of(tmp_path))
    assert files_in(tmp_path) == {"metadata": METADATA}


@pytest.mark.parametrize(
    ("records", "files"),
    [
        # Whole lists, those that a decided batch has read, and those of plans made by others.
        (finished_files(0), FILES | NEXT),
        (finished_files(0), FILES | {"sources/1/0": b""}),
        (finished_files(1), FILES | {"sources/1/1": b""}),
        ((), FILES | {"sources/1/0": b""}),
        (FINISHED, WHOLE | {"commits/1": END, "sources/0/0": b""}),
        ((), {"metadata": METADATA, "offsets/0": plan(0), "sources/0/0": KAFKA}),
        # Files in a form of their own.
        ((), {"metadata": METADATA, "sources/0/0": b"shard-7", "sources/0/offsets": b""}),
        ((), {"metadata": METADATA, "offsets/0": b"v1\n{}\n17", "sources/notes": b""}),
    ],
)
def test_files_of_sources_that_may_be_needed_are_not_touched(
    tmp_path: Path, records: tuple[Record, ...], files: Mapping[str, bytes]
) -> None:
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path, *records))
    assert files_in(tmp_path) == files


def test_state_of_a_withdrawn_first_batch_is_moved(tmp_path: Path) -> None:
    """Its tasks may have written it after the operator's command."""
    files = {"metadata": METADATA, "state/0/0/1.delta": b"late"}
    log = log_of(tmp_path, Withdrawn(0, "hash-0", "operator"))
    checkpoint_in(tmp_path, files).mend(log)
    (moved,) = (name for name in files_in(tmp_path) if name != "metadata")
    assert moved.startswith("poundlock-withdrawn/0-state-") and moved.endswith("/0/0/1.delta")


@pytest.mark.parametrize("plan", [{}, {"offsets/0": plan(0), "sources/0/0": KAFKA}])
def test_state_that_may_count_is_not_moved(tmp_path: Path, plan: Mapping[str, bytes]) -> None:
    """It is of another plan of the first batch, or nobody has withdrawn one."""
    files = {"metadata": METADATA, "state/0/0/1.delta": b"state", **plan}
    log = log_of(tmp_path, *([Withdrawn(0, "hash-0", "operator")] if plan else []))
    checkpoint_in(tmp_path, files).mend(log)
    assert files_in(tmp_path) == files


def test_a_checksum_without_its_file_does_not_keep_spark_from_writing_it(tmp_path: Path) -> None:
    lost = {"commits/.1.crc": b"", "offsets/.2.crc": b""}
    checkpoint_in(tmp_path, WHOLE | lost).mend(log_of(tmp_path, *FINISHED))
    assert files_in(tmp_path) == WHOLE


@pytest.mark.parametrize("left", [b"", b"v1\n{", plan(2)[:-8], b"v1\n{}\n"])
def test_a_torn_plan_of_an_undecided_batch_is_removed(tmp_path: Path, left: bytes) -> None:
    files = WHOLE | {"commits/1": END}
    checkpoint_in(tmp_path, {**files, "offsets/2": left}).mend(log_of(tmp_path, *FINISHED))
    assert files_in(tmp_path) == files


def test_torn_metadata_of_a_query_that_never_ran_is_removed(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, {"metadata": b""})
    assert checkpoint.query() is None
    checkpoint.mend(written(tmp_path / "log", generation()))
    assert files_in(tmp_path) == {}


def test_all_that_a_replay_reads_is_synced_before_the_batch(tmp_path: Path) -> None:
    """And each file once: Spark never changes one."""
    synced: list[str] = []
    disk = SpoiledDisk()

    def note(call: str, path: str) -> None:
        if call == "sync" and Path(path).exists():
            synced.append(str(Path(path).relative_to(tmp_path)))

    disk.fail = note
    checkpoint_in(tmp_path, {**WHOLE, "offsets/.1.crc": b"", "sources/0/1": b"v1"})
    checkpoint = FileCheckpoint(str(tmp_path), disk=disk)
    assert checkpoint.plan(1).text == plan(1)
    files = ["offsets/0", "offsets/1", "offsets/.1.crc", "commits/0", "sources/0/1"]
    assert synced[:5] == files
    assert sorted(synced[5:]) == [".", "commits", "offsets", "sources", "sources/0"]
    synced.clear()
    checkpoint_in(tmp_path, {"commits/1": END, "offsets/2": plan(2)})
    checkpoint.plan(2)
    assert synced == ["offsets/2", "commits/1", "commits", "offsets", "."]


def test_a_failed_sync_of_the_checkpoint_is_fatal(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    disk.fail = lambda call, path: OSError(errno.EIO, "no") if call == "sync" else None
    checkpoint_in(tmp_path, WHOLE)
    with pytest.raises(LogCorrupt, match="failed to make Spark's checkpoint durable"):
        FileCheckpoint(str(tmp_path), disk=disk).plan(1)


def test_a_checkpoint_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    disk = SpoiledDisk()
    disk.fail = lambda call, path: OSError(errno.EIO, "no") if call == "read" else None
    checkpoint_in(tmp_path, WHOLE)
    with pytest.raises(Unavailable, match="cannot be read or written"):
        FileCheckpoint(str(tmp_path), disk=disk).query()


def test_a_batch_that_spark_runs_by_another_plan_is_refused() -> None:
    """Some file systems keep one of two plans, and do not tell the driver of the other."""
    stored = Plan(plan(4))
    stored.check_runs(4, ['{"topic": {"0": 4}}'])
    Plan(b'v2\n{}\n1:{"logOffset":7}\n0:"5"').check_runs(4, ['"5"', '{"logOffset": 7}'])
    for running in (['{"topic":{"0":5}}'], [], ['{"topic":{"0":4}}', '{"logOffset":0}']):
        with pytest.raises(LogMismatch, match="runs batch 4 with other source offsets"):
            stored.check_runs(4, running)


def test_a_plan_that_spark_has_not_written_is_a_mismatch(tmp_path: Path) -> None:
    with pytest.raises(LogMismatch, match="offsets/2 is not in its checkpoint"):
        checkpoint_in(tmp_path, WHOLE).plan(2)


def test_a_source_that_is_read_twice_lacks_no_files(tmp_path: Path) -> None:
    """Its offset is in the plan twice, and its lists are in one directory."""
    twice = b'v1\n{"batchWatermarkMs":0,"conf":{}}\n{"logOffset":0}\n{"logOffset":0}'
    files = {"metadata": METADATA, "offsets/0": twice, "sources/0/0": b'v1\n{"path":"a"}'}
    checkpoint_in(tmp_path, files).mend(log_of(tmp_path))
    assert files_in(tmp_path) == files
