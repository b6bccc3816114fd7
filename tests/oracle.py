"""What really is in Kafka, seen by clients that are not ours: confluent-kafka and kafka-python's admin.

Nothing here imports poundlock. A test that asks this module cannot be fooled by a mistake that the
library makes in writing and again in looking.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka.admin import KafkaAdminClient
from kafka.errors import TransactionalIdNotFoundError

SECONDS = 60.0
OPEN_STATES = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")

T = TypeVar("T")


def eventually(
    look: Callable[[], T], *, seconds: float = SECONDS, want: Callable[[T], bool] = bool
) -> T:
    """Look again and again until it is as wanted, and return what was seen last."""
    deadline = time.monotonic() + seconds
    while not want(seen := look()):
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: last seen {seen!r}"
        time.sleep(0.05)
    return seen


class Row(NamedTuple):
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]


class Kafka:
    """One cluster. `settings` are librdkafka's."""

    def __init__(self, settings: Mapping[str, str]):
        self.settings = dict(settings)
        self.servers = self.settings["bootstrap.servers"]
        # Of brokers that are gone it does not tell, while other tests go on.
        self._client = self.settings | {"log_level": "0"}
        self._admin = AdminClient(self._client)

    # Making.

    def create(
        self,
        name: str | None = None,
        *,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        replicas: list[list[int]] | None = None,
    ) -> str:
        """Create a topic; `replicas` are the brokers of each partition, in place of a number."""
        name = name or f"t-{uuid.uuid4().hex[:10]}"
        if replicas is None:
            topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        else:
            topic = NewTopic(
                name, len(replicas), replica_assignment=replicas, config=dict(config or {})
            )
        self._admin.create_topics([topic])[name].result(SECONDS)
        eventually(lambda: self.partitions(name), want=lambda seen: None not in seen)
        return name

    def configure(self, topic: str, name: str, value: str) -> None:
        """Change a setting of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        resource.add_incremental_config(
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        )
        for future in self._admin.incremental_alter_configs([resource]).values():
            future.result(SECONDS)

    def partitions(self, topic: str) -> list[int | None]:
        """Return the leader of each partition, None where there is none."""
        found = self._admin.list_topics(topic, SECONDS).topics[topic].partitions
        leaders = {number: part.leader for number, part in found.items()}
        return [leaders[n] if leaders[n] >= 0 else None for n in sorted(leaders)] or [None]

    def produce(self, topic: str, values: Iterable[str], *, partition: int | None = None) -> None:
        """Append rows, outside of any transaction, with no key; round the partitions in turn."""
        producer = Producer(self._client | {"linger.ms": "5"})
        count = len(self.partitions(topic))
        for number, value in enumerate(values):
            where = number % count if partition is None else partition
            producer.produce(topic, value=value.encode(), partition=where)
            producer.poll(0)
        assert producer.flush(SECONDS) == 0

    def fence(self, id: str) -> None:
        """Open a transactional id anew, as a second producer would: what was open is aborted."""
        Producer(self._client | {"transactional.id": id}).init_transactions(SECONDS)

    # Looking.

    def rows(self, topic: str, *, committed: bool = True) -> list[Row]:
        """Read a topic from its beginning to its end, as a reader of that isolation sees it."""
        consumer = Consumer(
            self._client
            | {
                "group.id": f"oracle-{uuid.uuid4().hex}",
                "enable.auto.commit": "false",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": "true",
            }
        )
        waiting = set(range(len(self.partitions(topic))))
        found: list[Row] = []
        try:
            consumer.assign([TopicPartition(topic, number, 0) for number in waiting])
            deadline = time.monotonic() + SECONDS
            while waiting:
                assert time.monotonic() < deadline, f"{topic}: no end of partitions {waiting}"
                for message in consumer.consume(10_000, 0.2):
                    error = message.error()
                    if error is None:
                        found.append(_row(message))
                    elif error.code() == KafkaError._PARTITION_EOF:
                        waiting.discard(message.partition())
        finally:
            consumer.close()
        return found

    def values(self, topic: str, *, committed: bool = True) -> Counter[str]:
        """Count the values of a topic."""
        return Counter((row.value or b"").decode() for row in self.rows(topic, committed=committed))

    def offsets(self, topic: str, *, committed: bool) -> list[int]:
        """Return the last stable offsets of a topic, or its high watermarks."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {
            TopicPartition(topic, number): OffsetSpec.latest()
            for number in range(len(self.partitions(topic)))
        }
        answers = self._admin.list_offsets(asked, isolation_level=level, request_timeout=SECONDS)
        found = {at.partition: future.result().offset for at, future in answers.items()}
        return [found[number] for number in sorted(found)]

    def transactions(self, pattern: str = ".*") -> dict[str, str]:
        """Return the unfinished transactions of all brokers: transactional id to state."""
        return {
            row.transactional_id: str(getattr(row.state, "value", row.state))
            for rows in self._ask(
                lambda admin: admin.list_transactions(
                    state_filters=list(OPEN_STATES), transactional_id_pattern=pattern
                )
            ).values()
            for row in rows
        }

    def transaction(self, id: str) -> str:
        """Return the state of a transactional id, in Kafka's word."""
        found = self._ask(lambda admin: admin.describe_transactions([id]))[id]
        return str(getattr(found.state, "value", found.state))

    def knows(self, id: str) -> bool:
        """Say whether Kafka remembers a transactional id."""
        try:
            return bool(self.transaction(id))
        except TransactionalIdNotFoundError:
            return False

    def coordinator(self, id: str) -> int:
        """Return the broker that coordinates a transactional id."""
        return self._ask(lambda admin: admin.describe_transactions([id]))[id].coordinator_id

    def group(self, group: str, topic: str) -> dict[int, int]:
        """Return a consumer group's committed offsets, by partition."""
        found = self._ask(lambda admin: admin.list_group_offsets({group: None}))[group]
        return {at.partition: it.offset for at, it in found.items() if at.topic == topic}

    def _ask(self, question: Callable[[KafkaAdminClient], T]) -> T:
        admin = KafkaAdminClient(**_for_kafka_python(self.settings))
        try:
            return question(admin)
        finally:
            admin.close()

    # Judging.

    def assert_settled(self, *topics: str, pattern: str = r"poundlock\..*") -> None:
        """No transaction of ours is open, and every reader can read to the end of every topic."""
        open_now = self.transactions(pattern)
        assert "Ongoing" not in open_now.values(), open_now
        # What is told to end needs nobody's help any more, but perhaps a moment.
        eventually(lambda: self.transactions(pattern), want=lambda seen: not seen)
        for topic in topics:
            assert self.offsets(topic, committed=True) == self.offsets(topic, committed=False)

    def assert_exact(self, topic: str, expected: Iterable[str]) -> None:
        """The topic shows every expected row, as often as expected, and nothing else."""
        seen, wanted = self.values(topic), Counter(expected)
        missing, surplus = wanted - seen, seen - wanted
        assert not missing and not surplus, (
            f"{topic}: {missing.total()} rows missing {_few(missing)}, "
            f"{surplus.total()} surplus {_few(surplus)}"
        )


def _few(rows: Counter[str]) -> list[str]:
    return list(rows)[:5]


def _row(message) -> Row:
    return Row(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        message.timestamp()[1],
        tuple(message.headers() or ()),
    )


def _for_kafka_python(settings: Mapping[str, str]) -> dict[str, object]:
    named = {
        "bootstrap.servers": "bootstrap_servers",
        "security.protocol": "security_protocol",
        "sasl.mechanism": "sasl_mechanism",
        "sasl.username": "sasl_plain_username",
        "sasl.password": "sasl_plain_password",
        "ssl.ca.location": "ssl_cafile",
    }
    return {named[key]: value for key, value in settings.items()}
