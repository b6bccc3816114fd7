"""Shows the first rows of a query. It commits nothing, and gives no guarantee."""

from __future__ import annotations

import tempfile
import time
from typing import Any

_POLL_S = 0.05


def first_rows(frame: Any, limit: int, patience: float, quiet: float) -> list[Any]:
    """Return at most `limit` rows of a query.

    A stream is read until no row has come for `quiet` seconds, and for `patience` seconds at most.
    """
    if not frame.isStreaming:
        return frame.limit(limit).collect()
    rows: list[Any] = []

    def take(batch: Any, number: int) -> None:
        if len(rows) < limit:
            rows.extend(batch.limit(limit - len(rows)).collect())

    with tempfile.TemporaryDirectory(prefix="poundlock-preview-") as place:
        query = _start(frame, take, place)
        try:
            busy = time.monotonic()
            end = busy + patience
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


def _start(frame: Any, take: Any, place: str) -> Any:
    """Start the query in append mode, or in update mode if Spark refuses append."""
    for mode in ("append", "update"):
        writer = frame.writeStream.foreachBatch(take).outputMode(mode)
        try:
            return writer.option("checkpointLocation", f"{place}/{mode}").start()
        except Exception as error:
            # Append needs final rows, and an aggregate without a watermark has none.
            if type(error).__name__ != "AnalysisException" or mode == "update":
                raise
    raise AssertionError("unreachable")
