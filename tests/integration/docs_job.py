"""Runs the examples of the given pages, each as a separate program, in one Spark session.

`test_docs_examples.py` runs it in a separate process, because the environment that an example reads
must be set before Spark starts, for its workers to have it too. Prints a line for each example that
succeeds, and the error of each one that fails. One failure does not stop the others.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

import poundlock as lock

# A block of Python after a line that marks it.
BLOCK = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
            run(page)
        except Exception:  # noqa: BLE001 (the test of this page reports it)
            print(f"failed {page}\n{traceback.format_exc()}\nend of {page}", flush=True)


def run(page: Path) -> None:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        # Errors name the lines of the page.
        code = compile("\n" * line + match[1], str(page), "exec")
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            exec(code, {"__name__": "__main__"})
        os.chdir("/")
        print(f"ran {page}:{line + 1}", flush=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
