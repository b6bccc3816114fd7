"""The witness: a record proves whether the transaction that wrote it was committed.

A record keeps its producer id for as long as it exists. A producer has one transaction at a time, so
the first end marker of that producer id after the record ends the record's transaction. The marker
proves the outcome, even where the coordinator has forgotten it. Kafka also keeps an index of aborted
transactions, which every read_committed reader uses. It must agree with the marker. Where the marker
is too far away to be searched for, the index alone decides. Nothing else counts as proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.sinks.kafka.client import KafkaClient, TryAgain, check_error
from poundlock.sinks.kafka.cluster import (
    NOWHERE,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Leaders,
    parse_topic_id,
)
from poundlock.sinks.kafka.kafka_python import consumer, error_name, errors, record
from poundlock.sinks.kafka.types import LastRecord, TopicPartition

SCAN_BYTES = 64 << 20  # how far to search for a marker in one partition
_FETCH_BYTES = 1 << 20


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"  # the record exists, and its transaction has no end yet
    UNKNOWN = "unknown"  # nothing can be proven


@dataclass(frozen=True, slots=True)
class Evidence:
    outcome: Outcome
    why: str
    gone: bool = False  # UNKNOWN only because the record was deleted


class _NoEvidence(Exception):
    """The record proves nothing."""


class _RecordGone(_NoEvidence):
    """The record was deleted, as all records are in the end."""


async def ask_records(
    client: KafkaClient, records: Sequence[LastRecord], producer_id: int
) -> Evidence:
    """Ask the last record in every partition whether their transaction was committed."""
    return combine([await ask_record(client, record, producer_id) for record in records])


async def ask_record(
    client: KafkaClient, last: LastRecord, producer_id: int, *, scan_bytes: int = SCAN_BYTES
) -> Evidence:
    """Ask one record whether its transaction was committed."""
    try:
        reader = _Reader(client, last)
        marker = await _find_marker(reader, producer_id, scan_bytes)
        index = await _ask_index(reader, producer_id)
    except _NoEvidence as none:
        return Evidence(Outcome.UNKNOWN, f"{last}: {none}", isinstance(none, _RecordGone))
    if marker is None and index is None:
        return Evidence(Outcome.OPEN, f"{last}: no end of producer {producer_id}'s transaction")
    if marker is not None and index is not None and marker.outcome is not index.outcome:
        return Evidence(Outcome.UNKNOWN, f"{last}: {marker.why}, but {index.why}")
    found = marker or index
    assert found is not None
    return Evidence(found.outcome, f"{last}: {found.why}")


def combine(evidence: Sequence[Evidence]) -> Evidence:
    """Conclude from all partitions of one transaction.

    The coordinator decides once for all of them, so one COMMIT marker proves a commit even where other
    records were deleted. ABORTED has all rows written again, so every partition must show it. A mix, or
    a marker in only some partitions, is a torn transaction (KAFKA-20734, or an operator's abort): it
    proves nothing.
    """
    why = "; ".join(part.why for part in evidence) or "no partition was recorded"
    outcomes = {part.outcome for part in evidence}
    if len(outcomes) == 1 and outcomes != {Outcome.UNKNOWN}:
        return Evidence(outcomes.pop(), why)
    unknown = [part for part in evidence if part.outcome is Outcome.UNKNOWN]
    gone = bool(unknown) and all(part.gone for part in unknown)
    if gone and outcomes == {Outcome.COMMITTED, Outcome.UNKNOWN}:
        return Evidence(Outcome.COMMITTED, why)
    return Evidence(Outcome.UNKNOWN, why, gone and outcomes == {Outcome.UNKNOWN})


class _Reader:
    """Fetches records of one partition, by the topic id that was written to."""

    def __init__(self, client: KafkaClient, last: LastRecord):
        self._client = client
        self.last = last
        self._leaders = Leaders(client)
        if not last.topic_id:
            raise _NoEvidence("its topic id was not recorded")

    async def fetch(self, offset: int, isolation: int, max_bytes: int) -> Any:
        """Fetch from `offset`: at least one whole batch, if there is one."""
        partition = self.last.topic_partition

        async def ask(node: int, _: Sequence[TopicPartition]) -> Mapping[TopicPartition, Any]:
            if node == NOWHERE:
                raise _RecordGone("the topic or partition is no longer there")
            request = self._request(offset, isolation, max_bytes)
            return {partition: self._read_part(await self._client.send(node, request))}

        collected = await self._client.collect(
            [partition], self._leaders.locate, ask, self._leaders.mark_moved
        )
        return collected.require_all("the records")[partition]

    def _request(self, offset: int, isolation: int, max_bytes: int) -> Any:
        topic = consumer.FetchRequest.FetchTopic
        part = topic.FetchPartition(
            partition=self.last.partition,
            current_leader_epoch=-1,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=max_bytes,
        )
        return consumer.FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=max_bytes,
            isolation_level=isolation,
            session_id=0,
            session_epoch=-1,  # no session
            topics=[topic(topic_id=parse_topic_id(self.last.topic_id), partitions=[part])],
            forgotten_topics_data=[],
            rack_id="",
            min_version=13,  # the first that asks by topic id: a topic created again does not answer
        )

    def _read_part(self, response: Any) -> Any:
        name = self.last.topic
        grant = f"READ on Topic {name}"
        again = check_error(response.error_code, f"the records of {name}", grant)
        if again is not None:
            return again
        (part,) = response.responses[0].partitions
        error = errors.for_code(part.error_code)
        if error in (errors.UnknownTopicIdError, errors.InconsistentTopicIdError):
            if self._leaders.topic_id(name) == self.last.topic_id:
                return TryAgain(error_name(part.error_code))  # the broker has not heard of it yet
            raise _RecordGone("the topic was deleted and created again")
        if error is errors.OffsetOutOfRangeError:
            raise _RecordGone("the record is no longer there")
        return check_error(part.error_code, f"the records of {name}", grant) or part


async def _find_marker(reader: _Reader, producer_id: int, scan_bytes: int) -> Evidence | None:
    """Read on from the record to the first end marker of its producer. None if it is too far."""
    last, offset, seen = reader.last, reader.last.offset, 0
    epoch: int | None = None
    while True:
        part = await reader.fetch(offset, READ_UNCOMMITTED, min(_FETCH_BYTES, scan_bytes))
        records = part.records or b""
        for batch in _batches(records):
            if epoch is None:
                epoch = _read_epoch(batch, last.offset, producer_id)
            elif batch.producer_id == producer_id:
                if batch.is_control_batch:
                    return _read_marker(batch)
                if batch.producer_epoch != epoch:
                    raise _NoEvidence("its marker is missing before its producer's next epoch")
            offset = batch.last_offset + 1
        if epoch is None:
            raise _NoEvidence("there is no record")
        seen += len(records)
        if not records or offset >= part.high_watermark or seen >= scan_bytes:
            return None


def _read_epoch(batch: Any, offset: int, producer_id: int) -> int:
    """Check that this batch holds the record, and return its epoch."""
    if not batch.base_offset <= offset <= batch.last_offset:
        raise _RecordGone("the record is no longer there")
    if batch.producer_id != producer_id or batch.is_control_batch or not batch.is_transactional:
        raise _NoEvidence(f"the record there is not of producer {producer_id}")
    if not batch.records_count:
        # Compaction keeps the empty shell of a producer's last batch, and may drop its marker.
        raise _RecordGone("the record was compacted away")
    return batch.producer_epoch


def _read_marker(batch: Any) -> Evidence:
    if not batch.validate_crc():
        raise _NoEvidence(f"the marker at offset {batch.base_offset} is damaged")
    (marker,) = batch
    if not marker.commit and not marker.abort:
        raise _NoEvidence(f"the control record at offset {marker.offset} is no end marker")
    outcome = Outcome.COMMITTED if marker.commit else Outcome.ABORTED
    return Evidence(outcome, f"its marker at offset {marker.offset} says {outcome.value}")


async def _ask_index(reader: _Reader, producer_id: int) -> Evidence | None:
    """Ask as a read_committed reader does. None until the last stable offset is past the record."""
    offset = reader.last.offset
    part = await reader.fetch(offset, READ_COMMITTED, 1)
    if part.last_stable_offset <= offset:
        return None
    # The broker lists the aborted transactions that reach this offset or go beyond it. If one of our
    # producer begins at or before the record, it is the record's own transaction.
    aborted = any(
        txn.producer_id == producer_id and txn.first_offset <= offset
        for txn in part.aborted_transactions or ()
    )
    outcome = Outcome.ABORTED if aborted else Outcome.COMMITTED
    return Evidence(outcome, f"the index of aborted transactions says {outcome.value}")


def _batches(records: bytes) -> Iterator[Any]:
    """Yield whole batches. A last batch that was cut off is left out."""
    for batch in record.MemoryRecords(records):
        if batch.magic < 2:
            raise _NoEvidence("the record is in a format without transactions")
        yield batch
