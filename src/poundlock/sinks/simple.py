"""The shortest way to a sink of your own: open, write, close.

    class Lines(Simple):
        def open(self, facts):
            self.file = open(f"/data/{facts.id}", "a")

        def write(self, rows):
            self.file.write(rows.to_pandas().to_csv(header=False, index=False))

        def close(self):
            self.file.close()

Rows go straight through from the task, before the batch is decided, and again when a task or a batch is
run again: at least once. For more, sign the whole contract: `poundlock.Participant`.
"""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
    id: str  # of this attempt at the task, unlike any other


class Simple(Participant):
    """Extend it. `open` and `close` are called once in each task that has rows, `write` in between."""

    commitment = Commitment.LOGGED
    semantic = Semantic.AT_LEAST_ONCE

    def __init__(self, name: str, *, semantic: str | Semantic | None = None):
        self.name = checked_name("sink name", name)
        self.asked = None if semantic is None else Semantic(semantic)
        if self.asked is Semantic.NONE:
            self.semantic = Semantic.NONE

    # For you.

    def open(self, facts: TaskFacts) -> None:
        """Connect. Runs in the task."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows. What it raises is a no vote: the batch is aborted, and run again."""

    def close(self) -> None:
        """Flush and disconnect; when this returns, the rows are safe. Runs in the task."""

    # For the pipeline.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {name: column.sql for name, column in columns.items()}

    def reader_settings(self) -> str:
        return "to pass over repeats"

    def begin(self, branch: Branch) -> Writer:
        return _SimpleWriter(copy.copy(self), branch)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return ["it was written straight through"] * len(receipts)

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
        with _voting(sink):
            sink.open(facts)

    def write(self, rows: pa.RecordBatch) -> None:
        with _voting(self._sink):
            self._sink.write(rows)

    def prepare(self) -> PreparedBranch | None:
        with _voting(self._sink):
            self._sink.close()
        return None

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()


class _voting(contextlib.AbstractContextManager[None]):  # noqa: N801 (reads as a verb)
    """Turn what the user's code raises into a vote that says where it came from."""

    def __init__(self, sink: Simple):
        self._sink = sink

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PoundlockError):
            raise Rejected(
                f"the sink's own code raised {type(error).__name__}: {error}", sink=self._sink.name
            ) from error
