"""The driver's Kafka client for tests: questions as methods, and some that only tests ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from poundlock.sinks.kafka import cluster, offsets, transactions, witness
from poundlock.sinks.kafka.branches import end_transactions
from poundlock.sinks.kafka.client import KafkaClient
from poundlock.sinks.kafka.cluster import READ_COMMITTED, READ_UNCOMMITTED, Leaders
from poundlock.sinks.kafka.transactions import Answer, ListedTxn, TxnDescription
from poundlock.sinks.kafka.types import LastRecord, TopicPartition, TransactionIdentity
from poundlock.sinks.kafka.witness import Evidence, Outcome

# What the states of a transaction say about it. Other states say nothing.
_OUTCOMES = {
    "Ongoing": Outcome.OPEN,
    "PrepareCommit": Outcome.COMMITTED,
    "CompleteCommit": Outcome.COMMITTED,
    "PrepareAbort": Outcome.ABORTED,
    "CompleteAbort": Outcome.ABORTED,
}


class Probe(KafkaClient):
    """A client for tests."""

    # Transactions.

    def end(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Answer:
        identity = TransactionIdentity(transactional_id, producer_id, epoch)
        return self.end_many([identity], commit)[0]

    def end_many(self, identities: Sequence[TransactionIdentity], commit: bool) -> list[Answer]:
        return end_transactions(self, identities, commit=commit)

    def describe(self, ids: Collection[str]) -> Mapping[str, TxnDescription | None]:
        return self.run(transactions.describe, ids)

    def list_open(self, prefix: str) -> list[ListedTxn]:
        return self.run(transactions.list_by_prefix, prefix)

    def settled(
        self, identity: TransactionIdentity, written: Sequence[LastRecord]
    ) -> transactions.Settlement:
        return self.run_briefly(transactions.settlements, [(identity, written)])[0]

    def witness_all(self, producer_id: int, written: Sequence[LastRecord]) -> Evidence:
        return self.run(witness.ask_records, written, producer_id)

    def witness(
        self, topic: str, topic_id: str, partition: int, offset: int, producer_id: int
    ) -> Evidence:
        return self.witness_all(producer_id, [LastRecord(topic, topic_id, partition, offset)])

    def outcome(self, identity: TransactionIdentity, written: Sequence[LastRecord]) -> Evidence:
        """Find out how a transaction ended, from its coordinator and from its own records.

        The coordinator knows until the id is used again. The records must agree with it. A decision
        counts when every partition has its marker; before that the transaction is OPEN.
        """
        id_ = identity.transactional_id
        remembered = read_outcome(self.describe([id_])[id_], identity)
        parts = [self.witness_all(identity.producer_id, [part]) for part in written]
        seen = witness.combine(parts)
        if remembered.outcome is Outcome.UNKNOWN:
            return Evidence(seen.outcome, f"{remembered.why}; {seen.why}")
        if any(part.outcome is Outcome.OPEN for part in parts):
            return Evidence(Outcome.OPEN, f"{remembered.why}; {seen.why}")
        if all(part.outcome is remembered.outcome or part.gone for part in parts):
            return Evidence(remembered.outcome, f"{remembered.why}; {seen.why}")
        return Evidence(Outcome.UNKNOWN, f"{remembered.why}, but {seen.why}")

    # Topics and partitions.

    def topics(self, names: Collection[str]) -> dict[str, cluster.Topic | None]:
        return self.run(cluster.topics, names)

    def topic_ids(self, names: Collection[str]) -> dict[str, str | None]:
        return {name: topic.id if topic else None for name, topic in self.topics(names).items()}

    def partition_counts(self, names: Collection[str]) -> dict[str, int | None]:
        found = self.topics(names)
        return {name: topic.partitions if topic else None for name, topic in found.items()}

    def last_stable_offsets(self, of: Collection[TopicPartition]) -> dict:
        leaders = Leaders(self)
        found = self.run(transactions.end_offsets, of, READ_COMMITTED, leaders)
        return dict(found.require_all("the offsets"))

    def high_watermarks(self, of: Collection[TopicPartition]) -> dict:
        leaders = Leaders(self)
        found = self.run(transactions.end_offsets, of, READ_UNCOMMITTED, leaders)
        return dict(found.require_all("the offsets"))

    def describe_producers(self, of: Collection[TopicPartition]) -> dict:
        found = self.run(transactions.producer_states, of, Leaders(self))
        return dict(found.require_all("the producers"))

    # Consumer groups.

    def commit_group_offsets(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        self.run(offsets.commit_offsets, group, positions)

    def stable_group_offsets(
        self, group: str, of: Collection[TopicPartition]
    ) -> offsets.StableOffsets:
        return self.run(offsets.read_stable_offsets, group, of)

    # The cluster.

    def brokers(self) -> dict[int, cluster.Broker]:
        return self.run(cluster.brokers)

    def features(self) -> dict[str, int]:
        known = self.brokers().values()
        names = {name for broker in known for name in broker.features}
        return {name: cluster.lowest_feature(known, name) for name in names}

    def max_version(self, api: str) -> int:
        return cluster.max_version(self.brokers().values(), api)

    def broker_config(self, names: Sequence[str]) -> cluster.Config:
        return self.run(cluster.broker_config, names)


def read_outcome(now: TxnDescription | None, identity: TransactionIdentity) -> Evidence:
    """Read the coordinator's description as an outcome of this transaction, and of no later one."""
    if now is None:
        return Evidence(Outcome.UNKNOWN, f"{identity.transactional_id} is not known any more")
    why = f"{identity.transactional_id} is {now.state}, epoch {now.epoch} after {identity.epoch}"
    steps = now.epoch - identity.epoch if now.producer_id == identity.producer_id else None
    # Version 5 and a time-out raise the epoch by one. A client's older version leaves it. An open
    # transaction at the next epoch is the next one.
    ours = steps == 0 or (steps == 1 and now.state != "Ongoing")
    return Evidence(_OUTCOMES.get(now.state, Outcome.UNKNOWN) if ours else Outcome.UNKNOWN, why)
