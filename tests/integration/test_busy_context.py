"""Transactional ids in a Spark context that runs other jobs too, and in which a task fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from busy_job import FAILS, OTHER_TASKS, TASKS

import oracle
import trial

JOB = Path(__file__).with_name("busy_job.py")
LONGEST_S = 400


def test_no_two_tasks_of_a_batch_share_an_id(kafka: oracle.Kafka, tmp_path: Path) -> None:
    source, target = kafka.create(partitions=1), kafka.create(partitions=3)
    rows = [f"row {number}" for number in range(20 * TASKS)]
    kafka.produce(source, rows)
    places = [kafka.servers, source, target, str(len(rows) // 2), str(tmp_path)]
    command = [sys.executable, str(JOB), *places]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1])["others"] >= OTHER_TASKS

    records = trial.records(tmp_path / "checkpoint")
    first, second = [record for record in records if record["kind"] == "Decided"]
    assert (first["attempt"], second["attempt"]) == (1, 1)
    # A lane, a partition, and a number: the second attempt at a task has an id of its own, and after it
    # comes another pair of lanes.
    assert _ends(first) == {f"0.{task}.{int(task == FAILS)}" for task in range(TASKS)}
    assert _ends(second) == {f"3.{task}.0" for task in range(TASKS)}
    kafka.assert_exact(target, rows)
    kafka.assert_settled(target)


def _ends(record: dict[str, list[dict[str, str]]]) -> set[str]:
    return {".".join(receipt["id"].split(".")[-3:]) for receipt in record["receipts"]}
