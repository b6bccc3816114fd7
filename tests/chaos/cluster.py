"""A Spark standalone cluster on this machine, from the scripts that pip installed with PySpark.

Its two workers use two loopback addresses, 127.0.0.1 and 127.0.0.2. Spark sees two hosts, and starts
speculative copies of tasks only then.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
from harness import wait_until

from poundlock.jvm import java

_SPARK = Path(pyspark.__file__).parent


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Run a master and two workers of one core each. Yield the master's URL."""
    with ExitStack() as processes:
        log = directory / "master.log"
        processes.enter_context(_daemon("master.Master", log, "--host", "127.0.0.1"))
        url = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        for host in ("127.0.0.1", "127.0.0.2"):
            place = ["--host", host, "--work-dir", str(directory / f"work-{host}")]
            size = ["--cores", "1", "--memory", "1g"]
            worker = directory / f"worker-{host}.log"
            processes.enter_context(_daemon("worker.Worker", worker, *place, *size, url))
            _wait_for(worker, r"(Successfully registered with master)")
        yield url


@contextmanager
def _daemon(name: str, log: Path, *arguments: str) -> Iterator[None]:
    command = [str(_SPARK / "bin/spark-class"), f"org.apache.spark.deploy.{name}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", "0", "--webui-port", "0", *arguments],
            env=os.environ
            | {"SPARK_HOME": str(_SPARK), "JAVA_HOME": str(java.executable().parent.parent)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()  # a worker stops its executors too
        process.wait(30)


def _wait_for(log: Path, pattern: str) -> str:
    def look() -> re.Match[str] | None:
        return re.search(pattern, log.read_text(errors="replace"))

    wait_until(lambda: look() is not None, f"{pattern!r} in {log}", 60)
    found = look()
    assert found is not None
    return found[1]
