"""The driver's half of the Kafka sink on the wire.

Used from one thread at a time. Every call ends within the time limit; after a lost connection the next
call connects again. Errors are Poundlock's: `Unavailable` where a repeat may help, `NotAuthorised` with
the permission that is missing, `UsageError` for settings and brokers that cannot work.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from poundlock.errors import Unavailable
from poundlock.sinks.kafka import cluster, partitions, transactions
from poundlock.sinks.kafka import witness as witnesses
from poundlock.sinks.kafka.cluster import Broker, Config, GroupOffsets
from poundlock.sinks.kafka.kafka_python import api_key
from poundlock.sinks.kafka.partitions import Partition, ProducerState, Topic, Written
from poundlock.sinks.kafka.settlement import Progress, Settlement, settlements
from poundlock.sinks.kafka.transactions import (
    END_TXN_VERSION,
    Answer,
    Identity,
    OpenTxn,
    TxnDescription,
)
from poundlock.sinks.kafka.wire import Wire
from poundlock.sinks.kafka.witness import Evidence, Outcome

__all__ = [
    "END_TXN_VERSION",
    "Answer",
    "Broker",
    "Config",
    "Evidence",
    "GroupOffsets",
    "Identity",
    "KafkaClient",
    "OpenTxn",
    "Outcome",
    "Partition",
    "ProducerState",
    "Progress",
    "Settlement",
    "Topic",
    "TxnDescription",
    "Written",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GLANCE_SECONDS = 5.0  # a look at how far things are must not wait for a dead partition


class KafkaClient:
    """Ends, describes and proves transactions that other processes wrote."""

    def __init__(self, settings: Mapping[str, str], *, time_limit: float = 30.0):
        """Take librdkafka's settings and seconds for each call. Does not connect yet."""
        self._wire = Wire(settings, time_limit)

    def __repr__(self) -> str:
        return f"KafkaClient({self._wire.servers})"

    def __enter__(self) -> KafkaClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections. The next call opens them again."""
        self._wire.close()

    # Transactions, by their coordinators.

    def end(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Answer:
        """Commit or abort one transaction."""
        return self.end_many([Identity(transactional_id, producer_id, epoch)], commit)[0]

    def end_many(self, identities: Sequence[Identity], commit: bool) -> list[Answer]:
        """Commit or abort each transaction, many at a time. Answers stand in the order asked.

        To abort a stray, pass the producer id and epoch just described. An InitProducerId would abort
        it as well, but wipe out the coordinator's memory of the outcome.
        """
        try:
            return self._run(lambda wire: transactions.end(wire, identities, commit))
        except Unavailable as error:  # nobody could be asked at all
            _log.warning("%s", error)
            return [Answer.UNREACHABLE] * len(identities)

    def describe(self, ids: Collection[str]) -> dict[str, TxnDescription | None]:
        """Describe transactional ids; None for one that Kafka does not know."""
        found = self._run(lambda wire: transactions.describe(wire, ids))
        return dict(found.all("the state"))

    def list_open(self, prefix: str) -> list[OpenTxn]:
        """List the unfinished transactions, on all brokers, whose id begins with `prefix`.

        Kafka leaves out, without a word, ids that the user may not DESCRIBE.
        """
        return self._run(lambda wire: transactions.list_open(wire, prefix))

    def list_all(self, prefix: str) -> list[OpenTxn]:
        """List the transactions of such ids in any state, as long as Kafka remembers the id."""
        return self._wire.run(lambda: transactions.list_open(self._wire, prefix, states=()))

    def settled(self, identity: Identity, written: Sequence[Written]) -> Settlement:
        """Say whether a transaction whose commit was DONE has reached every partition."""
        return self.settled_many([(identity, written)])[0]

    def settled_many(
        self, handles: Sequence[tuple[Identity, Sequence[Written]]]
    ) -> list[Settlement]:
        """Say of each transaction whose commit was DONE whether it has reached every partition.

        A look at how things stand now, to be repeated: it does not wait long for what is missing.
        """
        return self._run(lambda wire: settlements(wire, handles), seconds=_GLANCE_SECONDS)

    # Transactions, by what they left in partitions.

    def witness(
        self, topic: str, topic_id: str, partition: int, offset: int, producer_id: int
    ) -> Evidence:
        """Ask the record at an offset whether its transaction was committed."""
        return self.witness_all(producer_id, [Written(topic, topic_id, partition, offset)])

    def witness_all(self, producer_id: int, written: Sequence[Written]) -> Evidence:
        """Ask the last record in every partition whether their transaction was committed."""
        return self._run(lambda wire: witnesses.witness_all(wire, written, producer_id))

    def outcome(self, identity: Identity, written: Sequence[Written]) -> Evidence:
        """Find out how a transaction ended whose EndTxn was CONTRADICTED or FORGOTTEN."""
        return self._run(lambda wire: witnesses.outcome(wire, identity, written))

    # Topics and partitions.

    def topics(self, names: Collection[str]) -> dict[str, Topic | None]:
        """Look at topics; None for one that does not exist."""
        return self._run(lambda wire: partitions.topics(wire, names))

    def topic_ids(self, names: Collection[str]) -> dict[str, str | None]:
        """Return the ids of topics; None for one that does not exist."""
        found = self.topics(names)
        return {name: topic.id if topic else None for name, topic in found.items()}

    def partition_counts(self, names: Collection[str]) -> dict[str, int | None]:
        """Return how many partitions topics have; None for one that does not exist."""
        found = self.topics(names)
        return {name: topic.partitions if topic else None for name, topic in found.items()}

    def last_stable_offsets(self, of: Collection[Partition]) -> dict[Partition, int | None]:
        """Return how far a read_committed reader can read; None where there is no partition."""
        found = self._run(lambda wire: partitions.last_stable_offsets(wire, of))
        return dict(found.all("the offsets"))

    def high_watermarks(self, of: Collection[Partition]) -> dict[Partition, int | None]:
        """Return how far any reader can read; None where there is no partition."""
        found = self._run(lambda wire: partitions.high_watermarks(wire, of))
        return dict(found.all("the offsets"))

    def describe_producers(
        self, of: Collection[Partition]
    ) -> dict[Partition, list[ProducerState] | None]:
        """Return what partitions know of their producers; None where there is no partition."""
        found = self._run(lambda wire: partitions.producers(wire, of))
        return dict(found.all("the producers"))

    # Consumer groups.

    def commit_group_offsets(self, group: str, positions: Mapping[Partition, int]) -> None:
        """Set a group's offsets. Raises `UsageError` if somebody is in the group."""
        self._run(lambda wire: cluster.commit_group_offsets(wire, group, positions))

    def stable_group_offsets(self, group: str, of: Collection[Partition]) -> GroupOffsets:
        """Read a group's offsets, and which of them an open transaction is about to change."""
        return self._run(lambda wire: cluster.stable_group_offsets(wire, group, of))

    # The cluster.

    def brokers(self) -> dict[int, Broker]:
        """Ask every broker for its release, versions and features."""
        return self._run(cluster.brokers)

    def features(self) -> dict[str, int]:
        """Return the finalized features, by the broker that knows least."""
        known = [broker.features for broker in self.brokers().values()]
        return {
            name: min(features.get(name, 0) for features in known)
            for name in set[str]().union(*known)
        }

    def max_version(self, api: str) -> int:
        """Return the highest version of an API ("EndTxn") that every broker speaks; -1 for none."""
        key = api_key(api)
        return min(broker.apis.get(key, (-1, -1))[1] for broker in self.brokers().values())

    def broker_config(self, names: Sequence[str]) -> Config:
        """Read settings of the brokers."""
        return self._run(lambda wire: cluster.broker_config(wire, names))

    def topic_config(self, topics: Sequence[str], names: Sequence[str]) -> dict[str, Config]:
        """Read settings of topics."""
        return self._run(lambda wire: cluster.topic_config(wire, topics, names))

    def _run(self, work: Callable[[Wire], Awaitable[T]], seconds: float | None = None) -> T:
        return self._wire.run(lambda: work(self._wire), seconds)
