"""The Kafka sink: its options, its checks, and what its receipts hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Receipt, checked_name
from poundlock.core.participant import Column, Commitment, Semantic, frame_mismatch
from poundlock.core.sparksql import moment_text, row_json
from poundlock.errors import UsageError
from poundlock.sinks.kafka import cluster, witness
from poundlock.sinks.kafka.branches import NEVER_MS, KafkaBranches
from poundlock.sinks.kafka.settings import check_settings, client_settings
from poundlock.sinks.kafka.transactions import END_TXN_VERSION
from poundlock.sinks.kafka.types import LastRecord
from poundlock.sinks.kafka.witness import Evidence
from poundlock.sinks.kafka.writer import KafkaWriter

_HEADERS = "array<struct<key:string,value:binary>>"
_AS_TEXT = ("tinyint", "smallint", "int", "bigint", "boolean", "float", "double", "date")


class Kafka(KafkaBranches):
    """A Kafka topic, or several.

    Args:
        topic: The topic. None: each row names its own in `topic_column`.
        bootstrap_servers: `host:port`, several with commas; or `env:NAME` or `file:PATH` with them.
        name: The sink's name in its pipeline; the topic's by default.
        key: Column for the key. Numbers and dates are written as text.
        value: Column for the value, or "json" for the whole row as JSON.
        headers, partition, timestamp: Columns for these, none by default.
        topic_column: Column with the topic of each row, where `topic` is None.
        semantic: "exactly_once", "at_least_once" or "none".
        transaction_timeout: Seconds, or "never" (Kafka 4.1 and later, where the brokers allow it). By
            default as long as the brokers allow.
        flush_timeout: Seconds that a task waits until its rows are acknowledged.
        settings: Any setting of librdkafka, security included.

    If neither key nor value is named, the columns `key`, `value`, `headers`, `partition` and
    `timestamp` are used if the DataFrame has them, as in Spark's own sink.
    """

    commitment = Commitment.TRANSACTIONAL

    def __init__(
        self,
        topic: str | None = None,
        *,
        bootstrap_servers: str,
        name: str | None = None,
        key: str | None = None,
        value: str | None = None,
        headers: str | None = None,
        partition: str | None = None,
        timestamp: str | None = None,
        topic_column: str = "topic",
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
        transaction_timeout: float | str | None = None,
        flush_timeout: float = 300.0,
        settings: Mapping[str, str] | None = None,
    ):
        label = name or (topic or "topics").replace(".", "-")
        super().__init__(
            checked_name("sink name", label), client_settings(bootstrap_servers, settings)
        )
        self.topic = topic
        self.semantic = Semantic(semantic)
        check_settings(self.settings, transactional=self.semantic is Semantic.EXACTLY_ONCE)
        self.flush_timeout = flush_timeout
        self._topic_column = topic_column
        self._columns = {
            "key": key,
            "value": value,
            "headers": headers,
            "partition": partition,
            "timestamp": timestamp,
        }
        self.asked_timeout_ms = _requested_ms(transaction_timeout)

    def __repr__(self) -> str:
        return f"Kafka({self.topic!r}, name={self.name!r})"

    def reader_settings(self) -> str:
        exact = self.semantic is Semantic.EXACTLY_ONCE
        return "isolation.level=read_committed" if exact else "nothing"

    # What the DataFrame must have.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        wanted: dict[str, str] = {}
        problems: list[str] = []
        for role, name in self._columns_by_role(columns).items():
            if role == "value" and name == "json" and "json" not in columns:
                wanted["value"] = f"CAST({row_json(columns)} AS BINARY)"
                continue
            if name not in columns:
                problems.append(f"there is no column {name!r} for the {role}")
                continue
            expression = _EXPRESSIONS[role](columns[name])
            if expression is not None:
                wanted[role] = expression
            else:
                problems.append(
                    f"column {name!r} has type {columns[name].type}, but the {role} needs "
                    f"{_ACCEPTED[role]}"
                )
        if problems:
            raise frame_mismatch(self.name, problems, columns)
        return wanted

    def _columns_by_role(self, columns: Mapping[str, Column]) -> dict[str, str]:
        named = self._columns
        if named["key"] is None and named["value"] is None:
            named = {
                role: name or (role if role in columns else None) for role, name in named.items()
            }
            named["value"] = named["value"] or "value"
        if self.topic is None:
            named = named | {"topic": self._topic_column}
        return {role: name for role, name in named.items() if name is not None}

    def check_dead_letters(self) -> None:
        """Check for a fixed topic. A dead letter is one JSON text without a key."""
        if self.topic is None:
            raise UsageError("a sink for bad rows needs a fixed topic: give topic=", sink=self.name)

    # What the brokers must offer.

    def preflight(self) -> list[str]:
        warnings = self._check_topic()
        if self.semantic is Semantic.EXACTLY_ONCE:
            warnings += self._check_brokers()
            warnings += self.check_time_out()
        return warnings

    def _check_topic(self) -> list[str]:
        if self.topic is None:
            return []
        found = self.client.run(cluster.topics, [self.topic])[self.topic]
        if found is None:
            raise UsageError(
                f"topic {self.topic!r} does not exist at {self.settings['bootstrap.servers']}. "
                "Create it with the partitions and replication that you want",
                sink=self.name,
            )
        if found.replication < 2:
            return [
                f"topic {self.topic} has {found.replication} replica: what its broker loses is lost"
            ]
        return []

    def _check_brokers(self) -> list[str]:
        warnings = list[str]()
        brokers = self.client.run(cluster.brokers).values()
        version = cluster.lowest_feature(brokers, "transaction.version")
        speaks = cluster.max_version(brokers, "EndTxn")
        if version < 2 or speaks < END_TXN_VERSION:
            raise UsageError(
                f"the brokers have transaction.version {version} and EndTxn up to version "
                f"{speaks}. Exactly-once needs 2 and {END_TXN_VERSION}, because only with these "
                "can a committed transaction be told from an aborted one. Use Kafka 4.1 or later "
                "and upgrade the feature: kafka-features.sh upgrade --feature "
                "transaction.version=2",
                sink=self.name,
            )
        releases = {broker.release[:2] for broker in brokers}
        if (4, 3) in releases:
            warnings.append(
                "Kafka 4.3.0 and 4.3.1 tear committed transactions when a partition has no leader "
                "(KAFKA-20734): use another release"
            )
        if (4, 0) in releases:
            warnings.append(
                "Kafka 4.0.0 answers wrongly about transactions that timed out (KAFKA-19367), and no "
                "broker tells its patch level: be sure to run 4.0.2 or later"
            )
        name = "transaction.state.log.replication.factor"
        replication = self.client.run(cluster.broker_config, [name])
        if replication.smallest(name, 3) < 3:
            warnings.append(
                f"{name} is below 3: a broker that dies for good takes the state of transactions "
                "with it"
            )
        return warnings

    # In a task.

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        texts = [json.dumps(dead_letter).encode() for dead_letter in dead_letters.to_pylist()]
        return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary())})

    def begin(self, branch: Branch) -> KafkaWriter:
        return KafkaWriter(self, branch)

    # On the driver.

    def annotate(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        # A topic that is deleted and created again has the same name and offsets, but another id.
        handles: list[Mapping[str, Any]] = [receipt.handle for receipt in receipts]
        names = [list[str](handle["written"]) for handle in handles]
        topics = self.client.run(cluster.topics, set[str]().union(*names))
        ids = {name: topic.id if topic else None for name, topic in topics.items()}
        return [
            replace(receipt, handle={**handle, "topics": {name: ids[name] for name in mine}})
            for receipt, handle, mine in zip(receipts, handles, names, strict=True)
        ]

    def last_records(self, receipt: Receipt) -> list[LastRecord]:
        handle: Mapping[str, Any] = receipt.handle
        topics = handle.get("topics", {})
        return [
            LastRecord(topic, topics.get(topic) or "", partition, last)
            for topic, (partitions, lasts) in handle["written"].items()
            for partition, last in zip(partitions, lasts, strict=True)
        ]

    def witness(self, receipt: Receipt) -> Evidence:
        handle: Mapping[str, Any] = receipt.handle
        records = self.last_records(receipt)
        return self.client.run(witness.ask_records, records, handle["producer_id"])


def _requested_ms(timeout: float | str | None) -> int | None:
    if timeout is None:
        return None
    if timeout == "never":
        return NEVER_MS
    try:
        milliseconds = int(float(timeout) * 1000)
    except ValueError:
        milliseconds = 0
    if not 1000 <= milliseconds < NEVER_MS:
        raise UsageError(f"transaction_timeout={timeout!r}: give seconds, at least 1, or 'never'")
    return milliseconds


def _bytes(column: Column) -> str | None:
    if column.type == "binary":
        return column.sql
    return f"CAST({column.sql} AS BINARY)" if column.type == "string" else None


def _text_bytes(column: Column) -> str | None:
    if column.type in ("timestamp", "timestamp_ntz"):
        return f"CAST({moment_text(column.sql, column.type)} AS BINARY)"
    if column.type in _AS_TEXT or column.type.startswith("decimal"):
        return f"CAST(CAST({column.sql} AS STRING) AS BINARY)"
    return _bytes(column)


def _milliseconds(column: Column) -> str | None:
    if column.type == "bigint":
        return column.sql
    if column.type == "timestamp_ntz":
        return f"unix_millis(CAST({column.sql} AS TIMESTAMP))"
    return f"unix_millis({column.sql})" if column.type == "timestamp" else None


_EXPRESSIONS = {
    "topic": lambda column: column.sql if column.type == "string" else None,
    "key": _text_bytes,
    "value": _bytes,
    "headers": lambda column: column.sql if column.type == _HEADERS else None,
    "partition": lambda column: (
        f"CAST({column.sql} AS INT)" if column.type in ("int", "smallint", "tinyint") else None
    ),
    "timestamp": _milliseconds,
}
_ACCEPTED = {
    "topic": "string",
    "key": "string, binary, a number, a date or a timestamp",
    "value": "string or binary (or value='json' for the whole row)",
    "headers": _HEADERS,
    "partition": "int",
    "timestamp": "timestamp, or bigint milliseconds",
}
