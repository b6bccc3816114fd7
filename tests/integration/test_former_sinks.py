"""A sink is renamed, removed or downgraded while it has branches open: nothing stays open.

An open branch holds locks and, in PostgreSQL, the vacuum horizon; in Kafka it hides later rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import oracle
import poundlock as lock
import trial
from databases import Databases
from poundlock import sinks
from poundlock.cli import poundlock
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.errors import LogMismatch
from poundlock.servers import mariadb, postgres

NUMBERS = list(range(20))
SYSTEMS = ("kafka", "postgres", "staged", "mariadb")


class Scene(Databases):
    """Pipelines of one name and checkpoint, with changing sinks, each with a target of its own."""

    def __init__(
        self,
        spark: Any,
        kafka: oracle.Kafka,
        topic: Callable[..., str],
        pg: postgres.Postgres,
        maria: mariadb.MariaDB,
        place: Path,
    ):
        super().__init__(pg, maria, place / "checkpoint", "--bootstrap-servers", kafka.servers)
        self.spark, self.kafka, self.files = spark, kafka, place / "files"
        self.source, self.topics = topic(partitions=2, name="in"), [topic(), topic()]
        self.tables = [name.replace("-", "_") for name in self.topics]
        self.name = f"former-{self.topics[0]}"
        kafka.produce(self.source, map(str, NUMBERS))
        for table in self.tables:
            self.execute_pg(f"CREATE TABLE {table} (n int)")
            self.execute_maria(f"CREATE TABLE {table} (n int)")

    def sink(self, system: str, name: str, target: int = 0, **options: Any) -> Participant:
        table = self.tables[target]
        match system:
            case "kafka":
                servers = self.kafka.servers
                topic = self.topics[target]
                return sinks.Kafka(
                    topic, bootstrap_servers=servers, name=name, value="json", **options
                )
            case "mariadb":
                return sinks.MySQL(table, url=self.maria.address, name=name, **options)
            case "files":
                return sinks.Files(str(self.files), name=name)
            case _:
                mode = "staged" if system == "staged" else "prepared"
                return sinks.Postgres(table, dsn=self.pg.address, name=name, mode=mode, **options)

    def pipeline(self, *targets: Participant) -> lock.Pipeline:
        number = "CAST(CAST(value AS STRING) AS INT) AS n"
        frame = trial.read(self.spark, self.kafka, self.source, [number])
        made = lock.pipeline(frame, name=self.name, checkpoint_location=str(self.checkpoint))
        for target in targets:
            made = made.to(target)
        return made

    def rows(self, system: str, target: int = 0) -> Counter[int]:
        if system == "kafka":
            values = self.kafka.values(self.topics[target])
            return Counter(json.loads(value)["n"] for value in values.elements())
        run = self.execute_maria if system == "mariadb" else self.execute_pg
        return Counter(n for (n,) in run(f"SELECT n FROM {self.tables[target]}"))

    def open(self, system: str) -> list[str]:
        """Return the names of the sinks that have branches open, as an operator sees them."""
        kind = {"kafka": "Kafka", "mariadb": "MySQL"}.get(system, "PostgreSQL")
        return sorted({line["sink"] for line in self.txn("list") if line["system"] == kind})


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


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_renamed_sink_leaves_nothing_open(scene: Scene, system: str) -> None:
    trial.die(scene.pipeline(scene.sink(system, "old")), Step.CHECKED)
    assert scene.open(system) == ["old"]
    trial.finish(scene.pipeline(scene.sink(system, "new")))
    assert scene.open(system) == []
    assert scene.rows(system) == Counter(NUMBERS)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_removed_sink_is_swept_by_another_of_its_system(scene: Scene, system: str) -> None:
    gone, stays = scene.sink(system, "gone", 1), scene.sink(system, "stays")
    trial.die(scene.pipeline(gone, stays), Step.CHECKED)
    assert scene.open(system) == ["gone", "stays"]
    trial.finish(scene.pipeline(scene.sink(system, "stays")))
    assert scene.open(system) == []
    assert (scene.rows(system), scene.rows(system, 1)) == (Counter(NUMBERS), Counter())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_downgraded_sink_sweeps_what_its_stronger_mode_left(scene: Scene, system: str) -> None:
    trial.die(scene.pipeline(scene.sink(system, "out")), Step.CHECKED)
    assert scene.open(system) == ["out"]
    trial.finish(scene.pipeline(scene.sink(system, "out", semantic="at_least_once")))
    assert scene.open(system) == []
    assert scene.rows(system) == Counter(NUMBERS)


@pytest.mark.parametrize("system", ["kafka", "postgres", "mariadb"])
def test_a_removed_sink_that_no_other_reaches_is_refused(scene: Scene, system: str) -> None:
    files = scene.sink("files", "files")
    trial.die(scene.pipeline(scene.sink(system, "gone"), files), Step.CHECKED)
    with pytest.raises(LogMismatch, match="sink 'gone' may have left branches open") as refused:
        scene.pipeline(scene.sink("files", "files")).start(availableNow=True)
    log = f"file://{scene.checkpoint}/poundlock"
    assert f"'poundlock txn forget --log {log} --sink gone'" in str(refused.value)
    assert scene.open(system) == ["gone"]
    # Put back for one start, it may go.
    trial.finish(scene.pipeline(scene.sink(system, "gone"), scene.sink("files", "files")))
    assert scene.open(system) == []
    trial.finish(scene.pipeline(scene.sink("files", "files")))
    assert scene.rows(system) == Counter(NUMBERS)


def test_an_operator_ends_a_removed_sink(scene: Scene) -> None:
    trial.die(
        scene.pipeline(scene.sink("postgres", "gone"), scene.sink("files", "files")), Step.CHECKED
    )
    early = scene.call("forget", "--sink", "gone", "--yes")
    assert "is still open in PostgreSQL" in str(early.exception)
    for line in scene.txn("list"):
        assert scene.txn("abort", line["id"], "--yes")["outcome"] == "aborted"
    assert scene.txn("forget", "--sink", "gone", "--yes") == {"forgotten": "gone"}
    trial.finish(scene.pipeline(scene.sink("files", "files")))
    assert scene.rows("postgres") == Counter()


def test_a_sink_whose_system_is_gone_can_be_forgotten_without_its_address(scene: Scene) -> None:
    trial.die(
        scene.pipeline(scene.sink("mariadb", "gone"), scene.sink("files", "files")), Step.CHECKED
    )
    line = ["txn", "forget", "--log", str(scene.checkpoint), "--sink", "gone", "--yes"]
    assert CliRunner().invoke(poundlock, line).exit_code == 0
    trial.finish(scene.pipeline(scene.sink("files", "files")))
    for number, first, second, data in scene.execute_maria("XA RECOVER"):
        text = data.decode()
        scene.execute_maria(
            f"XA ROLLBACK '{text[:first]}','{text[first : first + second]}',{number}"
        )


@pytest.mark.parametrize("system", ["kafka", "postgres", "mariadb"])
def test_what_a_decision_names_is_not_aborted(scene: Scene, system: str) -> None:
    trial.die(scene.pipeline(scene.sink(system, "old")), Step.DECIDED)
    with pytest.raises(LogMismatch, match="decided branches of sink 'old'"):
        scene.pipeline(scene.sink(system, "new")).start(availableNow=True)
    assert scene.open(system) == ["old"]
    trial.finish(scene.pipeline(scene.sink(system, "old")))
    trial.finish(scene.pipeline(scene.sink(system, "new")))
    assert scene.rows(system) == Counter(NUMBERS)


def test_after_a_clean_end_any_sink_may_go(scene: Scene) -> None:
    trial.finish(scene.pipeline(scene.sink("postgres", "gone"), scene.sink("files", "files")))
    trial.finish(scene.pipeline(scene.sink("files", "files")))
    assert scene.rows("postgres") == Counter(NUMBERS)
