"""A job file that the command line inspects and never starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from poundlock.cli import poundlock
from poundlock.errors import UsageError

JOB = """
import poundlock as lock
from poundlock.sinks import Files, WriteAhead

def pipeline(spark, args):
    frame = {source}
    return (
        lock.pipeline(frame, name="job", checkpoint_location=args[0])
        .to(Files(args[0] + "/out", name="files"))
        .to(WriteAhead(print, name="own"))
    )
"""
RATE = 'spark.readStream.format("rate").load()'
SOCKET = 'lock.read_socket(spark, "127.0.0.1", 9)'


def guarantee(*arguments: str | Path) -> Result:
    return CliRunner().invoke(poundlock, ["guarantee", *map(str, arguments), "--json"])


def parse_output(result: Result) -> Any:
    return json.loads(result.stdout[result.stdout.index("{") :])


def test_the_guarantee_of_a_job_is_shown(spark: Any, tmp_path: Path) -> None:
    job, place = tmp_path / "rates.py", tmp_path / "place"
    job.write_text(JOB.format(source=RATE))
    result = guarantee(job, place)
    assert result.exit_code == 0, result.output
    found = parse_output(result)
    assert (found["replayable"], found["guarantee"]) == (True, "at_least_once")
    assert {sink["sink"]: (sink["kind"], sink["guarantee"]) for sink in found["sinks"]} == {
        "files": ("staged", "exactly_once"),
        "own": ("logged", "at_least_once"),
    }
    assert all(sink["reason"] and sink["reader"] for sink in found["sinks"])
    assert not place.exists(), "nothing was started"


def test_an_impossible_guarantee_is_refused(spark: Any, tmp_path: Path) -> None:
    job = tmp_path / "sockets.py"
    job.write_text(JOB.format(source=SOCKET))
    result = guarantee(job, tmp_path / "place")
    assert result.exit_code == 1
    assert "cannot be replayed" in result.stderr
    assert {sink["guarantee"] for sink in parse_output(result)["sinks"]} == {"at_most_once"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no job file"),
        ("x = 1", "does not define pipeline"),
        ("def pipeline(spark, args): return 1", "returned int: make it return a Pipeline"),
        ("pipeline = 3", "pipeline of {job} is of type int"),
        ("def pipeline(spark): return 1", "takes (spark), but is called with (spark, args)"),
        (
            "\ndef pipeline(spark, args):\n    return args[0]",
            "{job}, line 3, failed when it was loaded: IndexError",
        ),
        ("pipeline = nothing", "{job}, line 1, failed when it was loaded: NameError"),
        ("def pipeline(", "failed when it was loaded: SyntaxError"),
        ("import sys; sys.exit(3)", "{job}, line 1, failed when it was loaded: SystemExit: 3"),
    ],
)
def test_a_file_without_a_job_is_refused(
    spark: Any, tmp_path: Path, text: str | None, words: str
) -> None:
    job = tmp_path / "wrong.py"
    if text is not None:
        job.write_text(text)
    result = guarantee(job)
    assert isinstance(result.exception, UsageError)
    assert words.format(job=job) in str(result.exception)


# A complete program, such as a beginner writes.
PROGRAM = """
import poundlock as lock
from poundlock.sinks import Files

spark = lock.session("local[1]")
frame = spark.readStream.format("rate").load()
pipeline = lock.pipeline(frame, name="job", checkpoint_location={place!r}).to(Files({place!r} + "/out"))
{more}
"""


def test_a_pipeline_at_module_level_is_found(spark: Any, tmp_path: Path) -> None:
    job, place = tmp_path / "whole.py", tmp_path / "place"
    job.write_text(PROGRAM.format(place=str(place), more=""))
    assert [sink["sink"] for sink in parse_output(guarantee(job))["sinks"]] == ["out"]


@pytest.mark.parametrize(
    "more",
    [
        "pipeline.start(availableNow=True).awaitTermination()",
        "def pipeline(spark, args): return lock.pipeline(frame, name='job', "
        "checkpoint_location={place!r}).to(Files({place!r} + '/out')).start()",
        "frame.writeStream.format('noop').option('checkpointLocation', {place!r}).start()",
    ],
)
def test_a_job_that_starts_when_it_is_loaded_is_refused(
    spark: Any, tmp_path: Path, more: str
) -> None:
    job, place = tmp_path / "program.py", tmp_path / "place"
    job.write_text(PROGRAM.format(place=str(place), more=more.format(place=str(place))))
    result = guarantee(job)
    assert isinstance(result.exception, UsageError), result.output
    assert "starts a query when it is loaded" in str(result.exception)
    assert not place.exists(), "nothing was started"
    assert spark.streams.active == []


def test_the_general_table_is_shown() -> None:
    assert parse_output(guarantee("--table")) == {
        "any": {"not_replayable": "at_most_once", "replayable": "at_least_once"},
        "idempotent": {"not_replayable": "at_most_once", "replayable": "exactly_once"},
        "logged": {"not_replayable": "at_most_once", "replayable": "at_least_once"},
        "transactional": {"not_replayable": "at_most_once", "replayable": "exactly_once"},
        "staged": {"not_replayable": "at_most_once", "replayable": "exactly_once"},
    }
