"""The executor's half of the Kafka sink: one branch in a task is one producer and one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from poundlock.core.model import Branch, Json
from poundlock.core.participant import PreparedBranch, Semantic, Writer, tolerate_loss
from poundlock.errors import BadRow, Rejected
from poundlock.secret import resolve_all
from poundlock.sinks.kafka.branches import transactional_id
from poundlock.sinks.kafka.producer import ArrowProducer
from poundlock.sinks.kafka.settings import DEFAULTS
from poundlock.sinks.text import not_utf8

if TYPE_CHECKING:
    from poundlock.sinks.kafka.sink import Kafka

_MESSAGE_OVERHEAD = 36  # what librdkafka adds to key and value before it checks the size


class KafkaWriter(Writer):
    """Writes one branch in a task."""

    def __init__(self, sink: Kafka, branch: Branch):
        self._sink = sink
        self._began_at = time.time()
        self._largest = None
        if branch.tolerant:
            self._largest = int((DEFAULTS | resolve_all(sink.settings))["message.max.bytes"])
        exact = sink.semantic is Semantic.EXACTLY_ONCE
        settings = dict(sink.settings)
        if exact:
            settings["transaction.timeout.ms"] = str(sink.timeout_ms)
        elif sink.semantic is Semantic.NONE:
            settings.setdefault("enable.idempotence", "false")
        self._id = transactional_id(branch) if exact else None
        self._producer = ArrowProducer(settings, transactional_id=self._id)
        try:
            self._producer.begin(sink.flush_timeout)
        except BaseException:
            self._producer.drop()
            raise

    def write(self, rows: pa.RecordBatch) -> None:
        topic = self._sink.topic
        if "timestamp" in rows.schema.names:
            self._refuse_early(rows.column("timestamp"))
        if "headers" in rows.schema.names:
            self._refuse_nameless(rows.column("headers"))
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
                rows=_reasons(topics.is_null(), "it has no topic"),
            )
        broken = not_utf8(topics)
        if broken.any():
            raise BadRow(
                f"{np.count_nonzero(broken)} rows have a topic that is not UTF-8: correct the topic "
                "column",
                sink=self._sink.name,
                rows=_reasons(broken, "its topic is not UTF-8"),
            )
        for name in topics.unique().to_pylist():
            self._send(name, rows.filter(pc.field("topic") == name))

    def lifetime(self) -> tuple[float, float] | None:
        exact = self._sink.semantic is Semantic.EXACTLY_ONCE
        expires_at = self._sink.expiry(self._began_at) if exact else None
        return None if expires_at is None else (self._began_at, expires_at)

    def _refuse_large(self, rows: pa.RecordBatch, largest: int) -> None:
        """Find the rows that librdkafka would refuse, before any row is sent."""
        sizes = np.full(len(rows), _MESSAGE_OVERHEAD, dtype=np.int64)
        for name in {"key", "value"} & set(rows.schema.names):
            lengths = pc.call_function("binary_length", [rows.column(name)])
            sizes += np.asarray(pc.fill_null(lengths, 0))
        large = sizes > largest
        if large.any():
            raise BadRow(
                f"messages are larger than message.max.bytes={largest}: make them smaller, or "
                "raise both the sink's message.max.bytes and the topic's max.message.bytes",
                sink=self._sink.name,
                rows=_reasons(large, f"the message is larger than message.max.bytes={largest}"),
            )

    def _refuse_early(self, times: pa.Array) -> None:
        """Find the timestamps that Kafka does not have, before any row is sent."""
        early = np.asarray(pc.fill_null(pc.call_function("less_equal", [times, 0]), False))
        if early.any():
            raise BadRow(
                f"{np.count_nonzero(early)} rows have timestamps in or before the first millisecond of "
                "1970, which cannot be written: correct the timestamp column, or use null for the time "
                "of writing",
                sink=self._sink.name,
                rows=_reasons(early, "its timestamp is in or before the first millisecond of 1970"),
            )

    def _refuse_nameless(self, headers: pa.Array) -> None:
        """Find headers whose key is null or no text of Kafka's, before any row is sent."""
        names = headers.flatten().flatten()[0]  # of a null struct too
        nameless = np.asarray(names.is_null()) | not_utf8(names)
        if nameless.any():
            parents = np.asarray(pc.call_function("list_parent_indices", [headers]))
            rows = np.unique(parents[nameless])
            raise BadRow(
                f"{len(rows)} rows have a header whose key is null or not UTF-8: correct the headers "
                "column. The key of a header may be empty",
                sink=self._sink.name,
                rows=dict.fromkeys(
                    rows.tolist(), "its headers have a key that is null or not UTF-8"
                ),
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
            # Some of these rows are already sent, so the good rows cannot be written again.
            raise Rejected(
                f"{error.args[0]}. Some rows of this batch are already sent, so bad rows can no "
                "longer be left out",
                sink=error.sink,
            ) from error

    def prepare(self) -> PreparedBranch | None:
        sink = self._sink
        if self._id is None:
            self._flush_without_transaction()
            return None
        self._producer.flush(sink.flush_timeout)
        identity = self._producer.identity()
        written = self._producer.acknowledged
        self._producer.drop()  # the transaction stays open, for the driver to commit
        return PreparedBranch(
            self._id,
            {
                "producer_id": identity.producer_id,
                "epoch": identity.epoch,
                "written": _columns(
                    (topic, number, last) for (topic, number), (_, last) in written.items()
                ),
            },
            began_at=self._began_at,
            expires_at=sink.expiry(self._began_at),
        )

    def _flush_without_transaction(self) -> None:
        try:
            with tolerate_loss(self._sink.name, self._sink.semantic):
                self._producer.flush(self._sink.flush_timeout)
        finally:
            self._producer.drop()

    def abort(self) -> None:
        self._producer.abort(timeout_s=5.0)


def _reasons(marked: Any, reason: str) -> dict[int, str]:
    """Return the reason for each marked row, by row number."""
    return dict.fromkeys(map(int, np.flatnonzero(np.asarray(marked))), reason)


def _columns(written: Iterable[tuple[str, int, int]]) -> dict[str, Json]:
    """Return the partitions of each topic and the last offset in each, as two lists.

    The driver reads thousands of these. A list for each partition would take much more of its time.
    """
    partitions, last_offsets = dict[str, list[Json]](), dict[str, list[Json]]()
    for topic, number, last in sorted(written):
        partitions.setdefault(topic, []).append(number)
        last_offsets.setdefault(topic, []).append(last)
    return {topic: [numbers, last_offsets[topic]] for topic, numbers in partitions.items()}
