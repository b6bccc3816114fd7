"""Write-ahead: a function that appends its rows to a file.

It is at least once by design, but while nothing dies between a send and its witness, no repeat
is visible either, so the whole suite passes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.core.site import LocalSite
from poundlock.errors import Unavailable
from poundlock.sinks import WriteAhead

_TAKEN = "The function is given the rows as they are: what it does not take it must say itself."
NOT_APPLICABLE: Mapping[str, str] = {
    "wrong_columns": _TAKEN,
    "wrong_type": _TAKEN,
    "wrong_password": "The sink logs in nowhere: where its function does is the function's own matter.",
    "null": _TAKEN,
    "too_long": _TAKEN,
    "duplicate_key": "The sink knows no keys.",
    "key_in_two_tasks": "The sink knows no keys.",
    "no_room": "Branches are files beside the log, of which there may be as many as the disk holds.",
    "lost_connection": "A task that writes has no connection: it keeps its rows in a file, and the "
    "function is called after the decision.",
}


@dataclass(frozen=True)
class Append:
    """A system that accepts every row."""

    path: str

    def __call__(self, rows: pa.RecordBatch, facts: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([facts.id, rows.column("number").to_pylist()]) + "\n")


class WriteAheadSubject(Subject):
    remembers = False  # what was sent is known only beside the log
    has_server = False

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        return self._make_sink(str(self._directory / str(next(self._numbers))), name)

    def again(self, sink: Any) -> Participant:
        return self._make_sink(sink.function.path, sink.name)

    def _make_sink(self, path: str, name: str, rows: Path | None = None) -> Participant:
        made = WriteAhead(Append(path), name=name)
        made.attach(LocalSite(str(rows or f"{path}-rows")))
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"number": list(numbers)})

    def visible(self, sink: Any) -> Counter[int]:
        received = Path(sink.function.path)
        lines = received.read_text().splitlines() if received.exists() else []
        return Counter(number for line in lines for number in json.loads(line)[1])

    def open(self, sink: Any) -> set[str]:
        files = Path(sink.row_store.uri).glob("*")
        return {file.name for file in files if file.suffix in (".arrow", ".tmp")}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Any, receipt: Receipt) -> None:
        (Path(sink.row_store.uri) / f"{receipt.id}.arrow").unlink()

    # Faults.

    @contextmanager
    def full_disk(self, sink: Any) -> Iterator[FaultCase]:
        with small_disk(4) as disk:
            yield FaultCase(
                f"{disk}.* the disk is full .*No space left.* make room",
                Unavailable,
                sink=self._make_sink(sink.function.path, sink.name, disk / "rows"),
                tasks=[[self.rows(range(5)), self.rows(range(5, 100_000))]],
                during=lambda: fill(disk),
                over=lambda: empty(disk),
            )


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield WriteAheadSubject(directory)
