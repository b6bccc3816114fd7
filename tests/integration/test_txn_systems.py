"""Branches of one decision in three systems, and an operator who rolls some of them back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oracle
import poundlock as lock
import trial
from databases import Databases
from poundlock import sinks
from poundlock.core.protocol import Step
from poundlock.errors import GuaranteeBroken
from poundlock.servers import mariadb, postgres

NUMBERS = list(range(40))


class Scene(Databases):
    """A pipeline into Kafka, PostgreSQL and MariaDB."""

    def __init__(
        self,
        spark: Any,
        kafka: oracle.Kafka,
        topic: Callable[..., str],
        pg: postgres.Postgres,
        maria: mariadb.MariaDB,
        place: Path,
    ):
        brokers = ("--bootstrap-servers", kafka.servers)
        super().__init__(pg, maria, place / "checkpoint", *brokers)
        self.spark, self.kafka = spark, kafka
        self.source, self.target = topic(partitions=2, name="in"), topic(partitions=2, name="out")
        self.table = self.target.replace("-", "_")
        self.name = f"three-{self.target}"  # the systems remember those of other tests
        kafka.produce(self.source, map(str, NUMBERS))
        self.execute_pg(f"CREATE TABLE {self.table} (n int)")
        self.execute_maria(f"CREATE TABLE {self.table} (n int)")

    def pipeline(self, number: str = "CAST(CAST(value AS STRING) AS INT)") -> lock.Pipeline:
        frame = trial.read(self.spark, self.kafka, self.source, [f"{number} AS n"])
        return (
            lock.pipeline(frame, name=self.name, checkpoint_location=str(self.checkpoint))
            .to(
                sinks.Kafka(
                    self.target, bootstrap_servers=self.kafka.servers, name="kafka", value="json"
                )
            )
            .to(sinks.Postgres(self.table, dsn=self.pg.address, name="postgres"))
            .to(sinks.MySQL(self.table, url=self.maria.address, name="mariadb"))
        )

    def rows(self) -> dict[str, Counter[int]]:
        topic = self.kafka.values(self.target)
        return {
            "kafka": Counter(json.loads(value)["n"] for value in topic.elements()),
            "postgres": Counter(n for (n,) in self.execute_pg(f"SELECT n FROM {self.table}")),
            "mariadb": Counter(n for (n,) in self.execute_maria(f"SELECT n FROM {self.table}")),
        }

    def open(self) -> tuple[list[Any], list[Any]]:
        prepared = self.execute_pg("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%.three-%'")
        return prepared, self.execute_maria("XA RECOVER")


@pytest.fixture
def scene(
    spark: Any,
    kafka: oracle.Kafka,
    topic: Callable[..., str],
    postgres_server: postgres.Postgres,
    mariadb_server: mariadb.MariaDB,
    tmp_path: Path,
) -> Scene:
    return Scene(spark, kafka, topic, postgres_server, mariadb_server, tmp_path)


def everywhere(numbers: list[int]) -> dict[str, Counter[int]]:
    return {name: Counter(numbers) for name in ("kafka", "postgres", "mariadb")}


def test_branches_of_three_systems_are_listed_together(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.DECIDED)
    lines = scene.txn("list")
    assert Counter((line["system"], line["sink"], line["decision"]) for line in lines) == {
        ("Kafka", "kafka", "commit"): 2,
        ("PostgreSQL", "postgres", "commit"): 2,
        ("MySQL", "mariadb", "commit"): 2,
    }
    by_hand = [
        next(line["id"] for line in lines if line["sink"] == sink)
        for sink in ("kafka", "postgres", "mariadb")
    ]
    for id_ in by_hand:
        assert scene.txn("commit", id_, "--yes") == {"id": id_, "outcome": "committed"}
    assert len(scene.txn("list")) == 6, "what the pipeline has not finished stays in doubt"
    trial.finish(scene.pipeline())
    assert scene.rows() == everywhere(NUMBERS)
    assert scene.open() == ([], [])
    assert scene.txn("list") == []


def test_strays_of_three_systems_are_aborted_by_hand(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.CHECKED)
    lines = scene.txn("list")
    assert {(line["system"], line["decision"]) for line in lines} == {
        ("Kafka", "none"),
        ("PostgreSQL", "none"),
        ("MySQL", "none"),
    }
    for line in lines:
        assert scene.txn("abort", line["id"], "--yes")["outcome"] == "aborted"
    assert scene.txn("list") == []
    assert scene.open() == ([], [])
    trial.finish(scene.pipeline())
    assert scene.rows() == everywhere(NUMBERS)


def roll_back_decided(scene: Scene) -> None:
    """Roll back like an operator who does not know Poundlock."""
    for (gid,) in scene.open()[0]:
        scene.execute_pg(f"ROLLBACK PREPARED '{gid}'")
    for number, first, second, data in scene.open()[1]:
        text = data.decode()
        gtrid, bqual = text[:first], text[first : first + second]
        scene.execute_maria(f"XA ROLLBACK '{gtrid}','{bqual}',{number}")


def test_a_branch_that_an_operator_rolled_back_is_repaired(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.DECIDED)
    roll_back_decided(scene)
    trial.finish(scene.pipeline())
    assert scene.rows() == everywhere(NUMBERS)
    assert scene.open() == ([], [])
    repaired = [it for it in trial.records(scene.checkpoint) if it["kind"] == "Repaired"]
    assert {receipt["sink"] for it in repaired for receipt in it["receipts"]} == {
        "postgres",
        "mariadb",
    }


def test_a_branch_that_cannot_be_repaired_is_reported(scene: Scene) -> None:
    volatile = "CAST(rand() * 1000000 AS INT)"
    trial.die(scene.pipeline(volatile), Step.DECIDED)
    roll_back_decided(scene)
    with pytest.raises(GuaranteeBroken, match="the replay gave different rows"):
        trial.finish(scene.pipeline(volatile))
    assert scene.rows()["postgres"] == Counter()
    assert scene.open() == ([], [])
    both = ("--sink", "postgres", "--sink", "mariadb")
    scene.txn("commit", "--batch", "0", "--accept-loss", *both, "--yes")
    trial.finish(scene.pipeline(volatile))
    assert scene.rows()["kafka"].total() == len(NUMBERS)
