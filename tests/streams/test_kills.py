"""Every operator is killed during its batches, and gives the same result as without kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import kill_job
from pyspark.sql import SparkSession

from poundlock.spark.stream import state

# Where a driver dies, and at the how manieth time. Both pipelines together have eight batches or more.
DEATHS = [("writing", 2), ("prepared", 3), ("decided", 2), ("finished", 3)]


def run(directory: Path, *arguments: object) -> int:
    command = [sys.executable, kill_job.__file__, str(directory), *map(str, arguments)]
    with open(directory / "log", "a") as log:
        return subprocess.run(command, stdout=log, stderr=log, timeout=600, check=False).returncode


def test_every_operator_through_kills(spark: SparkSession, tmp_path: Path) -> None:
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for directory in (quiet, killed):
        directory.mkdir()
    assert run(quiet) == 0, (quiet / "log").read_text()[-3000:]
    (killed / "kill-worker").touch()
    for death in DEATHS:
        assert run(killed, *death) == -signal.SIGKILL, death
    assert not (killed / "kill-worker").exists()
    assert run(killed) == 0, (killed / "log").read_text()[-3000:]

    rows = {
        each: [seen(spark, place / each) for place in (quiet, killed)]
        for each in ("results", "late", "united")
    }
    for each, (expected, found) in rows.items():
        assert expected and found == expected, each
    operators = Counter(row.split('"operator":"')[1].split('"')[0] for row in rows["united"][0])
    assert set(operators) == {
        "sessions",
        "count",
        "timers",
        "pattern",
        "both",
        "rules",
        "join",
        "rolling",
        "native",
    }
    assert any("timer [" in row for row in rows["united"][0])
    assert rows["late"][0].total() < kill_job.BATCHES * 60

    for name in ("windows", "others"):
        kept = [everything_kept(spark, place / name) for place in (quiet, killed)]
        assert kept[0] and kept[0] == kept[1], name


def seen(spark: SparkSession, directory: Path) -> Counter[str]:
    """Return what plain Spark sees in a sink: only committed files, by the manifest."""
    return Counter(row.value for row in spark.read.text(str(directory)).collect())


def everything_kept(spark: SparkSession, checkpoint: Path) -> set[str]:
    found: set[str] = set()
    for operator in state.operators(spark, str(checkpoint)):
        if operator.ours:
            for entry in state.entries(spark, str(checkpoint), operator.number):
                found.add(repr((operator.number, entry.key, entry.state, entry.timers)))
    return found
