"""One sink in one task: its branch, its fingerprint and its bad rows.

Rules of this file: no Python call per row, except for bad rows, which should be few.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from poundlock.core.expiry import check_task
from poundlock.core.model import Branch, Fingerprint, Receipt
from poundlock.core.participant import DEAD_LETTER, Participant, Writer
from poundlock.errors import BadRow, error_context

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
            self._write(pa.RecordBatch.from_struct_array(rows), hashes)

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
            good = np.ones(len(rows), dtype=bool)
            good[list(problem.rows)] = False
            chosen, rest = pa.array(np.flatnonzero(~good)), pa.array(np.flatnonzero(good))
            self._leave_out(rows.take(chosen), hashes.take(chosen), problem.rows)
            rows, hashes = rows.take(rest), hashes.take(rest)

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
        known = (self.sink.original_row(row) for row in _readable(rows).to_pylist())
        dead_letters = pa.RecordBatch.from_pydict(
            {
                "pipeline": [transaction.namespace.pipeline] * len(rows),
                "batch": [transaction.batch] * len(rows),
                "sink": [self.sink.name] * len(rows),
                "error": [reasons[index] for index in sorted(reasons)],
                "row": [json.dumps(row, default=_plain) for row in known],
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


def _readable(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert what Python cannot read, which may be why the row is bad.

    Times become text, because Python has none after the year 9999. Spark does not check that texts are
    UTF-8: if one is not, texts become bytes.
    """
    try:
        rows.validate(full=True)
        text = pa.string()
    except pa.ArrowInvalid:
        text = pa.binary()
    columns = [column.cast(_readable_type(column.type, text)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _readable_type(kind: pa.DataType, text: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_string(kind):
        return text
    if isinstance(kind, pa.StructType):
        return pa.struct([it.with_type(_readable_type(it.type, text)) for it in kind])
    if isinstance(kind, pa.MapType):
        return pa.map_(_readable_type(kind.key_type, text), _readable_type(kind.item_type, text))
    if isinstance(kind, pa.ListType):
        return pa.list_(kind.value_field.with_type(_readable_type(kind.value_type, text)))
    return kind


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not have."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "base64:" + base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal | datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    return repr(value)
