"""The first rows of a query, for looking at: nothing of it is kept, and nobody is promised anything."""

from __future__ import annotations

import tempfile
import time
from typing import Any

_POLL_S = 0.05


def first_rows(frame: Any, limit: int, patience: float, quiet: float) -> list[Any]:
    """Return rows of a query: of a stream, `limit` or those until nothing came for `quiet` seconds.

    Whatever happens, it ends after `patience` seconds with the rows that there are.
    """
    if not frame.isStreaming:
        return frame.limit(limit).collect()
    rows: list[Any] = []

    def take(batch: Any, number: int) -> None:
        if len(rows) < limit:
            rows.extend(batch.limit(limit - len(rows)).collect())

    with tempfile.TemporaryDirectory(prefix="poundlock-preview-") as place:
        query = _started(frame, take, place)
        try:
            end = time.monotonic() + patience
            busy = time.monotonic()
            while query.isActive and len(rows) < limit and time.monotonic() < end:
                status = query.status
                if status["isTriggerActive"] or status["isDataAvailable"] or not query.lastProgress:
                    busy = time.monotonic()
                elif time.monotonic() - busy > quiet:
                    break
                time.sleep(_POLL_S)
            if query.exception() is not None and not rows:
                raise query.exception()
        finally:
            query.stop()
    return rows


def _started(frame: Any, take: Any, place: str) -> Any:
    """Start the query, in the first of Spark's modes that can show it."""
    for mode in ("append", "update"):
        writer = frame.writeStream.foreachBatch(take).outputMode(mode)
        try:
            return writer.option("checkpointLocation", f"{place}/{mode}").start()
        except Exception as error:
            # An aggregate without a watermark has no final rows, only ones that change.
            if type(error).__name__ != "AnalysisException" or mode == "update":
                raise
    raise AssertionError("unreachable")
