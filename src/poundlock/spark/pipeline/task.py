"""The function that runs on executors: one pass over a task's rows, for all sinks.

Rules of this file:

- There is no Python call per row.
- The input is read to its end, because Spark commits a query's state only then. Only a task that is
  out of time ends at once: its batch will be aborted, with its state.
- A no vote is returned as data. The driver gets the original error, and Spark does not run the task
  again. A system that does not answer (`Unavailable`) is no refusal: it fails the task, and Spark
  runs the task again, because another executor may reach the system.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from poundlock.core.job import is_refusal
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Participant
from poundlock.core.taskerrors import Seal, TaskFailed, error_from_json, error_to_json
from poundlock.errors import OutOfTime, PoundlockError, Rejected
from poundlock.spark.columns import hash_column, read_rows
from poundlock.spark.pipeline.sinktask import SinkTask

if TYPE_CHECKING:
    from pyspark import TaskContext

# With each vote comes the stage of its task, and which attempt at the task cast it.
VOTE_SCHEMA = "vote string, stage int, attempt int"
_VOTE = pa.schema([("vote", pa.string()), ("stage", pa.int32()), ("attempt", pa.int32())])


@dataclass(frozen=True)
class WriteTask:
    """The function that Spark runs on each partition, as `mapInArrow` wants it."""

    sinks: Sequence[Participant]  # each with a column of rows, in this order
    # For each tolerant sink, the sink for its dead letters, or None.
    dead_letters: Mapping[str, Participant | None] = field(default_factory=dict)
    transaction: Transaction | None = None  # None: a drain, which writes nothing
    writing: frozenset[str] = frozenset()  # the others only compute their fingerprints
    held_ids: Mapping[str, frozenset[str]] = field(default_factory=dict)
    at_most_once: bool = False  # the task must not run a second time
    least_time_left_s: float = 0  # that a branch must have left at the decision
    seal: Seal = field(default_factory=Seal)  # on the error that fails the task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        sink_tasks = self._sink_tasks(context)
        try:
            if self.at_most_once and context.attemptNumber() > 0:
                raise Rejected(
                    "the task has been run before and may have written rows. They may be written at "
                    "most once, because the source cannot be replayed"
                )
            votes = self._write(sink_tasks, batches)
        except BaseException as error:
            for sink_task in sink_tasks:
                sink_task.abandon()
            if not isinstance(error, PoundlockError):
                raise
            if not is_refusal(error, at_most_once=self.at_most_once):
                raise TaskFailed(self.seal.text(error)) from error
            if not isinstance(error, OutOfTime):  # the rest would take as long again
                for _ in batches:
                    pass
            votes = [encode_refusal(error)]
        origin = {"stage": context.stageId(), "attempt": context.attemptNumber()}
        columns = {name: [number] * len(votes) for name, number in origin.items()}
        yield pa.RecordBatch.from_pydict({"vote": votes, **columns}, schema=_VOTE)

    def _sink_tasks(self, context: TaskContext) -> list[SinkTask]:
        """Return a `SinkTask` for each sink in order, then those that take dead letters."""
        targets = {
            sink.name: SinkTask(sink, self._branch(sink, context))
            for sink in self.dead_letters.values()
            if sink is not None
        }
        sink_tasks: list[SinkTask] = []
        for sink in self.sinks:
            target = self.dead_letters.get(sink.name)
            dead_letters = None if target is None else targets[target.name]
            sink_tasks.append(SinkTask(sink, self._branch(sink, context), dead_letters))
        return [*sink_tasks, *targets.values()]

    def _branch(self, sink: Participant, context: TaskContext) -> Branch | None:
        if self.transaction is None or sink.name not in self.writing:
            return None
        return Branch(
            transaction=self.transaction,
            sink=sink.name,
            task=context.partitionId(),
            task_attempt=context.taskAttemptId(),
            retry=context.attemptNumber(),
            held_ids=self.held_ids.get(sink.name, frozenset()),
            tolerant=sink.name in self.dead_letters,
        )

    def _write(
        self, sink_tasks: Sequence[SinkTask], batches: Iterator[pa.RecordBatch]
    ) -> list[str]:
        routed = sink_tasks[: len(self.sinks)]
        for batch in batches:
            for index, sink_task in enumerate(routed):
                sink_task.take(read_rows(batch, index), batch.column(hash_column(index)))
            for sink_task in sink_tasks:
                sink_task.check_time(self.least_time_left_s)
        # Prepare only when every sink has all its rows: an error before that costs less.
        receipts = [sink_task.prepare() for sink_task in sink_tasks]
        return [
            encode_vote(sink_task.sink.name, sink_task.offered, receipt, sink_task.bad)
            for sink_task, receipt in zip(sink_tasks, receipts, strict=True)
        ]


def encode_vote(sink: str, offered: Fingerprint, receipt: Receipt | None, bad: int = 0) -> str:
    """Encode the yes vote of one sink in one task. Without a receipt there is nothing to commit."""
    return json.dumps(
        {
            "sink": sink,
            **offered.to_json(),
            "receipt": receipt.to_json() if receipt else None,
            "bad": bad,
        }
    )


def encode_refusal(refusal: PoundlockError) -> str:
    """Encode a no vote: the error, which the driver raises."""
    return json.dumps({"no": error_to_json(refusal)})


def read_votes(
    votes: Sequence[str],
) -> tuple[list[Receipt], dict[str, Fingerprint], dict[str, int]]:
    """Decode the votes of all tasks into receipts, totals by sink, and counts of bad rows by sink.

    Raises the error of the first no vote.
    """
    receipts: list[Receipt] = []
    totals: dict[str, Fingerprint] = {}
    bad: dict[str, int] = {}
    for vote in map(json.loads, votes):
        if "no" in vote:
            raise error_from_json(vote["no"])
        sink = vote["sink"]
        part = Fingerprint.from_json(vote)
        totals[sink] = totals.get(sink, Fingerprint()) + part
        if vote["receipt"] is not None:
            receipts.append(Receipt.from_json(vote["receipt"]))
        if vote["bad"]:
            bad[sink] = bad.get(sink, 0) + vote["bad"]
    return receipts, totals, bad
