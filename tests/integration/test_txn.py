"""`poundlock txn` against a real broker: what an operator sees, can do, and cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import oracle
import trial
from poundlock.cli import poundlock
from poundlock.core.protocol import Step
from poundlock.errors import UsageError

ROWS = [f"row {number}" for number in range(20)]


class Resolver:
    """The command line, bound to one checkpoint and one broker."""

    def __init__(self, checkpoint: Path, servers: str):
        self._where = ["--log", str(checkpoint), "--bootstrap-servers", servers, "--json"]

    def __call__(self, *arguments: str, text: str | None = None) -> Any:
        result = CliRunner().invoke(poundlock, ["txn", *arguments, *self._where], input=text)
        if isinstance(result.exception, UsageError):
            raise result.exception
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(
            result.stdout[result.stdout.index("[" if arguments == ("list",) else "{") :]
        )


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
    with pytest.raises(UsageError, match="may not be aborted"):
        desk("abort", first, "--yes")
    assert desk("commit", first, "--yes") == {"id": first, "outcome": "committed"}
    assert kafka.transaction(first) == "CompleteCommit"
    shown = desk("show", first)
    assert shown["system"]["state"] == "CompleteCommit"
    assert shown["log"][0]["stage"] == "decided"
    assert [note["action"] for note in shown["audit"]] == ["commit"]
    trial.finish(pipeline)  # it finds that branch committed, and commits the others
    kafka.assert_exact(target, ROWS)
    assert desk("list") == []
    with pytest.raises(UsageError, match="already finished"):
        desk("commit", first, "--yes")


def test_a_stray_is_shown_and_aborted_by_hand(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, target, desk = scene
    trial.die(pipeline, Step.PREPARED)
    lines = desk("list")
    assert {(line["decision"], line["state"]) for line in lines} == {("none", "Ongoing")}
    stray = lines[0]["id"]
    with pytest.raises(UsageError, match="has not decided"):
        desk("commit", stray, "--yes")
    with pytest.raises(UsageError, match="is not a branch of the log"):
        desk("abort", stray.replace("trial", "trials"), "--yes")
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
    where = desk._where
    result = CliRunner().invoke(poundlock, ["txn", "abort", stray, *where], input="n\n")
    assert result.exit_code == 1
    assert kafka.transaction(stray) == "Ongoing"
    trial.finish(pipeline)  # leave nothing open on the shared broker
    kafka.assert_exact(target, ROWS)
