"""Topics and partitions: what they are, how far they reach, who writes to them."""

from __future__ import annotations

import base64
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from poundlock.sinks.kafka.kafka_python import admin, consumer, errors
from poundlock.sinks.kafka.wire import Again, Collected, Wire, judge

Partition = tuple[str, int]

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
_LATEST = -1
NOWHERE = -1  # the node of what does not exist


@dataclass(frozen=True, slots=True)
class Topic:
    id: str  # as Kafka's tools and librdkafka spell it; a topic created anew has another
    partitions: int
    replication: int  # of its least replicated partition
    leaders: Mapping[int, int]  # partition to broker; leaderless ones are left out


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition knows of a producer. `open_since`: first offset of its open transaction."""

    producer_id: int
    epoch: int
    open_since: int | None


@dataclass(frozen=True, slots=True)
class Written:
    """One partition's share of a transaction, up to its last record."""

    topic: str
    topic_id: str
    partition: int
    last_offset: int

    @property
    def place(self) -> Partition:
        return self.topic, self.partition

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}@{self.last_offset}"


def spell_id(topic_id: uuid.UUID) -> str:
    """Spell a topic id as Kafka's tools and librdkafka do."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parse_id(spelled: str) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(spelled + "=="))


async def topics(wire: Wire, names: Iterable[str]) -> dict[str, Topic | None]:
    """Look at topics as they are now; None for one that does not exist."""
    found = dict[str, Topic | None].fromkeys(names)
    for row in (await wire.metadata(found)).topics if found else ():
        if errors.for_code(row.error_code) in (
            errors.UnknownTopicOrPartitionError,
            errors.InvalidTopicError,
        ):
            continue
        again = judge(row.error_code, f"topic {row.name}", f"DESCRIBE on Topic {row.name}")
        if again is not None:
            raise again
        found[row.name] = Topic(
            id=spell_id(row.topic_id),
            partitions=len(row.partitions),
            replication=min((len(part.replica_nodes) for part in row.partitions), default=0),
            leaders={
                part.partition_index: part.leader_id
                for part in row.partitions
                if part.leader_id >= 0
            },
        )
    return found


class Leaders:
    """Where partitions are led. Asks once, and again for what turns out to have moved."""

    def __init__(self, wire: Wire):
        self._wire = wire
        self._known: dict[str, Topic | None] = {}
        self._moved: set[str] = set()

    async def locate(self, partitions: Sequence[Partition]) -> Mapping[Partition, int | Again]:
        wanted = {topic for topic, _ in partitions}
        self._known.update(
            await topics(self._wire, sorted(wanted - self._known.keys() | wanted & self._moved))
        )
        self._moved -= wanted
        found = {partition: self._leader(*partition) for partition in partitions}
        self._moved.update(
            topic for (topic, _), leader in found.items() if isinstance(leader, Again)
        )
        return found

    def lost(self, partition: Partition) -> None:
        self._moved.add(partition[0])

    def topic_id(self, topic: str) -> str | None:
        """The id that a topic had when last asked for; None if there was no such topic."""
        known = self._known.get(topic)
        return known.id if known is not None else None

    def _leader(self, topic: str, partition: int) -> int | Again:
        known = self._known[topic]
        if known is None or not 0 <= partition < known.partitions:
            return NOWHERE
        leader = known.leaders.get(partition)
        if leader is None:
            return Again(f"{topic}-{partition} has no leader")
        return leader


async def last_stable_offsets(
    wire: Wire, partitions: Iterable[Partition], leaders: Leaders | None = None
) -> Collected[Partition, int | None]:
    """Find how far a read_committed reader can read; None where there is no partition."""
    return await _offsets(wire, partitions, READ_COMMITTED, leaders)


async def high_watermarks(
    wire: Wire, partitions: Iterable[Partition], leaders: Leaders | None = None
) -> Collected[Partition, int | None]:
    """Find how far any reader can read; None where there is no partition."""
    return await _offsets(wire, partitions, READ_UNCOMMITTED, leaders)


async def _offsets(
    wire: Wire, partitions: Iterable[Partition], isolation: int, leaders: Leaders | None
) -> Collected[Partition, int | None]:
    async def ask(node: int, group: Sequence[Partition]) -> Mapping[Partition, int | Again | None]:
        if node == NOWHERE:
            return dict.fromkeys(group)
        row = consumer.ListOffsetsRequest.ListOffsetsTopic
        request = consumer.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                row(
                    name=topic,
                    partitions=[
                        row.ListOffsetsPartition(
                            partition_index=number, current_leader_epoch=-1, timestamp=_LATEST
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in by_topic(group)
            ],
            timeout_ms=int(wire.left * 1000),
            min_version=2,  # the first that knows isolation levels
        )
        response = await wire.send(node, request)
        return {
            (topic.name, part.partition_index): judge(
                part.error_code, f"the offsets of {topic.name}", f"DESCRIBE on Topic {topic.name}"
            )
            or part.offset
            for topic in response.topics
            for part in topic.partitions
        }

    leaders = leaders or Leaders(wire)
    return await wire.collect(partitions, leaders.locate, ask, leaders.lost)


async def producers(
    wire: Wire, partitions: Iterable[Partition], leaders: Leaders | None = None
) -> Collected[Partition, list[ProducerState] | None]:
    """List what each partition's leader knows of its producers; None where there is no partition."""

    async def ask(
        node: int, group: Sequence[Partition]
    ) -> Mapping[Partition, list[ProducerState] | Again | None]:
        if node == NOWHERE:
            return dict.fromkeys(group)
        row = admin.DescribeProducersRequest.TopicRequest
        request = admin.DescribeProducersRequest(
            topics=[row(name=name, partition_indexes=numbers) for name, numbers in by_topic(group)]
        )
        answers: dict[Partition, list[ProducerState] | Again | None] = {}
        for topic in (await wire.send(node, request)).topics:
            for part in topic.partitions:
                again = judge(
                    part.error_code, f"the producers of {topic.name}", f"READ on Topic {topic.name}"
                )
                answers[topic.name, part.partition_index] = again or [
                    ProducerState(
                        state.producer_id,
                        state.producer_epoch,
                        state.current_txn_start_offset
                        if state.current_txn_start_offset >= 0
                        else None,
                    )
                    for state in part.active_producers
                ]
        return answers

    leaders = leaders or Leaders(wire)
    return await wire.collect(partitions, leaders.locate, ask, leaders.lost)


def by_topic(partitions: Iterable[Partition]) -> Iterator[tuple[str, list[int]]]:
    grouped: dict[str, list[int]] = defaultdict(list)
    for topic, number in partitions:
        grouped[topic].append(number)
    return iter(grouped.items())
