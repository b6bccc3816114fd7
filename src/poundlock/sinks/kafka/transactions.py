"""What Kafka knows about transactions: end, describe and list them, and see whether a commit arrived.

`EndTxn` is always sent in version 5, because only its answers can be told apart. Mixing versions makes
answers wrong: a repeat in version 4 of a commit in version 5 is answered PRODUCER_FENCED although the
transaction was committed, and version 4 can commit the next transaction of the same epoch.

`Answer.DONE` means that the coordinator has decided. The markers in the partitions follow, and Kafka
4.3.0 and 4.3.1 call a transaction complete although a partition without a leader never gets its marker
(KAFKA-20734). So `settlements` looks at every partition. A last stable offset beyond our last record is
proof. Where it is not beyond, another open transaction may hold it back, so the partition is asked
whether ours is open.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from poundlock.errors import NotAuthorised
from poundlock.sinks.kafka.client import (
    Collected,
    CoordinatorKind,
    KafkaClient,
    TryAgain,
    check_error,
)
from poundlock.sinks.kafka.cluster import (
    NOWHERE,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Leaders,
    by_topic,
)
from poundlock.sinks.kafka.kafka_python import admin, consumer, error_name, errors, producer
from poundlock.sinks.kafka.types import LastRecord, TopicPartition, TransactionIdentity

T = TypeVar("T")

END_TXN_VERSION = 5
OPEN_STATES = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
_LOG_TOPIC = "__transaction_state"  # where coordinators keep their transactions
_LATEST = -1
_GRANT = "DESCRIBE and WRITE on its TransactionalId"

_log = logging.getLogger(__name__)


# End.


class Answer(Enum):
    """What the coordinator's answer to EndTxn means for the transaction."""

    DONE = "done"  # ended as asked, now or before
    CONTRADICTED = "contradicted"  # ended the other way, or nothing was ever written
    FORGOTTEN = "forgotten"  # the coordinator no longer knows: ask the witness
    BUSY = "busy"  # an earlier end is still being carried out: ask again
    UNREACHABLE = "unreachable"  # no answer: the outcome is unknown, and asking again is safe


# The whole table. A code that is not in it says nothing about the transaction.
ANSWERS: Mapping[type[Exception], Answer] = {
    errors.NoError: Answer.DONE,
    errors.InvalidTxnStateError: Answer.CONTRADICTED,
    errors.ProducerFencedError: Answer.FORGOTTEN,
    errors.InvalidProducerEpochError: Answer.FORGOTTEN,
    errors.InvalidProducerIdMappingError: Answer.FORGOTTEN,
    errors.TransactionalIdNotFoundError: Answer.FORGOTTEN,
    errors.ConcurrentTransactionsError: Answer.BUSY,
}


async def end(
    client: KafkaClient, identities: Sequence[TransactionIdentity], *, commit: bool
) -> list[Answer]:
    """Commit or abort each transaction, many at a time. Returns the answers in the same order.

    To abort a stray, pass the producer id and epoch just described. An InitProducerId would abort it
    too, but it would delete the coordinator's memory of the outcome.
    """

    async def end_one(node: int, identity: TransactionIdentity) -> Answer | TryAgain:
        request = producer.EndTxnRequest(
            *identity, commit, min_version=END_TXN_VERSION, max_version=END_TXN_VERSION
        )
        try:
            response = await client.send(node, request)
        except TryAgain as again:
            return again
        return read_answer(response.error_code, identity.transactional_id)

    async def ask(
        node: int, group: Sequence[TransactionIdentity]
    ) -> Mapping[TransactionIdentity, Answer | TryAgain]:
        answers = await client.gather(partial(end_one, node, identity) for identity in group)
        return dict(zip(group, answers, strict=True))

    async def locate(
        group: Sequence[TransactionIdentity],
    ) -> Mapping[TransactionIdentity, int | TryAgain]:
        ids = [identity.transactional_id for identity in group]
        nodes = await client.find_coordinators(CoordinatorKind.TRANSACTION, _GRANT, ids)
        return {identity: nodes[identity.transactional_id] for identity in group}

    def mark_moved(identity: TransactionIdentity) -> None:
        client.forget_coordinator(CoordinatorKind.TRANSACTION, identity.transactional_id)

    collected = await client.collect(identities, locate, ask, mark_moved)
    return [
        collected.answers.get(identity) or _unanswered(identity, collected.missing[identity])
        for identity in identities
    ]


