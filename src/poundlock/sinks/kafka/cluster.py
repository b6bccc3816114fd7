"""What a cluster has and allows: brokers and their settings, topics, and partitions' leaders."""

from __future__ import annotations

import base64
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poundlock.errors import NotAuthorised
from poundlock.sinks.kafka.client import KafkaClient, TryAgain, check_error
from poundlock.sinks.kafka.kafka_python import admin, api_key, errors, metadata, release_of
from poundlock.sinks.kafka.types import TopicPartition

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
NOWHERE = -1  # the node of a partition that does not exist
_BROKER = 4  # a kind of resource in DescribeConfigs


# Brokers.


@dataclass(frozen=True, slots=True)
class Broker:
    release: tuple[int, ...]  # major and minor, guessed from the APIs: none shows the patch level
    apis: Mapping[int, tuple[int, int]]  # API key to lowest and highest version
    features: Mapping[str, int]  # finalized for the whole cluster


@dataclass(frozen=True, slots=True)
class Config:
    """Settings as the brokers show them. None and a reason where the user may not see them."""

    values: Mapping[str, tuple[str, ...]] | None  # distinct values, where brokers differ
    why: str = ""

    def smallest(self, name: str, default: int) -> int:
        """Return the smallest value of a setting, `default` if no broker shows it."""
        found = (self.values or {}).get(name)
        return min(map(int, found)) if found else default


async def identity(client: KafkaClient) -> str:
    """Return the cluster's id. It stays the same for the whole life of the cluster."""
    return str((await client.metadata(None)).cluster_id)


async def brokers(client: KafkaClient) -> dict[int, Broker]:
    """Ask every broker for its release, versions and features."""

    async def ask(node: int, _: Sequence[int]) -> Mapping[int, Broker | TryAgain]:
        request = metadata.ApiVersionsRequest(
            client_software_name="poundlock", client_software_version="0", min_version=3
        )
        response = await client.send(node, request)
        again = check_error(response.error_code, f"the versions of broker {node}", "nothing")
        apis = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        features = {row.name: row.max_version_level for row in response.finalized_features}
        return {node: again or Broker(release_of(apis), apis, features)}

    return dict(await _ask_every_broker(client, ask))


def lowest_feature(brokers: Iterable[Broker], name: str) -> int:
    """Return the level of a finalized feature, by the broker that knows least."""
    return min(broker.features.get(name, 0) for broker in brokers)


def max_version(brokers: Iterable[Broker], api: str) -> int:
    """Return the highest version of an API ("EndTxn") that every broker speaks. -1 for none."""
    return min(broker.apis.get(api_key(api), (-1, -1))[1] for broker in brokers)


async def broker_config(client: KafkaClient, names: Sequence[str]) -> Config:
    """Read settings of the brokers."""

    async def ask(node: int, _: Sequence[int]) -> Mapping[int, Mapping[str, str] | TryAgain]:
        resource = admin.DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_BROKER, resource_name=str(node), configuration_keys=list(names)
        )
        request = admin.DescribeConfigsRequest(
            resources=[resource], include_synonyms=False, include_documentation=False
        )
        (result,) = (await client.send(node, request)).results
        grant = "DESCRIBE_CONFIGS on Cluster"
        again = check_error(result.error_code, "the configuration of the cluster", grant)
        values = {entry.name: entry.value for entry in result.configs if entry.value is not None}
        return {node: again or values}

    try:
        answers = await _ask_every_broker(client, ask)
    except NotAuthorised as error:
        return Config(None, str(error))
    return Config(
        {
            name: tuple(sorted({found[name] for found in answers.values() if name in found}))
            for name in names
        }
    )


async def _ask_every_broker(client: KafkaClient, ask: Any) -> Mapping[int, Any]:
    async def locate(nodes: Sequence[int]) -> Mapping[int, int | TryAgain]:
        return {node: node for node in nodes}

    nodes = [broker.node_id for broker in (await client.metadata(None)).brokers]
    return (await client.collect(nodes, locate, ask)).require_all("the settings")


# Topics and partitions.


@dataclass(frozen=True, slots=True)
class Topic:
    id: str  # as Kafka's tools and librdkafka spell it; a topic that is created again has another
    partitions: int
    replication: int  # of its least replicated partition
    leaders: Mapping[int, int]  # partition to broker; leaderless ones are left out


async def topics(client: KafkaClient, names: Iterable[str]) -> dict[str, Topic | None]:
    """Look at topics as they are now. None for one that does not exist."""
    found = dict[str, Topic | None].fromkeys(names)
    for row in (await client.metadata(found)).topics if found else ():
        if errors.for_code(row.error_code) in (
            errors.UnknownTopicOrPartitionError,
            errors.InvalidTopicError,
        ):
            continue
        again = check_error(row.error_code, f"topic {row.name}", f"DESCRIBE on Topic {row.name}")
        if again is not None:
            raise again
        found[row.name] = Topic(
            id=spell_topic_id(row.topic_id),
            partitions=len(row.partitions),
            replication=min((len(part.replica_nodes) for part in row.partitions), default=0),
            leaders={
                part.partition_index: part.leader_id
                for part in row.partitions
                if part.leader_id >= 0
            },
        )
    return found


def spell_topic_id(topic_id: uuid.UUID) -> str:
    """Spell a topic id as Kafka's tools and librdkafka do."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parse_topic_id(spelled: str) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(spelled + "=="))


class Leaders:
    """The nodes that lead partitions. Asks once, and again for partitions that have moved."""

    def __init__(self, client: KafkaClient):
        self._client = client
        self._known: dict[str, Topic | None] = {}
        self._moved: set[str] = set()

    async def locate(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int | TryAgain]:
        wanted = {topic for topic, _ in partitions}
        unknown = wanted - self._known.keys() | wanted & self._moved
        self._known.update(await topics(self._client, sorted(unknown)))
        self._moved -= wanted
        found = {partition: self._leader(*partition) for partition in partitions}
        self._moved.update(
            topic for (topic, _), leader in found.items() if isinstance(leader, TryAgain)
        )
        return found

    def mark_moved(self, partition: TopicPartition) -> None:
        self._moved.add(partition[0])

    def topic_id(self, topic: str) -> str | None:
        """Return the id that a topic had when last asked for. None if there was no such topic."""
        known = self._known.get(topic)
        return known.id if known is not None else None

    def _leader(self, topic: str, partition: int) -> int | TryAgain:
        known = self._known[topic]
        if known is None or not 0 <= partition < known.partitions:
            return NOWHERE
        leader = known.leaders.get(partition)
        if leader is None:
            return TryAgain(f"{topic}-{partition} has no leader")
        return leader


def by_topic(partitions: Iterable[TopicPartition]) -> Iterable[tuple[str, list[int]]]:
    """Group partition numbers by topic, as requests want them."""
    grouped: dict[str, list[int]] = defaultdict(list)
    for topic, number in partitions:
        grouped[topic].append(number)
    return grouped.items()
