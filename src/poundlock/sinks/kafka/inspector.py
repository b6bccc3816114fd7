"""Kafka as an operator inspects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from poundlock.core.inspector import Ended, Inspector, OpenBranch
from poundlock.core.model import Json, Namespace, Receipt, Stray
from poundlock.sinks.kafka import transactions
from poundlock.sinks.kafka.branches import (
    PREFIX,
    KafkaBranches,
    parse_transactional_id,
    shows_commit,
    stray_of,
)
from poundlock.sinks.kafka.offsets import GroupOffsetsParticipant
from poundlock.sinks.kafka.sink import Kafka


class KafkaInspector(Inspector):
    """Shows every transaction of Poundlock that the brokers hold open."""

    system = "Kafka"

    def __init__(self, settings: Mapping[str, str]):
        self._settings = dict(settings)
        self._made: list[Kafka] = []
        self._client = self._sink("any").client

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        listed = self._client.run(transactions.list_by_prefix, f"{PREFIX}.")
        ids = [txn.transactional_id for txn in listed]
        described = self._client.run(transactions.describe, ids)
        found: list[OpenBranch] = []
        for id_ in ids:
            parsed, now = parse_transactional_id(id_), described[id_]
            if parsed is None or now is None:
                continue
            if namespace in (None, parsed.namespace):
                stray = stray_of(parsed.sink, id_, parsed.lane.generation, now)
                found.append(OpenBranch(parsed.namespace, stray))
        return found

    def ended(self, receipts: Sequence[Receipt]) -> dict[str, Ended]:
        described = self._client.run(transactions.describe, [it.id for it in receipts])
        return {
            receipt.id: Ended(now.state, committed)
            for receipt in receipts
            if (now := described[receipt.id]) is not None
            and (committed := shows_commit(now, receipt)) is not None
        }

    def participant(self, branch: Receipt | Stray) -> KafkaBranches:
        if "offsets" in branch.handle:
            group = str(branch.handle.get("group", ""))
            return GroupOffsetsParticipant(branch.sink, group, self._settings)
        return self._sink(branch.sink)

    def describe(self, id: str) -> dict[str, Json] | None:
        described = self._client.run(transactions.describe, [id])[id]
        if described is None:
            return None
        known: dict[str, Json] = asdict(described)
        known["partitions"] = [[topic, number] for topic, number in sorted(described.partitions)]
        return known

    def close(self) -> None:
        for made in self._made:
            made.close()

    def _sink(self, name: str) -> Kafka:
        servers = self._settings["bootstrap.servers"]
        self._made.append(Kafka(bootstrap_servers=servers, name=name, settings=self._settings))
        return self._made[-1]
