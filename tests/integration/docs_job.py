"""Runs the examples of one page, each as a program of its own in one Spark session.

Run by `test_docs_examples.py`, in a process of its own: what an example reads from the environment must
be there before Spark starts, for its workers to have it too.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import poundlock as lock

# A block of Python with a mark on the line before it. `<!-- run delta -->`: with Delta in the session.
BLOCK = re.compile(r"^<!-- run( delta)? -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = ("SERVERS", "PG_DSN", "MYSQL_URL", "REDIS_URL", "OPENSEARCH_URL")


def main(page: Path) -> None:
    text = page.read_text()
    delta = any(match[1] for match in BLOCK.finditer(text))
    spark = lock.session(
        "local[2]",
        delta=delta,
        parallelism=2,
        conf={"spark.ui.enabled": "false", "spark.databricks.delta.snapshotPartitions": "1"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    for match in BLOCK.finditer(text):
        line = text[: match.start(2)].count("\n")
        code = compile("\n" * line + match[2], str(page), "exec")  # errors name the page's lines
        with tempfile.TemporaryDirectory() as directory:
            os.environ["DIR"] = directory
            given = {name: os.environ[name] for name in (*NAMES, "DIR") if name in os.environ}
            exec(code, {"__name__": "__main__", "spark": spark} | given)
        print(f"ran {page.name}:{line + 1}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
