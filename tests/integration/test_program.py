"""Commands that start Spark, and the examples, each in a process that nothing has prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from packed import make_wheel
from program import call_program

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["fraud", "late_data", "minimum", "rules", "sessions", "temperature_rise"]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
SUBMITTED = """
import sys
import poundlock as lock
from poundlock.sinks import Files

place = sys.argv[1]
spark = lock.session("local[1]", conf={"spark.ui.enabled": "false"})
frame = lock.from_collection(spark, [("a", 1)], "id string, v long", directory=f"{place}/rows")

def where(row):
    import poundlock
    return [(row.id, poundlock.__file__)]

flow = lock.flow(frame).flat_map(where, "id string, file string")
pipeline = lock.pipeline(flow, name="p", checkpoint_location=f"{place}/c")
pipeline.to(Files(f"{place}/out", format="json")).start(availableNow=True).awaitTermination()
print("driver", lock.__file__)
"""
SQL = """
name = "job"
checkpoint_location = "checkpoint"
sql = "INSERT INTO warm SELECT id FROM readings WHERE temperature > 30"

[source.readings]
kind = "collection"
schema = "id STRING, temperature DOUBLE"
rows = [["a", 20.0], ["b", 41.0]]
directory = "rows"

[sink.warm]
kind = "files"
path = "warm"
format = "json"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(SQL)
    return file


def test_sql_explains_and_runs_a_file(job: Path) -> None:
    explained = call_program("sql", job, "--explain", "--json")
    assert explained.returncode == 0, explained.stderr
    [plan] = json.loads(explained.stdout)
    assert (plan["pipeline"], plan["guarantee"]) == ("job-readings", "exactly_once")
    assert not (job.parent / "warm").exists()

    done = call_program("sql", job, "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"pipeline": "job-readings", "state": "done"}]
    written = "".join(it.read_text() for it in (job.parent / "warm").glob("*.json"))
    assert written == '{"id":"b"}\n'


def test_the_shell_of_sql_reads_statements_from_its_input(job: Path) -> None:
    done = call_program("sql", "--shell", job, text="SELECT id FROM readings;\nEXIT;\n")
    assert done.returncode == 0, done.stderr
    assert "2 rows" in done.stdout and "Traceback" not in done.stderr


def test_guarantee_reads_a_job_file(tmp_path: Path) -> None:
    done = call_program("guarantee", EXAMPLES / "sessions.py", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["guarantee"] == "exactly_once"
    assert not (tmp_path / "visits").exists(), "nothing was started"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_without_arguments_prints_its_usage(name: str) -> None:
    example = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(example, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    first, last = done.stderr.splitlines()
    assert first.startswith(f"usage: {name}.py [-h] directory"), "nothing before it, as of Spark"
    assert "the following arguments are required: directory" in last


def test_an_example_runs_as_a_program(tmp_path: Path) -> None:
    example = [sys.executable, str(EXAMPLES / "sessions.py"), str(tmp_path)]
    done = subprocess.run(example, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "visits").glob("*.json"))


def test_a_wheel_that_is_submitted_with_a_job_as_a_zip_is_enough(tmp_path: Path) -> None:
    job, wheel = tmp_path / "job.py", make_wheel(tmp_path).rename(tmp_path / "poundlock.zip")
    job.write_text(SUBMITTED)
    done = subprocess.run(
        [str(SUBMIT), "--master", "local[1]", "--py-files", str(wheel), str(job), str(tmp_path)],
        env=os.environ
        | {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"driver {wheel}/poundlock" in done.stdout
    [row] = [json.loads(it.read_text()) for it in (tmp_path / "out").glob("*.json")]
    assert f"{wheel.name}/poundlock" in row["file"]
