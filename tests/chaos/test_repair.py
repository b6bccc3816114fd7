"""Decided branches that are lost are repaired, or stop the pipeline until an operator decides.

Kafka really aborts decided transactions here: their time-out is a few seconds, and the driver is dead
or paused until the broker has aborted them. Other tests combine parts of a pipeline that do not belong
together, such as a log and the checkpoint of another query.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness import Chaos, Fault, Query
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.cli import poundlock
from poundlock.core.protocol import Step
from poundlock.errors import GuaranteeBroken, LogMismatch
from poundlock.servers import kafka as servers
from trial import Died, copying, die, finish

ROWS = [f"row-{number}" for number in range(30)]
TIMEOUT_S = 5
# Branches expire after seconds here, so accept those with little time left, and commit one by one.
PATIENCE = {"least_time_left_s": 0.5, "tries": 5, "commits_at_once": 1}
RANDOM = ["concat(CAST(value AS STRING), ':', rand()) AS value"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Cluster]:
    swift = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with servers.running(properties=swift) as running:
        yield running


@pytest.fixture(scope="module")
def kafka(cluster: servers.Cluster) -> oracle.Kafka:
    return oracle.Kafka(cluster.client_settings())


class Case:
    """A pipeline from a topic of two partitions, so with two branches, and with its own checkpoint."""

    def __init__(self, spark: SparkSession, kafka: oracle.Kafka, checkpoint: Path):
        self._spark = spark
        self.kafka = kafka
        self.checkpoint = checkpoint
        self.source, self.target = kafka.create(partitions=2), kafka.create(partitions=2)
        kafka.produce(self.source, ROWS)

    def pipeline(self, **changes: Any) -> lock.Pipeline:
        return copying(
            *(self._spark, self.kafka, self.source, self.target, self.checkpoint),
            settings=lock.Settings(**PATIENCE),
            sink={"transaction_timeout": TIMEOUT_S},
            **changes,
        )

    def lose(self, pipeline: lock.Pipeline, at: Step = Step.DECIDED) -> list[str]:
        """Let the driver die, and wait until the broker has aborted its branches. Return their ids."""
        die(pipeline, at)
        ids = trial.decided(self.checkpoint)
        gone = [id_ for id_ in ids if self.kafka.transaction(id_) != "CompleteCommit"]
        self.expire(gone)
        return gone

    def expire(self, ids: Sequence[str]) -> None:
        oracle.eventually(
            lambda: {self.kafka.transaction(id_) for id_ in ids},
            want=lambda states: states == {"CompleteAbort"},
        )

    def rule(self, *arguments: str) -> None:
        """Decide as an operator would, on the command line."""
        line = ["txn", "commit", "--log", str(self.checkpoint), "--yes", *arguments]
        result = CliRunner().invoke(poundlock, line)
        assert result.exit_code == 0, result.output

    def kinds(self) -> list[str]:
        return [record["kind"] for record in trial.records(self.checkpoint)]

    def repairs(self) -> list[tuple[int, int]]:
        """Return how many branches each repair lost, and how many replaced them."""
        return [
            (len(record["lost"]), len(record["receipts"]))
            for record in trial.records(self.checkpoint)
            if record["kind"] == "Repaired"
        ]

    def check(self, rows: Iterable[str] = ROWS) -> None:
        self.kafka.assert_exact(self.target, rows)
        self.kafka.assert_settled(self.target)


@pytest.fixture
def case(spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path) -> Case:
    return Case(spark, kafka, tmp_path / "checkpoint")


# Repaired.


def test_branches_lost_while_the_driver_was_dead_are_repaired(case: Case) -> None:
    pipeline = case.pipeline()
    assert len(case.lose(pipeline)) == 2
    assert case.kafka.values(case.target) == Counter()
    finish(pipeline)
    assert case.repairs()[0] == (2, 2)
    case.check()


def test_branches_lost_while_the_driver_was_paused_are_repaired(case: Case) -> None:
    """The driver lives, comes too late to its own commit, and repairs at once."""

    def wait(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.DECIDED:
            case.expire(trial.decided(case.checkpoint))

    finish(case.pipeline().observe(wait))
    assert case.repairs()[0] == (2, 2)
    case.check()


def test_only_lost_branches_are_repaired(case: Case) -> None:
    """One branch was committed before the driver died, so only the other is written again."""
    pipeline = case.pipeline()
    assert len(case.lose(pipeline, at=Step.COMMITTED_ONE)) == 1
    before = case.kafka.values(case.target)
    assert 0 < before.total() < len(ROWS)
    finish(pipeline)
    assert case.repairs()[0] == (1, 1)
    case.check()


def test_a_replay_with_other_partitions_repairs_a_complete_loss(case: Case) -> None:
    """The replay has other branches but the same rows. It is accepted if all branches are lost."""
    case.lose(case.pipeline())
    finish(case.pipeline(minPartitions=5))
    lost, new = case.repairs()[0]
    assert lost == 2 and new > 2
    case.check()


def test_a_replay_with_other_partitions_is_refused_after_a_partial_loss(case: Case) -> None:
    """The replay could repeat rows of the committed branch, so it needs the original partitions."""
    case.lose(case.pipeline(), at=Step.COMMITTED_ONE)
    before = case.kafka.values(case.target)
    with pytest.raises(
        GuaranteeBroken, match="has the same rows in different partitions"
    ) as broken:
        finish(case.pipeline(minPartitions=5))
    assert "1 of 2 branches are already committed" in str(broken.value)
    assert case.kafka.values(case.target) == before
    case.kafka.assert_settled(case.target)
    finish(case.pipeline())
    case.check()


def test_a_branch_fenced_by_another_producer_is_repaired(case: Case) -> None:
    """Another producer opened the id, so the broker forgot the outcome. The rows prove it."""
    pipeline = case.pipeline()
    die(pipeline, Step.DECIDED)
    for id_ in trial.decided(case.checkpoint):
        case.kafka.fence(id_)
    finish(pipeline)
    assert case.repairs()[0] == (2, 2)
    case.check()


@pytest.mark.parametrize(
    "step",
    [Step.REPAIRING, "prepared", Step.REPAIRED, Step.COMMITTED_ONE, Step.COMMITTED, Step.FINISHED],
    ids=str,
)
def test_a_driver_killed_during_the_repair_repairs_again(
    case: Case, step: Step | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the driver dies, the next start finishes the repair or starts another."""
    pipeline = case.pipeline()
    case.lose(pipeline)
    if isinstance(step, Step):
        die(pipeline, step, after=Step.REPAIRING)
    else:
        with monkeypatch.context() as patch:
            # Called when the replay's branches are prepared, before the repair is in the log.
            patch.setattr(sinks.Kafka, "annotate", _die)
            query = pipeline.start(availableNow=True)
            with pytest.raises(Exception, match="Died"):
                query.awaitTermination()
            assert isinstance(query.error, Died)
    finish(pipeline)
    case.check()


