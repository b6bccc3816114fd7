"""The compliance suite for the sink template.

Copy it together with `sqlite_sink.py`, adapt both, and run

    pip install 'poundlock[compliance]'
    pytest test_sqlite_sink.py
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlite_sink import SqliteTable

from poundlock import Participant
from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.compliance.faults import *  # noqa: F403
from poundlock.compliance.requirements import *  # noqa: F403
from poundlock.core.model import Receipt
from poundlock.core.participant import Column
from poundlock.errors import Unavailable, UsageError

_A_FILE = "A database of SQLite is a file, and each access opens it anew."

TABLE = """
CREATE TABLE numbers (
    number INTEGER NOT NULL UNIQUE,
    word TEXT CONSTRAINT short CHECK (length(word) < 20)
) STRICT
"""


def worded(numbers: Sequence[Any], words: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"number": list(numbers), "word": words})


class SqliteSubject(Subject):
    """SQLite files, read through SQLite itself."""

    has_server = False
    not_applicable = {  # noqa: RUF012
        "wrong_password": _A_FILE,
        "lost_connection": _A_FILE,
        "no_room": "Branches are lines of a table, as many as there is room for on the disk.",
    }

    def __init__(self, directory: Path):
        self._directory = directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        path = self._directory / f"{next(self._numbers)}.db"
        with sqlite3.connect(path) as db:
            db.execute(TABLE)
        return self._looked_over(path, name)

    def again(self, sink: Any) -> Participant:
        return self._looked_over(sink.path, sink.name)

    def _looked_over(self, path: Any, name: str, *columns: str) -> Participant:
        made = SqliteTable(path, "numbers", name=name)
        made.project({each: Column(each, "string") for each in columns or ("number", "word")})
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return worded(numbers, [f"number {number}" for number in numbers])

    def visible(self, sink: Any) -> Counter[int]:
        with sqlite3.connect(sink.path) as db:
            return Counter(line[0] for line in db.execute("SELECT number FROM numbers"))

    def open(self, sink: Any) -> set[str]:
        with sqlite3.connect(sink.path) as db:
            return {
                line[0]
                for line in db.execute(
                    "SELECT DISTINCT poundlock_branch FROM poundlock_rows_numbers"
                )
            }

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Any, receipt: Receipt) -> None:
        with sqlite3.connect(sink.path) as db:
            db.execute(
                "DELETE FROM poundlock_rows_numbers WHERE poundlock_branch = ?", (receipt.id,)
            )
            db.execute("DELETE FROM poundlock_branches WHERE name = ?", (receipt.id,))

    # Troubles.

    @contextmanager
    def wrong_columns(self, sink: Any) -> Iterator[FaultCase]:
        says = "the frame lacks the columns number"
        make = lambda: self._looked_over(sink.path, sink.name, "nummer", "word")  # noqa: E731
        yield FaultCase(says, UsageError, make=make)

    @contextmanager
    def wrong_type(self, sink: Any) -> Iterator[FaultCase]:
        """Only the rows show it: SQLite gives types to values."""
        says = "refuses its rows: cannot store TEXT value in INTEGER column numbers.number"
        yield FaultCase(says, tasks=[[worded(["many"], ["fine"])]], hides="many")

    @contextmanager
    def null(self, sink: Any) -> Iterator[FaultCase]:
        says = "refuses its rows: NOT NULL constraint failed: numbers.number"
        yield FaultCase(says, tasks=[[self.rows(range(5)), worded([None, 6], ["a", "b"])]])

    @contextmanager
    def too_long(self, sink: Any) -> Iterator[FaultCase]:
        says = "refuses its rows: CHECK constraint failed: short"
        yield FaultCase(says, tasks=[[worded([1], ["much too " * 5])]], hides="much too")

    @contextmanager
    def duplicate_key(self, sink: Any) -> Iterator[FaultCase]:
        says = "refuses its rows: UNIQUE constraint failed: numbers.number"
        yield FaultCase(says, tasks=[[self.rows([1, 2]), self.rows([2, 3])]])

    @contextmanager
    def key_in_two_tasks(self, sink: Any) -> Iterator[FaultCase]:
        says = "refuses its rows: UNIQUE constraint failed: numbers.number"
        yield FaultCase(says, tasks=[[self.rows([1, 2])], [self.rows([2, 3])]])

    @contextmanager
    def full_disk(self, sink: Any) -> Iterator[FaultCase]:
        with small_disk(1) as disk:
            with sqlite3.connect(disk / "small.db") as db:
                db.execute(TABLE)
            using = self._looked_over(disk / "small.db", sink.name)
            many = [self.rows(range(start, start + 500)) for start in range(0, 5000, 500)]
            yield FaultCase(
                "disk is full.*can be run again",
                Unavailable,
                sink=using,
                tasks=[many],
                during=lambda: fill(disk),
                over=lambda: empty(disk),
            )


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return SqliteSubject(tmp_path_factory.mktemp("sqlite"))
