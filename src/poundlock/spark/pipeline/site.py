"""What Spark offers to a sink on the driver: a directory beside the log, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from poundlock.core.log import NumberTaken
from poundlock.core.site import create_local
from poundlock.errors import PoundlockError, Unavailable
from poundlock.spark.pipeline.task import no, read_votes
from poundlock.spark.storage import (
    ATOMIC_RENAME,
    CONDITIONAL_CREATE,
    HadoopFiles,
    local_path,
)

T = TypeVar("T")
R = TypeVar("R")


class SparkSite:
    """See `poundlock.core.site.Site`."""

    def __init__(self, spark: SparkSession, log_location: str):
        self.spark = spark
        self.rows_uri = f"{log_location}/rows"
        self._places: dict[str, HadoopFiles] = {}

    @property
    def tasks_at_once(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    @property
    def speculation(self) -> bool:
        setting = self.spark.sparkContext.getConf().get("spark.speculation") or "false"
        return setting.lower() == "true"

    def spread(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if not items:
            return []

        # Errors travel as values: a task that raised would be tried again for nothing.
        def task(item: T) -> tuple[R | None, str | None]:
            try:
                return function(item), None
            except PoundlockError as error:
                return None, no(error)

        context = self.spark.sparkContext
        try:
            answers = context.parallelize(list(items), len(items)).map(task).collect()
        except (PySparkException, Py4JError) as error:
            raise Unavailable(f"the tasks that send rows failed: {error}") from error
        for _, error in answers:
            if error is not None:
                read_votes([error])  # raises it
        results: list[Any] = [result for result, _ in answers]
        return results

    def _place(self, uri: str) -> HadoopFiles:
        """Open a directory, and see that no two writers can create one file there."""
        if uri not in self._places:
            files = HadoopFiles(self.spark, uri)
            files.make_root()
            if files.scheme not in ATOMIC_RENAME | CONDITIONAL_CREATE:
                files.probe()
            self._places[uri] = files
        return self._places[uri]

    def create(self, uri: str, data: bytes) -> bool:
        path = local_path(uri)
        if path is not None:
            return create_local(Path(path), data)
        parent, _, name = uri.rpartition("/")
        files = self._place(parent)
        try:
            files.create(name, data)
            return True
        except NumberTaken:
            return False
