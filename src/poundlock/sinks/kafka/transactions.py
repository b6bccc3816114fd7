"""Transactions as their coordinators see them: end, describe, list.

`EndTxn` is always sent in version 5, never in another, for the answers of version 5 alone can be
told apart, and mixing versions turns true answers into false ones: a repeat in version 4 of a commit
in version 5 answers PRODUCER_FENCED although it was committed, and version 4 can commit the next
transaction of the same epoch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from poundlock.errors import NotAuthorised
from poundlock.sinks.kafka.kafka_python import admin, error_name, errors, producer
from poundlock.sinks.kafka.wire import Again, Collected, Kind, Wire, judge

END_TXN_VERSION = 5
_LOG_TOPIC = "__transaction_state"  # where coordinators keep their transactions
_OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")

_log = logging.getLogger(__name__)


class Answer(Enum):
    """What the coordinator's answer to EndTxn means, for the transaction it was asked about."""

    DONE = "done"  # ended as asked, now or before
    CONTRADICTED = "contradicted"  # ended the other way, or nothing was ever written
    FORGOTTEN = "forgotten"  # the coordinator no longer knows: ask the witness
    BUSY = "busy"  # an earlier end is still being carried out: ask again
    UNREACHABLE = "unreachable"  # no answer: the outcome is unknown, and asking again is safe


# The whole table; a code that is not in it says nothing about the transaction.
ANSWERS: Mapping[type[Exception], Answer] = {
    errors.NoError: Answer.DONE,
    errors.InvalidTxnStateError: Answer.CONTRADICTED,
    errors.ProducerFencedError: Answer.FORGOTTEN,
    errors.InvalidProducerEpochError: Answer.FORGOTTEN,
    errors.InvalidProducerIdMappingError: Answer.FORGOTTEN,
    errors.TransactionalIdNotFoundError: Answer.FORGOTTEN,
    errors.ConcurrentTransactionsError: Answer.BUSY,
}


class Identity(NamedTuple):
    """One transaction of Kafka: valid for exactly one, as every end in version 5 raises the epoch."""

    transactional_id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TxnDescription:
    """The last state of a transactional id. There is no history: an id shows its latest use only."""

    state: str  # Kafka's word: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, ...
    producer_id: int
    epoch: int
    timeout_ms: int
    started_at: float | None  # seconds since 1970, by the broker's clock
    partitions: frozenset[tuple[str, int]]  # while ending: those still without a marker


@dataclass(frozen=True, slots=True)
class OpenTxn:
    transactional_id: str
    producer_id: int
    state: str


def meaning(code: int, transactional_id: str) -> Answer | Again:
    """Say what an error code of EndTxn means. Raises `NotAuthorised`."""
    error = errors.for_code(code)
    if issubclass(error, errors.AuthorizationError):
        raise NotAuthorised(
            f"Kafka refused to end the transaction of {transactional_id} ({error_name(code)}): grant "
            f"WRITE on TransactionalId {transactional_id} to the driver's user. Nothing was changed"
        )
    answer = ANSWERS.get(error)
    if answer is None or answer is Answer.BUSY:
        return Again(error_name(code), stale=answer is None)
    return answer


async def end(wire: Wire, identities: Sequence[Identity], commit: bool) -> list[Answer]:
    """Commit or abort each transaction; many are in flight at a time."""

    async def one(node: int, identity: Identity) -> Answer | Again:
        request = producer.EndTxnRequest(
            *identity, commit, min_version=END_TXN_VERSION, max_version=END_TXN_VERSION
        )
        try:
            response = await wire.send(node, request)
        except Again as again:
            return again
        return meaning(response.error_code, identity.transactional_id)

    async def ask(node: int, group: Sequence[Identity]) -> Mapping[Identity, Answer | Again]:
        answers = await wire.gather(partial(one, node, identity) for identity in group)
        return dict(zip(group, answers, strict=True))

    async def locate(group: Sequence[Identity]) -> Mapping[Identity, int | Again]:
        homes = await _homes(wire, [identity.transactional_id for identity in group])
        return {identity: homes[identity.transactional_id] for identity in group}

    collected = await wire.collect(
        identities, locate, ask, lambda identity: _forget(wire, identity.transactional_id)
    )
    return [
        collected.answers.get(it) or _unanswered(it, collected.missing[it]) for it in identities
    ]


