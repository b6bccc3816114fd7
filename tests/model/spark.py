"""Spark as the coordinator sees it: a checkpoint, batches, and tasks that are run and run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poundlock.core.job import Votes
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Participant
from poundlock.errors import Unavailable

from .schedule import Config
from .systems import Row

Range = tuple[int, int]


class SparkConflict(Exception):
    """Spark fails: a checkpoint file is unavailable, or another query wrote it first."""


@dataclass
class Checkpoint:
    """`offsets/N` before a batch and `commits/N` after it, each created only if absent.

    Where it swallows conflicts, as Spark's checkpoint manager does on S3A, the loser of a race gets
    no error and continues with the plan it has in memory.
    """

    swallows: bool = False
    query: str | None = None
    offsets: dict[int, Range] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)
    queries: int = 0

    def start(self) -> str:
        """Return the query's id; a new checkpoint gets a new one."""
        if self.query is None:
            self.queries += 1
            self.query = f"query-{self.queries}"
        return self.query

    def next_batch(self) -> int:
        """Return the batch that a query begins with: the last one, if it was not committed."""
        last = max(self.offsets, default=-1)
        return last if last >= 0 and last not in self.commits else last + 1

    def plan(self, batch: int, planned: Range) -> None:
        if self.offsets.setdefault(batch, planned) is not planned and not self.swallows:
            raise SparkConflict

    def commit(self, batch: int) -> None:
        if batch in self.commits and not self.swallows:
            raise SparkConflict
        self.commits.add(batch)

    def restore(self, steps: int) -> None:
        """Go back to an older state: without the newest files."""
        for _ in range(steps):
            last = max(self.offsets, default=None)
            if last is None:
                return
            if last in self.commits:
                self.commits.remove(last)
            else:
                del self.offsets[last]


def fingerprint(rows: Sequence[Row]) -> Fingerprint:
    return Fingerprint(len(rows), sum(hash(row) for row in rows) % (1 << 64))


class SimJob:
    """One call of a batch. Each run may partition the rows differently and, if salted, change them."""

    def __init__(
        self,
        config: Config,
        rows: Range,
        sinks: Mapping[str, Participant],
        runs: Runs,
        batch: int,
        cut: Mapping[str, str],
    ):
        self._config, self._rows, self._sinks = config, range(*rows), sinks
        self._runs, self._batch, self._cut = runs, batch, cut
        self.kept: Mapping[str, Fingerprint] | None = None  # what Spark's state now belongs to

    @property
    def stateful(self) -> bool:
        return self._config.stateful

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        receipts: list[Receipt] = []
        self._settled = True
        parts, totals = self._run()
        for task, rows in enumerate(parts):
            for name in self._sinks:
                mine = routed(name, rows)
                if name in sinks and mine:
                    receipts.append(self._task(transaction, name, task, mine, held_ids[name]))
        self.kept = totals
        return Votes(tuple(receipts), totals, self._settled, self._cut)

    def drain(self) -> Mapping[str, Fingerprint]:
        _, self.kept = self._run()
        return self.kept

    def _run(self) -> tuple[list[list[Row]], dict[str, Fingerprint]]:
        run = self._runs.of_batch(self._batch)
        salt = run if self._config.salted else 0
        shift = run if self._config.shifting else int(self._cut.get("cores", 0))
        tasks = 1 + (self._config.tasks - 1 + shift) % 3
        rows = [(row, salt) for row in self._rows]
        parts = [[row for row in rows if (row[0] + shift) % tasks == task] for task in range(tasks)]
        return parts, {name: fingerprint(routed(name, rows)) for name in self._sinks}

    def _task(
        self,
        transaction: Transaction,
        sink: str,
        task: int,
        rows: list[Row],
        held_ids: frozenset[str],
    ) -> Receipt:
        """Run one task; Spark reruns a failed one, and what that left remains."""
        for retry in range(3):
            attempt = self._runs.next_task()
            branch = Branch(transaction, sink, task, attempt, retry, held_ids)
            try:
                writer = self._sinks[sink].begin(branch)
                writer.write(rows)
                prepared = writer.prepare()
            except Unavailable:
                self._settled = False
                continue
            assert prepared is not None
            return Receipt(
                sink,
                prepared.id,
                task,
                fingerprint(rows),
                prepared.handle,
                prepared.began_at,
                prepared.expires_at,
            )
        raise Unavailable("a task failed too often", transaction=str(transaction), sink=sink)


OTHER_TASKS = 6  # of other jobs in the same Spark context, between any two tasks of ours


@dataclass
class Runs:
    """Counts what must differ: task attempts within a driver, runs of a batch in all the world."""

    batches: dict[int, int]
    tasks: int = 0

    def next_task(self) -> int:
        self.tasks += OTHER_TASKS + 1
        return self.tasks

    def of_batch(self, batch: int) -> int:
        self.batches[batch] = self.batches.get(batch, -1) + 1
        return self.batches[batch]


def routed(sink: str, rows: Sequence[Row]) -> list[Row]:
    """Choose a sink's rows: the second sink takes the even ones, so that some tasks have none."""
    return [row for row in rows if sink[-1] == "0" or row[0] % 2 == 0]
