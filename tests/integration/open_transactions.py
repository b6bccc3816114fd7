"""Transactions that a producer leaves open on a real broker."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_probe import Probe
from poundlock.servers import kafka
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity

SECONDS = 20


def make_topic(cluster: kafka.Cluster, name: str | None = None) -> str:
    name = name or f"t-{uuid.uuid4().hex[:8]}"
    admin = AdminClient(cluster.client_settings())  # it must outlive its futures
    admin.create_topics([NewTopic(name, 2)])[name].result(SECONDS)
    return name


def eventually(what: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


@dataclass
class Open:
    """A transaction that its producer left open, as a task would."""

    identity: TransactionIdentity
    written: list[LastRecord]
    row: str  # the first record it wrote
    producer: object  # still alive, so it could be a zombie

    @property
    def id(self) -> str:
        return self.identity.transactional_id


def leave_open(
    cluster: kafka.Cluster,
    topic: str,
    *,
    id_: str | None = None,
    partitions: tuple[int, ...] = (0, 1),
    rows: int = 3,
    timeout_ms: int = 60_000,
) -> Open:
    """Write a transaction with librdkafka and leave it."""
    eos: dict[str, int] = {}
    last: dict[int, int] = {}

    def delivered(error: object, message: object) -> None:
        if error is None:
            last[message.partition()] = max(message.offset(), last.get(message.partition(), -1))

    token = uuid.uuid4().hex[:8]
    id_ = id_ or f"x-{token}"
    producer = confluent_kafka.Producer(
        {
            **cluster.client_settings(),
            "transactional.id": id_,
            "log_level": 0,  # brokers are killed here, and producers would log it
            "transaction.timeout.ms": timeout_ms,
            "statistics.interval.ms": 10,
            "stats_cb": lambda stats: eos.update(json.loads(stats)["eos"]),
            "on_delivery": delivered,
        }
    )
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    for row in range(rows):
        for partition in partitions:
            producer.produce(topic, value=f"{token}/{row}".encode(), partition=partition)
    producer.flush(SECONDS)
    eos.clear()
    until = time.monotonic() + SECONDS
    while eos.get("producer_id", -1) < 0:
        assert time.monotonic() < until
        producer.poll(0.05)
    with Probe(cluster.client_settings()) as client:
        topic_id = client.topic_ids([topic])[topic]
    assert topic_id is not None
    written = [LastRecord(topic, topic_id, part, offset) for part, offset in sorted(last.items())]
    assert len(last) == (len(partitions) if rows else 0)
    identity = TransactionIdentity(id_, eos["producer_id"], eos["producer_epoch"])
    return Open(identity, written, f"{token}/0", producer)
