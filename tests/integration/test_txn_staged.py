"""Staged branches, and witnesses in a separate place, as an operator sees them."""

from __future__ import annotations

import json
import uuid
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
from poundlock.errors import Unavailable, UsageError
from poundlock.servers import mariadb, postgres, valkey

NUMBERS = list(range(10))
NOWHERE = {
    "TRIAL_DSN": "postgresql://u@127.0.0.1:1/none",
    "TRIAL_URL": "mysql://u@127.0.0.1:1/none",
}


class Scene(Databases):
    """A pipeline into PostgreSQL in both modes, MariaDB, Valkey and files, with separate witnesses."""

    def __init__(
        self,
        spark: Any,
        kafka: oracle.Kafka,
        topic: Callable[..., str],
        pg: postgres.Postgres,
        maria: mariadb.MariaDB,
        cache: valkey.Valkey,
        place: Path,
    ):
        super().__init__(pg, maria, place / "checkpoint")
        self.spark, self.kafka, self.cache = spark, kafka, cache
        self.place, self.source = place, topic(partitions=1, name="in")
        self.own = f"own_{uuid.uuid4().hex[:8]}"  # tables, and the places of their witnesses
        kafka.produce(self.source, map(str, NUMBERS))
        self.execute_pg(f"CREATE TABLE {self.own}_a (n int)")
        self.execute_pg(f"CREATE TABLE {self.own}_u (n int PRIMARY KEY)")
        self.execute_maria(f"CREATE DATABASE {self.own}")
        self.execute_maria(f"CREATE TABLE {self.own}_u (n int PRIMARY KEY)")

    def pipeline(self) -> lock.Pipeline:
        frame = trial.read(
            self.spark, self.kafka, self.source, ["CAST(CAST(value AS STRING) AS INT) AS n"]
        )
        dsn, own = self.pg.address, self.own
        return (
            lock.pipeline(frame, name="aside", checkpoint_location=str(self.checkpoint))
            .to(sinks.Postgres(f"{own}_a", dsn=dsn, name="append", witness_schema=own))
            .to(sinks.Postgres(f"{own}_u", dsn=dsn, name="upsert", key="n", witness_schema=own))
            .to(
                sinks.MySQL(
                    f"{own}_u", url=self.maria.address, name="maria", key="n", witness_database=own
                )
            )
            .to(sinks.Redis(hash=own, field="n", value="n", url=self.cache.address, name="cache"))
            .to(sinks.Files(str(self.place / "out"), name="files"))
        )

    def lines(self) -> dict[str, dict[str, Any]]:
        return {line["sink"]: line for line in self.txn("list")}

    def rows(self) -> list[list[int]]:
        return [
            sorted(n for (n,) in self.execute_pg(f"SELECT n FROM {self.own}_a")),
            sorted(n for (n,) in self.execute_pg(f"SELECT n FROM {self.own}_u")),
            sorted(n for (n,) in self.execute_maria(f"SELECT n FROM {self.own}_u")),
        ]


@pytest.fixture
def scene(
    spark: Any,
    kafka: oracle.Kafka,
    topic: Callable[..., str],
    postgres_server: postgres.Postgres,
    mariadb_server: mariadb.MariaDB,
    valkey_server: valkey.Valkey,
    tmp_path: Path,
) -> Scene:
    return Scene(spark, kafka, topic, postgres_server, mariadb_server, valkey_server, tmp_path)


