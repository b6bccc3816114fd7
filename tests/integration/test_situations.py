"""What can happen to a pipeline between two starts, and what the next start answers.

docs/restored.md has the table. Each of its cells is one test here, named by the row and the column.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import targets
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.cli import poundlock
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.errors import PoundlockError

PAGE = Path(__file__).parents[2] / "docs" / "restored.md"
ANY = "any sink"
FIRST, SECOND, THIRD = (["a1", "a2"], ["b1", "b2"], ["c1", "c2"])


class Scene:
    """A pipeline that reads files of lines, one file a batch, and writes to a target."""

    def __init__(
        self, spark: SparkSession, request: pytest.FixtureRequest, system: str, place: Path
    ):
        self.spark, self.request, self.system, self.place = spark, request, system, place
        self.target = targets.create(system, request, place)
        self.source, self.checkpoint = place / "source", place / "checkpoint"
        self.source.mkdir()
        self.name = f"p{uuid.uuid4().hex[:8]}"
        self.fed: list[str] = []

    def feed(self, *batches: Sequence[str]) -> None:
        for rows in batches:
            hidden = self.place / ".rows"
            hidden.write_text("\n".join(rows) + "\n")
            hidden.rename(self.source / f"{len(list(self.source.iterdir())):03}.txt")
            self.fed += rows

    def frame(self, select: str = "value") -> Any:
        reader = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return reader.load(str(self.source)).selectExpr(f"{select} AS value")

    def pipeline(
        self, *others: Participant, frame: Any = None, name: str | None = None
    ) -> lock.Pipeline:
        pipeline = lock.pipeline(
            frame or self.frame(), name=name or self.name, checkpoint_location=str(self.checkpoint)
        )
        for sink in others or [self.target.make()]:
            pipeline = pipeline.to(sink)
        return pipeline

    def other(self) -> Participant:
        return sinks.Files(str(self.place / "other"))

    def run(self, *others: Participant, **changes: Any) -> None:
        trial.finish(self.pipeline(*others, **changes))

    def refuse(self, words: str, *others: Participant, **changes: Any) -> PoundlockError:
        """Check that the next start is refused, and that nothing is written."""
        before = sorted(self.target.read())
        with pytest.raises(PoundlockError, match=words) as refused:
            self.run(*others, **changes)
        assert sorted(self.target.read()) == before
        return refused.value

    def exact(self) -> None:
        self.target.assert_exact(self.fed)

    def copy(self, part: str = "") -> Path:
        """Copy the checkpoint, or a part of it, aside."""
        copy = self.place / f"copy of {part or 'both'}"
        shutil.copytree(self.checkpoint / part, copy)
        return copy

    def restore(self, copy: Path, part: str = "") -> None:
        shutil.rmtree(self.checkpoint / part)
        shutil.copytree(copy, self.checkpoint / part)


# The situations. Each function plays one, and checks the answer that the page gives.


def both_restored(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    copy = scene.copy()
    scene.feed(SECOND)
    scene.run()
    scene.restore(copy)
    if scene.system == "OpenSearch":  # not noticed; documents with an id are written again
        scene.run()
        return scene.exact()
    scene.refuse("restored to an older state")
    return scene.exact()


def both_restored_within_a_run(scene: Scene) -> None:
    scene.feed(FIRST, SECOND)
    copies: list[Path] = []

    def copy(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.ENTERED and facts["batch"] == 1:
            copies.append(scene.copy())

    trial.finish(scene.pipeline().observe(copy))
    scene.restore(copies[0])
    if scene.system == "OpenSearch":
        scene.run()
        return scene.exact()
    scene.refuse("restored to an older state")
    return scene.exact()


def checkpoint_restored(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    copy, log = scene.copy(), scene.checkpoint / "poundlock"
    for rows in (SECOND, THIRD):
        scene.feed(rows)
        scene.run()
    newest = shutil.copytree(log, scene.place / "newest")
    scene.restore(copy)
    scene.restore(newest, "poundlock")
    scene.refuse("other source offsets")
    scene.exact()


def checkpoint_restored_by_one_batch(scene: Scene) -> None:
    topic, frame = source_of(scene)
    kafka_of(scene).produce(topic, FIRST)
    scene.run(frame=frame)
    copy, log = scene.copy(), scene.checkpoint / "poundlock"
    kafka_of(scene).produce(topic, SECOND)
    scene.run(frame=frame)
    newest = shutil.copytree(log, scene.place / "newest")
    scene.restore(copy)
    scene.restore(newest, "poundlock")
    kafka_of(scene).produce(topic, THIRD)
    scene.run(frame=frame)
    scene.target.assert_exact([*FIRST, *SECOND, *THIRD])


def checkpoint_of_files_restored_by_one_batch(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    copy, log = scene.copy(), scene.checkpoint / "poundlock"
    scene.feed(SECOND)
    scene.run()
    newest = shutil.copytree(log, scene.place / "newest")
    scene.restore(copy)
    scene.restore(newest, "poundlock")
    with pytest.raises(StreamingQueryException, match="batch 1 doesn't exist"):
        scene.run()
    scene.exact()


def log_restored(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    copy = scene.copy("poundlock")
    scene.feed(SECOND)
    scene.run()
    scene.restore(copy, "poundlock")
    scene.feed(THIRD)
    scene.refuse("restored to an older state")


def checkpoint_deleted(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    for entry in scene.checkpoint.iterdir():
        if entry.name != "poundlock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    scene.refuse("the checkpoint was deleted")
    scene.exact()


def log_deleted(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    shutil.rmtree(scene.checkpoint / "poundlock")
    scene.refuse("the log was deleted")
    scene.exact()


def both_deleted(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    shutil.rmtree(scene.checkpoint)
    if scene.system == "OpenSearch":
        scene.run()
        return scene.exact()
    scene.refuse("has already committed")
    return scene.exact()


def copied(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    original, scene.checkpoint = scene.checkpoint, scene.copy()
    scene.refuse("moved or copied")
    scene.checkpoint = original
    scene.feed(SECOND)
    scene.run()
    scene.exact()


def moved(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    scene.checkpoint = Path(shutil.move(scene.checkpoint, scene.place / "moved"))
    scene.refuse("moved or copied")
    adopt(scene)
    scene.feed(SECOND)
    scene.run()
    scene.exact()


def forked(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    original, scene.checkpoint = scene.checkpoint, scene.copy()
    adopt(scene)
    scene.feed(SECOND)
    scene.run()
    scene.checkpoint = original
    if scene.system == "OpenSearch":
        scene.run()
        return scene.exact()
    scene.refuse("restored to an older state")
    return scene.exact()


def adopt(scene: Scene) -> None:
    adopt = ["txn", "adopt", "--yes", "--log", str(scene.checkpoint)]
    assert CliRunner().invoke(poundlock, adopt).exit_code == 0


def renamed(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    scene.refuse("belongs to pipeline", name="another")
    scene.exact()


def sink_renamed(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run(scene.target.make(name="before"))
    scene.feed(SECOND)
    scene.run(scene.target.make(name="after"))
    scene.exact()


def sink_renamed_after_a_crash(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(name="before")), Step.CHECKED)
    scene.run(scene.target.make(name="after"))
    scene.exact()


def sink_removed_after_a_crash(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(), scene.other()), Step.CHECKED)
    scene.refuse("may have left branches open", scene.other())
    scene.run(scene.target.make(), scene.other())
    scene.exact()
    scene.run(scene.other())


def sink_removed(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run(scene.target.make(), scene.other())
    scene.feed(SECOND)
    scene.run(scene.target.make())
    scene.exact()


def sink_added(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    scene.feed(SECOND)
    scene.run(scene.target.make(), scene.other())
    scene.exact()


def query_changed(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    scene.feed(SECOND)
    scene.run(frame=scene.frame("upper(value)"))
    scene.target.assert_exact([*FIRST, *(row.upper() for row in SECOND)])


def query_changed_in_doubt(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(), Step.DECIDED)
    scene.run(frame=scene.frame("upper(value)"))
    scene.exact()


def query_changed_after_a_loss(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(), Step.DECIDED)
    server = scene.request.getfixturevalue("postgres_server")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        ours = f"SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%{scene.name}%'"
        for (gid,) in connection.execute(ours).fetchall():  # type: ignore[arg-type]
            connection.execute(f"ROLLBACK PREPARED '{gid}'")  # type: ignore[arg-type]
    scene.refuse("the replay", frame=scene.frame("upper(value)"))
    scene.run()
    scene.exact()


def options_changed(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run(scene.target.make(mode="prepared"))
    scene.feed(SECOND)
    scene.run(scene.target.make(mode="staged"))
    scene.exact()


def options_changed_in_doubt(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(mode="prepared")), Step.DECIDED)
    scene.run(scene.target.make(mode="staged"))
    scene.exact()


def place_changed(scene: Scene) -> None:
    (scene.place / "elsewhere").mkdir()
    elsewhere = targets.create(scene.system, scene.request, scene.place / "elsewhere")
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(name="same")), Step.DECIDED)
    scene.refuse("leads to", elsewhere.make(name="same"))
    assert elsewhere.read() == []
    scene.run(scene.target.make(name="same"))
    scene.exact()


def sink_removed_in_doubt(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(), scene.other()), Step.DECIDED)
    scene.refuse("has no such sink", scene.other())
    scene.run(scene.target.make(), scene.other())
    scene.exact()


def sink_renamed_in_doubt(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(scene.target.make(name="before")), Step.DECIDED)
    scene.refuse("has no such sink", scene.target.make(name="after"))
    scene.run(scene.target.make(name="before"))
    scene.exact()


def system_restored(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    assert scene.target.backup
    restore = scene.target.backup(scene.name)
    scene.feed(SECOND)
    scene.run()
    restore()
    scene.feed(THIRD)
    scene.refuse("the system was restored to an older state")
    scene.target.assert_exact(FIRST)
    error = scene.refuse("accept-loss")
    decide = re.search(r"poundlock (txn commit [^']*)'", str(error))
    assert decide
    assert CliRunner().invoke(poundlock, [*decide[1].split(), "--yes"]).exit_code == 0
    scene.run()
    scene.target.assert_exact([*FIRST, *THIRD])


def all_restored(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    assert scene.target.backup
    restore, copy = scene.target.backup(scene.name), scene.copy()
    scene.feed(SECOND)
    scene.run()
    restore()
    scene.restore(copy)
    scene.run()
    scene.exact()


# What can happen to Kafka's topics.


def kafka_of(scene: Scene) -> oracle.Kafka:
    return scene.request.getfixturevalue("kafka")


def target_topic(scene: Scene) -> str:
    sink = scene.target.make()
    assert isinstance(sink, sinks.Kafka)
    assert sink.topic
    return sink.topic


def create_again(scene: Scene, topic: str) -> None:
    admin = AdminClient({**kafka_of(scene).settings})
    admin.delete_topics([topic])[topic].result(oracle.SECONDS)
    known = lambda: topic in admin.list_topics(timeout=oracle.SECONDS).topics  # noqa: E731
    oracle.eventually(known, want=lambda seen: not seen)
    kafka_of(scene).create(topic, partitions=2)


def add_partitions(scene: Scene, topic: str) -> None:
    admin = AdminClient({**kafka_of(scene).settings})
    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(oracle.SECONDS)
    oracle.eventually(
        lambda: kafka_of(scene).partitions(topic),
        want=lambda seen: len(seen) == 4 and None not in seen,
    )


def target_given_partitions(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    add_partitions(scene, target_topic(scene))
    scene.feed(SECOND)
    scene.run()
    scene.exact()


def target_created_again(scene: Scene) -> None:
    scene.feed(FIRST)
    scene.run()
    create_again(scene, target_topic(scene))
    scene.feed(SECOND)
    scene.run()
    scene.target.assert_exact(SECOND)


def target_created_again_in_doubt(scene: Scene) -> None:
    scene.feed(FIRST)
    trial.die(scene.pipeline(), Step.DECIDED)
    create_again(scene, target_topic(scene))
    scene.refuse("no witness|accept-loss")
    scene.target.assert_exact([])


def source_of(scene: Scene) -> tuple[str, Any]:
    topic = kafka_of(scene).create(partitions=2)
    select = ["CAST(value AS STRING) AS value"]
    return topic, trial.read(scene.spark, kafka_of(scene), topic, select)


def source_given_partitions(scene: Scene) -> None:
    topic, frame = source_of(scene)
    kafka_of(scene).produce(topic, FIRST)
    scene.run(frame=frame)
    add_partitions(scene, topic)
    for partition in range(4):
        kafka_of(scene).produce(topic, [f"row {partition}"], partition=partition)
    scene.run(frame=frame)
    scene.target.assert_exact([*FIRST, *(f"row {partition}" for partition in range(4))])


def source_created_again(scene: Scene) -> None:
    topic, frame = source_of(scene)
    kafka_of(scene).produce(topic, ["x"] * 10)
    scene.run(frame=frame)
    create_again(scene, topic)
    kafka_of(scene).produce(topic, FIRST)
    with pytest.raises(StreamingQueryException, match="failOnDataLoss"):
        scene.run(frame=frame)
    scene.target.assert_exact(["x"] * 10)


def source_created_again_and_longer(scene: Scene) -> None:
    topic, frame = source_of(scene)
    kafka_of(scene).produce(topic, ["x"], partition=0)
    scene.run(frame=frame)
    create_again(scene, topic)
    kafka_of(scene).produce(topic, FIRST, partition=0)
    scene.run(frame=frame)
    scene.target.assert_exact(["x", *FIRST[1:]])  # as plain Spark does


@dataclass(frozen=True)
class Row:
    """A row of the page's table."""

    what: str
    answer: str
    play: Callable[[Scene], None]
    systems: Sequence[str] = ("Files",)  # one is enough where the sink makes no difference


