"""The witness that a record itself bears: what became of the transaction that wrote it.

A record keeps its producer id for as long as it is kept, and the first end marker of that producer id
after it ends its transaction, for a producer has one transaction at a time. The marker therefore
proves the outcome, whatever became of the coordinator's memory. Kafka's own index of aborted
transactions, which every read_committed reader goes by, must say the same; it alone decides where the
marker is too far away to be looked for. Nothing else counts as proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.sinks.kafka.kafka_python import consumer, error_name, errors, record
from poundlock.sinks.kafka.partitions import (
    NOWHERE,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Leaders,
    Partition,
    Written,
    parse_id,
)
from poundlock.sinks.kafka.transactions import Identity, TxnDescription, describe
from poundlock.sinks.kafka.wire import Again, Wire, judge

SCAN_BYTES = 64 << 20  # how far to look for a marker in one partition
_FETCH_BYTES = 1 << 20


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"  # the record is there, and no end of its transaction is to be seen yet
    UNKNOWN = "unknown"  # nothing can be proven


@dataclass(frozen=True, slots=True)
class Evidence:
    outcome: Outcome
    why: str
    gone: bool = False  # UNKNOWN for no other reason than that the record was deleted


# What the states of a transaction say of it; the others say nothing.
_STATES = {
    "Ongoing": Outcome.OPEN,
    "PrepareCommit": Outcome.COMMITTED,
    "CompleteCommit": Outcome.COMMITTED,
    "PrepareAbort": Outcome.ABORTED,
    "CompleteAbort": Outcome.ABORTED,
}


class _NoEvidence(Exception):
    """The record cannot bear witness."""


class _Gone(_NoEvidence):
    """The record was deleted, as all records are in the end."""


async def witness(
    wire: Wire, written: Written, producer_id: int, *, scan_bytes: int = SCAN_BYTES
) -> Evidence:
    """Ask the record itself whether its transaction was committed."""
    try:
        reader = _Reader(wire, written)
        marker = await _find_marker(reader, producer_id, scan_bytes)
        index = await _ask_index(reader, producer_id)
    except _NoEvidence as none:
        return Evidence(Outcome.UNKNOWN, f"{written}: {none}", isinstance(none, _Gone))
    if marker is None and index is None:
        return Evidence(Outcome.OPEN, f"{written}: no end of producer {producer_id}'s transaction")
    if marker is not None and index is not None and marker.outcome is not index.outcome:
        return Evidence(Outcome.UNKNOWN, f"{written}: {marker.why}, but {index.why}")
    found = marker or index
    assert found is not None
    return Evidence(found.outcome, f"{written}: {found.why}")


async def witness_all(wire: Wire, written: Sequence[Written], producer_id: int) -> Evidence:
    """Ask the last record in every partition whether their transaction was committed."""
    return together([await witness(wire, part, producer_id) for part in written])


def together(evidence: Sequence[Evidence]) -> Evidence:
    """Conclude from all partitions of one transaction.

    Its coordinator decides once for all of them, so one COMMIT marker proves a commit even where
    other records were deleted. ABORTED makes us write all rows again, so every partition must say it. A
    mix, or a marker here and none there, is a torn transaction (KAFKA-20734, or an operator's abort):
    nothing follows from it.
    """
    why = "; ".join(part.why for part in evidence) or "no partition was recorded"
    outcomes = {part.outcome for part in evidence}
    for outcome in (Outcome.COMMITTED, Outcome.ABORTED, Outcome.OPEN):
        if outcomes == {outcome}:
            return Evidence(outcome, why)
    unknown = [part for part in evidence if part.outcome is Outcome.UNKNOWN]
    gone = bool(unknown) and all(part.gone for part in unknown)
    if gone and outcomes == {Outcome.COMMITTED, Outcome.UNKNOWN}:
        return Evidence(Outcome.COMMITTED, why)
    return Evidence(Outcome.UNKNOWN, why, gone and outcomes == {Outcome.UNKNOWN})


async def outcome(wire: Wire, identity: Identity, written: Sequence[Written]) -> Evidence:
    """Find out how a transaction ended, from its coordinator and from its own records.

    For an EndTxn that was CONTRADICTED or FORGOTTEN. The coordinator knows as long as the id has not
    been used again; the records must not say otherwise. What is decided counts once every partition
    has its marker, and is OPEN before.
    """
    now = (await describe(wire, [identity.transactional_id])).all("the state")
    said = _said(now[identity.transactional_id], identity)
    parts = [await witness(wire, part, identity.producer_id) for part in written]
    seen = together(parts)
    if said.outcome is Outcome.UNKNOWN:
        return Evidence(seen.outcome, f"{said.why}; {seen.why}")
    if any(part.outcome is Outcome.OPEN for part in parts):
        return Evidence(Outcome.OPEN, f"{said.why}; {seen.why}")
    if all(part.outcome is said.outcome or part.gone for part in parts):
        return Evidence(said.outcome, f"{said.why}; {seen.why}")
    return Evidence(Outcome.UNKNOWN, f"{said.why}, but {seen.why}")


def _said(now: TxnDescription | None, identity: Identity) -> Evidence:
    """Read the coordinator's description as an outcome of this transaction, and of no later one."""
    if now is None:
        return Evidence(Outcome.UNKNOWN, f"{identity.transactional_id} is not known any more")
    why = f"{identity.transactional_id} is {now.state}, epoch {now.epoch} after {identity.epoch}"
    steps = now.epoch - identity.epoch if now.producer_id == identity.producer_id else None
    # Version 5 and a time-out raise the epoch by one, a client's older version leaves it. An open
    # transaction at the next epoch is the next one.
    ours = steps == 0 or (steps == 1 and now.state != "Ongoing")
    return Evidence(_STATES.get(now.state, Outcome.UNKNOWN) if ours else Outcome.UNKNOWN, why)


class _Reader:
    """Fetches one partition, under the topic id that was written to."""

    def __init__(self, wire: Wire, written: Written):
        self._wire = wire
        self.written = written
        self._leaders = Leaders(wire)
        if not written.topic_id:
            raise _NoEvidence("its topic id was not recorded")

    async def fetch(self, offset: int, isolation: int, max_bytes: int) -> Any:
        """Fetch from `offset`; at least one whole batch, if there is one."""
        partition = self.written.place

        async def ask(node: int, _: Sequence[Partition]) -> Mapping[Partition, Any]:
            if node == NOWHERE:
                raise _Gone("the topic or partition is no longer there")
            request = self._request(offset, isolation, max_bytes)
            return {partition: self._checked(await self._wire.send(node, request))}

        collected = await self._wire.collect(
            [partition], self._leaders.locate, ask, self._leaders.lost
        )
        return collected.all("the records")[partition]

    def _request(self, offset: int, isolation: int, max_bytes: int) -> Any:
        topic = consumer.FetchRequest.FetchTopic
        part = topic.FetchPartition(
            partition=self.written.partition,
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
            topics=[topic(topic_id=parse_id(self.written.topic_id), partitions=[part])],
            forgotten_topics_data=[],
            rack_id="",
            min_version=13,  # the first that asks by topic id: a topic created anew does not answer
        )

    def _checked(self, response: Any) -> Any:
        name = self.written.topic
        grant = f"READ on Topic {name}"
        again = judge(response.error_code, f"the records of {name}", grant)
        if again is not None:
            return again
        (part,) = response.responses[0].partitions
        error = errors.for_code(part.error_code)
        if error in (errors.UnknownTopicIdError, errors.InconsistentTopicIdError):
            if self._leaders.topic_id(name) == self.written.topic_id:
                return Again(error_name(part.error_code))  # the broker is still learning of it
            raise _Gone("the topic was deleted and created anew")
        if error is errors.OffsetOutOfRangeError:
            raise _Gone("the record is no longer there")
        return judge(part.error_code, f"the records of {name}", grant) or part


async def _find_marker(reader: _Reader, producer_id: int, scan_bytes: int) -> Evidence | None:
    """Read on from the record to the first end marker of its producer."""
    written, offset, seen = reader.written, reader.written.last_offset, 0
    epoch: int | None = None
    while True:
        part = await reader.fetch(offset, READ_UNCOMMITTED, min(_FETCH_BYTES, scan_bytes))
        records = part.records or b""
        for batch in _batches(records):
            if epoch is None:
                epoch = _epoch_of_record(batch, written.last_offset, producer_id)
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


def _epoch_of_record(batch: Any, offset: int, producer_id: int) -> int:
    """Check that this batch holds the record, and return its epoch."""
    if not batch.base_offset <= offset <= batch.last_offset:
        raise _Gone("the record is no longer there")
    if batch.producer_id != producer_id or batch.is_control_batch or not batch.is_transactional:
        raise _NoEvidence(f"the record there is not of producer {producer_id}")
    if not batch.records_count:
        # Compaction keeps the empty shell of a producer's last batch, and may drop its marker.
        raise _Gone("the record was compacted away")
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
    """Ask as a read_committed reader does; None while the last stable offset is not past the record."""
    offset = reader.written.last_offset
    part = await reader.fetch(offset, READ_COMMITTED, 1)
    if part.last_stable_offset <= offset:
        return None
    # The broker lists the aborted transactions that reach to this offset or beyond it. One of our
    # producer that begins at or before the record is the record's own.
    aborted = any(
        txn.producer_id == producer_id and txn.first_offset <= offset
        for txn in part.aborted_transactions or ()
    )
    outcome = Outcome.ABORTED if aborted else Outcome.COMMITTED
    return Evidence(outcome, f"the index of aborted transactions says {outcome.value}")


def _batches(records: bytes) -> Iterator[Any]:
    """Yield whole batches; a last one that was cut off is left out."""
    for batch in record.MemoryRecords(records):
        if batch.magic < 2:
            raise _NoEvidence("the record is in a format without transactions")
        yield batch
