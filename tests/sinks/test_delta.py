"""Delta Lake, in a separate session, because that of the other tests lacks Delta."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poundlock.core.participant import Column
from poundlock.core.site import LocalSite
from poundlock.errors import UsageError
from poundlock.sinks import Delta

HERE = Path(__file__).parent


def test_a_batch_adds_one_version_to_the_table_after_any_crash(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "delta_job.py", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"LC_ALL": "C"},
        timeout=300,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["died"] == ["decided", "committed", "finished"]
    assert report["numbers"] == sorted(range(40))
    assert report["appends"] == 4  # one version each, although two batches were committed twice
    # The decided rows, not those of the changed query.
    assert report["changed"] == [{"a": "left", "b": "right"}]
    assert report["commit"] == {
        "staged": ["prepared", 0],
        "first": ["committed", 3],
        "again": ["committed", 3],
        "half settled": ["committed", 6],
        "lost": ["aborted", 6],
        "its neighbour": ["committed", 9],
        "replayed": ["committed", 12],
    }
    check_demands(report["demands"])
    assert "has type string, but bigint in the table" in report["wrong type"]
    assert "the table has no column 'extra'" in report["wrong type"]
    start = report["at the start"]
    assert "partitioned by ['day'], and not by ['number']" in start["other partitions"]
    assert "is no Delta table, and not empty" in start["plain files"]
    assert "cannot have columns or fields called ['a b']" in start["blanks"]
    assert start["names"] == "1"


def check_demands(report: dict[str, Any]) -> None:
    """Check that each refused row is reported in time and without its values."""
    assert re.match(r"BadRow: .*constraint small \(1 rows\)", report["broken"])
    assert re.match(r"InDoubt: .*its rows are stored: correct the table", report["too late"])
    assert report["put right"] == "committed"
    assert ["lacks columns required by constraint w" in it for it in report["another column"]] == [
        True
    ]
    null, long = report["other letters"]
    assert re.match(r"BadRow: .*ID is null", null) and re.match(r"BadRow: .*WORD is longer", long)
    assert ["the lengths inside w" in it for it in report["inside"]] == [True]
    assert re.match(r"BadRow: .*`s`.`a` NOT NULL \(2 rows\)", report["null inside"])
    assert report["good inside"] == [None, "committed"]
    assert report["filled"] == [[], None, "committed"]
    assert re.match(r"BadRow: .*constraints .*: m \(1 rows\)", report["filled otherwise"])
    assert re.match(r"BadRow: .*expression of the table fail", report["no number"])
    assert report["relative"] == [None, "committed"]
    assert re.match(r"InDoubt: .*damaged .*Delete the file", report["damaged"])
    (locale,) = report["locale"]  # of an ASCII locale
    assert "a row with others in a partition column is a bad row" in locale
    assert report["unfit"] == [1, 2, 3, 5] and report["fitting"] == "committed"
    assert re.match(r"BadRow: .*\(2 in all\): t is before the year 1", report["times"])
    assert "; the clocks of Europe/Berlin show its t for another instant too" in report["times"]
    assert report["mapped"] == [[5], "committed"]
    for value in ("54321", "7654", "many", "long "):
        assert value not in json.dumps(report)


def test_a_missing_spark_session_is_reported(tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table")
    sink.attach(LocalSite(str(tmp_path / "rows")))
    with pytest.raises(UsageError, match="needs a Spark session"):
        sink.preflight()


def test_a_weaker_semantic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave semantic= out"):
        Delta(tmp_path / "table", semantic="at_least_once")


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table", partition_by="day")
    with pytest.raises(UsageError, match=r"no column 'day'.*'n' has type void"):
        sink.project({"n": Column("n", "void")})


def test_a_frame_with_only_partition_columns_is_refused(tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table", partition_by="s")
    with pytest.raises(
        UsageError, match=r"by which Delta cannot partition; no column is left besides"
    ):
        sink.project({"s": Column("s", "struct<a:int>")})


def test_a_session_without_delta_is_refused(spark: object, tmp_path: Path) -> None:
    sink = Delta(tmp_path / "table")
    site = LocalSite(str(tmp_path / "rows"))
    site.spark = spark  # type: ignore[assignment]
    sink.attach(site)
    with pytest.raises(UsageError, match=r"poundlock\.session\(delta=True\)"):
        sink.preflight()