def _die(*arguments: Any) -> Any:
    raise Died


def test_branches_lost_after_the_repair_are_repaired_again(case: Case) -> None:
    """The new branches time out as well, so they are repaired once more."""
    pipeline = case.pipeline()
    case.lose(pipeline)
    die(pipeline, Step.REPAIRED)
    repaired = [it for it in trial.records(case.checkpoint) if it["kind"] == "Repaired"][-1]
    case.expire([receipt["id"] for receipt in repaired["receipts"]])
    finish(pipeline)
    assert len(case.repairs()) >= 2
    case.check()


def test_every_kind_of_query_is_repaired_after_a_kill(
    cluster: servers.Cluster, kafka: oracle.Kafka, tmp_path: Path
) -> None:
    """SIGKILL follows the decision of three kinds of query. The next driver repairs all of them."""
    kinds = ("stateless", "outputs", "stateful")
    queries = [
        Query(kind, rows=60, sink={"transaction_timeout": 2 * TIMEOUT_S}, settings=PATIENCE)
        for kind in kinds
    ]
    chaos = Chaos(tmp_path, cluster.bootstrap_servers, queries)
    chaos.die_at({kind: Fault("decided", nth=2) for kind in kinds})
    lost = {kind: trial.decided(chaos.checkpoint(kind)) for kind in kinds}
    for ids in lost.values():
        assert ids
        oracle.eventually(
            lambda ids=ids: {kafka.transaction(id_) for id_ in ids},
            want=lambda states: states == {"CompleteAbort"},
        )
    chaos.live(sink={}).ended()
    for kind in kinds:
        records = trial.records(chaos.checkpoint(kind))
        assert "Repaired" in [record["kind"] for record in records], kind
    chaos.check()


