"""The shortest way to a sink of your own: open, write, close.

    class Lines(Simple):
        def open(self, facts):
            self.file = open(f"/data/{facts.id}", "a")

        def write(self, rows):
            self.file.write(rows.to_pandas().to_csv(header=False, index=False))

        def close(self):
            self.file.close()

Tasks write rows directly, before the batch is decided, and write them again when a task or a batch is
run again: at least once. For more, implement the whole contract: `poundlock.Participant`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa

from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import name_of
from poundlock.core.participant import (
    Column,
    Commitment,
    Participant,
    PreparedBranch,
    Semantic,
    Writer,
)
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Rejected


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a task works on."""

    pipeline: str
    sink: str
    batch: int
    task: int
    id: str  # of this attempt at the task; no other has the same


class Simple(Participant):
    """Extend it. `open` and `close` are called once in each task that has rows, `write` in between."""

    commitment = Commitment.LOGGED
    semantic = Semantic.AT_LEAST_ONCE

    def __init__(self, name: str, *, semantic: str | Semantic | None = None):
        self.name = checked_name("sink name", name)
        self.asked = None if semantic is None else Semantic(semantic)
        if self.asked is Semantic.NONE:
            self.semantic = Semantic.NONE

    # What a subclass implements.

    def open(self, facts: TaskFacts) -> None:
        """Connect. Runs in the task."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows. An error is a no vote: the batch is aborted, and run again."""

    def close(self) -> None:
        """Flush and disconnect. When this returns, the rows are safe. Runs in the task."""

    # What the pipeline calls.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {name: column.sql for name, column in columns.items()}

    def reader_settings(self) -> str:
        return "to ignore repeats"

    def begin(self, branch: Branch) -> Writer:
        return _SimpleWriter(copy.copy(self), branch)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return ["it was written directly, without a branch"] * len(receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [BranchState.NO_WITNESS] * len(receipts)

    def find(self, namespace: Namespace) -> list[Stray]:
        return []

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return [BranchState.NO_WITNESS] * len(strays)


class _SimpleWriter(Writer):
    """A copy of the sink, for one task."""

    def __init__(self, sink: Simple, branch: Branch):
        self._sink = sink
        transaction = branch.transaction
        facts = TaskFacts(
            transaction.namespace.pipeline,
            branch.sink,
            transaction.batch,
            branch.task,
            str(name_of(branch)),
        )
        with _own_code(sink):
            sink.open(facts)

    def write(self, rows: pa.RecordBatch) -> None:
        with _own_code(self._sink):
            self._sink.write(rows)

    def prepare(self) -> PreparedBranch | None:
        with _own_code(self._sink):
            self._sink.close()
        return None

    def abort(self) -> None:
        with suppress(Exception):
            self._sink.close()


@contextmanager
def _own_code(sink: Simple) -> Iterator[None]:
    """Turn an error of the user's code into a no vote that says where it came from."""
    try:
        yield
    except PoundlockError:
        raise
    except Exception as error:
        raise Rejected(
            f"the sink's own code raised {type(error).__name__}: {error}", sink=sink.name
        ) from error
