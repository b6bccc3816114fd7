"""The content of Kafka, seen by clients that share no code with the product."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from kafka.admin import KafkaAdminClient


def quiet(servers: str) -> dict[str, Any]:
    """Settings of a client that does not log brokers which are down during a test."""
    return {"bootstrap.servers": servers, "log_level": 0}


def create_topics(servers: str, topics: Mapping[str, int], replication: int = 1) -> None:
    admin = AdminClient(quiet(servers))
    made = admin.create_topics([NewTopic(name, n, replication) for name, n in topics.items()])
    for future in made.values():
        future.result()


def partitions_of(servers: str, topics: Iterable[str]) -> list[TopicPartition]:
    admin = AdminClient(quiet(servers))
    return [
        TopicPartition(topic, number)
        for topic in topics
        for number in admin.list_topics(topic, timeout=30).topics[topic].partitions
    ]


def read(
    servers: str, topics: Sequence[str], *, isolation: str = "read_committed"
) -> dict[str, Counter[str]]:
    """Read all values of topics that a reader of this isolation level can read now."""
    consumer = Consumer(
        quiet(servers)
        | {
            "group.id": f"chaos-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    try:
        parts = partitions_of(servers, topics)
        consumer.assign([TopicPartition(part.topic, part.partition, 0) for part in parts])
        values: dict[str, Counter[str]] = {topic: Counter() for topic in topics}
        left = len(parts)
        deadline = time.monotonic() + 60
        while left:
            assert time.monotonic() < deadline, f"{topics} cannot be read to their ends"
            for message in consumer.consume(10_000, 0.2):
                if message.error():
                    assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                    left -= 1
                else:
                    values[message.topic()][message.value().decode()] += 1
        return values
    finally:
        consumer.close()


def stable_and_high(
    servers: str, topics: Iterable[str]
) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Return the last stable offset and the high watermark of every partition, by ListOffsets."""
    admin = AdminClient(quiet(servers))
    asked = {part: OffsetSpec.latest() for part in partitions_of(servers, topics)}

    def ends(level: IsolationLevel) -> dict[tuple[str, int], int]:
        found = admin.list_offsets(asked, isolation_level=level)
        return {(p.topic, p.partition): future.result().offset for p, future in found.items()}

    return ends(IsolationLevel.READ_COMMITTED), ends(IsolationLevel.READ_UNCOMMITTED)


def open_transactions(servers: str, topics: Iterable[str], marked: str = "\0") -> dict[str, str]:
    """Return the state of every unfinished transaction, by id.

    Only those that touch one of the topics, or whose id is marked as given.
    """
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        listed = [
            transaction.transactional_id
            for each in admin.list_transactions().values()
            for transaction in each
            if transaction.state.value == "Ongoing" or transaction.state.value.startswith("Prepare")
        ]
        wanted = set(topics)
        return {
            id_: found.state.value
            for id_, found in admin.describe_transactions(listed).items()
            if marked in id_ or wanted & {part.topic for part in found.topic_partitions}
        }
    finally:
        admin.close()


def group_offsets(servers: str, group: str, topic: str) -> dict[int, int]:
    """Return the offsets that a consumer group has committed, by partition."""
    consumer = Consumer(quiet(servers) | {"group.id": group})
    try:
        found = consumer.committed(partitions_of(servers, [topic]), timeout=30)
        return {part.partition: part.offset for part in found}
    finally:
        consumer.close()


def abort_transactions(servers: str, topics: Iterable[str]) -> list[str]:
    """Abort the open transactions on the topics, by opening their transactional ids again."""
    ids = list(open_transactions(servers, topics))
    for id_ in ids:
        Producer(quiet(servers) | {"transactional.id": id_}).init_transactions(30)
    return ids
