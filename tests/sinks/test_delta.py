"""Delta Lake, with a session of its own: the others' does not know Delta."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from poundlock.core.participant import Column
from poundlock.core.site import LocalSite
from poundlock.errors import UsageError
from poundlock.sinks import Delta

HERE = Path(__file__).parent


def test_a_batch_is_one_version_of_the_table_whatever_dies(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "delta_job.py", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["died"] == ["decided", "committed", "finished"]
    assert report["numbers"] == sorted(range(40))
    assert report["appends"] == 4  # a version each, though two batches were committed twice
    assert report["commit"] == {
        "staged": ["prepared", 0],
        "first": ["committed", 3],
        "again": ["committed", 3],
        "half settled": ["committed", 6],
        "lost": ["aborted", 6],
        "its neighbour": ["committed", 9],
        "replayed": ["committed", 12],
    }
    told = report["constraints"]
    assert (
        "rows break constraint small (1 rows)" in told["before"] and "54321" not in told["before"]
    )
    assert "its rows are kept: correct the table" in told["after"] and "77" not in told["after"]
    assert told["put right"] == "committed"
    [warning] = told["another column"]
    assert "constraint w" in warning and "needs columns that the frame has not" in warning
    assert "has type string, but bigint in the table" in report["wrong type"]
    assert "the table has no column 'extra'" in report["wrong type"]


def test_without_spark_it_says_so(tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table")
    sink.attach(LocalSite(str(tmp_path / "rows")))
    with pytest.raises(UsageError, match="needs a Spark session"):
        sink.preflight()


def test_it_cannot_write_straight_through(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave semantic= out"):
        Delta(tmp_path / "table", semantic="at_least_once")


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table", partition_by="day")
    with pytest.raises(UsageError, match=r"no column 'day'.*'n' has type void"):
        sink.project({"n": Column("n", "void")})


def test_a_session_without_delta_is_refused(spark: object, tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table")
    site = LocalSite(str(tmp_path / "rows"))
    site.spark = spark  # type: ignore[assignment]
    sink.attach(site)
    with pytest.raises(UsageError, match=r"poundlock\.session\(delta=True\)"):
        sink.preflight()
