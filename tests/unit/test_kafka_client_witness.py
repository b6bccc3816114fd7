"""What the records of a transaction prove about its outcome."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace

import pytest
from kafka.record.util import calc_crc32c
from scripted_broker import TOPIC_ID, wired

from kafka_probe import read_outcome
from poundlock.sinks.kafka import witness
from poundlock.sinks.kafka.branches import shows_abort
from poundlock.sinks.kafka.cluster import parse_topic_id
from poundlock.sinks.kafka.transactions import TxnDescription
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity
from poundlock.sinks.kafka.witness import Evidence, Outcome, combine

YES = Evidence(Outcome.COMMITTED, "yes")
NO = Evidence(Outcome.ABORTED, "no")
OPEN = Evidence(Outcome.OPEN, "open")
GONE = Evidence(Outcome.UNKNOWN, "gone", gone=True)
ODD = Evidence(Outcome.UNKNOWN, "odd")


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([YES], Outcome.COMMITTED),
        ([YES, YES], Outcome.COMMITTED),
        ([YES, GONE], Outcome.COMMITTED),
        ([YES, ODD], Outcome.UNKNOWN),
        ([YES, GONE, ODD], Outcome.UNKNOWN),
        ([NO, NO], Outcome.ABORTED),
        ([NO, GONE], Outcome.UNKNOWN),
        ([YES, NO], Outcome.UNKNOWN),
        ([YES, NO, GONE], Outcome.UNKNOWN),
        ([YES, OPEN], Outcome.UNKNOWN),
        ([NO, OPEN], Outcome.UNKNOWN),
        ([OPEN, OPEN], Outcome.OPEN),
        ([OPEN, GONE], Outcome.UNKNOWN),
        ([GONE], Outcome.UNKNOWN),
        ([], Outcome.UNKNOWN),
    ],
)
def test_evidence_of_partitions_is_combined(parts: list[Evidence], outcome: Outcome):
    evidence = combine(parts)
    assert evidence.outcome is outcome
    assert all(part.why in evidence.why for part in parts)


@pytest.mark.parametrize(
    ("state", "producer_id", "epoch", "outcome"),
    [
        ("Ongoing", 7, 3, Outcome.OPEN),
        ("Ongoing", 7, 4, Outcome.UNKNOWN),  # the next one
        ("PrepareCommit", 7, 4, Outcome.COMMITTED),
        ("CompleteCommit", 7, 4, Outcome.COMMITTED),
        ("CompleteCommit", 7, 3, Outcome.COMMITTED),  # from EndTxn below version 5
        ("CompleteAbort", 7, 4, Outcome.ABORTED),
        ("CompleteAbort", 7, 3, Outcome.ABORTED),
        ("PrepareAbort", 7, 4, Outcome.ABORTED),
        ("CompleteAbort", 7, 5, Outcome.UNKNOWN),  # may be a later one's
        ("CompleteCommit", 8, 4, Outcome.UNKNOWN),  # another producer's
        ("Empty", 7, 5, Outcome.UNKNOWN),
        ("Empty", 7, 3, Outcome.UNKNOWN),
        ("PrepareEpochFence", 7, 4, Outcome.UNKNOWN),
        ("SomethingNew", 7, 4, Outcome.UNKNOWN),
    ],
)
def test_a_description_is_read_as_the_outcome_of_this_transaction_only(
    state: str, producer_id: int, epoch: int, outcome: Outcome
):
    now = TxnDescription(state, producer_id, epoch, 1, None, frozenset())
    identity = TransactionIdentity("id", 7, 3)
    assert read_outcome(now, identity).outcome is outcome
    assert shows_abort(now, identity) is (outcome is Outcome.ABORTED)


def test_an_unknown_id_proves_nothing():
    identity = TransactionIdentity("id", 7, 3)
    assert read_outcome(None, identity).outcome is Outcome.UNKNOWN
    assert not shows_abort(None, identity)


# The witness, with scripted partitions.

COMMIT, ABORT = 1, 0


def batch(
    offset: int, producer_id: int, epoch: int, *, marker: int | None = None, rows: int = 1
) -> bytes:
    """Return one batch as a broker stores it. Only markers need their content."""
    attributes, body = 0x10, b"rows"
    if marker is not None:
        key = struct.pack(">hh", 0, marker)
        # A small varint is twice its number.
        record = bytes([0, 0, 0, 2 * len(key)]) + key + bytes([0, 0])
        attributes, body = 0x30, bytes([2 * len(record)]) + record
    fields = (max(rows, 1) - 1, 0, 0, producer_id, epoch, -1, rows)
    checked = struct.pack(">hiqqqhii", attributes, *fields) + body
    rest = struct.pack(">ibI", 0, 2, calc_crc32c(checked)) + checked
    return struct.pack(">qi", offset, len(rest)) + rest


def ask_record(
    *batches: bytes, offset: int = 10, stable: int = 100, aborted: tuple[int, ...] = ()
) -> Evidence:
    """Ask for the record at `offset` of producer 7. Each fetch returns one of the batches."""
    topic = SimpleNamespace(
        error_code=0,
        name="t",
        topic_id=parse_topic_id(TOPIC_ID),
        partitions=[SimpleNamespace(partition_index=0, leader_id=1, replica_nodes=[1])],
    )
    at = {struct.unpack_from(">q", it)[0]: it for it in batches}

    def answer(node, request):
        if node is None:
            return SimpleNamespace(topics=[topic])
        wanted = request.topics[0].partitions[0].fetch_offset
        found = [it for start, it in sorted(at.items()) if start >= wanted]
        part = SimpleNamespace(
            error_code=0,
            records=found[0] if found else b"",
            high_watermark=100,
            last_stable_offset=stable,
            aborted_transactions=[
                SimpleNamespace(producer_id=7, first_offset=first) for first in aborted
            ],
        )
        return SimpleNamespace(error_code=0, responses=[SimpleNamespace(partitions=[part])])

    client, _ = wired(answer, seconds=2)
    return asyncio.run(witness.ask_record(client, LastRecord("t", TOPIC_ID, 0, offset), 7))


OURS = batch(10, 7, 3)


def test_the_first_marker_of_our_producer_decides_the_outcome():
    other = batch(11, 8, 0, marker=ABORT)
    ours, next_one = batch(12, 7, 4, marker=COMMIT), batch(14, 7, 5, marker=ABORT)
    assert ask_record(OURS, other, ours, next_one, aborted=(13,)).outcome is Outcome.COMMITTED
    ours = batch(12, 7, 4, marker=ABORT)
    assert ask_record(OURS, other, ours, next_one, aborted=(10, 13)).outcome is Outcome.ABORTED


def test_marker_and_index_must_agree():
    marker = batch(12, 7, 4, marker=COMMIT)
    evidence = ask_record(OURS, marker, aborted=(10,))
    assert evidence.outcome is Outcome.UNKNOWN
    assert "says committed" in evidence.why
    assert "says aborted" in evidence.why


def test_a_transaction_without_marker_that_holds_readers_back_is_open():
    assert ask_record(OURS, batch(11, 8, 0), stable=10).outcome is Outcome.OPEN


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([batch(10, 7, 3, rows=0), batch(12, 7, 4, marker=COMMIT)], "compacted away"),
        ([batch(11, 7, 3), batch(12, 7, 4, marker=COMMIT)], "no longer there"),
        ([OURS, batch(12, 7, 5), batch(14, 7, 6, marker=COMMIT)], "marker is missing"),
        ([batch(10, 8, 3), batch(12, 7, 4, marker=COMMIT)], "not of producer 7"),
        ([OURS, batch(12, 7, 4, marker=COMMIT)[:-1] + b"?"], "damaged"),
        ([OURS, batch(12, 7, 4, marker=5)], "no end marker"),
        ([], "no record"),
    ],
)
def test_records_without_evidence_give_an_unknown_outcome(batches: list[bytes], why: str):
    evidence = ask_record(*batches)
    assert evidence.outcome is Outcome.UNKNOWN
    assert why in evidence.why


def test_a_record_whose_topic_id_was_not_recorded_is_no_witness():
    client, _ = wired(lambda node, request: None)
    evidence = asyncio.run(witness.ask_record(client, LastRecord("t", "", 0, 10), 7))
    assert evidence.outcome is Outcome.UNKNOWN
