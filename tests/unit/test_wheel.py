"""What the package reads of itself is found inside a wheel that is not unpacked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packed import make_wheel
from poundlock.spark import session
from program import call_program

READ_ALL = """
import poundlock, sys
from poundlock.demo import report
from poundlock.jvm import jars
from poundlock.sinks.redis.client import MOVE
assert MOVE and poundlock.__file__.startswith(sys.path[1]), poundlock.__file__
assert all(jars.locked(name) for name in jars.ROOTS)
assert "$verdict" in report.TEMPLATE.read_text()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


def test_every_file_of_the_package_is_read_from_a_wheel(wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL],
        env={"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_program_runs_from_a_wheel(wheel: Path) -> None:
    done = call_program("doctor", "--json", PYTHONPATH=str(wheel), PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0, done
    found = {finding["what"]: finding["found"] for finding in json.loads(done.stdout)}
    assert "jars spark-kafka" in found


def test_a_wheel_that_spark_gives_to_the_driver_alone_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session.warn_of_wheels({"spark.submit.pyFiles": "/a/more.zip,file:/a/poundlock-1-py3.whl"})
    [warning] = caplog.messages
    assert "do not import from poundlock-1-py3.whl" in warning and ".zip" in warning
    caplog.clear()
    session.warn_of_wheels({})
    assert caplog.messages == []
