"""Lines from a socket. Only for trials, because a socket cannot be replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_socket(
    spark: SparkSession, host: str, port: int, *, include_timestamp: bool = False
) -> DataFrame:
    """Open a socket that sends lines as a streaming DataFrame with one column, `value`.

    It cannot be replayed. Rows read before a crash are lost, so every sink gives at most once.

    Args:
        include_timestamp: Add a column `timestamp` with the time of arrival.
    """
    reader = spark.readStream.format("socket").option("host", host).option("port", str(port))
    return reader.option("includeTimestamp", str(include_timestamp).lower()).load()
