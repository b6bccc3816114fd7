"""Kafka: a broker of its own, which the suite may kill."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

import oracle
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.servers import kafka
from poundlock.sinks import Kafka

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


class KafkaSubject(Subject):
    def __init__(self, cluster: kafka.Cluster):
        self._cluster = cluster
        self._oracle = oracle.Kafka(cluster.client_settings())
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        return self._looked_over(self._oracle.create(f"topic-{next(self._numbers)}"), name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Kafka) and sink.topic
        return self._looked_over(sink.topic, sink.name)

    def _looked_over(self, topic: str, name: str) -> Participant:
        made = Kafka(topic, bootstrap_servers=self._cluster.bootstrap_servers, name=name)
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        values = [str(number).encode() for number in numbers]
        return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Kafka) and sink.topic
        found = self._oracle.values(sink.topic)
        return Counter({int(value): count for value, count in found.items()})

    def open(self, sink: Participant) -> set[str]:
        return set(self._oracle.transactions(rf"poundlock\..*\.{sink.name}\..*"))

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._cluster.kill(1)
        yield
        self._cluster.start(1)

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        self._oracle.fence(receipt.id)


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with kafka.running(directory) as cluster:
        yield KafkaSubject(cluster)
