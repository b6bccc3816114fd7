"""A user's own program whose pipeline fails, for `test_failures_shown.py`. Argument: how it fails."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import poundlock as lock
from poundlock import sinks
from poundlock.errors import BadRow

REASON = "column a is null in row 3"


class Picky(sinks.Simple):
    """Refuses every row."""

    def write(self, rows: pa.RecordBatch) -> None:
        raise BadRow(REASON)


def main(how: str) -> None:
    if os.environ.get("DEBUGGING"):
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("poundlock").setLevel(logging.DEBUG)
    spark = lock.session("local[2]", kafka=False, conf={"spark.ui.enabled": "false"})
    place = tempfile.mkdtemp(dir=os.environ["DIR"])
    frame: Any = lock.from_collection(spark, [(1, "a")], "id int, a string", directory=place)
    if how == "spark":  # Spark reads the option only in the query's own thread
        (files,) = Path(place).iterdir()
        frame = lock.read_files(spark, files, maxFilesPerTrigger="many")
    sink = Picky("picky") if how == "row" else sinks.Console()
    if how == "start":
        sink = sinks.Redis(list="l", value="a", url="redis://127.0.0.1:1")
    made = lock.pipeline(frame, name="noisy", checkpoint_location=tempfile.mkdtemp(dir=place))
    query = made.to(sink).start(availableNow=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1])
