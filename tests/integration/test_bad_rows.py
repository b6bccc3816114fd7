"""Rows that a sink refuses, in a real pipeline: the batch fails or goes on without them."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.protocol import Step
from poundlock.errors import BadRow, UsageError

GOOD = [f"row {number}" for number in range(20)]
LARGE = ["x" * 3000, "y" * 4000]
LIMIT = {"message.max.bytes": "2000"}


class Scene:
    def __init__(self, spark: Any, kafka: oracle.Kafka, topic: Callable[..., str], place: Path):
        self.spark, self.kafka, self.place = spark, kafka, place
        self.source, self.target = topic(partitions=2, name="in"), topic(partitions=2, name="out")
        self.dead = topic(partitions=1, name="dead")
        self.name = f"bad-{uuid.uuid4().hex[:8]}"  # Kafka remembers those of other tests
        kafka.produce(self.source, [*GOOD[:10], LARGE[0], *GOOD[10:], LARGE[1]])

    def sink(self, topic: str, name: str, **options: Any) -> sinks.Kafka:
        return sinks.Kafka(topic, bootstrap_servers=self.kafka.servers, name=name, **options)

    def pipeline(self, on_bad_row: Any) -> lock.Pipeline:
        frame = trial.read(self.spark, self.kafka, self.source, ["CAST(value AS STRING) AS value"])
        place = str(self.place / "checkpoint")
        made = lock.pipeline(frame, name=self.name, checkpoint_location=place)
        return made.to(self.sink(self.target, "out", settings=LIMIT), on_bad_row=on_bad_row)

    def dead_letters(self) -> list[dict[str, Any]]:
        return [json.loads(row.value or b"") for row in self.kafka.rows(self.dead)]


@pytest.fixture
def scene(spark: Any, kafka: oracle.Kafka, topic: Callable[..., str], tmp_path: Path) -> Scene:
    return Scene(spark, kafka, topic, tmp_path)


def test_by_default_the_batch_fails_and_nothing_is_written(scene: Scene) -> None:
    with pytest.raises(BadRow, match=r"message\.max\.bytes=2000") as caught:
        trial.finish(scene.pipeline("fail"))
    text = str(caught.value)
    assert "on_bad_row=" in text
    for number, rows in Counter(it.partition for it in scene.kafka.rows(scene.source)).items():
        assert f"{scene.source}, partition {number}, offsets 0 to {rows - 1}" in text
    assert scene.kafka.values(scene.target) == Counter()
    scene.kafka.assert_settled(scene.target)


def test_bad_rows_are_skipped_and_reported(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    trial.finish(scene.pipeline("skip"))
    assert scene.kafka.values(scene.target) == Counter(GOOD)
    assert "could not take" in caplog.text and "left out" in caplog.text


def test_bad_rows_are_committed_to_another_sink_in_the_same_decision(scene: Scene) -> None:
    dead = scene.sink(scene.dead, "dead")
    trial.die(scene.pipeline(dead), Step.DECIDED)
    assert scene.kafka.values(scene.target) == Counter()
    assert scene.dead_letters() == []
    trial.finish(scene.pipeline(dead))
    assert scene.kafka.values(scene.target) == Counter(GOOD)
    dead_letters = scene.dead_letters()
    assert sorted(json.loads(it["row"])["value"] for it in dead_letters) == sorted(LARGE)
    assert {(it["pipeline"], it["sink"]) for it in dead_letters} == {(scene.name, "out")}
    assert all("message.max.bytes=2000" in it["error"] for it in dead_letters)
    scene.kafka.assert_settled(scene.target)
    scene.kafka.assert_settled(scene.dead)


def test_a_lost_dead_letter_is_replayed(scene: Scene) -> None:
    dead = scene.sink(scene.dead, "dead")
    trial.die(scene.pipeline(dead), Step.DECIDED)
    for id_ in trial.decided(scene.place / "checkpoint"):
        if ".dead." in id_:
            scene.kafka.fence(id_)
    trial.finish(scene.pipeline(dead))
    assert scene.kafka.values(scene.target) == Counter(GOOD)
    assert sorted(json.loads(it["row"])["value"] for it in scene.dead_letters()) == sorted(LARGE)
    scene.kafka.assert_settled(scene.target)


def test_wrong_calls_are_refused(scene: Scene) -> None:
    with pytest.raises(UsageError, match="'fail', 'skip' or a sink"):
        scene.pipeline("ignore")
    with pytest.raises(UsageError, match="fixed topic"):
        scene.pipeline(sinks.Kafka(bootstrap_servers=scene.kafka.servers, name="dead"))
    dead = scene.sink(scene.dead, "out")
    with pytest.raises(UsageError, match="two sinks are called"):
        scene.pipeline(dead)
    dead = scene.sink(scene.dead, "dead")
    with pytest.raises(UsageError, match="either rows or bad rows"):
        scene.pipeline(dead).to(dead)