@pytest.mark.parametrize("shuffled", [False, True], ids=["files", "shuffle"])
def test_a_partial_loss_is_repaired_on_a_cluster_of_another_size(
    cluster: servers.Cluster, kafka: oracle.Kafka, tmp_path: Path, shuffled: bool
) -> None:
    """The number of cores cuts files, and the shuffles of a stateless query, into other tasks."""
    chance = random.Random(1)  # rows that do not compress, so that a shuffle has several tasks
    rows = [f"row-{number}-{chance.randbytes(80).hex()}" for number in range(60_000)]
    source, topic, path = tmp_path / "source", kafka.create(partitions=2), tmp_path / "config.json"
    source.mkdir()
    for part in range(4):
        (source / f"{part}.txt").write_text("\n".join(rows[part::4]) + "\n")
    options = {
        "source": str(source),
        "checkpoint": str(tmp_path / "checkpoint"),
        "topic": topic,
        "servers": cluster.bootstrap_servers,
        "shuffled": shuffled,
        "kept": ["spark.sql.files.minPartitionNum", "spark.sql.leafNodeDefaultParallelism"],
    }

    def start(master: str, **more: Any) -> subprocess.CompletedProcess[str]:
        path.write_text(json.dumps(options | {"master": master} | more))
        command = [sys.executable, str(Path(__file__).with_name("resized_job.py")), str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    died = start("local[2]", die=True, timeout=2 * TIMEOUT_S)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    ids = trial.decided(tmp_path / "checkpoint")
    lost = [id_ for id_ in ids if kafka.transaction(id_) != "CompleteCommit"]
    assert 0 < len(lost) < len(ids)
    oracle.eventually(
        lambda: {kafka.transaction(id_) for id_ in lost},
        want=lambda states: states == {"CompleteAbort"},
    )
    back = start("local[4]", die=False, timeout=900)
    assert back.returncode == 0, back.stderr[-4000:]
    kafka.assert_exact(topic, rows)
    kafka.assert_settled(topic)


# Not repaired.


def test_a_nondeterministic_query_stops_until_an_operator_decides(case: Case) -> None:
    """The error shows both fingerprints, and nothing is written until an operator decides."""
    pipeline = case.pipeline(select=RANDOM)
    case.lose(pipeline)
    for _ in range(2):  # it stays stopped
        with pytest.raises(GuaranteeBroken) as broken:
            finish(pipeline)
        message = str(broken.value)
        prints = re.search(
            r"recorded: 30 rows, hash (\w{16}); replayed: 30 rows, hash (\w{16})", message
        )
        assert prints is not None and prints[1] != prints[2]
        assert "--accept-replay" in message and "--accept-loss" in message
        assert case.kafka.values(case.target) == Counter()
        case.kafka.assert_settled(case.target)
        assert "Repaired" not in case.kinds() and "Finished" not in case.kinds()

    case.rule("--batch", "0", "--accept-replay")
    case.kafka.produce(case.source, ["more"])
    finish(pipeline)
    seen = Counter(value.split(":")[0] for value in case.kafka.values(case.target).elements())
    assert seen == Counter([*ROWS, "more"])
    case.kafka.assert_settled(case.target)


def test_an_operator_accepts_the_loss(case: Case) -> None:
    pipeline = case.pipeline(select=RANDOM)
    case.lose(pipeline)
    with pytest.raises(GuaranteeBroken):
        finish(pipeline)
    case.rule("--batch", "0", "--accept-loss")
    case.kafka.produce(case.source, ["more"])
    finish(pipeline)
    assert [value.split(":")[0] for value in case.kafka.values(case.target)] == ["more"]
    case.kafka.assert_settled(case.target)


def test_a_partial_loss_of_a_nondeterministic_query_can_only_be_accepted(case: Case) -> None:
    """No replay can replace half of the rows, so an operator can only accept their loss."""
    pipeline = case.pipeline(select=RANDOM)
    case.lose(pipeline, at=Step.COMMITTED_ONE)
    before = case.kafka.values(case.target)
    with pytest.raises(GuaranteeBroken):
        finish(pipeline)
    case.rule("--batch", "0", "--accept-replay")
    with pytest.raises(GuaranteeBroken):
        finish(pipeline)
    assert case.kafka.values(case.target) == before
    case.kafka.assert_settled(case.target)
    case.rule("--batch", "0", "--accept-loss")
    finish(pipeline)
    assert case.kafka.values(case.target) == before
    case.kafka.assert_settled(case.target)


# Parts that do not belong together. By default the log is in the checkpoint's directory.


def without_log(checkpoint: Path) -> list[Path]:
    return [entry for entry in checkpoint.iterdir() if entry.name != "poundlock"]


def save(checkpoint: Path, aside: Path) -> None:
    """Copy Spark's part of a checkpoint."""
    aside.mkdir()
    for entry in without_log(checkpoint):
        copy = shutil.copytree if entry.is_dir() else shutil.copy2
        copy(entry, aside / entry.name)


def wipe(checkpoint: Path) -> None:
    """Delete Spark's part of a checkpoint."""
    for entry in without_log(checkpoint):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def restore(aside: Path, checkpoint: Path) -> None:
    wipe(checkpoint)
    shutil.copytree(aside, checkpoint, dirs_exist_ok=True)


def refused(case: Case, pipeline: lock.Pipeline, *words: str) -> None:
    """Check that the pipeline is refused, with the reason and the remedy, and changes nothing."""
    before = case.kafka.values(case.target)
    with pytest.raises(LogMismatch) as parted:
        finish(pipeline)
    for word in words:
        assert word in str(parted.value)
    assert case.kafka.values(case.target) == before
    case.kafka.assert_settled(case.target)


@pytest.mark.parametrize("fresh", [True, False], ids=["new-rows", "no-new-rows"])
def test_a_checkpoint_restored_to_an_older_state_is_refused(
    case: Case, tmp_path: Path, fresh: bool
) -> None:
    """Spark plans batch 1 again, perhaps with other rows. The batch number does not show that."""
    pipeline = case.pipeline()
    finish(pipeline)
    save(case.checkpoint, tmp_path / "old")
    for row in ("one", "more"):
        case.kafka.produce(case.source, [row])
        finish(pipeline)
    save(case.checkpoint, tmp_path / "new")
    if fresh:
        case.kafka.produce(case.source, ["two"])

    restore(tmp_path / "old", case.checkpoint)
    refused(case, pipeline, "batch 1", "other source offsets", "Restore the checkpoint")

    restore(tmp_path / "new", case.checkpoint)
    finish(pipeline)
    case.check([*ROWS, "one", "more", "two"] if fresh else [*ROWS, "one", "more"])


def test_a_checkpoint_that_lacks_only_the_newest_batch_comes_through(
    case: Case, tmp_path: Path
) -> None:
    """As after a loss of power: the plan of the batch is restored from its decision."""
    pipeline = case.pipeline()
    finish(pipeline)
    save(case.checkpoint, tmp_path / "old")
    case.kafka.produce(case.source, ["one"])
    finish(pipeline)
    case.kafka.produce(case.source, ["two"])
    restore(tmp_path / "old", case.checkpoint)
    finish(pipeline)
    case.check([*ROWS, "one", "two"])


def test_a_log_restored_to_an_older_state_is_refused(case: Case, tmp_path: Path) -> None:
    pipeline = case.pipeline()
    finish(pipeline)
    shutil.copytree(case.checkpoint / "poundlock", tmp_path / "old")
    for row in ("one", "two"):
        case.kafka.produce(case.source, [row])
        finish(pipeline)
    shutil.move(case.checkpoint / "poundlock", tmp_path / "new")
    shutil.copytree(tmp_path / "old", case.checkpoint / "poundlock")
    case.kafka.produce(case.source, ["three"])
    refused(case, pipeline, "generation 3", "knows only 1", "Restore the newest log")

    shutil.rmtree(case.checkpoint / "poundlock")
    shutil.move(tmp_path / "new", case.checkpoint / "poundlock")
    # The refused driver wrote only to the old log, so the right log can continue.
    finish(pipeline)
    case.check([*ROWS, "one", "two", "three"])


def test_a_deleted_checkpoint_is_refused(case: Case, tmp_path: Path) -> None:
    pipeline = case.pipeline()
    finish(pipeline)
    save(case.checkpoint, tmp_path / "saved")
    wipe(case.checkpoint)
    refused(
        case, pipeline, "the checkpoint was deleted", "Restore it, or start with a new pipeline"
    )
    assert not without_log(case.checkpoint), "Spark must not start a new checkpoint"
    restore(tmp_path / "saved", case.checkpoint)
    finish(pipeline)
    case.check()


def test_a_checkpoint_of_another_query_is_refused(case: Case, tmp_path: Path) -> None:
    pipeline = case.pipeline()
    finish(pipeline)
    save(case.checkpoint, tmp_path / "saved")
    other = Case(case._spark, case.kafka, tmp_path / "other")
    finish(other.pipeline())
    save(other.checkpoint, tmp_path / "exchanged")
    restore(tmp_path / "exchanged", case.checkpoint)
    refused(case, pipeline, "deleted or exchanged", "Restore it, or start with a new pipeline name")
    restore(tmp_path / "saved", case.checkpoint)
    finish(pipeline)
    case.check()


def test_a_checkpoint_copied_with_its_log_is_refused(case: Case, tmp_path: Path) -> None:
    """A copy has the identity of the original, so the two would abort each other's branches."""
    pipeline = case.pipeline()
    finish(pipeline)
    copy = tmp_path / "copy"
    shutil.copytree(case.checkpoint, copy)
    case.kafka.produce(case.source, ["more"])
    original, case.checkpoint = case.checkpoint, copy
    refused(
        case, case.pipeline(), "moved or copied", "poundlock txn adopt", "new checkpoint location"
    )
    case.checkpoint = original
    finish(pipeline)
    case.check([*ROWS, "more"])


def test_a_moved_checkpoint_can_be_adopted(case: Case, tmp_path: Path) -> None:
    """The error names this remedy."""
    finish(case.pipeline())
    case.kafka.produce(case.source, ["more"])
    case.checkpoint = Path(shutil.move(case.checkpoint, tmp_path / "moved"))
    refused(case, case.pipeline(), "poundlock txn adopt")
    adopt = ["txn", "adopt", "--yes", "--log", str(case.checkpoint)]
    assert CliRunner().invoke(poundlock, adopt).exit_code == 0
    finish(case.pipeline())
    case.check([*ROWS, "more"])
