"""Write-ahead: a function that appends what it is given to a file.

It is at least once by design, but as long as nothing dies between a send and its witness, a repeat is
not to be seen either: the suite holds whole.
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

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.core.site import LocalSite
from poundlock.sinks import WriteAhead

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Append:
    """A system that takes all it is given."""

    path: str

    def __call__(self, rows: pa.RecordBatch, facts: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([facts.id, rows.column("number").to_pylist()]) + "\n")


class WriteAheadSubject(Subject):
    has_server = False

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        return self._looked_over(str(self._directory / str(next(self._numbers))), name)

    def again(self, sink: Any) -> Participant:
        return self._looked_over(sink.function.path, sink.name)

    def _looked_over(self, path: str, name: str) -> Participant:
        made = WriteAhead(Append(path), name=name)
        made.attach(LocalSite(f"{path}-rows"))
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"number": list(numbers)})

    def visible(self, sink: Any) -> Counter[int]:
        received = Path(sink.function.path)
        lines = received.read_text().splitlines() if received.exists() else []
        return Counter(number for line in lines for number in json.loads(line)[1])

    def open(self, sink: Any) -> set[str]:
        return {file.name for file in Path(sink.shelf.uri).glob("*.arrow")}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Any, receipt: Receipt) -> None:
        (Path(sink.shelf.uri) / f"{receipt.id}.arrow").unlink()


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield WriteAheadSubject(directory)
