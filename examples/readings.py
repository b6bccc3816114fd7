"""The input of the other examples: sensor temperatures as lines `id,timestamp,temperature`."""

from __future__ import annotations

import poundlock as lock

START = 1_767_225_600  # 2026-01-01 00:00:00 UTC


def readings(spark, rows, directory, batch_rows=4):
    """Return lines as a stream of `id`, `ts` and `temperature`, some rows at a time."""
    lines = [(f"{sensor},{START + second},{value}",) for sensor, second, value in rows]
    frame = lock.from_collection(
        spark, lines, "line string", batch_rows=batch_rows, directory=f"{directory}/rows"
    )
    return frame.selectExpr(
        "split(line, ',')[0] AS id",
        "timestamp_seconds(CAST(split(line, ',')[1] AS LONG)) AS ts",
        "CAST(split(line, ',')[2] AS DOUBLE) AS temperature",
    )