def _unanswered(identity: Identity, reason: Again) -> Answer:
    _log.warning("no answer yet to the end of %s: %s", identity.transactional_id, reason)
    busy = str(reason) == errors.ConcurrentTransactionsError.message
    return Answer.BUSY if busy else Answer.UNREACHABLE


async def describe(wire: Wire, ids: Iterable[str]) -> Collected[str, TxnDescription | None]:
    """Describe transactional ids; None for one that its coordinator does not know."""

    async def ask(node: int, group: Sequence[str]) -> Mapping[str, TxnDescription | Again | None]:
        response = await wire.send(
            node, admin.DescribeTransactionsRequest(transactional_ids=list(group))
        )
        return {row.transactional_id: _described(row) for row in response.transaction_states}

    return await wire.collect(ids, partial(_homes, wire), ask, partial(_forget, wire))


def _described(row: Any) -> TxnDescription | Again | None:
    if errors.for_code(row.error_code) is errors.TransactionalIdNotFoundError:
        return None
    grant = f"DESCRIBE on TransactionalId {row.transactional_id}"
    again = judge(row.error_code, f"the state of {row.transactional_id}", grant)
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


async def list_open(wire: Wire, prefix: str, states: Sequence[str] = _OPEN) -> list[OpenTxn]:
    """List unfinished transactions whose id begins with `prefix`, on every broker.

    No states at all mean every state, so also what is over and not yet forgotten.

    A broker left out would hide a stray, so either all answered, and no coordinator moved meanwhile,
    or `Again` is raised and all is asked anew: a broker that died has a successor by then.
    """
    before = await _coordinators(wire)
    found = await wire.gather(
        partial(_list_on, wire, node, prefix, states) for node in before.brokers
    )
    if await _coordinators(wire) != before:
        raise Again("the coordinators of transactions moved while being asked")
    return sorted(chain.from_iterable(found), key=lambda it: it.transactional_id)


async def _list_on(wire: Wire, node: int, prefix: str, states: Sequence[str]) -> list[OpenTxn]:
    request = admin.ListTransactionsRequest(
        state_filters=list(states),
        producer_id_filters=[],
        duration_filter=-1,
        transactional_id_pattern=re.escape(prefix) + ".*",
    )
    try:
        response = await wire.send(node, request)
    except Again as again:
        raise Again(f"broker {node} did not list its transactions: {again}") from again
    again = judge(response.error_code, f"the transactions of broker {node}", "DESCRIBE")
    if again is not None:
        raise Again(f"broker {node} cannot list its transactions: {again}")
    # Brokers before 4.1 take no pattern and send all ids, so the choice is made here in any case.
    return [
        OpenTxn(row.transactional_id, row.producer_id, row.transaction_state)
        for row in response.transaction_states
        if row.transactional_id.startswith(prefix)
    ]


@dataclass(frozen=True, slots=True)
class _Coordinators:
    brokers: frozenset[int]
    leaders: frozenset[tuple[int, int, int]]  # partition, leader, leader epoch; empty: not allowed


async def _coordinators(wire: Wire) -> _Coordinators:
    """Say who coordinates transactions now. Raises `Again` if a part of them has nobody."""
    metadata = await wire.metadata([_LOG_TOPIC])
    partitions = [partition for topic in metadata.topics for partition in topic.partitions]
    brokers = frozenset(broker.node_id for broker in metadata.brokers)
    hidden = [part.partition_index for part in partitions if part.leader_id not in brokers]
    if hidden:
        raise Again(f"partitions {hidden} of {_LOG_TOPIC} have no leader: transactions are hidden")
    return _Coordinators(
        brokers,
        frozenset((part.partition_index, part.leader_id, part.leader_epoch) for part in partitions),
    )


async def _homes(wire: Wire, ids: Sequence[str]) -> Mapping[str, int | Again]:
    return await wire.homes(Kind.TRANSACTION, "DESCRIBE and WRITE on its TransactionalId", ids)


def _forget(wire: Wire, transactional_id: str) -> None:
    wire.forget(Kind.TRANSACTION, transactional_id)
