"""One sink in one task: its branch, its fingerprint and its bad rows.

Rules of this file: no Python call per row, except for bad rows, which should be few.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from poundlock.core.expiry import check_task
from poundlock.core.model import Branch, Fingerprint, Receipt
from poundlock.core.participant import DEAD_LETTER, Participant, Writer
from poundlock.errors import BadRow, error_context
from poundlock.spark.pipeline.badrows import marked_rows, plain_rows

_ARROW_TYPES = {"string": pa.string(), "bigint": pa.int64()}
_DEAD_LETTER = pa.schema([(name, _ARROW_TYPES[it.type]) for name, it in DEAD_LETTER.items()])


@dataclass
class SinkTask:
    """A sink in one task. Without a branch, it only computes the fingerprint."""

    sink: Participant
    branch: Branch | None
    # Where bad rows go. If None, a tolerant branch leaves them out.
    dead_letters: SinkTask | None = None
    writer: Writer | None = None
    offered: Fingerprint = field(default_factory=Fingerprint)  # all rows, including bad ones
    fingerprint: Fingerprint = field(default_factory=Fingerprint)  # the rows in the branch
    bad: int = 0

    def take(self, rows: pa.StructArray, hashes: pa.Array) -> None:
        """Write the rows that are not null, and count them."""
        if rows.null_count:
            mine = rows.is_valid()
            rows, hashes = rows.filter(mine), hashes.filter(mine)
        if len(rows) == 0:
            return
        self.offered += _fingerprint(hashes)
        if self.branch is not None:
            self._write(*self._unmarked(pa.RecordBatch.from_struct_array(rows), hashes))

    def _unmarked(self, rows: pa.RecordBatch, hashes: pa.Array) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the rows that Spark has not marked as bad, and their hashes."""
        assert self.branch is not None
        bad = marked_rows(rows)
        if not bad:
            return rows, hashes
        if not self.branch.tolerant:
            with error_context(sink=self.sink.name, transaction=self.branch.transaction):
                raise BadRow(
                    f"{len(bad)} rows cannot be written, the first because {bad[min(bad)]}. Correct "
                    "them in the query, or choose on_bad_row=",
                    rows=bad,
                )
        return self._split_off(rows, hashes, bad)

    def _split_off(
        self, rows: pa.RecordBatch, hashes: pa.Array, bad: Mapping[int, str]
    ) -> tuple[pa.RecordBatch, pa.Array]:
        """Leave bad rows out, and return the others with their hashes."""
        good = np.ones(len(rows), dtype=bool)
        good[list(bad)] = False
        chosen, rest = pa.array(np.flatnonzero(~good)), pa.array(np.flatnonzero(good))
        self._leave_out(rows.take(chosen), hashes.take(chosen), bad)
        return rows.take(rest), hashes.take(rest)

    def _write(self, rows: pa.RecordBatch, hashes: pa.Array) -> None:
        assert self.branch is not None
        with error_context(sink=self.sink.name, transaction=self.branch.transaction):
            # Outside the loop: an error here is not the fault of a row, and must not leave one out.
            self.writer = self.writer or self.sink.begin(self.branch)
        while len(rows):
            try:
                with error_context(sink=self.sink.name, transaction=self.branch.transaction):
                    self.writer.write(rows)
                self.fingerprint += _fingerprint(hashes)
                return
            except BadRow as error:
                if not self.branch.tolerant:
                    raise
                problem = error
            if not problem.rows:
                self._search(rows, hashes, problem)
                return
            rows, hashes = self._split_off(rows, hashes, problem.rows)

    def _search(self, rows: pa.RecordBatch, hashes: pa.Array, error: BadRow) -> None:
        """Write the good rows of a batch that was refused, by bisection."""
        if len(rows) == 1:
            self._leave_out(rows, hashes, {0: str(error.args[0])})
            return
        middle = len(rows) // 2
        for start, length in ((0, middle), (middle, len(rows) - middle)):
            self._write(rows.slice(start, length), hashes.slice(start, length))

    def _leave_out(
        self, rows: pa.RecordBatch, hashes: pa.Array, reasons: Mapping[int, str]
    ) -> None:
        assert self.branch is not None
        self.bad += len(rows)
        if self.dead_letters is None:
            return
        transaction = self.branch.transaction
        known = (self.sink.original_row(row) for row in plain_rows(rows))
        dead_letters = pa.RecordBatch.from_pydict(
            {
                "pipeline": [transaction.namespace.pipeline] * len(rows),
                "batch": [transaction.batch] * len(rows),
                "sink": [self.sink.name] * len(rows),
                "error": [reasons[index] for index in sorted(reasons)],
                "row": [json.dumps(row, default=str) for row in known],
            },
            schema=_DEAD_LETTER,
        )
        self.dead_letters.receive(dead_letters, hashes)

    def check_time(self, least_s: float) -> None:
        """Raise `OutOfTime` if the open branch can no longer be committed in time."""
        if self.writer is not None and self.branch is not None:
            with error_context(sink=self.sink.name, transaction=self.branch.transaction):
                check_task(self.writer.lifetime(), self.fingerprint.rows, time.time(), least_s)

    def receive(self, dead_letters: pa.RecordBatch, hashes: pa.Array) -> None:
        """Write another sink's dead letters. They are not `offered`: a drain does not find them."""
        if self.branch is not None:
            self._write(self.sink.dead_letters(dead_letters), hashes)

    def prepare(self) -> Receipt | None:
        if self.writer is None or self.branch is None or self.fingerprint.rows == 0:
            if self.writer is not None:
                self.writer.abort()  # all rows were bad, and empty branches are not prepared
            return None
        with error_context(sink=self.sink.name, transaction=self.branch.transaction):
            prepared = self.writer.prepare()
        if prepared is None:
            return None
        return Receipt(
            sink=self.sink.name,
            id=prepared.id,
            task=self.branch.task,
            fingerprint=self.fingerprint,
            handle=prepared.handle,
            began_at=prepared.began_at,
            expires_at=prepared.expires_at,
            system=self.sink.system,
        )

    def abandon(self) -> None:
        if self.writer is not None:
            self.writer.abort()


def _fingerprint(hashes: pa.Array) -> Fingerprint:
    if isinstance(hashes, pa.ChunkedArray):
        hashes = hashes.combine_chunks()
    digest = int(np.asarray(pc.fill_null(hashes, 0)).view(np.uint64).sum(dtype=np.uint64))
    return Fingerprint(len(hashes), digest)
