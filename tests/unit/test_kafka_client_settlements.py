"""When a commit is settled, and when it is pending, torn or lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from scripted_broker import TOPIC_ID, coordinators, wired

from poundlock.sinks.kafka.cluster import parse_topic_id
from poundlock.sinks.kafka.transactions import Progress, settlements
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity


def last_offsets(request, stable):
    """Answer ListOffsets: partition 0 ends at 100, and partition 1 is stable up to `stable`."""
    row = request.topics[0]
    high = 100 if request.isolation_level == 0 else stable
    partitions = [
        SimpleNamespace(
            partition_index=it.partition_index,
            error_code=0,
            offset=100 if it.partition_index == 0 else high,
        )
        for it in row.partitions
    ]
    return SimpleNamespace(topics=[SimpleNamespace(name="t", partitions=partitions)])


def progress(
    *, leader: int = 1, stable: int = 100, state: str = "CompleteCommit", topic_id=TOPIC_ID
):
    """Ask about a commit of producer 7 to t-0 and t-1. `leader` and `stable` belong to t-1."""
    described = SimpleNamespace(
        error_code=0,
        transactional_id="id",
        transaction_state=state,
        transaction_start_time_ms=-1,
        transaction_timeout_ms=1,
        producer_id=7,
        producer_epoch=4,
        topics=[SimpleNamespace(topic="t", partitions=[1])],
    )
    topic = SimpleNamespace(
        error_code=0,
        name="t",
        topic_id=parse_topic_id(topic_id),
        partitions=[
            SimpleNamespace(partition_index=0, leader_id=1, replica_nodes=[1]),
            SimpleNamespace(partition_index=1, leader_id=leader, replica_nodes=[2]),
        ],
    )

    def answer(node, request):
        match type(request).__name__:
            case "FindCoordinatorRequest":
                return coordinators(request, 1)
            case "DescribeTransactionsRequest":
                return SimpleNamespace(transaction_states=[described])
            case "MetadataRequest":
                return SimpleNamespace(topics=[topic])
            case "ListOffsetsRequest":
                return last_offsets(request, stable)
            case "DescribeProducersRequest":
                state = SimpleNamespace(producer_id=7, producer_epoch=3, current_txn_start_offset=9)
                part = SimpleNamespace(partition_index=1, error_code=0, active_producers=[state])
                return SimpleNamespace(topics=[SimpleNamespace(name="t", partitions=[part])])

    written = [LastRecord("t", TOPIC_ID, 0, 10), LastRecord("t", TOPIC_ID, 1, 10)]
    client, _ = wired(answer, seconds=0.1)
    (settlement,) = asyncio.run(settlements(client, [(TransactionIdentity("id", 7, 3), written)]))
    return settlement


def test_a_commit_is_settled_when_every_partition_shows_it():
    assert progress().progress is Progress.SETTLED


def test_a_commit_whose_markers_are_being_written_is_pending():
    settlement = progress(state="PrepareCommit")
    assert settlement.progress is Progress.PENDING
    assert "t-1" in settlement.why


def test_a_partition_without_a_leader_is_pending_and_its_topic_not_lost():
    # Kafka 4.3.1 reports the transaction as complete at this time.
    settlement = progress(leader=-1)
    assert settlement.progress is Progress.PENDING
    assert "t-1 has no leader" in settlement.why


def test_a_transaction_that_stays_open_in_a_partition_is_torn():
    settlement = progress(stable=9)
    assert settlement.progress is Progress.TORN
    assert "t-1@10: producer 7 is open there since 9" in settlement.why


def test_a_topic_created_again_is_lost():
    assert progress(topic_id="AAAAAAAAAAAAAAAAAAAAAA").progress is Progress.LOST


def test_an_abort_in_place_of_the_commit_is_torn():
    assert progress(state="CompleteAbort").progress is Progress.TORN
