"""What a user's own program prints when its pipeline fails: the reason, once, as the last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "failing_job.py"
REASONS = {
    "row": "column a is null in row 3",
    "start": "127.0.0.1:1 refuses connections",
    "spark": "Invalid value 'many'",
}
# What only a developer of Poundlock or of Spark wants to read.
NOISE = ("py4j", "Logical Plan", "\tat org.apache", "direct cause", "During handling")


def errors_of(how: str, place: Path, **environment: str) -> list[str]:
    """Return the lines on standard error of a program that fails."""
    done = subprocess.run(
        [sys.executable, JOB, how],
        env=os.environ | {"DIR": str(place)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.rstrip().splitlines()


@pytest.mark.parametrize("how", REASONS)
def test_a_failure_prints_its_reason_once_and_last(how: str, tmp_path: Path) -> None:
    lines = errors_of(how, tmp_path)
    text = "\n".join(lines)
    assert REASONS[how] in lines[-1], text
    assert text.count(REASONS[how]) == 1, text
    assert not [word for word in NOISE if word in text], text


def test_at_debug_level_a_failure_prints_everything(tmp_path: Path) -> None:
    lines = errors_of("row", tmp_path, DEBUGGING="yes")
    text = "\n".join(lines)
    assert REASONS["row"] in lines[-1]
    assert all(word in text for word in ("py4j", "Logical Plan", "direct cause"))
