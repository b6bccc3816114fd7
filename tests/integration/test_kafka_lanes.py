"""Which transactional ids the drivers of one pipeline use, one after the other, on a real broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

import oracle
from poundlock.core.checkpoint import Plan
from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.errors import LogMismatch
from poundlock.servers import kafka as servers
from poundlock.sinks import Kafka

TASKS = 3


class Died(BaseException):
    """The driver has died: nothing of it runs after this."""


@dataclass
class Tasks:
    """A job of a few tasks in this process."""

    sink: Kafka
    batch: int
    dies: bool = False  # the driver, when all tasks have prepared
    stateful = False

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        receipts = [self._run(transaction, task) for task in range(TASKS)]
        if self.dies:
            raise Died
        return Votes(tuple(receipts), {self.sink.name: Fingerprint(TASKS)})

    def _run(self, transaction: Transaction, task: int) -> Receipt:
        writer = self.sink.begin(Branch(transaction, self.sink.name, task, task))
        writer.write(pa.RecordBatch.from_pydict({"value": [f"{self.batch}-{task}".encode()]}))
        done = writer.prepare()
        assert done is not None
        share, times = Fingerprint(1), (done.began_at, done.expires_at)
        return Receipt(self.sink.name, done.id, task, share, done.handle, *times)

    def drain(self) -> Mapping[str, Fingerprint]:
        raise NotImplementedError


class Pipeline:
    """A pipeline without Spark."""

    def __init__(self, kafka: oracle.Kafka, topic: str):
        self.records: dict[int, bytes] = {}
        others = dict(kafka.settings)
        self.sink = Kafka(topic, bootstrap_servers=others.pop("bootstrap.servers"), settings=others)
        self.sink.project({"value": Column("value", "binary")})
        self.sink.preflight()

    def start(self) -> Coordinator:
        coordinator = Coordinator(MemoryLog(self.records), {self.sink.name: self.sink})
        coordinator.take_over("lanes", query=lambda: "query", owner="test")
        return coordinator

    def run(self, coordinator: Coordinator, batch: int, *, dies: bool = False) -> None:
        job = Tasks(self.sink, batch, dies)
        coordinator.run(batch, Plan(f"plan {batch}".encode()), job)


@pytest.fixture
def pipeline(kafka_server: servers.Cluster, topic: Any) -> Any:
    made = Pipeline(oracle.Kafka(kafka_server.client_settings()), topic(partitions=2))
    yield made
    made.sink.close()


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "killed"])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_log_of_an_earlier_driver_is_noticed(
    pipeline: Pipeline, known: int, *, ends: bool
) -> None:
    """Each driver runs one batch. The restored log has none, one or all but one of the batches."""
    older = dict[int, bytes]()
    for batch in range(4):
        if batch == known:
            older = dict(pipeline.records)
        coordinator = pipeline.start()
        pipeline.run(coordinator, batch)
        if ends or batch != known - 1:
            coordinator.end()
    pipeline.records = older or {0: pipeline.records[0]}  # the first driver had only begun
    with pytest.raises(LogMismatch, match=r"does not know it|knows only"):
        pipeline.start()


@pytest.mark.parametrize("known", [1, 2, 3])
def test_a_log_of_the_same_driver_is_noticed_though_a_write_was_cut_off(
    pipeline: Pipeline, known: int
) -> None:
    """One driver runs four batches and dies in the fifth, whose transactions are all open."""
    older, coordinator = dict[int, bytes](), pipeline.start()
    for batch in range(4):
        if batch == known:
            older = dict(pipeline.records)
        pipeline.run(coordinator, batch)
    with pytest.raises(Died):
        pipeline.run(coordinator, 4, dies=True)
    newest, pipeline.records = pipeline.records, older
    with pytest.raises(LogMismatch, match="does not know it"):
        pipeline.start()
    pipeline.records = newest
    pipeline.start()  # aborts what is open
