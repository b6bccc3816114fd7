"""The driver's machine loses power: files of Spark's checkpoint, which Spark does not sync, are lost.

Each pipeline is killed at a point. Then the files that such a crash can take are damaged: they are
missing, empty, cut off, or as long as before with zeros at the end. The next driver must come through,
with exact output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from harness import Chaos, Fault, Query
from pyspark.sql import SparkSession

import poundlock as lock
import trial
from poundlock.core.protocol import Step
from poundlock.servers.kafka import Cluster
from poundlock.sinks import Files

PLANS, COMMITS = "offsets", "commits"
DECIDED, FINISHED = Fault("decided", nth=2), Fault("finished", nth=2)
PLANNED = Fault("entered", nth=3)  # Spark has planned batch 2, and written the end of batch 1
BEGUN = Fault("entered")  # Spark has planned batch 0, and written where Kafka's topic begins

# By the name of a pipeline: its point, and what happens to which file.
DECIDED_LOSSES: Mapping[str, tuple[Fault, Mapping[str, str]]] = {
    "plan-missing": (DECIDED, {"offsets/1": "missing"}),
    "plan-empty": (DECIDED, {"offsets/1": "empty"}),
    "plan-cut": (DECIDED, {"offsets/1": "cut"}),
    "finished-zeros": (FINISHED, {"offsets/1": "zeros"}),
    "finished-missing": (FINISHED, {"offsets/1": "missing"}),
}
LATER_LOSSES: Mapping[str, tuple[Fault, Mapping[str, str]]] = {
    "next-empty": (PLANNED, {"offsets/2": "empty"}),
    "next-cut-end-kept": (PLANNED, {"offsets/2": "cut"}),
    "end-empty": (PLANNED, {"commits/1": "empty"}),
    "end-missing": (PLANNED, {"commits/1": "missing"}),
    "both": (PLANNED, {"offsets/2": "missing", "commits/1": "cut"}),
    "first-position-empty": (BEGUN, {"sources/0/0": "empty"}),
    "first-position-missing": (BEGUN, {"sources/0/0": "missing"}),
}


def lose(file: Path, how: str) -> None:
    text = file.read_bytes()
    half = text[: len(text) // 2]
    lost = {"empty": b"", "cut": half, "zeros": half + bytes(len(text) - len(half))}
    file.unlink()
    if how in lost:
        file.write_bytes(lost[how])


def play(
    directory: Path, servers: str, kind: str, losses: Mapping[str, tuple[Fault, Mapping[str, str]]]
) -> str:
    """Kill each pipeline at its point, damage its files, and run it to the end. Return the log."""
    chaos = Chaos(directory, servers, [Query(kind, name=name, rows=120) for name in losses])
    chaos.die_at({name: point for name, (point, _) in losses.items()})
    for name, (_, files) in losses.items():
        for file, how in files.items():
            lose(chaos.checkpoint(name) / file, how)
    last = chaos.live().ended()
    chaos.check()
    return last.output


@pytest.mark.parametrize("kind", ["stateless", "stateful"])
def test_the_plan_of_a_decided_batch_is_restored(
    kafka_server: Cluster, tmp_path: Path, kind: str
) -> None:
    output = play(tmp_path, kafka_server.bootstrap_servers, kind, DECIDED_LOSSES)
    assert output.count("it is restored from the decision") == len(DECIDED_LOSSES)


def test_what_spark_wrote_after_the_last_decision_is_written_again(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    """Batch 1 is finished and is not written again. Batch 2 is not decided, so it is planned again.

    So is batch 0, if the position was lost at which it begins.
    """
    output = play(tmp_path, kafka_server.bootstrap_servers, "stateful", LATER_LOSSES)
    removed = [line for line in output.splitlines() if "it is removed" in line]
    assert sum("offsets/2" in line for line in removed) == 4  # with the end of the batch before
    assert sum("commits/1" in line for line in removed) == 2
    assert sum("offsets/0" in line for line in removed) == 2


@pytest.mark.parametrize("how", ["empty", "cut", "zeros", "missing"])
@pytest.mark.parametrize("plan", ["kept", "empty"])
def test_a_lost_list_of_files_is_written_again(
    spark: SparkSession, tmp_path: Path, how: str, plan: str
) -> None:
    """A source of files lists the files of a batch, which is not decided, before Spark's plan."""
    source, target, checkpoint = tmp_path / "in", tmp_path / "out", tmp_path / "checkpoint"
    source.mkdir()

    def copying() -> lock.Pipeline:
        frame = spark.readStream.schema("n int").json(str(source))
        made = lock.pipeline(frame, name="files", checkpoint_location=str(checkpoint))
        return made.to(Files(target, name="out", format="json"))

    for number in range(3):
        (source / f"{number}.json").write_text(f'{{"n": {number}}}\n')
        if number < 2:
            trial.finish(copying())
    trial.die(copying(), Step.ENTERED)
    lose(checkpoint / "sources/0/2", how)
    if plan == "empty":
        lose(checkpoint / "offsets/2", "empty")
    (source / "3.json").write_text('{"n": 3}\n')
    trial.finish(copying())
    assert sorted(row.n for row in spark.read.json(str(target)).collect()) == [0, 1, 2, 3]
