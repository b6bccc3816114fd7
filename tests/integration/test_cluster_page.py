"""The command of docs/cluster.md gives a submitted job the connector, and shows no secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
SECRET = "postgresql://user:hunter2@127.0.0.1:1/db"
JOB = """
import os, urllib.request
import poundlock as lock

spark = lock.session(conf={"spark.ui.enabled": "true", "spark.ui.port": "0"})
kafka = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "sensor"}
print("columns", spark.readStream.format("kafka").options(**kafka).load().columns[:2])
context = spark.sparkContext
page = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/environment"
shown = urllib.request.urlopen(page).read().decode()
print("shown", "executorEnv.PG_DSN" in shown, "hunter2" in shown)
"""


def test_the_command_of_the_page_has_the_jars_and_hides_the_secrets(tmp_path: Path) -> None:
    found = re.search(r"^<!-- submit -->\n```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None
    (tmp_path / "sensors.py").write_text(JOB)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", found[1].replace("spark://HOST:7077", "local[1]")],
        cwd=tmp_path,
        env=os.environ
        | {"PATH": path, "PG_DSN": SECRET, "REDIS_URL": SECRET, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "columns ['key', 'value']\n" in done.stdout
    assert "shown True False\n" in done.stdout
