"""Consumer-group offsets: set, read, and committed as a branch of the decision.

Spark reads without a consumer group, so Poundlock hands the offsets back to the group: after the batch
with `commit_offsets`, or inside the decision as a `GroupOffsetsBranch`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poundlock.core.model import Branch, Fingerprint, Receipt
from poundlock.core.participant import Column, Commitment, Writer
from poundlock.errors import Rejected, Unavailable, UsageError
from poundlock.sinks.kafka.branches import KafkaBranches, transactional_id
from poundlock.sinks.kafka.client import CoordinatorKind, KafkaClient, TryAgain, check_error
from poundlock.sinks.kafka.cluster import by_topic
from poundlock.sinks.kafka.kafka_python import consumer, error_name, errors
from poundlock.sinks.kafka.producer import ArrowProducer
from poundlock.sinks.kafka.types import LastRecord, TopicPartition
from poundlock.sinks.kafka.witness import Evidence, Outcome

Offsets = Mapping[TopicPartition, int]

_TIMEOUT_S = 30.0
_TRIES = 3
_LAST_BY_NAME = 9  # the last version of OffsetCommit and OffsetFetch that uses topic names
_GRANT = "DESCRIBE and READ on the Group"
_HAS_MEMBERS = (
    errors.UnknownMemberIdError,
    errors.IllegalGenerationError,
    errors.RebalanceInProgressError,
    errors.StaleMemberEpochError,
    errors.FencedMemberEpochError,
    errors.FencedInstanceIdError,
)


class GroupOffsetsParticipant(KafkaBranches):
    """Consumer-group offsets as a branch of the decision. The witness is a stable offset fetch."""

    commitment = Commitment.TRANSACTIONAL

    def __init__(self, name: str, group: str, settings: Mapping[str, str]):
        super().__init__(name, settings)
        self.group = group

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {}  # takes no rows

    def preflight(self) -> list[str]:
        return self.check_time_out()

    def begin(self, branch: Branch) -> Writer:
        raise UsageError("offsets are written by the driver, not by tasks", sink=self.name)

    def last_records(self, receipt: Receipt) -> list[LastRecord]:
        return []  # offsets go to the group's own topic, which we do not read

    def witness(self, receipt: Receipt) -> Evidence:
        handle: Mapping[str, Any] = receipt.handle
        wanted = {(topic, number): offset for topic, number, offset in handle["offsets"]}
        found = self.client.run(read_stable_offsets, self.group, wanted)
        if found.pending:
            return Evidence(Outcome.OPEN, "a transaction is about to change the group's offsets")
        # Only this pipeline moves the group, only forwards, and moves all offsets of a batch together.
        # So the branch is committed if all offsets are at or past ours, and not committed if one is
        # before. If a person has set the group back, repair sets it forward again.
        if any(found.offsets.get(at, -1) < offset for at, offset in wanted.items()):
            return Evidence(Outcome.ABORTED, "no transaction is open and the offsets are older")
        return Evidence(Outcome.COMMITTED, "the group's offsets have reached the branch's")


class GroupOffsetsBranch:
    """One batch's offsets. The driver prepares them after the tasks have voted."""

    def __init__(self, participant: GroupOffsetsParticipant, offsets: Offsets):
        self._participant = participant
        self._offsets = offsets
        self.name = participant.name
        self.tries = 0

    def fingerprint(self) -> Fingerprint:
        text = json.dumps(sorted((*at, offset) for at, offset in self._offsets.items()))
        digest = hashlib.sha256(text.encode()).digest()
        return Fingerprint(len(self._offsets), int.from_bytes(digest[:8], "big"))

    def prepare(self, branch: Branch) -> Receipt:
        for retry in range(_TRIES):
            self.tries = retry + 1
            try:
                return self._prepare(replace(branch, retry=retry))
            except (Rejected, Unavailable):
                # The group's coordinator may be starting. Trying again is cheaper than a new batch.
                if retry == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _prepare(self, branch: Branch) -> Receipt:
        participant, began_at = self._participant, time.time()
        id_ = transactional_id(branch)
        settings = participant.settings | {"transaction.timeout.ms": str(participant.timeout_ms)}
        producer = ArrowProducer(settings, transactional_id=id_)
        try:
            producer.begin(_TIMEOUT_S)
            producer.send_offsets(participant.group, self._offsets, _TIMEOUT_S)
            identity = producer.identity()
        except BaseException:
            producer.abort(timeout_s=5.0)
            raise
        producer.drop()
        return Receipt(
            sink=self.name,
            id=id_,
            task=branch.task,
            fingerprint=self.fingerprint(),
            handle={
                "producer_id": identity.producer_id,
                "epoch": identity.epoch,
                "group": participant.group,
                "offsets": [[*at, offset] for at, offset in sorted(self._offsets.items())],
            },
            began_at=began_at,
            expires_at=participant.expiry(began_at),
            system=participant.system,
        )


