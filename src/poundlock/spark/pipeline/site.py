"""What Spark offers to a sink on the driver: a directory for rows, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from poundlock.core.log import NumberTaken
from poundlock.core.site import create_local
from poundlock.core.taskerrors import Seal
from poundlock.errors import PoundlockError, Unavailable
from poundlock.spark.pipeline.task import encode_refusal, read_votes
from poundlock.spark.storage import HadoopFiles, local_path

T = TypeVar("T")
R = TypeVar("R")


class SparkSite:
    """See `poundlock.core.site.Site`."""

    def __init__(self, spark: SparkSession, log_location: str):
        self.spark = spark
        self.rows_uri = f"{log_location}/rows"
        self._directories: dict[str, HadoopFiles] = {}

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

        seal = Seal()

        # Refusals are returned as values: Spark would run a task that raised again. That is wanted
        # only where the system was not reached, because another executor may reach it.
        def task(item: T) -> tuple[R | None, str | None]:
            with seal.on(Unavailable):
                try:
                    return function(item), None
                except Unavailable:
                    raise
                except PoundlockError as error:
                    return None, encode_refusal(error)

        context = self.spark.sparkContext
        try:
            answers = context.parallelize(list(items), len(items)).map(task).collect()
        except (PySparkException, Py4JError) as error:
            if failed := seal.find(str(error), Unavailable):
                raise failed from error
            raise Unavailable(f"the tasks that send rows failed: {error}") from error
        for _, error in answers:
            if error is not None:
                read_votes([error])  # raises it
        results: list[Any] = [result for result, _ in answers]
        return results

    def create(self, uri: str, data: Iterable[bytes]) -> bool:
        path = local_path(uri)
        if path is not None:
            return create_local(Path(path), data)
        parent, _, name = uri.rpartition("/")
        if parent not in self._directories:
            files = HadoopFiles(self.spark, parent)
            files.make_root()
            files.check_safe()
            self._directories[parent] = files
        try:
            self._directories[parent].create_in_pieces(name, data)
            return True
        except NumberTaken:
            return False
