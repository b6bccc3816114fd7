"""The driver's half of the Kafka sink on the wire.

Used from one thread at a time. Every call ends within the time limit; after a lost connection the next
call connects again. Errors are Poundlock's: `Unavailable` where a repeat may help, `NotAuthorised` with
the permission that is missing, `UsageError` for settings and brokers that cannot work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from poundlock.sinks import _kafka_cluster as cluster
from poundlock.sinks import _kafka_partitions as partitions
from poundlock.sinks import _kafka_transactions as transactions
from poundlock.sinks import _kafka_witness as witnesses
from poundlock.sinks._kafka_cluster import Broker, Config, GroupOffsets
from poundlock.sinks._kafka_partitions import Partition, ProducerState, Topic, Written
from poundlock.sinks._kafka_python import api_key
from poundlock.sinks._kafka_transactions import (
    END_TXN_VERSION,
    Answer,
    Identity,
    OpenTxn,
    Progress,
    Settlement,
    TxnDescription,
)
from poundlock.sinks._kafka_wire import Wire
from poundlock.sinks._kafka_witness import Evidence, Outcome

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

        Never raises `Unavailable`: what could not be asked is UNREACHABLE, one by one. To abort a
        stray, pass the producer id and epoch just described; an InitProducerId would abort as well,
        but wipe out the coordinator's memory of the outcome.
        """
        return self._wire.run(transactions.end(self._wire, identities, commit))

    def describe(self, ids: Iterable[str]) -> dict[str, TxnDescription | None]:
        """Describe transactional ids; None for one that Kafka does not know."""

        async def work() -> dict[str, TxnDescription | None]:
            return dict((await transactions.describe(self._wire, ids)).all("the state"))

        return self._wire.run(work())

    def list_open(self, prefix: str) -> list[OpenTxn]:
        """List the unfinished transactions, on all brokers, whose id begins with `prefix`.

        Kafka leaves out, without a word, ids that the user may not DESCRIBE.
        """
        return self._wire.run(transactions.list_open(self._wire, prefix))

    def settled(self, identity: Identity, written: Sequence[Written]) -> Settlement:
        """Say whether a transaction whose commit was DONE has reached every partition."""
        return self.settled_many([(identity, written)])[0]

    def settled_many(
        self, handles: Sequence[tuple[Identity, Sequence[Written]]]
    ) -> list[Settlement]:
        """Say of each transaction whose commit was DONE whether it has reached every partition."""
        return self._wire.run(transactions.settlements(self._wire, handles), _GLANCE_SECONDS)

    # Transactions, by what they left in partitions.

    def witness(
        self, topic: str, topic_id: str, partition: int, offset: int, producer_id: int
    ) -> Evidence:
        """Ask the record at an offset whether its transaction was committed."""
        written = Written(topic, topic_id, partition, offset)
        return self._wire.run(witnesses.witness(self._wire, written, producer_id))

    def witness_all(self, producer_id: int, written: Sequence[Written]) -> Evidence:
        """Ask the last record in every partition whether their transaction was committed."""

        async def work() -> Evidence:
            parts = [await witnesses.witness(self._wire, part, producer_id) for part in written]
            return witnesses.together(parts)

        return self._wire.run(work())

    def outcome(self, identity: Identity, written: Sequence[Written]) -> Evidence:
        """Find out how a transaction ended whose EndTxn was CONTRADICTED or FORGOTTEN."""
        return self._wire.run(witnesses.outcome(self._wire, identity, written))

    # Topics and partitions.

    def topics(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """Look at topics; None for one that does not exist."""
        return self._wire.run(partitions.topics(self._wire, names))

    def topic_ids(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the ids of topics; None for one that does not exist."""
        found = self.topics(names)
        return {name: topic.id if topic else None for name, topic in found.items()}

    def partition_counts(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return how many partitions topics have; None for one that does not exist."""
        found = self.topics(names)
        return {name: topic.partitions if topic else None for name, topic in found.items()}

    def last_stable_offsets(self, of: Iterable[Partition]) -> dict[Partition, int | None]:
        """Return how far a read_committed reader can read; None where there is no partition."""
        return self._offsets(of, committed=True)

    def high_watermarks(self, of: Iterable[Partition]) -> dict[Partition, int | None]:
        """Return how far any reader can read; None where there is no partition."""
        return self._offsets(of, committed=False)

    def describe_producers(
        self, of: Iterable[Partition]
    ) -> dict[Partition, list[ProducerState] | None]:
        """Return what partitions know of their producers; None where there is no partition."""

        async def work() -> dict[Partition, list[ProducerState] | None]:
            return dict((await partitions.producers(self._wire, of)).all("the producers"))

        return self._wire.run(work())

    def _offsets(self, of: Iterable[Partition], *, committed: bool) -> dict[Partition, int | None]:
        async def work() -> dict[Partition, int | None]:
            found = await partitions.offsets(self._wire, of, committed=committed)
            return dict(found.all("the offsets"))

        return self._wire.run(work())

    # Consumer groups.

    def commit_group_offsets(self, group: str, positions: Mapping[Partition, int]) -> None:
        """Set a group's offsets. Raises `UsageError` if somebody is in the group."""
        self._wire.run(cluster.commit_group_offsets(self._wire, group, positions))

    def stable_group_offsets(self, group: str, of: Iterable[Partition]) -> GroupOffsets:
        """Read a group's offsets, and which of them an open transaction is about to change."""
        return self._wire.run(cluster.stable_group_offsets(self._wire, group, of))

    # The cluster.

    def brokers(self) -> dict[int, Broker]:
        """Ask every broker for its release, versions and features."""
        return self._wire.run(cluster.brokers(self._wire))

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
        return self._wire.run(cluster.broker_config(self._wire, names))

    def topic_config(self, topics: Sequence[str], names: Sequence[str]) -> dict[str, Config]:
        """Read settings of topics."""
        return self._wire.run(cluster.topic_config(self._wire, topics, names))


_GLANCE_SECONDS = 5.0  # a look at how far things are must not wait for a dead partition
