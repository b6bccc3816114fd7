"""What cut the rows of a decided batch: recorded, and named where a replay cannot have it."""

from __future__ import annotations

import pytest

from poundlock.core.coordinator import Coordinator
from poundlock.core.encoding import record_from_json, record_to_json
from poundlock.core.log import MemoryLog
from poundlock.core.model import Decided, Fingerprint, Finished, Generation, Namespace, Receipt
from poundlock.core.operator_decisions import unrepairable_loss
from poundlock.core.protocol import BatchHistory, Mismatch
from poundlock.spark.pipeline.cut import Settings

CUT = {"spark.sql.files.minPartitionNum": "2"}
RECEIPTS = tuple(Receipt("out", f"b{n}", n, Fingerprint(1, n)) for n in range(2))
DECIDED = Decided(0, 1, 1, "hash", RECEIPTS, {"out": Fingerprint(2, 1)}, CUT)
SAME_ROWS = Mismatch("out", Fingerprint(2, 1), Fingerprint(2, 1), "other partitions")
OTHER_ROWS = Mismatch("out", Fingerprint(2, 1), Fingerprint(2, 9), "different rows")


def test_the_cut_survives_the_log() -> None:
    assert record_from_json(*record_to_json(DECIDED)) == DECIDED


def test_only_a_batch_that_must_run_again_is_cut_as_before() -> None:
    log = MemoryLog()
    log.append(Generation(1, Namespace("lock", "feed"), log.uri, None, "here:1"))
    coordinator = Coordinator(log, {})
    assert coordinator.cut_to_repeat() == {}
    log.append(DECIDED)
    assert coordinator.cut_to_repeat() == CUT
    log.append(Finished(0))
    assert coordinator.cut_to_repeat() == {}


@pytest.mark.parametrize(
    ("problem", "now", "says", "never"),
    [
        (
            SAME_ROWS,
            {},
            "start once with spark.sql.files.minPartitionNum=2. Otherwise run",
            "(such",
        ),
        (SAME_ROWS, CUT, "(such as minPartitions) has changed", "start once"),
        (OTHER_ROWS, {}, "Nothing was written. Run 'poundlock", "partitions"),
    ],
    ids=["settings", "query", "rows"],
)
def test_a_refused_repair_says_what_cut_the_rows(
    problem: Mismatch, now: dict[str, str], says: str, never: str
) -> None:
    lost = {("out", "b0")}
    error = str(unrepairable_loss("log", BatchHistory(DECIDED, RECEIPTS), lost, [problem], now))
    assert says in error and never not in error.replace(str(problem), "")
    assert "--accept-loss" in error


def test_cores_count_where_no_setting_does() -> None:
    leaf, files = "spark.sql.leafNodeDefaultParallelism", "spark.sql.files.minPartitionNum"
    coalesced = "spark.sql.adaptive.coalescePartitions.minPartitionNum"
    first = "spark.sql.adaptive.coalescePartitions.parallelismFirst"
    assert Settings({}).cut(3) == {leaf: "3", files: "3", coalesced: "3"}
    assert Settings({leaf: "5"}).cut(3) == {leaf: "5", files: "5", coalesced: "3"}
    assert Settings({files: "7"}).cut(3)[files] == "7"
    assert Settings({first: "false"}).cut(3)[coalesced] == "1"
