"""`poundlock txn` against a real broker: what an operator sees, can do, and cannot do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import oracle
import trial
from poundlock.core.protocol import Step
from program import call_program

ROWS = [f"row {number}" for number in range(20)]


class Resolver:
    """The command line, bound to one checkpoint and one broker."""

    def __init__(self, checkpoint: Path, servers: str):
        self._where = ["--log", str(checkpoint), "--bootstrap-servers", servers]

    def run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        done = call_program("txn", *arguments, *self._where, text=text)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def __call__(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    def refusal(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr


@pytest.fixture
def scene(spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path) -> Any:
    source, target = topic(partitions=2, name="source"), topic(partitions=2, name="target")
    kafka.produce(source, ROWS)
    pipeline = trial.copying(spark, kafka, source, target, tmp_path / "checkpoint")
    return pipeline, target, Resolver(tmp_path / "checkpoint", kafka.servers)


def test_a_decided_branch_is_shown_and_committed_by_hand(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, target, desk = scene
    trial.die(pipeline, Step.DECIDED)
    lines = desk("list")
    assert {(line["decision"], line["state"], line["batch"]) for line in lines} == {
        ("commit", "Ongoing", 0)
    }
    assert all(line["time_left_s"] > 0 and line["generation"] == 1 for line in lines)
    first = lines[0]["id"]
    refused = desk.refusal("abort", first, "--yes")
    assert "may not be aborted" in refused and "txn commit" not in refused
    assert desk("commit", first, "--yes") == {"id": first, "outcome": "committed"}
    assert kafka.transaction(first) == "CompleteCommit"
    shown = desk("show", first)
    assert shown["system"]["state"] == "CompleteCommit"
    assert shown["log"][0]["stage"] == "decided"
    assert [note["action"] for note in shown["audit"]] == ["commit"]
    [line] = [line for line in desk("list") if line["id"] == first]
    assert {**line, "age_s": 0, "time_left_s": 0} == {
        **shown["branch"],
        "age_s": 0,
        "time_left_s": 0,
    }
    assert line["state"] == "CompleteCommit"
    assert line["next"] == "is committed; its batch is finished when the pipeline starts"
    told = desk.run("show", first).stdout
    assert told.startswith(f"{first}\n  sink ") and "state CompleteCommit" in told
    assert "Kafka says: state CompleteCommit, producer id " in told
    assert "entry 0 of the audit: commit, at " in told
    assert told.endswith(f"next: {line['next']}\n")
    trial.finish(pipeline)  # it finds that branch committed, and commits the others
    kafka.assert_exact(target, ROWS)
    assert desk("list") == []
    assert "already finished" in desk.refusal("commit", first, "--yes")
    shown = desk("show", first)["branch"]
    assert (shown["decision"], shown["state"]) == ("finished", "CompleteCommit")


def test_a_stray_is_shown_and_aborted_by_hand(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, target, desk = scene
    trial.die(pipeline, Step.PREPARED)
    lines = desk("list")
    assert {(line["decision"], line["state"]) for line in lines} == {("none", "Ongoing")}
    stray = lines[0]["id"]
    refused = desk.refusal("commit", stray, "--yes")
    assert "has not decided" in refused and "txn abort" not in refused
    other = desk.refusal("abort", stray.replace("trial", "trials"), "--yes")
    assert "is not a branch of the log" in other
    assert kafka.transaction(stray) == "Ongoing"
    assert desk("abort", stray, "--yes")["outcome"] == "aborted"
    assert kafka.transaction(stray) == "CompleteAbort"
    assert stray not in {line["id"] for line in desk("list")}
    trial.finish(pipeline)
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


def test_nothing_is_done_without_confirmation(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, target, desk = scene
    trial.die(pipeline, Step.PREPARED)
    stray = desk("list")[0]["id"]
    result = desk.run("abort", stray, text="n\n")
    assert (result.returncode, result.stderr.endswith("stopped; nothing was changed\n")) == (
        1,
        True,
    )
    assert kafka.transaction(stray) == "Ongoing"
    trial.finish(pipeline)  # leave nothing open on the shared broker
    kafka.assert_exact(target, ROWS)
