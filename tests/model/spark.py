"""Spark as the coordinator sees it: a checkpoint, batches, and tasks that are run and run again."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poundlock.core.job import Votes, is_refusal
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Participant
from poundlock.errors import PoundlockError, Unavailable

from .disk import SimDisk
from .systems import Row, first_name

if TYPE_CHECKING:
    from .world import World

Range = tuple[int, int]


class SparkConflict(Exception):
    """Spark fails: a checkpoint file is unavailable, or another query wrote it first."""


class TornFile(Exception):
    """Spark fails at every start: the newest file of a log has lost its content."""


class Checkpoint:
    """`offsets/N` before a batch and `commits/N` after it, each created only if absent.

    Its source is one of files: before a plan that needs it, `sources/0/K` lists the newest files.
    Spark syncs none of them. Where it swallows conflicts, as Spark's checkpoint manager does on S3A,
    the loser of a race gets no error and continues with the plan it has in memory.
    """

    def __init__(self, disk: SimDisk, root: str, *, swallows: bool = False):
        self.swallows = swallows
        self._disk, self._root = disk, root
        self._queries = self._plans = 0

    @property
    def query(self) -> str | None:
        text = self._text("metadata")
        return json.loads(text)["id"] if text else None

    @property
    def plans(self) -> dict[int, bytes]:
        """The plans that a start finds, torn ones left out."""
        found = {batch: self._text(f"offsets/{batch}") for batch in self._numbers("offsets")}
        return {batch: text for batch, text in found.items() if text and whole(text)}

    @property
    def offsets(self) -> dict[int, Range]:
        return {batch: range_of(text) for batch, text in self.plans.items()}

    @property
    def commits(self) -> set[int]:
        numbers = self._numbers("commits")
        return {batch for batch in numbers if whole(self._text(f"commits/{batch}") or b"")}

    def start(self) -> str:
        """Return the query's id; a new checkpoint gets a new one."""
        if self._text("metadata") == b"":
            raise TornFile("metadata")
        if self.query is None:
            self._queries += 1
            self._write("metadata", b'{"id":"query-%d"}' % self._queries)
        query = self.query
        assert query is not None
        return query

    def next_batch(self) -> int:
        """Return the batch that a query begins with: the last one, if it was not committed."""
        for log in ("offsets", "commits"):
            numbers = self._numbers(log)
            if numbers and not whole(self._text(f"{log}/{max(numbers)}") or b""):
                raise TornFile(f"{log}/{max(numbers)}")
        self._check_sources()
        last = max(self.offsets, default=-1)
        if last > 0 and last - 1 not in self.offsets:
            raise TornFile(f"offsets/{last - 1}")  # Spark reads where the last batch began
        return last if last >= 0 and last not in self.commits else last + 1

    def _check_sources(self) -> None:
        """Fail as Spark does if a list is torn, or one that the newest batch needs is missing."""
        there = self._numbers("sources/0")
        torn = [n for n in there if not whole(self._text(f"sources/0/{n}") or b"")]
        batch = max(self.plans, default=None)
        if batch is not None and batch not in self.commits:
            before = list_of(self.plans[batch - 1]) if batch - 1 in self.plans else -1
            torn += set(range(before + 1, list_of(self.plans[batch]) + 1)) - set(there)
        if torn:
            raise TornFile(f"sources/0/{max(torn)}")

    def plan(self, batch: int, planned: Range) -> None:
        self._plans += 1
        number = max(self._numbers("sources/0"), default=-1) + 1
        self._write(f"sources/0/{number}", b"v1\n[%d,%d]" % planned)
        text = text_of(planned, self._plans, number)
        if not self._write(f"offsets/{batch}", text) and not self.swallows:
            raise SparkConflict

    def commit(self, batch: int) -> None:
        if not self._write(f"commits/{batch}", COMMIT) and not self.swallows:
            raise SparkConflict

    def restore(self, steps: int) -> None:
        """Go back to an older state: without the newest files."""
        query, plans, commits = self.query, self.plans, self.commits
        for _ in range(steps):
            last = max(plans, default=None)
            if last is None:
                break
            if last in commits:
                commits.remove(last)
            else:
                del plans[last]
        self.put(query, plans, commits)

    def forget(self, *, plan: int, commit: int) -> bool:
        """Lose the newest plan and the newest commit. 0: not, 1: its content, 2: half of it, 3: all."""
        plans, commits = self._numbers("offsets"), self._numbers("commits")
        newest = {"offsets": max(plans, default=None), "commits": max(commits, default=None)}
        if newest["commits"] != newest["offsets"]:
            newest["commits"] = None
        lost = False
        for (log, batch), how in zip(newest.items(), (plan, commit), strict=True):
            if batch is None or how == 0:
                continue
            lost, path = True, f"{self._root}/{log}/{batch}"
            text = self._text(f"{log}/{batch}") or b""
            self._disk.unlink(path)
            if how < 3:
                self._disk.write(path, text[: len(text) // 2] if how == 2 else b"")
        self._disk.keep_all(self._root)
        return lost

    def put(self, query: str | None, plans: Mapping[int, bytes], commits: Collection[int]) -> None:
        """Replace all files, durably."""
        for path in [path for path in self._disk.live if path.startswith(f"{self._root}/")]:
            if re.search(r"/(metadata|offsets/.*|commits/.*)$", path):
                self._disk.unlink(path)
        if query is not None:
            self._write("metadata", b'{"id":"%s"}' % query.encode())
        for batch, text in plans.items():
            self._write(f"offsets/{batch}", text)
        for batch in commits:
            self._write(f"commits/{batch}", COMMIT)
        self._disk.keep_all(self._root)

    def _write(self, name: str, text: bytes) -> bool:
        path = f"{self._root}/{name}"
        if path in self._disk.live:
            return False
        self._disk.make_directory(path.rpartition("/")[0])
        self._disk.write(path, text)
        return True

    def _text(self, name: str) -> bytes | None:
        file = self._disk.live.get(f"{self._root}/{name}")
        return None if file is None else file.data

    def _numbers(self, log: str) -> list[int]:
        start = f"{self._root}/{log}/"
        names = [path[len(start) :] for path in self._disk.live if path.startswith(start)]
        return [int(name) for name in names if name.isdecimal()]


COMMIT = b'v1\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}'


def text_of(planned: Range, time: int = 0, number: int = 0) -> bytes:
    """Return a plan as Spark writes it. What a crash leaves of it may end anywhere.

    It has two sources: one of files, with the number of its newest list, and that of the rows.
    """
    metadata = b'{"batchWatermarkMs":0,"batchTimestampMs":%d,"conf":{}}' % time
    return b'v1\n%s\n{"logOffset":%d}\n[%d,%d]' % (metadata, number, *planned)


def range_of(text: bytes) -> Range:
    start, end = json.loads(text.split(b"\n")[3])
    return start, end


def list_of(text: bytes) -> int:
    return json.loads(text.split(b"\n")[2])["logOffset"]


def whole(text: bytes) -> bool:
    """Return whether a file has all its content. All files of the model end with a bracket."""
    return text.endswith((b"]", b"{}}")) and text.startswith(b"v1")


def fingerprint(rows: Sequence[Row]) -> Fingerprint:
    return Fingerprint(len(rows), sum(hash(row) for row in rows) % (1 << 64))


class SimJob:
    """One call of a batch. Each run may partition the rows differently and, if salted, change them."""

    def __init__(
        self,
        world: World,
        rows: Range,
        sinks: Mapping[str, Participant],
        runs: Runs,
        batch: int,
        cut: Mapping[str, str],
    ):
        self._world, self._config = world, world.config
        self._rows, self._sinks = range(*rows), sinks
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
                self._reach(sink, (task + retry) % EXECUTORS)
                writer = self._sinks[sink].begin(branch)
                writer.write(rows)
                if self._world.slow:
                    self._world.pass_time(len(rows) * SLOW_ROW_S)
                prepared = writer.prepare()
            except PoundlockError as error:
                if is_refusal(error, at_most_once=False):
                    raise
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

    def _reach(self, sink: str, executor: int) -> None:
        if (executor, first_name(sink)) in self._world.cut_off:
            raise Unavailable("the executor is cut off", sink=sink)


EXECUTORS = 2
SLOW_ROW_S = 400.0  # two rows fit into a transaction of Kafka's, and three do not
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
