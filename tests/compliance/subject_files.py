"""Files: a directory on this disk, read only through Spark's manifest."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.core.site import LocalSite
from poundlock.errors import BadRow, Unavailable, UsageError
from poundlock.sinks import Files

NOT_APPLICABLE: Mapping[str, str] = {
    "wrong_password": "A directory has no password; one that may not be written is tried in "
    "tests/sinks/test_files_faults.py.",
    "null": "Files require no column, and a null to partition by has a directory of its own.",
    "duplicate_key": "Files have no keys.",
    "key_in_two_tasks": "Files have no keys.",
    "no_room": "Branches are files, of which there may be as many as the disk holds.",
    "lost_connection": "A task writes to the file system itself: there is no connection to lose.",
}
FRAME = {"number": "bigint", "odd": "boolean"}


def named(directory: Path) -> list[Path]:
    """Return the files in the manifest as Spark does: from the last compacted record on."""
    records = {
        int(file.name.removesuffix(".compact")): file
        for file in (directory / "_spark_metadata").glob("[0-9]*")
    }
    compacted = [number for number, file in records.items() if file.suffix == ".compact"]
    start = max(compacted, default=0)
    files: list[Path] = []
    for number in range(start, max(records, default=-1) + 1):
        version, *lines = records[number].read_text().split("\n")
        assert version == "v1"
        files += [Path(unquote(urlparse(json.loads(line)["path"]).path)) for line in lines]
    return files


def data_files(directory: Path) -> list[Path]:
    """Return every data file in the directory, also those that the manifest lacks."""
    return [
        file
        for file in directory.rglob("*.parquet")
        if not any(part.startswith("_") for part in file.relative_to(directory).parts)
    ]


class FilesSubject(Subject):
    prunes = False  # the manifest is the witness, and names every file
    has_server = False

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        return self._make_sink(self._directory / f"data {next(self._numbers)}", name)

    def again(self, sink: Participant) -> Participant:
        return self._make_sink(self.place(sink), sink.name)

    def place(self, sink: Participant) -> Path:
        assert isinstance(sink, Files)
        return Path(sink.place)

    def _make_sink(self, place: Path, name: str, frame: Mapping[str, str] = FRAME) -> Participant:
        made = Files(place, partition_by=["odd"], name=name)
        made.attach(LocalSite(str(self._directory / "rows")))
        made.project({column: Column(column, kind) for column, kind in frame.items()})
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        odd = ["true" if number % 2 else "false" for number in numbers]
        return pa.RecordBatch.from_pydict({"__by_odd": odd, "number": list(numbers)})

    def visible(self, sink: Participant) -> Counter[int]:
        seen: Counter[int] = Counter()
        for file in named(self.place(sink)):
            assert file.parent.name in ("odd=true", "odd=false")
            seen.update(pq.ParquetFile(file).read().column("number").to_pylist())
        return seen

    def open(self, sink: Participant) -> set[str]:
        place = self.place(sink)
        unnamed = set(data_files(place)) - set(named(place))
        marks = (place / "_poundlock").glob("*")
        ours = {file for file in marks if file.suffix in (".open", ".staged", ".tmp")}
        return {str(file) for file in unnamed | ours}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        next(file for file in data_files(self.place(sink)) if receipt.id in file.name).unlink()

    # Faults.

    def _refused(self, sink: Participant, frame: Mapping[str, str]) -> Participant:
        return self._make_sink(self.place(sink), sink.name, frame)

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        says = "there is no column 'odd' to partition by. The DataFrame has number bigint"
        make = lambda: self._refused(sink, {"number": "bigint"})  # noqa: E731
        yield FaultCase(says, UsageError, make=make)

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        frame = FRAME | {"number": "interval"}
        says = "column 'number' has type interval, which parquet cannot hold"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame))

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self.rows([5, 6]).set_column(0, "__by_odd", pa.array(["true", "much too long" * 20]))
        says = "1 rows have a partition value.* odd=..., would have a name of more than 255 bytes"
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]], hides="much too")

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        with small_disk(4) as disk:
            yield FaultCase(
                f"{disk}.* the disk is full .*No space left.* make room",
                Unavailable,
                sink=self._make_sink(disk / "data", sink.name),
                tasks=[[self.rows(range(5)), self.rows(range(5, 100_000))]],
                during=lambda: fill(disk),
                over=lambda: empty(disk),
            )


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield FilesSubject(directory)
