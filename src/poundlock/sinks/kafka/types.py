"""The values that several files of this folder share: partitions, producers and transactions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

TopicPartition = tuple[str, int]


class ProducerIdentity(NamedTuple):
    """How the brokers know a producer."""

    producer_id: int
    epoch: int


class TransactionIdentity(NamedTuple):
    """One transaction. Ending it raises the epoch, so no later transaction has the same identity."""

    transactional_id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LastRecord:
    """Where a transaction's last record in one partition is."""

    topic: str
    topic_id: str  # a topic that was deleted and created again has another id
    partition: int
    offset: int

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}@{self.offset}"
