"""What a cluster is and allows: versions, features, configuration; and its consumer groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from poundlock.errors import NotAuthorised, UsageError
from poundlock.sinks.kafka.kafka_python import (
    admin,
    consumer,
    error_name,
    errors,
    metadata,
    release_of,
)
from poundlock.sinks.kafka.partitions import Partition, by_topic
from poundlock.sinks.kafka.wire import Again, Kind, Wire, judge

_BROKER, _TOPIC = 4, 2  # kinds of resources in DescribeConfigs
_LIVE_MEMBERS = (
    errors.UnknownMemberIdError,
    errors.IllegalGenerationError,
    errors.RebalanceInProgressError,
    errors.StaleMemberEpochError,
    errors.FencedMemberEpochError,
    errors.FencedInstanceIdError,
)


@dataclass(frozen=True, slots=True)
class Broker:
    release: tuple[int, ...]  # as its APIs show: major and minor, for no API tells the patch
    apis: Mapping[int, tuple[int, int]]  # API key to lowest and highest version
    features: Mapping[str, int]  # finalized for the whole cluster


@dataclass(frozen=True, slots=True)
class Config:
    """Settings as the brokers show them; None and a reason where they may not be seen."""

    values: Mapping[str, tuple[str, ...]] | None  # distinct values, where brokers differ
    why: str = ""


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    offsets: Mapping[Partition, int]  # without those that were never committed
    pending: frozenset[Partition]  # an open transaction is about to change them


async def brokers(wire: Wire) -> dict[int, Broker]:
    """Ask every broker for its versions and features."""

    async def ask(node: int, _: Sequence[int]) -> Mapping[int, Broker | Again]:
        request = metadata.ApiVersionsRequest(
            client_software_name="poundlock", client_software_version="0", min_version=3
        )
        response = await wire.send(node, request)
        again = judge(response.error_code, f"the versions of broker {node}", "nothing")
        apis = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        features = {row.name: row.max_version_level for row in response.finalized_features}
        return {node: again or Broker(release_of(apis), apis, features)}

    return dict((await _every_broker(wire, ask)).items())


async def broker_config(wire: Wire, names: Sequence[str]) -> Config:
    """Read settings of the brokers."""

    async def ask(node: int, _: Sequence[int]) -> Mapping[int, Mapping[str, str] | Again]:
        found = await _configs(wire, node, _BROKER, [str(node)], names, "Cluster")
        return {node: found[str(node)]}

    try:
        answers = await _every_broker(wire, ask)
    except NotAuthorised as error:
        return Config(None, str(error))
    return Config(
        {
            name: tuple(sorted({found[name] for found in answers.values() if name in found}))
            for name in names
        }
    )


async def topic_config(
    wire: Wire, topics: Sequence[str], names: Sequence[str]
) -> dict[str, Config]:
    """Read settings of topics."""

    async def one(topic: str) -> Config:
        try:
            found = (await _configs(wire, None, _TOPIC, [topic], names, f"Topic {topic}"))[topic]
        except NotAuthorised as error:
            return Config(None, str(error))
        if isinstance(found, Again):
            raise found
        return Config({name: (value,) for name, value in found.items()})

    return {topic: await one(topic) for topic in topics}


async def _every_broker(wire: Wire, ask: Any) -> Mapping[int, Any]:
    async def locate(nodes: Sequence[int]) -> Mapping[int, int | Again]:
        return {node: node for node in nodes}

    nodes = [broker.node_id for broker in (await wire.metadata(None)).brokers]
    return (await wire.collect(nodes, locate, ask)).all("the settings")


async def _configs(
    wire: Wire,
    node: int | None,
    kind: int,
    resources: Sequence[str],
    names: Sequence[str],
    grant: str,
) -> dict[str, dict[str, str] | Again]:
    row = admin.DescribeConfigsRequest.DescribeConfigsResource
    request = admin.DescribeConfigsRequest(
        resources=[
            row(resource_type=kind, resource_name=name, configuration_keys=list(names))
            for name in resources
        ],
        include_synonyms=False,
        include_documentation=False,
    )
    found: dict[str, dict[str, str] | Again] = {}
    for result in (await wire.send(node, request)).results:
        again = judge(
            result.error_code,
            f"the configuration of {grant.lower()}",
            f"DESCRIBE_CONFIGS on {grant}",
        )
        found[result.resource_name] = again or {
            entry.name: entry.value for entry in result.configs if entry.value is not None
        }
    return found


# Consumer groups: Spark reads without one, so offsets are handed back to it after the fact.


async def commit_group_offsets(wire: Wire, group: str, positions: Mapping[Partition, int]) -> None:
    """Set a group's offsets, as long as nobody is in it."""
    if not positions:
        return
    row = consumer.OffsetCommitRequest.OffsetCommitRequestTopic

    async def ask(node: int, _: Sequence[str]) -> Mapping[str, bool | Again]:
        request = consumer.OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[
                row(
                    name=topic,
                    partitions=[
                        row.OffsetCommitRequestPartition(
                            partition_index=number,
                            committed_offset=positions[topic, number],
                            committed_leader_epoch=-1,
                            committed_metadata="",
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in by_topic(positions)
            ],
            min_version=7,
            max_version=9,  # the last that goes by topic names
        )
        for topic in (await wire.send(node, request)).topics:
            for part in topic.partitions:
                again = _group_error(group, topic.name, part.error_code)
                if again is not None:
                    return {group: again}
        return {group: True}

    collected = await wire.collect([group], partial(_homes, wire), ask, partial(_forget, wire))
    collected.all("the offsets")


def _group_error(group: str, topic: str, code: int) -> Again | None:
    error = errors.for_code(code)
    if error in _LIVE_MEMBERS:
        raise UsageError(
            f"the offsets of consumer group {group} cannot be set ({error_name(code)}): it has live "
            "members, which commit their own. Stop them, or give the pipeline a group of its own"
        )
    if error is errors.UnknownTopicOrPartitionError:
        raise UsageError(f"consumer group {group} cannot keep offsets of {topic}: no such topic")
    return judge(code, f"the offsets of group {group}", f"READ on Group {group} and Topic {topic}")


async def stable_group_offsets(
    wire: Wire, group: str, partitions: Iterable[Partition]
) -> GroupOffsets:
    """Read a group's offsets, apart from those that an open transaction is about to change."""
    row = consumer.OffsetFetchRequest.OffsetFetchRequestGroup
    wanted = list(partitions)

    async def ask(node: int, _: Sequence[str]) -> Mapping[str, GroupOffsets | Again]:
        request = consumer.OffsetFetchRequest(
            groups=[
                row(
                    group_id=group,
                    member_id=None,
                    member_epoch=-1,
                    topics=[
                        row.OffsetFetchRequestTopics(name=topic, partition_indexes=numbers)
                        for topic, numbers in by_topic(wanted)
                    ],
                )
            ],
            require_stable=True,
            min_version=8,
            max_version=9,  # the last that goes by topic names
        )
        (answer,) = (await wire.send(node, request)).groups
        again = _group_error(group, "*", answer.error_code)
        return {group: again or _group_offsets(group, answer)}

    collected = await wire.collect([group], partial(_homes, wire), ask, partial(_forget, wire))
    return collected.all("the offsets")[group]


def _group_offsets(group: str, answer: Any) -> GroupOffsets | Again:
    offsets, pending = dict[Partition, int](), set[Partition]()
    for topic in answer.topics:
        for part in topic.partitions:
            where = (topic.name, part.partition_index)
            if errors.for_code(part.error_code) is errors.UnstableOffsetCommitError:
                pending.add(where)
                continue
            again = _group_error(group, topic.name, part.error_code)
            if again is not None:
                return again
            if part.committed_offset >= 0:
                offsets[where] = part.committed_offset
    return GroupOffsets(offsets, frozenset(pending))


async def _homes(wire: Wire, groups: Sequence[str]) -> Mapping[str, int | Again]:
    return await wire.homes(Kind.GROUP, "DESCRIBE and READ on the Group", groups)


def _forget(wire: Wire, group: str) -> None:
    wire.forget(Kind.GROUP, group)
