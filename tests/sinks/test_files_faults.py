"""Files: two drivers at once, and disks that fail."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fix_files import OURS, begin, make_rows, make_sink, prepare

from poundlock.compliance import empty, fill, small_disk
from poundlock.core.protocol import BranchState
from poundlock.errors import LogMismatch, NotAuthorised, Rejected, Unavailable
from poundlock.sinks import Files
from poundlock.sinks.files import committed


class TestTwoDrivers:
    """Another driver acts between this driver's look at the directory and its publishing."""

    def before_publishing(self, sink: Files, action: Callable[[], object]) -> None:
        """Call `action` right before the sink publishes for the first time."""
        site, left = sink._site, [action]

        class Slow:
            def create(self, uri: str, data: Iterable[bytes]) -> bool:
                if left:
                    left.pop()()
                return site.create(uri, data)  # type: ignore[union-attr]

        sink._site = Slow()  # type: ignore[assignment]

    def test_a_late_driver_cannot_commit_what_has_a_tombstone(self, tmp_path: Path) -> None:
        late, other = make_sink(tmp_path / "out"), make_sink(tmp_path / "out")
        receipt = prepare(late, 0, make_rows([1], ["a"]))
        self.before_publishing(late, lambda: other.abort(other.find(OURS)))
        assert late.commit([receipt]) == [BranchState.ABORTED]
        assert committed(tmp_path / "out") == []

    def test_an_abort_sees_what_another_driver_committed_meanwhile(self, tmp_path: Path) -> None:
        committing, aborting = make_sink(tmp_path / "out"), make_sink(tmp_path / "out")
        receipt = prepare(committing, 0, make_rows([1], ["a"]))
        strays, states = aborting.find(OURS), []
        site = committing._site
        assert site is not None

        class Racing:
            def create(self, uri: str, data: Iterable[bytes]) -> bool:
                # This driver has looked. Now the other writes a tombstone, then each writes a record.
                committing._site = site
                outer.before_publishing(aborting, lambda: site.create(uri, data))
                states.extend(aborting.abort(strays))
                return False

        outer = self
        committing._site = Racing()  # type: ignore[assignment]
        assert committing.commit([receipt]) == [BranchState.COMMITTED]
        assert states == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 1
        assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1
        assert make_sink(tmp_path / "out").commit([receipt]) == [BranchState.COMMITTED]

    def test_two_drivers_can_commit_the_same_batch(self, tmp_path: Path) -> None:
        late, other = make_sink(tmp_path / "out"), make_sink(tmp_path / "out")
        receipt = prepare(late, 0, make_rows([1], ["a"]))
        self.before_publishing(late, lambda: other.commit([receipt]))
        assert late.commit([receipt]) == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 1

    def test_two_pipelines_share_a_directory(self, tmp_path: Path) -> None:
        first, second = make_sink(tmp_path / "out", name="a"), make_sink(tmp_path / "out", name="b")
        receipts = [
            prepare(sink, 0, make_rows([n], ["x"])) for n, sink in enumerate((first, second))
        ]
        self.before_publishing(first, lambda: second.commit(receipts[1:]))
        assert first.commit(receipts[:1]) == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 2

    def test_an_interrupted_abort_is_repeated(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        receipt = prepare(sink, 0, make_rows([1], ["a"]))
        (tmp_path / "out" / "_poundlock" / f"{receipt.id}.aborted").touch()
        assert make_sink(tmp_path / "out").commit([receipt]) == [BranchState.ABORTED]
        assert list((tmp_path / "out").rglob("*.parquet")) == []

    def test_a_zombie_task_finds_that_it_was_aborted(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0)
        writer.write(make_rows([1], ["a"]))
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        with pytest.raises(Rejected, match="were deleted"):
            writer.prepare()
        assert list((tmp_path / "out").rglob("*.parquet")) == []
        assert sink.find(OURS) == []

    def test_a_zombie_task_without_rows_finds_that_it_was_aborted(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0)
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        with pytest.raises(Rejected, match="was aborted while it was written"):
            writer.write(make_rows([1], ["a"]))
        with pytest.raises(Rejected, match="was aborted while it was written"):
            writer.prepare()
        assert list((tmp_path / "out").rglob("*.parquet")) == []
        assert sink.find(OURS) == []

    def test_lost_files_stay_lost_after_a_restore(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        receipt = prepare(sink, 0, make_rows([1], ["a"]))
        files_of_branch = [
            path for path in (tmp_path / "out").rglob(f"*{receipt.id}*") if path.is_file()
        ]
        contents = {path: path.read_bytes() for path in files_of_branch}
        for path in files_of_branch:
            path.unlink()
        assert sink.commit([receipt]) == [BranchState.ABORTED]
        for path, content in contents.items():  # somebody restores a backup
            path.write_bytes(content)
        assert make_sink(tmp_path / "out").commit([receipt]) == [BranchState.ABORTED]
        assert committed(tmp_path / "out") == []


class TestTheDisk:
    """A disk that is full before or after a task writes. tests/compliance fills it during one."""

    FULL = r"the disk is full \(.*No space left.*\). Nothing is lost: make room there"

    @staticmethod
    def files(place: Path) -> list[str]:
        return sorted(path.name for path in place.rglob("*") if path.is_file())

    @pytest.mark.parametrize("options", [{}, {"format": "json", "compression": "gzip"}])
    def test_a_disk_that_is_full_before_the_first_row_is_reported(
        self, options: dict[str, Any]
    ) -> None:
        written = make_rows([1], ["a"])
        if options:
            written = written.rename_columns(["__by_day", "__line"]).set_column(
                1, "__line", pa.array(['{"number":1}'])
            )
        with small_disk(1) as disk:
            sink = make_sink(disk / "out", **options)
            fill(disk)
            writer = begin(sink, 0)

            def run() -> None:
                writer.write(written)
                writer.prepare()  # compressed rows may stay in memory until now

            with pytest.raises(Unavailable, match=self.FULL):
                run()
            writer.abort()
            assert self.files(disk / "out") == []
            empty(disk)
            assert sink.commit([prepare(sink, 0, written)]) == [BranchState.COMMITTED]

    def test_a_disk_that_is_full_during_prepare_is_reported(self) -> None:
        with small_disk(1) as disk:
            sink = make_sink(disk / "out")
            writer = begin(sink, 0)
            writer.write(make_rows([1], ["a"]))  # the end of the file fits into the same block
            fill(disk)
            with pytest.raises(Unavailable, match=self.FULL):
                writer.prepare()
            writer.abort()
            assert self.files(disk / "out") == []

    def test_a_disk_that_is_full_during_commit_or_abort_is_reported(self) -> None:
        with small_disk(1) as disk:
            sink = make_sink(disk / "out")
            decided, dead = (
                prepare(sink, 0, make_rows([1], ["a"])),
                prepare(sink, 0, make_rows([2], ["a"]), 1),
            )
            fill(disk)
            for _ in range(2):
                with pytest.raises(Unavailable, match=self.FULL):
                    sink.commit([decided])
                with pytest.raises(Unavailable, match=self.FULL):
                    sink.abort([stray for stray in sink.find(OURS) if stray.id == dead.id])
            assert committed(disk / "out") == []
            empty(disk)
            assert sink.commit([decided]) == [BranchState.COMMITTED]
            assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
            (uri,) = committed(disk / "out")
            assert decided.id in uri
            left = self.files(disk / "out")
            assert [name for name in left if not name.startswith("part-")] == [
                "0",
                "1",
                f"{dead.id}.aborted",
            ]
            assert len(left) == 4

    def test_files_that_cannot_be_deleted_are_left_to_the_sweep(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0)
        writer.write(make_rows([1], ["a"]))
        whole = writer._system

        class Away:
            def delete_file(self, path: str) -> None:
                if path.endswith(".parquet"):
                    raise OSError("not now")
                whole.delete_file(path)

        monkeypatch.setattr(writer, "_system", Away())
        writer.abort()
        monkeypatch.setattr(writer, "_system", whole)
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        assert list((tmp_path / "out").rglob("*.parquet")) == []

    def test_a_directory_without_write_permission_is_reported(self) -> None:
        # Others can enter it, unlike pytest's directory.
        with tempfile.TemporaryDirectory() as directory:
            os.chmod(directory, 0o755)
            sink = make_sink(Path(directory, "out"))
            Path(directory, "out").mkdir(mode=0o555)
            user = os.geteuid()
            os.seteuid(user or 65534)  # because root can write anywhere
            try:
                assert os.listdir(sink.place) == []
                with pytest.raises(
                    NotAuthorised, match=r"out: .*Permission denied.*read and write there"
                ):
                    begin(sink, 0)
            finally:
                os.seteuid(user)


class TestDamage:
    @pytest.mark.parametrize("left", ["a line", "nothing", "other text"])
    def test_a_list_that_lost_lines_is_not_published(self, tmp_path: Path, left: str) -> None:
        sink = make_sink(tmp_path / "out")
        receipt = prepare(sink, 0, make_rows([1, 2], ["a", "b"]))
        (mark,) = (tmp_path / "out" / "_poundlock").glob("*.staged")
        whole = mark.read_text()
        texts = {"a line": whole.split("\n")[0], "nothing": "", "other text": whole[:-2]}
        mark.write_text(texts[left])
        assert sink.check([receipt]) == ["its files are gone"]
        assert sink.commit([receipt]) == [BranchState.ABORTED]
        assert committed(tmp_path / "out") == []
        assert list((tmp_path / "out").rglob("part-*")) == []

    def test_a_batch_is_not_divided_between_two_directories(self, tmp_path: Path) -> None:
        sink, other = make_sink(tmp_path / "out"), make_sink(tmp_path / "other")
        receipt = prepare(sink, 0, make_rows([1, 2], ["a", "b"]))
        with pytest.raises(LogMismatch, match=r"leads to file:.*/other"):
            other.commit([receipt])
        assert sink.commit([receipt]) == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 2

    def test_what_a_zombie_task_wrote_is_deleted(self, tmp_path: Path) -> None:
        """The driver lost its executor and swept its branch."""
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0)
        writer.write(make_rows([1], ["a"]))
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        with pytest.raises(Rejected, match="was aborted"):
            writer.write(make_rows([2], ["b"]))
        late = tmp_path / "out" / "day=c" / f"part-{writer._name}-00007.parquet"
        late.parent.mkdir()
        late.write_text("it was opened just before the tombstone")
        kept = prepare(sink, 1, make_rows([3], ["c"]))
        assert sink.commit([kept]) == [BranchState.COMMITTED]
        sink.prune(OURS, 1000)
        assert not late.exists()
        assert (
            len(list((tmp_path / "out").rglob("part-*"))) == 1 == len(committed(tmp_path / "out"))
        )

    def test_a_damaged_list_can_be_swept(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        prepare(sink, 0, make_rows([1, 2], ["a", "b"]))
        (mark,) = (tmp_path / "out" / "_poundlock").glob("*.staged")
        mark.write_text(mark.read_text()[:-2])
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        assert list((tmp_path / "out").rglob("part-*")) == []
