"""Runs the examples of every page given, each as a program of its own, in one Spark session.

Run by `test_docs_examples.py`, in a process of its own: what an example reads from the environment must
be there before Spark starts, for its workers to have it too. Prints a line for each example that ran,
and the error of one that did not; the others run all the same.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import poundlock as lock

# A block of Python with a mark on the line before it.
BLOCK = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = ("SERVERS", "PG_DSN", "MYSQL_URL", "REDIS_URL", "OPENSEARCH_URL")


def main(pages: list[Path]) -> None:
    spark = lock.session(
        "local[2]",
        delta=True,
        parallelism=2,
        conf={"spark.ui.enabled": "false", "spark.databricks.delta.snapshotPartitions": "1"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    for page in pages:
        try:
            run(page, spark)
        except Exception:  # noqa: BLE001 (whatever it is: the test of this page tells it)
            print(f"failed {page}\n{traceback.format_exc()}\nend of {page}", flush=True)


def run(page: Path, spark: Any) -> None:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        code = compile("\n" * line + match[1], str(page), "exec")  # errors name the page's lines
        with tempfile.TemporaryDirectory() as directory:
            os.environ["DIR"] = directory
            given = {name: os.environ[name] for name in (*NAMES, "DIR") if name in os.environ}
            exec(code, {"__name__": "__main__", "spark": spark} | given)
        print(f"ran {page}:{line + 1}", flush=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