def read_answer(code: int, transactional_id: str) -> Answer | TryAgain:
    """Return what an error code of EndTxn means. Raises `NotAuthorised`."""
    error = errors.for_code(code)
    if issubclass(error, errors.AuthorizationError):
        raise NotAuthorised(
            f"Kafka refused to end the transaction of {transactional_id} ({error_name(code)}): grant "
            f"WRITE on TransactionalId {transactional_id} to the driver's user. Nothing was changed"
        )
    answer = ANSWERS.get(error)
    if answer is None or answer is Answer.BUSY:
        return TryAgain(error_name(code), stale=answer is None)
    return answer


def _unanswered(identity: TransactionIdentity, reason: TryAgain) -> Answer:
    _log.warning("no answer yet to the end of %s: %s", identity.transactional_id, reason)
    busy = str(reason) == errors.ConcurrentTransactionsError.message
    return Answer.BUSY if busy else Answer.UNREACHABLE


# Describe.


@dataclass(frozen=True, slots=True)
class TxnDescription:
    """The state of a transactional id's latest transaction. Kafka keeps no earlier one."""

    state: str  # Kafka's word: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, ...
    producer_id: int
    epoch: int
    timeout_ms: int
    started_at: float | None  # seconds since 1970, by the broker's clock
    partitions: frozenset[TopicPartition]  # while ending: those still without a marker


async def describe(client: KafkaClient, ids: Iterable[str]) -> Mapping[str, TxnDescription | None]:
    """Describe transactional ids. None for an id that Kafka does not know. Raises `Unavailable`."""
    return (await _collect_descriptions(client, ids)).require_all("the state")


async def _collect_descriptions(
    client: KafkaClient, ids: Iterable[str]
) -> Collected[str, TxnDescription | None]:
    async def ask(
        node: int, group: Sequence[str]
    ) -> Mapping[str, TxnDescription | TryAgain | None]:
        request = admin.DescribeTransactionsRequest(transactional_ids=list(group))
        rows = (await client.send(node, request)).transaction_states
        return {row.transactional_id: _read_description(row) for row in rows}

    return await client.ask_coordinators(CoordinatorKind.TRANSACTION, _GRANT, ids, ask)


def _read_description(row: Any) -> TxnDescription | TryAgain | None:
    if errors.for_code(row.error_code) is errors.TransactionalIdNotFoundError:
        return None
    grant = f"DESCRIBE on TransactionalId {row.transactional_id}"
    again = check_error(row.error_code, f"the state of {row.transactional_id}", grant)
    if again is not None:
        return again
    started = row.transaction_start_time_ms
    return TxnDescription(
        state=row.transaction_state,
        producer_id=row.producer_id,
        epoch=row.producer_epoch,
        timeout_ms=row.transaction_timeout_ms,
        started_at=started / 1000 if started >= 0 else None,
        partitions=frozenset(
            (topic.topic, partition) for topic in row.topics for partition in topic.partitions
        ),
    )


# List.


@dataclass(frozen=True, slots=True)
class ListedTxn:
    transactional_id: str
    producer_id: int
    state: str


async def list_by_prefix(
    client: KafkaClient, prefix: str, states: Sequence[str] = OPEN_STATES
) -> list[ListedTxn]:
    """List transactions in these states whose id begins with `prefix`, on every broker.

    An empty `states` means every state: also transactions that are over and not yet forgotten. Kafka
    silently leaves out ids that the user may not DESCRIBE.

    A missing broker would hide a stray. So `TryAgain` is raised, and all brokers are asked again,
    unless every broker answers and no coordinator moves meanwhile. A broker that died has a successor
    by then.
    """
    before = await _read_coordinators(client)
    found = await client.gather(
        partial(_list_on_broker, client, node, prefix, states) for node in before.brokers
    )
    if await _read_coordinators(client) != before:
        raise TryAgain("the coordinators of transactions moved while being asked")
    return sorted(chain.from_iterable(found), key=lambda txn: txn.transactional_id)


async def _list_on_broker(
    client: KafkaClient, node: int, prefix: str, states: Sequence[str]
) -> list[ListedTxn]:
    request = admin.ListTransactionsRequest(
        state_filters=list(states),
        producer_id_filters=[],
        duration_filter=-1,
        transactional_id_pattern=re.escape(prefix) + ".*",
    )
    try:
        response = await client.send(node, request)
    except TryAgain as again:
        raise TryAgain(f"broker {node} did not list its transactions: {again}") from again
    again = check_error(response.error_code, f"the transactions of broker {node}", "DESCRIBE")
    if again is not None:
        raise TryAgain(f"broker {node} cannot list its transactions: {again}")
    # Brokers before 4.1 ignore the pattern and send all ids, so filter here too.
    return [
        ListedTxn(row.transactional_id, row.producer_id, row.transaction_state)
        for row in response.transaction_states
        if row.transactional_id.startswith(prefix)
    ]


