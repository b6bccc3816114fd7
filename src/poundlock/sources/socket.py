"""Lines from a socket: for trying things, for nothing that it hands out can be had again."""

from __future__ import annotations

from typing import Any


def read_socket(spark: Any, host: str, port: int, *, include_timestamp: bool = False) -> Any:
    """Open a socket that sends lines as a streaming DataFrame with one column, `value`.

    It cannot be replayed: what was read before a crash is gone, so every sink gives at most once.

    Args:
        include_timestamp: Add a column `timestamp` with the time of arrival.
    """
    reader = spark.readStream.format("socket").option("host", host).option("port", str(port))
    return reader.option("includeTimestamp", str(include_timestamp).lower()).load()
