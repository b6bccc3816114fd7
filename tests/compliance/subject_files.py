"""Files: a directory on this disk, read by eyes that know only Spark's manifest."""

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

from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.core.site import LocalSite
from poundlock.sinks import Files

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


def named(directory: Path) -> list[Path]:
    """Return the files that the manifest names, as Spark would: from the last compacted record on."""
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
    """Return every data file that lies in the directory, named or not."""
    return [
        file
        for file in directory.rglob("*.parquet")
        if not any(part.startswith("_") for part in file.relative_to(directory).parts)
    ]


class FilesSubject(Subject):
    has_server = False

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        return self._looked_over(self._directory / f"data {next(self._numbers)}", name)

    def again(self, sink: Participant) -> Participant:
        return self._looked_over(self.place(sink), sink.name)

    def place(self, sink: Participant) -> Path:
        assert isinstance(sink, Files)
        return Path(sink.place)

    def _looked_over(self, place: Path, name: str) -> Participant:
        made = Files(place, partition_by=["odd"], name=name)
        made.attach(LocalSite(str(self._directory / "rows")))
        made.project({"number": Column("number", "bigint"), "odd": Column("odd", "boolean")})
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
        return {str(file) for file in set(data_files(place)) - set(named(place))}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        next(file for file in data_files(self.place(sink)) if receipt.id in file.name).unlink()


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield FilesSubject(directory)