@dataclass(frozen=True, slots=True)
class _Coordinators:
    brokers: frozenset[int]
    # Partition, leader and leader epoch. Empty if the user may not see them.
    leaders: frozenset[tuple[int, int, int]]


async def _read_coordinators(client: KafkaClient) -> _Coordinators:
    """Return who coordinates transactions now. Raises `TryAgain` if a part of them has nobody."""
    metadata = await client.metadata([_LOG_TOPIC])
    partitions = [partition for topic in metadata.topics for partition in topic.partitions]
    brokers = frozenset(broker.node_id for broker in metadata.brokers)
    leaderless = [part.partition_index for part in partitions if part.leader_id not in brokers]
    if leaderless:
        raise TryAgain(
            f"partitions {leaderless} of {_LOG_TOPIC} have no leader: transactions are hidden"
        )
    return _Coordinators(
        brokers,
        frozenset((part.partition_index, part.leader_id, part.leader_epoch) for part in partitions),
    )


# See whether a commit reached every partition.


class Progress(Enum):
    """How far a transaction is whose commit was answered with DONE."""

    SETTLED = "settled"  # every partition has its marker
    PENDING = "pending"  # markers are missing, or nobody can be asked whether they are
    TORN = "torn"  # called complete, but open or aborted: KAFKA-20734
    LOST = "lost"  # its topic was deleted, or deleted and created again


@dataclass(frozen=True, slots=True)
class Settlement:
    progress: Progress
    why: str
    hidden: bool = False  # from readers, by another transaction that is open before it


Commit = tuple[TransactionIdentity, Sequence[LastRecord]]


async def settlements(client: KafkaClient, commits: Sequence[Commit]) -> list[Settlement]:
    """Return for each commit answered with DONE whether it has reached every partition.

    This shows the state now. It does not wait for missing markers, so ask again.
    """
    ids = [identity.transactional_id for identity, _ in commits]
    described = await _collect_descriptions(client, ids)
    unfinished = {identity: _coordinator_progress(described, identity) for identity, _ in commits}
    complete = [records for identity, records in commits if unfinished[identity] is None]
    view = await _read_partitions(client, [record for records in complete for record in records])
    return [
        unfinished[identity] or _all_partitions_progress(view, identity, records)
        for identity, records in commits
    ]


def _coordinator_progress(
    described: Collected[str, TxnDescription | None], identity: TransactionIdentity
) -> Settlement | None:
    """Return how far the coordinator is with a commit. None if it has finished."""
    id_ = identity.transactional_id
    if id_ in described.missing:
        why = f"its coordinator did not answer: {described.missing[id_]}"
        return Settlement(Progress.PENDING, why)
    now = described.answers[id_]
    if now is None or now.producer_id != identity.producer_id or now.epoch > identity.epoch + 1:
        # The id expired, or has its next transaction or its next producer id (epochs end at 32767).
        # All of this can happen only after the commit is complete.
        return None
    if now.state == "CompleteCommit":
        return None
    if now.epoch == identity.epoch + 1 and now.state in ("Empty", "Ongoing"):
        return None  # the next transaction, of a client that keeps the epoch it was given
    if now.epoch == identity.epoch + 1 and now.state == "PrepareCommit":
        missing = ", ".join(f"{topic}-{number}" for topic, number in sorted(now.partitions))
        return Settlement(Progress.PENDING, f"markers are to be written to {missing or 'nothing'}")
    why = f"its coordinator took the commit, and now shows {now.state} at epoch {now.epoch}"
    return Settlement(Progress.TORN, why)


@dataclass(frozen=True, slots=True)
class _View:
    """What partitions show. The last two are read only where `stable` does not give the answer."""

    leaders: Leaders
    stable: Collected[TopicPartition, int | None]  # last stable offsets
    high: Collected[TopicPartition, int | None]  # high watermarks
    producers: Collected[TopicPartition, list[ProducerState] | None]


async def _read_partitions(client: KafkaClient, records: Sequence[LastRecord]) -> _View:
    leaders = Leaders(client)
    partitions = {record.topic_partition for record in records}
    stable = await end_offsets(client, partitions, READ_COMMITTED, leaders)
    behind = {
        record.topic_partition
        for record in records
        if (stable.answers.get(record.topic_partition) or 0) <= record.offset
        and record.topic_partition not in stable.missing
    }
    high = await end_offsets(client, behind, READ_UNCOMMITTED, leaders)
    try:
        producers = await producer_states(client, behind, leaders)
    except NotAuthorised as error:  # nothing else may need READ on the topic
        producers = Collected[TopicPartition, list[ProducerState] | None](
            {}, dict.fromkeys(behind, TryAgain(str(error)))
        )
    return _View(leaders, stable, high, producers)


