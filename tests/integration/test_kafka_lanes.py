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
from poundlock.sinks.kafka import transactions

TASKS = 3


@dataclass
class Tasks:
    """A job of a few tasks in this process."""

    sink: Kafka
    batch: int
    stateful = False

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        receipts = [self._run(transaction, task) for task in range(TASKS)]
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
    """A pipeline without Spark whose drivers run one batch each."""

    def __init__(self, kafka: oracle.Kafka, topic: str):
        self.records: dict[int, bytes] = {}
        others = dict(kafka.settings)
        self.sink = Kafka(topic, bootstrap_servers=others.pop("bootstrap.servers"), settings=others)
        self.sink.project({"value": Column("value", "binary")})
        self.sink.preflight()

    def drive(self, batch: int, *, ends: bool = True) -> None:
        coordinator = Coordinator(MemoryLog(self.records), {self.sink.name: self.sink})
        coordinator.take_over("lanes", query=lambda: "query", owner="test")
        coordinator.run(batch, Plan(f"plan {batch}".encode()), Tasks(self.sink, batch))
        if ends:
            coordinator.end()

    def ids(self) -> set[str]:
        log = MemoryLog(self.records)
        generation = log.load().generation
        assert generation is not None
        prefix = f"poundlock.lanes.{generation.namespace.identity}."
        found = self.sink.client.run(transactions.list_by_prefix, prefix, states=())
        return {it.transactional_id for it in found}


@pytest.fixture
def pipeline(kafka_server: servers.Cluster, topic: Any) -> Any:
    made = Pipeline(oracle.Kafka(kafka_server.client_settings()), topic(partitions=2))
    yield made
    made.sink.close()


@pytest.mark.parametrize("ends", [True, False], ids=["same-lane", "next-lane"])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_restored_log_is_noticed_in_any_lane(
    pipeline: Pipeline, known: int, *, ends: bool
) -> None:
    """The restored log has none, one or all batches of the lane that was used before."""
    older = dict[int, bytes]()
    for batch in range(4):
        if batch == known:
            older = dict(pipeline.records)
        pipeline.drive(batch, ends=ends or batch != known - 1)
    pipeline.records = older or {0: pipeline.records[0]}  # the first driver had only begun
    with pytest.raises(LogMismatch, match=r"does not know it|knows only"):
        pipeline.drive(known)
