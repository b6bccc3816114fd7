"""A session of a job that was submitted to a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cluster
import pyspark

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
JOB = """
import poundlock as lock

spark = lock.session(kafka=False, conf={"spark.executor.memory": "600m"})
print("master", spark.sparkContext.master)
print("counted", spark.range(1000, numPartitions=3).count())
"""


def test_a_submitted_job_runs_on_its_cluster(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    kept = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    with cluster.standalone(tmp_path) as url:
        done = subprocess.run(
            [str(SUBMIT), "--master", url, str(job)],
            env=kept | {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
    assert f"master {url}\n" in done.stdout, done.stdout[-4000:]
    assert "counted 1000\n" in done.stdout, done.stdout[-4000:]
