"""The template of a custom sink, as anybody would bring it: one file outside the package."""

from __future__ import annotations

import importlib.util
import itertools
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    """Load a file of examples/ as a module that pickle can find again."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class SqliteSubject(Subject):
    has_server = False

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        path = self._directory / f"{next(self._numbers)}.db"
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE numbers (number INTEGER)")
        return self._looked_over(path, name)

    def again(self, sink: Any) -> Participant:
        return self._looked_over(sink.path, sink.name)

    def _looked_over(self, path: Any, name: str) -> Participant:
        made = example("sqlite_sink").SqliteTable(path, "numbers", name=name)
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"number": list(numbers)})

    def visible(self, sink: Any) -> Counter[int]:
        with sqlite3.connect(sink.path) as db:
            return Counter(line[0] for line in db.execute("SELECT number FROM numbers"))

    def open(self, sink: Any) -> set[str]:
        with sqlite3.connect(sink.path) as db:
            return {line[0] for line in db.execute(
                "SELECT DISTINCT poundlock_branch FROM poundlock_rows_numbers")}  # fmt: skip

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Any, receipt: Receipt) -> None:
        with sqlite3.connect(sink.path) as db:
            db.execute(
                "DELETE FROM poundlock_rows_numbers WHERE poundlock_branch = ?", (receipt.id,)
            )
            db.execute("DELETE FROM poundlock_branches WHERE name = ?", (receipt.id,))


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield SqliteSubject(directory)