async def commit_offsets(client: KafkaClient, group: str, offsets: Offsets) -> None:
    """Set a group's offsets. Raises `UsageError` if the group has members."""
    if not offsets:
        return
    row = consumer.OffsetCommitRequest.OffsetCommitRequestTopic

    async def ask(node: int, _: Sequence[str]) -> Mapping[str, bool | TryAgain]:
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
                            committed_offset=offsets[topic, number],
                            committed_leader_epoch=-1,
                            committed_metadata="",
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in by_topic(offsets)
            ],
            min_version=7,
            max_version=_LAST_BY_NAME,
        )
        for topic in (await client.send(node, request)).topics:
            for part in topic.partitions:
                again = _check_group_error(group, topic.name, part.error_code)
                if again is not None:
                    return {group: again}
        return {group: True}

    collected = await client.ask_coordinators(CoordinatorKind.GROUP, _GRANT, [group], ask)
    collected.require_all("the offsets")


@dataclass(frozen=True, slots=True)
class StableOffsets:
    offsets: Offsets  # without those that were never committed
    pending: frozenset[TopicPartition]  # an open transaction is about to change them


async def read_stable_offsets(
    client: KafkaClient, group: str, partitions: Collection[TopicPartition]
) -> StableOffsets:
    """Read a group's offsets, and which of them an open transaction is about to change."""
    row = consumer.OffsetFetchRequest.OffsetFetchRequestGroup

    async def ask(node: int, _: Sequence[str]) -> Mapping[str, StableOffsets | TryAgain]:
        request = consumer.OffsetFetchRequest(
            groups=[
                row(
                    group_id=group,
                    member_id=None,
                    member_epoch=-1,
                    topics=[
                        row.OffsetFetchRequestTopics(name=topic, partition_indexes=numbers)
                        for topic, numbers in by_topic(partitions)
                    ],
                )
            ],
            require_stable=True,
            min_version=8,
            max_version=_LAST_BY_NAME,
        )
        (answer,) = (await client.send(node, request)).groups
        again = _check_group_error(group, "*", answer.error_code)
        return {group: again or _read_answer(group, answer)}

    collected = await client.ask_coordinators(CoordinatorKind.GROUP, _GRANT, [group], ask)
    return collected.require_all("the offsets")[group]


def _read_answer(group: str, answer: Any) -> StableOffsets | TryAgain:
    offsets, pending = dict[TopicPartition, int](), set[TopicPartition]()
    for topic in answer.topics:
        for part in topic.partitions:
            where = (topic.name, part.partition_index)
            if errors.for_code(part.error_code) is errors.UnstableOffsetCommitError:
                pending.add(where)
                continue
            again = _check_group_error(group, topic.name, part.error_code)
            if again is not None:
                return again
            if part.committed_offset >= 0:
                offsets[where] = part.committed_offset
    return StableOffsets(offsets, frozenset(pending))


def _check_group_error(group: str, topic: str, code: int) -> TryAgain | None:
    error = errors.for_code(code)
    if error in _HAS_MEMBERS:
        raise UsageError(
            f"the offsets of consumer group {group} cannot be set ({error_name(code)}): it has live "
            "members, which commit their own. Stop them, or give the pipeline a group of its own"
        )
    if error is errors.UnknownTopicOrPartitionError:
        raise UsageError(
            f"consumer group {group} cannot keep offsets of {topic}: that topic does not exist"
        )
    grant = f"READ on Group {group} and Topic {topic}"
    return check_error(code, f"the offsets of group {group}", grant)