def _all_partitions_progress(
    view: _View, identity: TransactionIdentity, records: Sequence[LastRecord]
) -> Settlement:
    """Combine the partitions of one transaction: the worst counts."""
    found = [_partition_progress(view, identity, record) for record in records]
    for progress in (Progress.TORN, Progress.LOST, Progress.PENDING):
        reasons = [settlement.why for settlement in found if settlement.progress is progress]
        if reasons:
            return Settlement(progress, "; ".join(reasons))
    hidden = any(settlement.hidden for settlement in found)
    return Settlement(Progress.SETTLED, "every partition has its marker", hidden)


def _partition_progress(
    view: _View, identity: TransactionIdentity, record: LastRecord
) -> Settlement:
    where = record.topic_partition
    for missing in (view.stable.missing, view.high.missing, view.producers.missing):
        if where in missing:
            return Settlement(Progress.PENDING, f"{record}: {missing[where]}")
    stable = view.stable.answers[where]
    if stable is None or view.leaders.topic_id(record.topic) != record.topic_id:
        return Settlement(Progress.LOST, f"{record}: the topic was deleted, or created again")
    if stable > record.offset:
        return Settlement(Progress.SETTLED, f"{record}: the last stable offset is {stable}")
    high = view.high.answers.get(where)
    if high is None or high <= record.offset:
        # A new leader may show less for a moment. If it lasts, the broker lost an acknowledged record.
        return Settlement(Progress.PENDING, f"{record}: the high watermark is {high}")
    for state in view.producers.answers.get(where) or ():
        since = state.open_since if state.producer_id == identity.producer_id else None
        if since is not None and since <= record.offset:
            why = f"producer {state.producer_id} is open there since {since}"
            return Settlement(Progress.TORN, f"{record}: {why}")
    why = f"{record}: only another transaction holds readers back"
    return Settlement(Progress.SETTLED, why, hidden=True)


async def end_offsets(
    client: KafkaClient, partitions: Collection[TopicPartition], isolation: int, leaders: Leaders
) -> Collected[TopicPartition, int | None]:
    """Find how far a reader can read: the last stable offset, or else the high watermark.

    None where there is no partition.
    """

    row = consumer.ListOffsetsRequest.ListOffsetsTopic

    def request(group: Sequence[TopicPartition]) -> Any:
        return consumer.ListOffsetsRequest(
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
            timeout_ms=int(client.seconds_left * 1000),
            min_version=2,  # the first that knows isolation levels
        )

    asked = ("offsets", "DESCRIBE")
    return await _ask_leaders(client, partitions, leaders, request, lambda part: part.offset, asked)


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition knows of a producer. `open_since`: first offset of its open transaction."""

    producer_id: int
    open_since: int | None


async def producer_states(
    client: KafkaClient, partitions: Collection[TopicPartition], leaders: Leaders
) -> Collected[TopicPartition, list[ProducerState] | None]:
    """List what each partition knows of its producers. None where there is no partition."""

    row = admin.DescribeProducersRequest.TopicRequest

    def request(group: Sequence[TopicPartition]) -> Any:
        topics = [row(name=name, partition_indexes=numbers) for name, numbers in by_topic(group)]
        return admin.DescribeProducersRequest(topics=topics)

    def read(part: Any) -> list[ProducerState]:
        return [_read_producer(state) for state in part.active_producers]

    return await _ask_leaders(client, partitions, leaders, request, read, ("producers", "READ"))


async def _ask_leaders(
    client: KafkaClient,
    partitions: Collection[TopicPartition],
    leaders: Leaders,
    request: Callable[[Sequence[TopicPartition]], Any],
    read: Callable[[Any], T],
    asked: tuple[str, str],
) -> Collected[TopicPartition, T | None]:
    """Ask the leader of each partition. `asked`: what for, and the right that it needs."""
    what, right = asked

    async def ask(
        node: int, group: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, T | TryAgain | None]:
        if node == NOWHERE:
            return dict.fromkeys(group)
        response = await client.send(node, request(group))
        return {
            (topic.name, part.partition_index): check_error(
                part.error_code, f"the {what} of {topic.name}", f"{right} on Topic {topic.name}"
            )
            or read(part)
            for topic in response.topics
            for part in topic.partitions
        }

    return await client.collect(partitions, leaders.locate, ask, leaders.mark_moved)


def _read_producer(state: Any) -> ProducerState:
    since = state.current_txn_start_offset
    return ProducerState(state.producer_id, since if since >= 0 else None)
