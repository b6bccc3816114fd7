"""Kafka: rows into topics, exactly once, by transactions that any process can commit.

A task writes with librdkafka, in one transaction of its own, and leaves it open. Its producer id and
epoch are the receipt, with the last offset in each partition as the witness. The driver commits with a
raw EndTxn, version 5: see `poundlock.sinks.kafka.branches`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from poundlock.core.model import Branch, Receipt, checked_name
from poundlock.core.participant import Column, Commitment, PreparedBranch, Semantic, Writer
from poundlock.core.sparksql import to_json
from poundlock.errors import BadRow, PoundlockError, Rejected, UsageError
from poundlock.sinks.kafka.branches import (
    NEVER_MS,
    KafkaBranches,
    client_settings,
    transactional_id,
)
from poundlock.sinks.kafka.client import END_TXN_VERSION, Evidence, Written
from poundlock.sinks.kafka.producer import ArrowProducer, check_settings

logger = logging.getLogger("poundlock")

_DEFAULT_TIMEOUT_MS = 900_000  # Kafka's own limit, where we may not ask for it
_LARGEST_MESSAGE = 1_000_000  # librdkafka's own default
_ENVELOPE = 36  # what librdkafka adds to key and value before it compares
_HEADERS = "array<struct<key:string,value:binary>>"
_AS_TEXT = ("tinyint", "smallint", "int", "bigint", "boolean", "float", "double", "date")


class Kafka(KafkaBranches):
    """A Kafka topic, or several.

    Args:
        topic: The topic. None: each row names its own in `topic_column`.
        bootstrap_servers: `host:port`, several with commas.
        name: The sink's name in its pipeline; the topic's by default.
        key: Column for the key; numbers and dates are written as text.
        value: Column for the value, or "json" for the whole row as JSON.
        headers, partition, timestamp: Columns for these, none by default.
        topic_column: Column with the topic of each row, where `topic` is None.
        semantic: "exactly_once", "at_least_once" or "none".
        transaction_timeout: Seconds, or "never" (Kafka 4.1 and later, where the brokers allow it); as
            long as the brokers allow by default.
        transactional_ids: How many ids the sink uses; several times the tasks of a batch.
        settings: Any setting of librdkafka, security included.

    If neither key nor value is named, the columns `key`, `value`, `headers`, `partition` and
    `timestamp` are taken where the frame has them, as in Spark's own sink.
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
        transactional_ids: int = 1000,
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
        self.transactional_ids = transactional_ids
        self.flush_timeout = flush_timeout
        self._topic_column = topic_column
        self._columns = {
            "key": key,
            "value": value,
            "headers": headers,
            "partition": partition,
            "timestamp": timestamp,
        }
        self._timeout_ms = _requested_ms(transaction_timeout)

    def __repr__(self) -> str:
        return f"Kafka({self.topic!r}, name={self.name!r})"

    def reader_settings(self) -> str:
        exact = self.semantic is Semantic.EXACTLY_ONCE
        return "isolation.level=read_committed" if exact else "nothing"

    # What the frame must have.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        named = self._columns
        if named["key"] is None and named["value"] is None:
            named = {key: name or (key if key in columns else None) for key, name in named.items()}
            named["value"] = named["value"] or "value"
        wanted: dict[str, str] = {}
        problems: list[str] = []
        if self.topic is None:
            named = named | {"topic": self._topic_column}
        for role, name in named.items():
            if name is None:
                continue
            if role == "value" and name == "json" and "json" not in columns:
                wanted["value"] = _whole_row(columns)
            elif name not in columns:
                problems.append(f"there is no column {name!r} for the {role}")
            else:
                expression = _EXPRESSIONS[role](columns[name])
                if expression is None:
                    problems.append(
                        f"column {name!r} has type {columns[name].type}, but the {role} needs "
                        f"{_ACCEPTED[role]}"
                    )
                else:
                    wanted[role] = expression
        if problems:
            raise UsageError(
                f"the frame does not fit: {'; '.join(problems)}. It has "
                + ", ".join(f"{name} {column.type}" for name, column in columns.items()),
                sink=self.name,
            )
        return wanted

    def check_dead_letters(self) -> None:
        """A letter is one JSON text, without a key, whatever columns the sink takes otherwise."""
        if self.topic is None:
            raise UsageError("a sink for bad rows needs a fixed topic", sink=self.name)

    # What the brokers must offer.

    def preflight(self) -> list[str]:
        warnings = self._check_topic()
        if self.semantic is Semantic.EXACTLY_ONCE:
            warnings += self._check_brokers()
            warnings += self._check_time_out()
        return warnings

    def _check_topic(self) -> list[str]:
        if self.topic is None:
            return []
        found = self.client.topics([self.topic])[self.topic]
        if found is None:
            raise UsageError(
                f"topic {self.topic!r} does not exist at {self.settings['bootstrap.servers']}. "
                "Create it with the partitions and replication that you want",
                sink=self.name,
            )
        if found.replication < 2:
            return [
                f"topic {self.topic} has {found.replication} replica: what a broker loses, is lost"
            ]
        return []

    def _check_brokers(self) -> list[str]:
        client, warnings = self.client, list[str]()
        version = client.features().get("transaction.version", 0)
        speaks = client.max_version("EndTxn")
        if version < 2 or speaks < END_TXN_VERSION:
            raise UsageError(
                f"the brokers have transaction.version {version} and EndTxn up to version {speaks}, "
                f"but exactly-once needs 2 and {END_TXN_VERSION}: only then can anybody tell a "
                "committed transaction from an aborted one. Use Kafka 4.1 or later and upgrade the "
                "feature: kafka-features.sh upgrade --feature transaction.version=2",
                sink=self.name,
            )
        releases = {broker.release[:2] for broker in client.brokers().values()}
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
        replication = client.broker_config(["transaction.state.log.replication.factor"])
        if _smallest(replication.values, "transaction.state.log.replication.factor", 3) < 3:
            warnings.append(
                "transaction.state.log.replication.factor is below 3: a broker that dies for good "
                "takes the state of transactions with it"
            )
        return warnings

    def _check_time_out(self) -> list[str]:
        name = "transaction.max.timeout.ms"
        config = self.client.broker_config([name])
        if config.values is None:
            self._timeout_ms = self._timeout_ms or _DEFAULT_TIMEOUT_MS
            return [f"{name} could not be read ({config.why}): taking {self._timeout_ms} ms"]
        limit = _smallest(config.values, name, _DEFAULT_TIMEOUT_MS)
        if self._timeout_ms is None:
            self._timeout_ms = limit
        elif self._timeout_ms > limit:
            raise UsageError(
                f"transaction_timeout asks for {self._timeout_ms} ms, but the brokers allow {limit} "
                f"ms ({name}). Ask for less, or raise the brokers' limit",
                sink=self.name,
            )
        return []

    # In a task.

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        texts = [json.dumps(dead_letter).encode() for dead_letter in dead_letters.to_pylist()]
        return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary())})

    def begin(self, branch: Branch) -> KafkaWriter:
        return KafkaWriter(self, branch)

    # On the driver.

    def annotate(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        # A topic that is deleted and created anew has the same name and offsets, but not the same id.
        ids = self.client.topic_ids(
            {part[0] for receipt in receipts for part in receipt.handle["written"]}  # pyright: ignore
        )
        return [
            replace(
                receipt,
                handle=receipt.handle
                | {"topics": {part[0]: ids[part[0]] for part in receipt.handle["written"]}},  # pyright: ignore
            )
            for receipt in receipts
        ]

    def written(self, receipt: Receipt) -> list[Written]:
        handle: Mapping[str, Any] = receipt.handle
        topics = handle.get("topics", {})
        return [
            Written(topic, topics.get(topic) or "", partition, last)
            for topic, partition, last in handle["written"]
        ]

    def witness(self, receipt: Receipt) -> Evidence:
        handle: Mapping[str, Any] = receipt.handle
        return self.client.witness_all(handle["producer_id"], self.written(receipt))

    @property
    def timeout_ms(self) -> int:
        return self._timeout_ms or _DEFAULT_TIMEOUT_MS


class KafkaWriter(Writer):
    """One branch in a task: one producer, one transaction."""

    def __init__(self, sink: Kafka, branch: Branch):
        self._sink = sink
        self._began_at = time.time()
        self._largest = None
        if branch.tolerant:
            self._largest = int(sink.settings.get("message.max.bytes", _LARGEST_MESSAGE))
        exact = sink.semantic is Semantic.EXACTLY_ONCE
        settings = dict(sink.settings)
        if exact:
            settings["transaction.timeout.ms"] = str(sink.timeout_ms)
        elif sink.semantic is Semantic.NONE:
            settings.setdefault("enable.idempotence", "false")
        self._id = transactional_id(branch, sink.transactional_ids) if exact else None
        self._producer = ArrowProducer(settings, transactional_id=self._id)
        try:
            self._producer.begin(sink.flush_timeout)
        except BaseException:
            self._producer.drop()
            raise

    def write(self, rows: pa.RecordBatch) -> None:
        topic = self._sink.topic
        if self._largest is not None:
            self._refuse_large(rows, self._largest)
        if topic is not None:
            self._send(topic, rows)
            return
        topics = rows.column("topic")
        if topics.null_count:
            raise BadRow(
                f"{topics.null_count} rows have no topic. Filter them out with where=, or fill the "
                "column",
                sink=self._sink.name,
                rows=_at(topics.is_null(), "it has no topic"),
            )
        for name in topics.unique().to_pylist():
            self._send(name, rows.filter(pc.field("topic") == name))

    def _refuse_large(self, rows: pa.RecordBatch, largest: int) -> None:
        """Name the rows that librdkafka would refuse one by one, before any of them is sent."""
        sizes = np.full(len(rows), _ENVELOPE, dtype=np.int64)
        for name in {"key", "value"} & set(rows.schema.names):
            lengths = pc.call_function("binary_length", [rows.column(name)])
            sizes += np.asarray(pc.fill_null(lengths, 0))
        large = sizes > largest
        if large.any():
            raise BadRow(
                f"messages are larger than message.max.bytes={largest}",
                sink=self._sink.name,
                rows=_at(large, f"the message is larger than message.max.bytes={largest}"),
            )

    def _send(self, topic: str, rows: pa.RecordBatch) -> None:
        columns = {name: rows.column(name) for name in rows.schema.names}
        try:
            self._producer.write(
                topic,
                keys=columns.get("key"),
                values=columns["value"],
                partitions=columns.get("partition"),
                headers=columns.get("headers"),
                timestamps=columns.get("timestamp"),
            )
        except BadRow as error:
            if self._largest is None:
                raise
            # Some of these rows are on their way: they cannot be given once more without the bad.
            raise Rejected(f"{error.args[0]}; this cannot be skipped", sink=error.sink) from error

    def prepare(self) -> PreparedBranch | None:
        sink = self._sink
        if self._id is None:
            self._flush_straight_through()
            return None
        self._producer.flush(sink.flush_timeout)
        identity = self._producer.identity()
        written = self._producer.acknowledged
        self._producer.drop()  # the transaction stays open: now it is the driver's
        ends = None if sink.timeout_ms == NEVER_MS else self._began_at + sink.timeout_ms / 1000
        return PreparedBranch(
            self._id,
            {
                "producer_id": identity.producer_id,
                "epoch": identity.epoch,
                "written": [
                    [topic, number, last] for (topic, number), (_, last) in sorted(written.items())
                ],
            },
            began_at=self._began_at,
            expires_at=ends,
        )

    def _flush_straight_through(self) -> None:
        try:
            self._producer.flush(self._sink.flush_timeout)
        except PoundlockError as error:
            if self._sink.semantic is not Semantic.NONE:
                raise
            logger.warning("sink %s: rows were lost, as semantic NONE allows: %s",
                           self._sink.name, error)  # fmt: skip
        finally:
            self._producer.drop()

    def abort(self) -> None:
        self._producer.abort(timeout_s=5.0)


def _at(marked: Any, reason: str) -> dict[int, str]:
    """Give the reason to each row that is marked."""
    return dict.fromkeys(map(int, np.flatnonzero(np.asarray(marked))), reason)


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


def _smallest(values: Mapping[str, Sequence[str]] | None, name: str, default: int) -> int:
    found = (values or {}).get(name)
    return min(map(int, found)) if found else default


def _bytes(column: Column) -> str | None:
    if column.type == "binary":
        return column.sql
    return f"CAST({column.sql} AS BINARY)" if column.type == "string" else None


def _text_bytes(column: Column) -> str | None:
    if column.type in _AS_TEXT or column.type.startswith(("decimal", "timestamp")):
        return f"CAST(CAST({column.sql} AS STRING) AS BINARY)"
    return _bytes(column)


def _milliseconds(column: Column) -> str | None:
    if column.type == "bigint":
        return column.sql
    if column.type == "timestamp_ntz":
        return f"unix_millis(CAST({column.sql} AS TIMESTAMP))"
    return f"unix_millis({column.sql})" if column.type == "timestamp" else None


def _whole_row(columns: Mapping[str, Column]) -> str:
    fields = ", ".join(
        f"'{name.replace(chr(92), chr(92) * 2).replace(chr(39), chr(92) + chr(39))}', {column.sql}"
        for name, column in columns.items()
    )
    return f"CAST({to_json(f'named_struct({fields})', nulls=False)} AS BINARY)"


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