def test_decided_branches_are_shown_and_committed_by_hand(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.DECIDED)
    lines = scene.lines()
    assert {sink: (line["system"], line["state"]) for sink, line in lines.items()} == {
        "append": ("PostgreSQL", "prepared"),
        "upsert": ("PostgreSQL", "staged"),
        "maria": ("MySQL", "staged"),
        "cache": ("Redis", "waits for the pipeline"),
        "files": ("Files", "waits for the pipeline"),
    }
    assert {sink for sink, line in lines.items() if "txn commit" in line["next"]} == {"append"}
    for sink in ("upsert", "maria", "cache", "files"):
        refused = scene.call("commit", lines[sink]["id"], "--yes").exception
        assert isinstance(refused, UsageError)
        assert "by its pipeline alone" in str(refused)
    by_hand = lines["append"]["id"]
    for _ in range(2):  # the second finds the witness in a schema that no option named
        assert scene.txn("commit", by_hand, "--yes") == {"id": by_hand, "outcome": "committed"}
    line = scene.lines()["append"]
    assert (line["state"], line["next"].split(";")[0]) == ("committed", "is committed")
    assert scene.txn("show", by_hand)["branch"]["state"] == "committed"
    trial.finish(scene.pipeline())
    assert scene.rows() == [NUMBERS] * 3
    assert scene.txn("list") == []


def test_staged_branches_without_a_decision_are_aborted_by_hand(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.CHECKED)
    lines = scene.lines()
    assert {sink: (line["decision"], line["state"]) for sink, line in lines.items()} == {
        "append": ("none", "prepared"),
        "upsert": ("none", "staged"),
        "maria": ("none", "staged"),
    }
    assert scene.txn("show", lines["upsert"]["id"])["system"]["state"] == "staged"
    for line in lines.values():
        assert scene.txn("abort", line["id"], "--yes")["outcome"] == "aborted"
    assert scene.txn("list") == []
    staged = f"SELECT 1 FROM pg_tables WHERE schemaname = '{scene.own}' AND tablename <> 'witness'"
    assert scene.execute_pg(staged) == []
    assert [name for (name,) in scene.execute_maria(f"SHOW TABLES FROM {scene.own}")] == [
        "poundlock_witness"
    ]
    trial.finish(scene.pipeline())
    assert scene.rows() == [NUMBERS] * 3


def test_an_unreachable_system_hides_no_other(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.DECIDED)
    id_ = scene.lines()["maria"]["id"]
    result = scene.call("list", "--json", TRIAL_DSN=NOWHERE["TRIAL_DSN"])
    assert result.exit_code == 1
    assert result.stderr.startswith("PostgreSQL cannot be asked: PostgreSQL cannot be reached")
    assert {line["sink"]: line["state"] for line in json.loads(result.stdout)} == {
        "append": "cannot be asked",
        "upsert": "cannot be asked",
        "maria": "staged",
        "cache": "waits for the pipeline",
        "files": "waits for the pipeline",
    }
    shown = scene.call("show", id_, "--json", TRIAL_DSN=NOWHERE["TRIAL_DSN"])
    assert (shown.exit_code, json.loads(shown.stdout)["system"]["state"]) == (1, "staged")
    trial.finish(scene.pipeline())
    result = scene.call("list", **NOWHERE)
    assert (result.exit_code, result.stdout) == (1, ""), "nobody can say that nothing is in doubt"
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["PostgreSQL", "MySQL"]
    aborted = scene.call("abort", id_, "--yes", **NOWHERE)
    assert isinstance(aborted.exception, Unavailable), "nobody can say that it is not open"


def test_another_system_of_the_same_kind_is_not_queried(scene: Scene) -> None:
    trial.die(scene.pipeline(), Step.DECIDED)
    scene.execute_pg(f"CREATE DATABASE {scene.own}")
    other = scene.pg.dsn(scene.own)
    result = scene.call("list", "--json", TRIAL_DSN=other)
    states = {line["sink"]: line for line in json.loads(result.stdout)}
    assert states["append"]["state"] == "not asked"
    id_ = states["append"]["id"]
    refused = scene.call("commit", id_, "--yes", TRIAL_DSN=other).exception
    assert "give the address of the PostgreSQL that it was written to" in str(refused)
    both = scene.call("commit", id_, "--yes", "--json", "--postgres", "env:OTHER", OTHER=other)
    assert json.loads(both.stdout)["outcome"] == "committed"
    trial.finish(scene.pipeline())
    assert scene.rows() == [NUMBERS] * 3
