"""A batch that takes longer than its transactions may stay open: told early, then planned anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.cli import poundlock
from poundlock.core.protocol import Step
from poundlock.errors import OutOfTime

ROWS = [f"row {number}" for number in range(60)]
WIDE = 30_000  # five rows are more than Spark gathers before it hands rows to Python
SLOW = (
    "CASE WHEN reflect('java.lang.Thread', 'sleep', 200L) = '' THEN '' "
    f"ELSE rpad(value, {WIDE}, '.') END AS value"
)


class Scene:
    def __init__(self, spark: SparkSession, kafka: oracle.Kafka, topic: Any, place: Path):
        self.spark, self.kafka, self.place = spark, kafka, place
        self.source, self.target = topic(partitions=1, name="in"), topic(partitions=1, name="out")
        kafka.produce(self.source, ROWS)

    def pipeline(self, *, stateful: bool, slow: bool, **options: Any) -> lock.Pipeline:
        select = ("CAST(value AS STRING) AS value",)
        frame = trial.read(self.spark, self.kafka, self.source, select, **options)
        frame = frame.dropDuplicates(["value"]) if stateful else frame
        sink = sinks.Kafka(
            self.target,
            bootstrap_servers=self.kafka.servers,
            transaction_timeout=14 if slow else None,
        )
        made = lock.pipeline(
            frame, name="slow", checkpoint_location=str(self.place), settings=lock.Settings(tries=1)
        )
        return made.to(sink, select=[SLOW] if slow else None)

    def replan(self, batch: int) -> dict[str, Any]:
        arguments = ["txn", "replan", "--log", str(self.place), "--batch", str(batch)]
        done = CliRunner().invoke(poundlock, [*arguments, "--yes", "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    def planned(self) -> list[int]:
        names = (file.name for file in (self.place / "offsets").iterdir())
        return sorted(int(name) for name in names if name.isdecimal())


@pytest.fixture
def scene(spark: SparkSession, kafka: oracle.Kafka, topic: Any, tmp_path: Path) -> Iterator[Scene]:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "5")
    yield Scene(spark, kafka, topic, tmp_path / "checkpoint")
    spark.conf.set(name, str(before))


def test_a_batch_that_is_never_in_time_is_planned_anew(scene: Scene) -> None:
    for limit in (
        {},
        {"maxOffsetsPerTrigger": 10},
    ):  # the limit does not change a batch that is planned
        with pytest.raises(OutOfTime) as caught:
            trial.finish(scene.pipeline(stateful=False, slow=True, **limit))
        told = str(caught.value)
        assert "may stay open for 14 s, of which a commit may need 10 s" in told
        assert (
            f"run 'poundlock txn replan --log {(scene.place / 'poundlock').as_uri()} --batch 0'"
            in told
        )
        done = int(told.split(" s for ")[1].split(" rows")[0])
        assert 0 < done < len(ROWS), "it ended before the batch did"
    kept = scene.replan(0)["kept"]
    assert Path(kept).read_text().startswith("v") and scene.planned() == []
    trial.finish(scene.pipeline(stateful=False, slow=True, maxOffsetsPerTrigger=10))
    scene.kafka.assert_exact(scene.target, [row.ljust(WIDE, ".") for row in ROWS])
    assert len(scene.planned()) == 6


@pytest.mark.parametrize("batch", [0, 1])
def test_state_of_a_withdrawn_batch_does_not_count(scene: Scene, batch: int) -> None:
    """Its tasks have written a version of the state, with all rows of the old plan."""
    if batch:
        trial.finish(scene.pipeline(stateful=True, slow=False))
        scene.kafka.produce(scene.source, [*ROWS, *(f"later {row}" for row in ROWS)])
    trial.die(scene.pipeline(stateful=True, slow=False), Step.DECIDING)
    assert scene.planned()[-1] == batch
    state = scene.place / "state"
    shutil.copytree(state, scene.place.parent / "state")
    scene.replan(batch)
    if batch == 0:  # tasks that still run write it once more
        shutil.copytree(scene.place.parent / "state", state)
    trial.finish(scene.pipeline(stateful=True, slow=False, maxOffsetsPerTrigger=25))
    later = [f"later {row}" for row in ROWS] if batch else []
    scene.kafka.assert_exact(scene.target, [*ROWS, *later])
    assert scene.planned()[-1] > batch + 1
