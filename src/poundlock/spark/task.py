"""What runs on the executors: one pass over a task's rows, routed to every sink.

Rules of this file: no Python call per row; the input is always read to its end, for Spark commits a
query's state only then; a sink's refusal is a vote and travels back as data, so that the driver sees
the very error and Spark does not try the task again for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from poundlock import errors
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Participant, Writer
from poundlock.errors import PoundlockError

if TYPE_CHECKING:
    from pyspark import TaskContext

VOTE_SCHEMA = "vote string"
_VOTE = pa.schema([("vote", pa.string())])


def rows_column(index: int) -> str:
    """Name the struct column with the rows of the sink at `index`; null where it takes none."""
    return f"rows{index}"


def hash_column(index: int) -> str:
    """Name the column with the hash of each of those rows."""
    return f"hash{index}"


@dataclass
class Lane:
    """One sink's way through a task: its fingerprint, and its branch if it has rows to write."""

    sink: Participant
    index: int
    branch: Branch | None  # None: only the fingerprint is wanted
    writer: Writer | None = None
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    def take(self, batch: pa.RecordBatch) -> None:
        rows = batch.column(rows_column(self.index))
        hashes = batch.column(hash_column(self.index))
        if rows.null_count:
            mine = rows.is_valid()
            rows, hashes = rows.filter(mine), hashes.filter(mine)
        if len(rows) == 0:
            return
        digest = int(np.asarray(hashes).view(np.uint64).sum(dtype=np.uint64))
        self.fingerprint += Fingerprint(len(rows), digest)
        if self.branch is not None:
            self.writer = self.writer or self.sink.begin(self.branch)
            self.writer.write(pa.RecordBatch.from_struct_array(rows))

    def prepare(self) -> Receipt | None:
        prepared = self.writer.prepare() if self.writer else None
        if prepared is None or self.branch is None:
            return None
        return Receipt(
            sink=self.sink.name,
            id=prepared.id,
            task=self.branch.task,
            fingerprint=self.fingerprint,
            handle=prepared.handle,
            began_at=prepared.began_at,
            expires_at=prepared.expires_at,
        )


@dataclass(frozen=True)
class WriteTask:
    """The function that Spark runs on each partition, as `mapInArrow` wants it."""

    sinks: Sequence[Participant]
    transaction: Transaction | None = None  # None: a drain, which writes nothing
    writing: frozenset[str] = frozenset()  # the others only have their fingerprints computed
    taken: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        lanes = [self._lane(index, sink, context) for index, sink in enumerate(self.sinks)]
        try:
            votes = self._write(lanes, batches)
        except PoundlockError as refusal:
            _abandon(lanes)
            for _ in batches:
                pass
            votes = [no(refusal)]
        except BaseException:
            _abandon(lanes)
            raise
        yield pa.RecordBatch.from_pydict({"vote": votes}, schema=_VOTE)

    def _lane(self, index: int, sink: Participant, context: TaskContext) -> Lane:
        if self.transaction is None or sink.name not in self.writing:
            return Lane(sink, index, None)
        branch = Branch(
            transaction=self.transaction,
            sink=sink.name,
            task=context.partitionId(),
            task_attempt=context.taskAttemptId(),
            retry=context.attemptNumber(),
            taken=self.taken.get(sink.name, frozenset()),
        )
        return Lane(sink, index, branch)

    def _write(self, lanes: Sequence[Lane], batches: Iterator[pa.RecordBatch]) -> list[str]:
        for batch in batches:
            for lane in lanes:
                lane.take(batch)
        # All lanes have all their rows before the first is prepared: a late refusal costs least.
        receipts = [lane.prepare() for lane in lanes]
        return [yes(lane.sink.name, lane.fingerprint, receipt)
                for lane, receipt in zip(lanes, receipts, strict=True)]  # fmt: skip


def _abandon(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        if lane.writer is not None:
            lane.writer.abort()


def yes(sink: str, fingerprint: Fingerprint, receipt: Receipt | None) -> str:
    """Spell a yes vote of one sink in one task; without a receipt there is nothing to commit."""
    return json.dumps(
        {
            "sink": sink,
            "rows": fingerprint.rows,
            "digest": f"{fingerprint.digest:016x}",
            "receipt": receipt.to_json() if receipt else None,
        }
    )


def no(refusal: PoundlockError) -> str:
    """Spell a no vote: the error itself, to be raised by the driver."""
    body = {
        "kind": type(refusal).__name__,
        "message": str(refusal.args[0]),
        "transaction": refusal.transaction,
        "sink": refusal.sink,
    }
    return json.dumps({"no": body})


def read_votes(votes: Sequence[str]) -> tuple[list[Receipt], dict[str, Fingerprint]]:
    """Read the votes of all tasks. Raises the first refusal, as the sink raised it."""
    receipts: list[Receipt] = []
    totals: dict[str, Fingerprint] = {}
    for vote in map(json.loads, votes):
        if "no" in vote:
            raise _refusal(vote["no"])
        sink = vote["sink"]
        part = Fingerprint(vote["rows"], int(vote["digest"], 16))
        totals[sink] = totals.get(sink, Fingerprint()) + part
        if vote["receipt"] is not None:
            receipts.append(Receipt.from_json(vote["receipt"]))
    return receipts, totals


def _refusal(body: Mapping[str, Any]) -> PoundlockError:
    kind = getattr(errors, body["kind"], errors.Rejected)
    return kind(body["message"], transaction=body["transaction"], sink=body["sink"])
