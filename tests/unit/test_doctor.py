"""`poundlock doctor` finds what this machine and the Python of Spark's workers lack."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from poundlock.cli.environment import DRIVERS
from program import call_program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def find(*arguments: str, expect: int = 0, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the findings by what was checked."""
    done = call_program("doctor", "--json", *arguments, **environment)
    assert (done.returncode, done.stderr) == (expect, ""), done
    return {finding["what"]: finding for finding in json.loads(done.stdout)}


def script(file: Path, *lines: str) -> str:
    """Write a program to a file, and return its path."""
    file.write_text("\n".join(("#!/bin/sh", *lines, "")))
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def drivers(tmp_path: Path) -> Path:
    """A directory whose modules hide those of the drivers."""
    place = tmp_path / "drivers"
    place.mkdir()
    return place


def hidden(place: Path) -> dict[str, str]:
    search = [str(place), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, search))}


def test_nothing_is_wrong_with_this_machine() -> None:
    findings = find(PYSPARK_PYTHON=sys.executable)
    assert findings.keys() >= {"Python", "Java", "pyspark", "PYSPARK_PYTHON", *DRIVERS}
    assert all(finding["good"] for finding in findings.values()), findings
    done = call_program("doctor", PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0
    assert all(line.startswith("good  ") for line in done.stdout.splitlines()), done.stdout


def test_it_knows_the_driver_of_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        (package.split(">")[0].split("[")[0], extra)
        for extra in ("kafka", "postgres", "mysql", "redis", "opensearch")
        for package in extras[extra]
    }
    assert wanted == {(name, driver.extra) for name, driver in DRIVERS.items()}


def test_a_missing_driver_is_shown_and_needed_only_for_its_system(drivers: Path) -> None:
    (drivers / "psycopg.py").write_text(
        "raise ModuleNotFoundError('No module named psycopg', name='psycopg')"
    )
    found = find(**hidden(drivers), PYSPARK_PYTHON=sys.executable)["psycopg"]
    assert (found["good"], found["needed"], found["found"]) == (False, False, "not installed")
    assert "pip install 'poundlock[postgres]'" in found["cure"]
    asked = find("--postgres", "postgresql://u@127.0.0.1:1/none", expect=1, **hidden(drivers))
    assert not asked["PostgreSQL"]["good"]
    assert "pip install 'poundlock[postgres]'" in asked["PostgreSQL"]["cure"]
    (drivers / "confluent_kafka.py").write_text((drivers / "psycopg.py").read_text())
    asked = find("--bootstrap-servers", "127.0.0.1:1", expect=1, **hidden(drivers))
    assert "pip install 'poundlock[kafka]'" in asked["Kafka at 127.0.0.1:1"]["cure"]
    shown = call_program("doctor", **hidden(drivers), PYSPARK_PYTHON=sys.executable)
    assert "note  psycopg: not installed\n      the Postgres sink needs it" in shown.stdout


def test_a_driver_that_cannot_be_imported_is_bad(drivers: Path) -> None:
    (drivers / "psycopg.py").write_text("raise ImportError('no pq wrapper available')")
    found = find(expect=1, **hidden(drivers), PYSPARK_PYTHON=sys.executable)["psycopg"]
    assert "no pq wrapper available" in found["found"] and found["needed"]


def test_workers_of_another_environment_with_the_same_interpreter_are_bad(tmp_path: Path) -> None:
    """The Python of a virtual environment is a link to the one that it was made with."""
    bare = tmp_path / "python"
    bare.symlink_to(Path(sys.executable).resolve())
    found = find(expect=1, PYSPARK_PYTHON=str(bare))["PYSPARK_PYTHON"]
    assert found["good"] is False
    assert "lacks" in found["found"] and "pyarrow" in found["found"]
    assert sys.executable in found["cure"]


def test_workers_that_lack_poundlock_are_bad(tmp_path: Path) -> None:
    lacking = script(tmp_path / "python", "unset PYTHONPATH", f'exec "{sys.executable}" -I -S "$@"')
    found = find(expect=1, PYSPARK_PYTHON=lacking)["PYSPARK_PYTHON"]
    assert "lacks poundlock, " in found["found"], found


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["exit 1"], "is no Python that runs"),
        (["""echo '{"python": [3, 8], "poundlock": "0.1.0", "missing": []}'"""], "is Python 3.8"),
        (
            ["""echo '{"python": [%d, %d], "poundlock": "0.0.1", "missing": []}'"""],
            "has Poundlock 0.0.1",
        ),
    ],
)
def test_workers_of_another_version_are_bad(tmp_path: Path, lines: list[str], problem: str) -> None:
    here = sys.version_info[:2]
    text = [line % here if "%d" in line else line for line in lines]
    found = find(expect=1, PYSPARK_PYTHON=script(tmp_path / "python", *text))["PYSPARK_PYTHON"]
    assert problem in found["found"], found


def test_workers_with_everything_at_another_path_are_good(tmp_path: Path) -> None:
    same = script(tmp_path / "python", f'exec "{sys.executable}" "$@"')
    assert find(PYSPARK_PYTHON=same)["PYSPARK_PYTHON"]["good"]


def test_the_python_that_spark_would_choose_itself_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    script(tmp_path / "python3", "exit 1")
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    findings = find(PATH=search)
    assert findings["PYSPARK_PYTHON"]["good"]
    chosen = findings["python3 on the PATH"]
    assert (chosen["good"], chosen["needed"]) == (False, False)
    assert "poundlock.session()" in chosen["cure"]


def test_a_setting_without_a_value_is_a_wrong_call() -> None:
    done = call_program("doctor", "--bootstrap-servers", "127.0.0.1:1", "--setting", "acks")
    assert done.returncode == 2 and "NAME=VALUE" in done.stderr
    assert "Traceback" not in done.stderr
