"""The topics of the demo: creates them, fills the input, and reads them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from poundlock.errors import Unavailable

SENSOR = "sensor"
READINGS = "readings"
SPARK_READINGS = "readings-spark"

PARTITIONS = 4  # of each topic, so a batch has four tasks and four branches
_SENSORS = 10
_FIRST_TIMESTAMP = 1547718199
_PATIENCE_S = 30.0


def sensor_lines(rows: int, seed: int) -> Iterator[str]:
    """Generate `rows` lines, no two with the same id and timestamp."""
    chance = random.Random(seed)
    temperatures = [chance.uniform(10, 40) for _ in range(_SENSORS)]
    for number in range(rows):
        sensor = number % _SENSORS
        temperatures[sensor] += chance.uniform(-0.5, 0.5)
        timestamp = _FIRST_TIMESTAMP + number // _SENSORS
        yield f"sensor_{sensor + 1},{timestamp},{temperatures[sensor]:.1f}"


def create(servers: str) -> None:
    """Create the three topics."""
    from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

    topics = [NewTopic(topic, PARTITIONS, 1) for topic in (SENSOR, READINGS, SPARK_READINGS)]
    admin = AdminClient(_client(servers))
    for created in admin.create_topics(topics).values():
        created.result(timeout=_PATIENCE_S)


def feed(servers: str, lines: Iterator[str]) -> None:
    """Send the sensors' lines, and check that all have arrived."""
    from confluent_kafka import Producer

    producer = Producer(_client(servers) | {"enable.idempotence": True, "linger.ms": 20})
    sent = 0
    for sent, line in enumerate(lines, start=1):
        while True:
            try:
                producer.produce(SENSOR, line, partition=sent % PARTITIONS)
                break
            except BufferError:  # the queue is full: let it drain a little
                producer.poll(0.1)
    producer.flush(_PATIENCE_S)
    with Watch(servers, SENSOR) as watch:
        arrived = watch.rows()
    if arrived != sent:
        raise Unavailable(f"{sent} sensor lines were sent to topic {SENSOR}, but it has {arrived}")


class Watch:
    """Counts the rows of a topic by its offsets, which is exact only without transactions."""

    def __init__(self, servers: str, topic: str):
        self._consumer, self._partitions = _open(servers, topic)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self) -> int:
        """Return the sum of the high watermarks."""
        return sum(
            self._consumer.get_watermark_offsets(partition, timeout=_PATIENCE_S)[1]
            for partition in self._partitions
        )

    def close(self) -> None:
        self._consumer.close()


def read(servers: str, topic: str) -> Iterator[bytes]:
    """Read everything that a reader with isolation.level=read_committed sees in a topic."""
    from confluent_kafka import KafkaError

    consumer, partitions = _open(servers, topic)
    try:
        consumer.assign(partitions)
        ended: set[int] = set()
        received_at = time.monotonic()
        while len(ended) < len(partitions):
            # Waits for that many messages or the time-out, so at the end always for the time-out.
            messages = consumer.consume(10_000, timeout=0.1)
            if messages:
                received_at = time.monotonic()
            elif time.monotonic() - received_at > _PATIENCE_S:
                raise Unavailable(f"topic {topic} returned nothing for {_PATIENCE_S:.0f} s")
            for message in messages:
                error = message.error()
                if error is None:
                    yield message.value()
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
                else:
                    raise Unavailable(f"topic {topic} cannot be read: {error}")
    finally:
        consumer.close()


def _open(servers: str, topic: str) -> tuple[Any, list[Any]]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        _client(servers)
        | {
            "group.id": "demo-reader",  # required, but partitions are assigned explicitly
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    return consumer, [TopicPartition(topic, n, OFFSET_BEGINNING) for n in range(PARTITIONS)]


def _client(servers: str) -> dict[str, Any]:
    return {"bootstrap.servers": servers}