REMEMBERS = tuple(system for system in targets.SYSTEMS if system != "OpenSearch")
RESTORABLE = tuple(system for system in REMEMBERS if system != "Kafka")
HOLDING = ("Kafka", "PostgreSQL", "PostgreSQL, staged", "MariaDB")  # open branches are in the way
PLACED = ("OpenSearch", "Files")
ROWS = (
    Row("the log and the checkpoint were restored together", "refused", both_restored, REMEMBERS),
    Row("the same", "not known", both_restored, ("OpenSearch",)),
    Row(
        "the same, and the copy is of the same run",
        "refused",
        both_restored_within_a_run,
        REMEMBERS,
    ),
    Row("the same", "not known", both_restored_within_a_run, ("OpenSearch",)),
    Row("the checkpoint was restored without the log", "refused", checkpoint_restored),
    Row("the same, and it lacks only the newest batch", "exact", checkpoint_restored_by_one_batch),
    Row("the same, of a file source", "refused", checkpoint_of_files_restored_by_one_batch),
    Row("the log was restored without the checkpoint", "refused", log_restored),
    Row("the checkpoint was deleted, the log was kept", "refused", checkpoint_deleted),
    Row("the log was deleted, the checkpoint was kept", "refused", log_deleted),
    Row("both were deleted", "refused", both_deleted, REMEMBERS),
    Row("the same", "not known", both_deleted, ("OpenSearch",)),
    Row("both were copied, and the copy is started", "refused", copied),
    Row("both were moved", "refused", moved),
    Row("the copy was adopted, and the original is started again", "refused", forked, REMEMBERS),
    Row("the same", "not known", forked, ("OpenSearch",)),
    Row("a system was restored", "refused", system_restored, RESTORABLE),
    Row("a system, the log and the checkpoint were restored", "exact", all_restored, RESTORABLE),
    Row("the pipeline has another name", "refused", renamed),
    Row("the query was changed", "exact", query_changed),
    Row("the same, while a decided batch waits", "exact", query_changed_in_doubt),
    Row("the same, and a system lost it", "refused", query_changed_after_a_loss, ("PostgreSQL",)),
    Row("a sink has another name", "exact", sink_renamed, targets.SYSTEMS),
    Row("the same, while a decided batch waits", "refused", sink_renamed_in_doubt),
    Row("the same, after its driver died", "exact", sink_renamed_after_a_crash, HOLDING),
    Row("a sink was removed", "exact", sink_removed),
    Row("the same, after its driver died", "refused", sink_removed_after_a_crash, HOLDING),
    Row("the same, while a decided batch waits", "refused", sink_removed_in_doubt),
    Row("a sink was added", "exact", sink_added),
    Row("the options of a sink were changed", "exact", options_changed, ("PostgreSQL",)),
    Row(
        "the same, while a decided batch waits", "exact", options_changed_in_doubt, ("PostgreSQL",)
    ),
    Row("a sink's place was changed while a decided batch waits", "refused", place_changed, PLACED),
    Row("the target topic was given partitions", "exact", target_given_partitions, ("Kafka",)),
    Row("the target topic was created again", "exact", target_created_again, ("Kafka",)),
    Row(
        "the same, while a decided batch waits",
        "refused",
        target_created_again_in_doubt,
        ("Kafka",),
    ),
    Row("the source topic was given partitions", "exact", source_given_partitions),
    Row("the source topic was created again, and is shorter", "refused", source_created_again),
    Row("the same, but it is as long", "not known", source_created_again_and_longer),
)
CELLS = [
    pytest.param(row.play, system, id=f"{row.play.__name__}, {system}")
    for row in ROWS
    for system in row.systems
]


@pytest.mark.parametrize(("play", "system"), CELLS)
def test_the_answer_is_that_of_the_page(
    spark: SparkSession,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    play: Callable[[Scene], None],
    system: str,
) -> None:
    play(Scene(spark, request, system, tmp_path))


def test_the_page_has_these_rows() -> None:
    """The page has one row for each situation, with its answer and the sinks it was played with."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    printed = [cells for cells in lines if len(cells) == 3][1:]
    assert [(what, answer.split(":")[0]) for what, answer, _ in printed] == [
        (row.what, row.answer) for row in ROWS
    ]
    for (_, _, named), row in zip(printed, ROWS, strict=True):
        names = (it.split(",")[0].replace("MariaDB", "MySQL") for it in row.systems)
        assert named in ("any", ", ".join(dict.fromkeys(names))), row
