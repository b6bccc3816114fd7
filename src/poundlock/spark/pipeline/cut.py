"""What cuts the rows of a batch into tasks: Spark's settings, and the size of the cluster.

A repair of some branches needs a replay with the same cut, so the decision records it. The driver that
replays the batch sets it before Spark plans the batch: the frame that Spark hands to us is cut already.
A scan of files follows the session in which its frame was made, at the time of planning. All else
follows the query's own session, a copy that is made when the query starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

_LEAF = "spark.sql.leafNodeDefaultParallelism"
_OF_FILES = "spark.sql.files.minPartitionNum"
_COALESCED = "spark.sql.adaptive.coalescePartitions.minPartitionNum"
_PARALLEL_FIRST = "spark.sql.adaptive.coalescePartitions.parallelismFirst"
# By default the number of cores, which is another one on another cluster.
_BY_CLUSTER = (_LEAF, _OF_FILES, _COALESCED)
_FILES = (
    *("spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes"),
    "spark.sql.files.maxPartitionNum",
)
_SHUFFLES = (
    *("spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled"),
    *("spark.sql.adaptive.coalescePartitions.enabled", _PARALLEL_FIRST),
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize",
    *("spark.sql.adaptive.advisoryPartitionSizeInBytes", "spark.sql.adaptive.skewJoin.enabled"),
    "spark.sql.adaptive.optimizeSkewsInRebalancePartitions.enabled",
    "spark.sql.adaptive.localShuffleReader.enabled",
)
_NAMES = (*_BY_CLUSTER, *_FILES, *_SHUFFLES)
_UNDEFINED = "<undefined>"


@dataclass(frozen=True)
class Settings:
    """The settings of the two sessions that cut the rows. Read once; only the cores may change."""

    given: Mapping[str, str]

    @classmethod
    def of(cls, frames: SparkSession, query: SparkSession) -> Settings:
        """Read the settings of the session that made the frame, and of the query's own."""
        of_files = _read(frames, (_OF_FILES, *_FILES))
        return cls(_read(query, (_LEAF, _COALESCED, *_SHUFFLES)) | of_files)

    def cut(self, cores: int) -> dict[str, str]:
        """Return what cuts the rows on a cluster with so many cores."""
        leaf = self.given.get(_LEAF, str(cores))
        first = self.given.get(_PARALLEL_FIRST, "true") == "true"
        by_cluster = {_LEAF: leaf, _OF_FILES: leaf, _COALESCED: str(cores) if first else "1"}
        return by_cluster | dict(self.given)


def _read(spark: SparkSession, names: tuple[str, ...]) -> dict[str, str]:
    found = {name: spark.conf.get(name) for name in names}
    return {name: value for name, value in found.items() if value not in (None, _UNDEFINED)}


@dataclass
class Pin:
    """The settings of a session while a decided batch is planned again."""

    cut: Mapping[str, str]
    _before: dict[str, str | None] = field(default_factory=dict[str, str | None], init=False)

    def set(self, spark: SparkSession) -> None:
        """Set the cut, and keep what the session had."""
        found = _read(spark, _NAMES)
        differing = [name for name in _NAMES if found.get(name) != self.cut.get(name)]
        self._before = {name: found.get(name) for name in differing}
        for name in differing:
            _put(spark, name, self.cut.get(name))

    def restore(self, spark: SparkSession) -> None:
        """Give a session, or a copy of it, the settings that it had."""
        for name, value in self._before.items():
            _put(spark, name, value)


def _put(spark: SparkSession, name: str, value: str | None) -> None:
    if value is None:
        spark.conf.unset(name)
    else:
        spark.conf.set(name, value)
