"""The first rows of each batch, printed on the driver after the decision: for trying things."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Receipt, checked_name
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Commitment, Semantic, Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, UsageError
from poundlock.sinks.rowstore import StoredBranches, StoredWriter
from poundlock.terminal import visible, write

logger = logging.getLogger("poundlock")


class Console(StoredBranches):
    """Prints the first rows of every batch on the driver.

    Args:
        rows: How many rows of a batch at most, 1 or more.
        truncate: How many characters of a value at most; 0 for all.
        name: The sink's name in its pipeline.
        semantic: It provides "at_least_once"; "exactly_once" is rejected.
        stream: Where to print; standard output by default.
    """

    system = "Console"
    commitment = Commitment.LOGGED

    def __init__(
        self,
        *,
        rows: int = 20,
        truncate: int = 20,
        name: str = "console",
        semantic: str | Semantic | None = None,
        stream: Any = None,
    ):
        self.name = checked_name("sink name", name)
        self.asked = None if semantic is None else Semantic(semantic)
        if rows < 1:
            raise UsageError(f"rows={rows} shows none: give 1 or more", sink=self.name)
        self.rows = rows
        self.truncate = truncate
        self._stream = stream

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_stream": None}

    def reader_settings(self) -> str:
        return "to ignore a batch that is printed twice"

    def begin(self, branch: Branch) -> Writer:
        return _FirstRows(self, branch)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        states = self.row_store.states()
        waiting = [r for r in receipts if states.get(r.id) is BranchState.PREPARED]
        if waiting:
            self._print(waiting)
        self.row_store.settle([receipt.id for receipt in waiting], sent=True)
        # The printed branches now count as sent. The base class does the rest.
        return super().commit(receipts)

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        raise AssertionError("the driver prints in `commit`")

    def _print(self, receipts: Sequence[Receipt]) -> None:
        stream = self._stream or sys.stdout
        try:
            write(self._page(receipts), stream)
        except PoundlockError:
            raise
        except Exception as error:  # noqa: BLE001 (a closed stream, a strange value, anything)
            # Other sinks may have a part in the batch, so a print must not stop it. The error's message
            # is left out, because it may contain values.
            kind = type(error).__name__
            logger.warning("sink %s: a batch could not be printed (%s): skipped", self.name, kind)

    def _page(self, receipts: Sequence[Receipt]) -> str:
        name = parse_name(receipts[0].id)
        assert name is not None
        count = sum(receipt.fingerprint.rows for receipt in receipts)
        found = list[pa.RecordBatch]()
        for receipt in receipts:
            if sum(map(len, found)) < self.rows:
                found += self.row_store.read(receipt.id)
        shown = pa.Table.from_batches(found).slice(0, self.rows)
        head = f"-- {name.namespace.pipeline}, batch {name.batch}: {count} rows --"
        lines = [head, *_grid(shown, self.truncate)]
        if count > len(shown):
            lines.append(f"only the first {len(shown)} of {count} rows")
        return "\n".join(lines)


class _FirstRows(StoredWriter):
    """Stores only as many rows as may be printed."""

    def __init__(self, sink: Console, branch: Branch):
        super().__init__(sink.row_store, branch, sink.target())
        self._left = sink.rows

    def write(self, rows: pa.RecordBatch) -> None:
        super().write(rows.slice(0, self._left))
        self._left -= min(self._left, len(rows))


def _grid(table: pa.Table, truncate: int) -> list[str]:
    def cell(value: Any) -> str:
        text = "NULL" if value is None else str(value)
        text = visible(text)
        short = 0 < truncate < len(text)
        return text[: max(truncate - 3, 1)] + "..." if short else text

    columns = [
        [visible(name), *(cell(value) for value in _readable(table.column(index)).to_pylist())]
        for index, name in enumerate(table.schema.names)
    ]
    widths = [max(map(len, column)) for column in columns]
    rule = "+".join(["", *("-" * width for width in widths), ""])
    rows = [
        "|" + "|".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + "|"
        for row in zip(*columns, strict=True)
    ]
    return [rule, rows[0], rule, *rows[1:], rule]


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return dates and times as text: Python has none before the year 1 or after 9999."""
    kind = column.type
    is_time = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return column.cast(pa.string()) if is_time else column
