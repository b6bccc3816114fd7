"""Files: a manifest that has grown for a long time."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from fix_files import OURS, make_rows, make_sink, prepare
from pyspark.sql import SparkSession

from poundlock.core.model import Branch, Transaction
from poundlock.core.naming import name_of
from poundlock.core.protocol import BranchState
from poundlock.core.site import LocalSite
from poundlock.errors import UsageError
from poundlock.sinks.files import committed
from poundlock.sinks.files.branches import branch_of
from poundlock.sinks.files.manifest import DataFile, Manifest
from poundlock.sinks.files.writer import OPEN, STAGED
from poundlock.sinks.files.writer import OURS as MARKS

TASKS = 100


class Site(LocalSite):
    """Writes records, and notes the largest piece that it was given."""

    def __init__(self, place: Path):
        super().__init__(str(place))
        self.largest = 0

    def create(self, uri: str, data: Iterable[bytes]) -> bool:
        def pieces() -> Iterable[bytes]:
            for piece in data:
                self.largest = max(self.largest, len(piece))
                yield piece

        return super().create(uri, pieces())


def names(batch: int) -> list[str]:
    transaction = Transaction(OURS, 1, batch, 1)
    return [str(name_of(Branch(transaction, "out", task, task))) for task in range(TASKS)]


def grow(place: Path, batches: int) -> Manifest:
    """Publish many batches as a driver does, without their files."""
    site, manifest = Site(place), Manifest(str(place), branch_of)
    manifest.load()
    for batch in range(batches):
        record = [
            DataFile.at(f"file://{place}", f"part-{name}-00000.snappy.parquet", 1, 1)
            for name in names(batch)
        ]
        assert manifest.publish(record, site.create)
    assert site.largest < 2 << 20
    return manifest


def peak_of_publishing(place: Path, batches: int) -> int:
    manifest = grow(place, batches)
    tracemalloc.start()
    try:
        again = Manifest(str(place), branch_of)  # a driver that has just started
        again.load()
        assert again.last == manifest.last
        for _ in range(10):
            assert again.publish([], Site(place).create)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_manifest(tmp_path: Path) -> None:
    small, large = (peak_of_publishing(tmp_path / str(n), n) for n in (60, 240))
    assert large < 1.5 * small, (small, large)


def test_every_branch_is_found_however_old_it_is(tmp_path: Path) -> None:
    manifest = grow(tmp_path / "out", 60)
    for batch in (0, 1, 30, 49, 50, 58, 59):
        assert manifest.named(names(batch)) == set(names(batch)), batch
    assert manifest.named(names(60)) == set()
    assert manifest.named([names(3)[0], names(59)[1], names(61)[0], "another"]) == {
        names(3)[0],
        names(59)[1],
    }
    assert set(manifest.published.newest(OURS, "out")) >= set(names(59))
    assert manifest.published.generation(OURS, "out") == 1


@pytest.mark.parametrize("act", ["abort", "commit", "find", "prune"])
def test_an_old_branch_whose_marks_were_left_stays_committed(tmp_path: Path, act: str) -> None:
    """As after a crash between the record and the deletion of the marks."""
    sink = make_sink(tmp_path / "out")
    old = prepare(sink, 0, make_rows([0], ["a"]))
    marks = tmp_path / "out" / MARKS
    staged = (marks / f"{old.id}{STAGED}").read_bytes()
    sink.commit([old])
    (marks / f"{old.id}{STAGED}").write_bytes(staged)
    (marks / f"{old.id}{OPEN}").touch()
    for batch in range(1, 40):
        sink.commit([prepare(sink, batch, make_rows([batch], ["a"]))])
    again = make_sink(tmp_path / "out")
    if act == "find":
        assert again.find(OURS) == []
    elif act == "prune":
        again.prune(OURS, 30)
        assert not any(file.name.startswith(old.id) for file in marks.iterdir())
    elif act == "commit":
        assert again.commit([old]) == [BranchState.COMMITTED]
    else:
        assert again.branches.abort([old.id]) == {old.id: BranchState.COMMITTED}
    assert len(committed(tmp_path / "out")) == 40
    assert all(Path(uri.removeprefix("file://")).exists() for uri in committed(tmp_path / "out"))


def age(sink_path: Path, hours: float) -> None:
    """Make all data files look as if they had been written earlier."""
    for file in sink_path.rglob("*.parquet"):
        then = time.time() - hours * 3600
        os.utime(file, (then, then))


def test_old_files_leave_the_manifest_and_plain_spark_reads_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    sink = make_sink(target, retention_hours=1)
    receipts = []
    for batch in range(40):
        receipt = prepare(sink, batch, make_rows([batch], ["a"]))
        if batch < 25:
            age(target, 2)
            # The mark was written before: it holds the times of the manifest.
            mark = target / MARKS / f"{receipt.id}{STAGED}"
            lines = [DataFile.parse(line) for line in mark.read_text().splitlines()]
            old = int((time.time() - 7200) * 1000)
            mark.write_text("\n".join(DataFile(it.uri, it.size, old).line() for it in lines))
            receipt = replace(receipt, handle={})
        sink.commit([receipt])
        receipts.append(receipt)
    kept = {row.number for row in spark.read.parquet(str(target)).collect()}
    assert kept == set(range(25, 40)), "old batches have left; the newest ten never do"
    assert len(committed(target)) == 15
    assert len(list(target.rglob("*.parquet"))) == 40, "data files are not deleted"
    again = make_sink(target, retention_hours=1)
    assert again.commit([receipts[-1]]) == [BranchState.COMMITTED]
    assert again.newest_generation(OURS) == 1


def test_the_newest_batches_stay_whatever_their_age(tmp_path: Path) -> None:
    """They prove that their branches are committed: a decided batch may ask after a long pause."""
    place = tmp_path / "out"
    grow(place, 25)  # all are from 1970
    manifest = Manifest(str(place), branch_of, retention_s=3600)
    manifest.load()
    for _ in range(10):
        assert manifest.publish([], Site(place).create)
    assert manifest.named(names(24)) == set(names(24))
    fresh = Manifest(str(place), branch_of, retention_s=3600)
    fresh.load()
    assert fresh.named(names(15)) == set(names(15))
    assert fresh.named(names(14)) == set()


@pytest.mark.parametrize("hours", [0, -1, float("nan")])
def test_a_retention_that_keeps_nothing_is_refused(tmp_path: Path, hours: float) -> None:
    with pytest.raises(UsageError, match="retention_hours"):
        make_sink(tmp_path / "out", retention_hours=hours)


def test_a_planted_list_of_files_deletes_nothing(tmp_path: Path) -> None:
    """Other users may be able to create files in a shared directory, but not to delete ours."""
    place, victim = tmp_path / "out", tmp_path / "victim.conf"
    victim.write_text("keep")
    sink = make_sink(place)
    sink.commit([prepare(sink, 0, make_rows([1, 2], ["a", "b"]))])
    published = [Path(uri.removeprefix("file://")) for uri in committed(str(place))]
    assert len(published) == 2
    at = f"file://{place}"
    listed = [DataFile(f"{at}/..%2Fvictim.conf", 4, 0)]
    listed += [DataFile(f"{at}/{it.relative_to(place)}", it.stat().st_size, 0) for it in published]
    planted = str(name_of(Branch(Transaction(OURS, 1, 9, 1), "out", 9, 9)))
    mark = place / MARKS / f"{planted}{STAGED}"
    mark.write_text("\n".join(file.line() for file in listed))
    assert sink.abort(make_sink(place).find(OURS)) == [BranchState.ABORTED]
    assert victim.exists() and all(it.exists() for it in published)
