"""The driver's Kafka client against a real broker.

First the answer matrix: the answer of EndTxn version 5 about a transaction after each possible end, and
what the transaction's own records prove.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from open_transactions import SECONDS, Open, eventually, leave_open, make_topic

from kafka_probe import Probe
from poundlock.errors import UsageError
from poundlock.servers import kafka
from poundlock.sinks.kafka import witness
from poundlock.sinks.kafka.transactions import Answer, Progress
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity
from poundlock.sinks.kafka.witness import Outcome


@pytest.fixture(scope="module")
def cluster() -> Iterator[kafka.Cluster]:
    # Timed-out transactions are aborted within a second and not ten.
    swift = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    with kafka.running(properties=swift) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: kafka.Cluster) -> Iterator[Probe]:
    with Probe(cluster.client_settings()) as client:
        yield client


@pytest.fixture
def topic(cluster: kafka.Cluster) -> str:
    return make_topic(cluster)


def initialise(cluster: kafka.Cluster, id_: str) -> None:
    """Take over a transactional id as its next user does."""
    producer = confluent_kafka.Producer({**cluster.client_settings(), "transactional.id": id_})
    producer.init_transactions(SECONDS)


def read_committed(cluster: kafka.Cluster, topic: str) -> list[str]:
    """Read all rows up to the last stable offsets."""
    consumer = confluent_kafka.Consumer(
        {
            **cluster.client_settings(),
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": "true",
            "auto.offset.reset": "earliest",
        }
    )
    partitions = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in partitions])
    rows, ended = [], 0
    while ended < len(partitions):
        message = consumer.poll(SECONDS)
        assert message is not None
        if message.error():
            ended += 1
        else:
            rows.append(message.value().decode())
    consumer.close()
    return rows


def wait_for(client: Probe, id_: str, state: str) -> None:
    eventually(lambda: client.describe([id_])[id_].state == state)


# The matrix. The name of each function says what happened to the transaction it returns.


def still_open(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    return leave_open(cluster, topic)


def committed(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic)
    assert client.end(*left.identity, commit=True) is Answer.DONE
    wait_for(client, left.id, "CompleteCommit")
    return left


def timed_out(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic, timeout_ms=1000)
    wait_for(client, left.id, "CompleteAbort")
    return left


def aborted_by_us(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic)
    assert client.end(*left.identity, commit=False) is Answer.DONE
    wait_for(client, left.id, "CompleteAbort")
    return left


def aborted_by_its_producer(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic)
    left.producer.abort_transaction(SECONDS)
    wait_for(client, left.id, "CompleteAbort")
    return left


def committed_by_its_producer(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic)
    left.producer.commit_transaction(SECONDS)
    wait_for(client, left.id, "CompleteCommit")
    return left


def committed_then_taken_over(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = committed(cluster, client, topic)
    initialise(cluster, left.id)
    return left


def taken_over_while_open(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = leave_open(cluster, topic)
    initialise(cluster, left.id)
    return left


def committed_then_next_aborted(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = committed(cluster, client, topic)
    following = leave_open(cluster, topic, id_=left.id)
    assert following.identity.producer_id == left.identity.producer_id
    assert client.end(*following.identity, commit=False) is Answer.DONE
    wait_for(client, left.id, "CompleteAbort")
    return left


def aborted_then_next_committed(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = aborted_by_us(cluster, client, topic)
    following = leave_open(cluster, topic, id_=left.id)
    assert following.identity.producer_id == left.identity.producer_id
    assert client.end(*following.identity, commit=True) is Answer.DONE
    wait_for(client, left.id, "CompleteCommit")
    return left


def committed_then_next_open(cluster: kafka.Cluster, client: Probe, topic: str) -> Open:
    left = committed(cluster, client, topic)
    leave_open(cluster, topic, id_=left.id)
    return left


MATRIX = [
    # what happened, the answer to COMMIT, the outcome that the witness proves
    (still_open, Answer.DONE, Outcome.COMMITTED),
    (committed, Answer.DONE, Outcome.COMMITTED),
    (timed_out, Answer.CONTRADICTED, Outcome.ABORTED),
    (aborted_by_us, Answer.CONTRADICTED, Outcome.ABORTED),
    (aborted_by_its_producer, Answer.CONTRADICTED, Outcome.ABORTED),
    (committed_by_its_producer, Answer.CONTRADICTED, Outcome.COMMITTED),
    (committed_then_taken_over, Answer.FORGOTTEN, Outcome.COMMITTED),
    (taken_over_while_open, Answer.FORGOTTEN, Outcome.ABORTED),
    (committed_then_next_aborted, Answer.FORGOTTEN, Outcome.COMMITTED),
    (aborted_then_next_committed, Answer.FORGOTTEN, Outcome.ABORTED),
    (committed_then_next_open, Answer.FORGOTTEN, Outcome.COMMITTED),
]


def _row(value: object) -> str:
    return getattr(value, "__name__", None) or value.name


@pytest.mark.parametrize(("happened", "answer", "outcome"), MATRIX, ids=_row)
def test_every_end_of_a_transaction_has_its_answer(
    cluster, client, topic, happened, answer, outcome
):
    left = happened(cluster, client, topic)
    for _ in range(2):  # a repeat changes nothing
        assert client.end(*left.identity, commit=True) is answer
        if answer is Answer.DONE:
            eventually(
                lambda: client.settled(left.identity, left.written).progress is Progress.SETTLED
            )
        assert client.outcome(left.identity, left.written).outcome is outcome
        assert client.witness_all(left.identity.producer_id, left.written).outcome is outcome
    # The witness agrees with readers, also while the next transaction of another producer is open.
    seen = outcome is Outcome.COMMITTED
    assert (left.row in read_committed(cluster, topic)) is seen


def test_an_id_that_never_existed_is_unknown(client: Probe):
    assert client.end("never-was", 1, 0, commit=True) is Answer.FORGOTTEN
    assert client.describe(["never-was"]) == {"never-was": None}


def test_a_transaction_without_rows_can_be_committed(cluster, client, topic):
    left = leave_open(cluster, topic, rows=0)
    assert client.end(*left.identity, commit=True) is Answer.CONTRADICTED
    assert client.outcome(left.identity, []).outcome is Outcome.UNKNOWN


def test_every_end_raises_the_epoch_as_version_5_does(cluster, client, topic):
    for commit in (True, False):
        left = leave_open(cluster, topic)
        client.end(*left.identity, commit=commit)
        assert client.describe([left.id])[left.id].epoch == left.identity.epoch + 1


def test_a_zombie_cannot_write_after_the_commit(cluster, client, topic):
    left = leave_open(cluster, topic)
    assert client.end(*left.identity, commit=True) is Answer.DONE
    # The answer comes before the marker, and only the marker informs a partition's leader of the new
    # epoch. Until then it accepts rows of the old one, so a writer sends nothing after its receipt.
    wait_for(client, left.id, "CompleteCommit")
    left.producer.produce(topic, value=b"zombie", partition=0)
    with pytest.raises(confluent_kafka.KafkaException, match="_FENCED"):
        left.producer.flush(SECONDS)
    assert "zombie" not in read_committed(cluster, topic)


def test_many_ends_are_answered_in_order(cluster, client, topic):
    lefts = [leave_open(cluster, topic) for _ in range(6)]
    client.end(*lefts[1].identity, commit=False)
    initialise(cluster, lefts[4].id)
    asked = [left.identity for left in lefts] + [TransactionIdentity("never-was", 1, 0)]
    answers = client.end_many(asked, commit=True)
    assert answers == [
        Answer.DONE,
        Answer.CONTRADICTED,
        Answer.DONE,
        Answer.DONE,
        Answer.FORGOTTEN,
        Answer.DONE,
        Answer.FORGOTTEN,
    ]
    assert client.end_many([], commit=True) == []


# The witness.


def test_an_open_transaction_has_no_outcome(cluster, client, topic):
    left = leave_open(cluster, topic)
    evidence = client.witness_all(left.identity.producer_id, left.written)
    assert evidence.outcome is Outcome.OPEN
    assert f"{topic}-0@" in evidence.why
    assert client.outcome(left.identity, left.written).outcome is Outcome.OPEN


def test_a_marker_counts_while_another_transaction_blocks_readers(cluster, client, topic):
    older = leave_open(cluster, topic)
    left = leave_open(cluster, topic)
    assert client.end(*left.identity, commit=True) is Answer.DONE
    eventually(lambda: client.settled(left.identity, left.written).progress is Progress.SETTLED)
    where = {(part.topic, part.partition) for part in left.written}
    stable = client.last_stable_offsets(where)
    assert all(stable[part.topic, part.partition] <= part.offset for part in left.written)
    assert client.witness_all(left.identity.producer_id, left.written).outcome is Outcome.COMMITTED
    assert client.witness_all(older.identity.producer_id, older.written).outcome is Outcome.OPEN


@pytest.mark.parametrize("commit", [True, False])
def test_the_index_decides_if_the_marker_is_too_far_away(cluster, client, topic, commit):
    left = leave_open(cluster, topic)
    client.end(*left.identity, commit=commit)
    wait_for(client, left.id, "CompleteCommit" if commit else "CompleteAbort")
    part, producer_id = left.written[0], left.identity.producer_id
    near = client.run(witness.ask_record, part, producer_id)
    far = client.run(witness.ask_record, part, producer_id, scan_bytes=1)
    assert near.outcome is far.outcome is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert "marker" in near.why
    assert "index" in far.why


def test_a_record_of_another_producer_proves_nothing(cluster, client, topic):
    left = committed(cluster, client, topic)
    evidence = client.witness_all(left.identity.producer_id + 1000, left.written)
    assert evidence.outcome is Outcome.UNKNOWN
    assert "not of producer" in evidence.why


def test_an_offset_that_was_never_written_proves_nothing(cluster, client, topic):
    left = committed(cluster, client, topic)
    part = left.written[0]
    for offset in (part.offset + 2, part.offset + 100):  # after the marker; far beyond
        evidence = client.witness(
            part.topic, part.topic_id, part.partition, offset, left.identity.producer_id
        )
        assert evidence.outcome is Outcome.UNKNOWN


def test_a_marker_is_not_mistaken_for_a_record(cluster, client, topic):
    left = committed(cluster, client, topic)
    part = left.written[0]
    evidence = client.witness(
        part.topic, part.topic_id, part.partition, part.offset + 1, left.identity.producer_id
    )
    assert evidence.outcome is Outcome.UNKNOWN


def test_deleted_records_prove_nothing(cluster, client, topic):
    left = committed(cluster, client, topic)
    admin = AdminClient(cluster.client_settings())
    parts = [
        confluent_kafka.TopicPartition(part.topic, part.partition, part.offset + 1)
        for part in left.written
    ]
    for future in admin.delete_records(parts[:1]).values():
        future.result(SECONDS)
    # One partition lost its records, and the other proves the commit for both.
    assert client.witness_all(left.identity.producer_id, left.written).outcome is Outcome.COMMITTED
    for future in admin.delete_records(parts[1:]).values():
        future.result(SECONDS)
    evidence = client.witness_all(left.identity.producer_id, left.written)
    assert evidence.outcome is Outcome.UNKNOWN
    assert "no longer there" in evidence.why
    # The coordinator still remembers it, until the next use of the id.
    assert client.outcome(left.identity, left.written).outcome is Outcome.COMMITTED
    initialise(cluster, left.id)
    assert client.outcome(left.identity, left.written).outcome is Outcome.UNKNOWN


def test_a_topic_that_was_deleted_or_created_again_proves_nothing(cluster, client, topic):
    left = committed(cluster, client, topic)
    admin = AdminClient(cluster.client_settings())
    admin.delete_topics([topic])[topic].result(SECONDS)
    eventually(lambda: client.topics([topic])[topic] is None)
    evidence = client.witness_all(left.identity.producer_id, left.written)
    assert evidence.outcome is Outcome.UNKNOWN
    assert "no longer there" in evidence.why

    make_topic(cluster, topic)
    committed(cluster, client, topic)  # other records at the same offsets
    evidence = client.witness_all(left.identity.producer_id, left.written)
    assert evidence.outcome is Outcome.UNKNOWN
    assert "created again" in evidence.why


# Settlements.


def test_an_open_or_aborted_transaction_is_never_settled(cluster, client, topic):
    left = leave_open(cluster, topic)
    assert client.settled(left.identity, left.written).progress is not Progress.SETTLED
    left = aborted_by_us(cluster, client, topic)
    assert client.settled(left.identity, left.written).progress is not Progress.SETTLED


def test_a_transaction_called_complete_but_open_in_a_partition_is_torn(cluster, client, topic):
    # This imitates KAFKA-20734: query a partition in which another transaction is open.
    left = committed(cluster, client, topic)
    still = leave_open(cluster, topic)
    torn = TransactionIdentity(left.id, still.identity.producer_id, still.identity.epoch)
    settlement = client.settled(torn, still.written)
    assert settlement.progress is Progress.TORN
    assert "open there since" in settlement.why


def test_a_lost_record_is_not_settled(cluster, client, topic):
    left = committed(cluster, client, topic)
    part = left.written[0]
    beyond = LastRecord(part.topic, part.topic_id, part.partition, part.offset + 100)
    assert client.settled(left.identity, [beyond]).progress is not Progress.SETTLED


def test_a_deleted_topic_is_lost_even_if_created_again(cluster, client, topic):
    left = committed(cluster, client, topic)
    admin = AdminClient(cluster.client_settings())
    admin.delete_topics([topic])[topic].result(SECONDS)
    eventually(lambda: client.topics([topic])[topic] is None)
    assert client.settled(left.identity, left.written).progress is Progress.LOST
    make_topic(cluster, topic)
    committed(cluster, client, topic)
    assert client.settled(left.identity, left.written).progress is Progress.LOST


# Finding open transactions.


def test_open_transactions_are_found_by_prefix_on_every_broker(cluster, client, topic):
    space = uuid.uuid4().hex[:8]
    mine = [leave_open(cluster, topic, id_=f"{space}.a.{n}") for n in range(3)]
    leave_open(cluster, topic, id_=f"{space}.ab.0")
    leave_open(cluster, topic, id_=f"{space}xa.0")  # the dot is no wildcard
    found = client.list_open(f"{space}.a.")
    assert [(it.transactional_id, it.producer_id, it.state) for it in found] == [
        (left.id, left.identity.producer_id, "Ongoing") for left in mine
    ]
    client.end(*mine[1].identity, commit=True)
    wait_for(client, mine[1].id, "CompleteCommit")
    assert [it.transactional_id for it in client.list_open(f"{space}.a.")] == [
        mine[0].id,
        mine[2].id,
    ]
    assert client.list_open("no-such-prefix") == []


def test_a_stray_is_aborted_as_described(cluster, client, topic):
    left = leave_open(cluster, topic)
    now = client.describe([left.id])[left.id]
    assert (now.state, now.timeout_ms) == ("Ongoing", 60_000)
    assert now.partitions == {(topic, 0), (topic, 1)}
    assert abs(now.started_at - time.time()) < SECONDS
    assert client.end(left.id, now.producer_id, now.epoch, commit=False) is Answer.DONE
    wait_for(client, left.id, "CompleteAbort")
    assert read_committed(cluster, topic) == []


# Topics, offsets, groups, facts.


def test_topics_and_offsets_are_described(cluster, client, topic):
    found = client.topics([topic, "no-such", "not a name"])
    assert (found["no-such"], found["not a name"]) == (None, None)
    assert (found[topic].partitions, found[topic].replication) == (2, 1)
    assert client.partition_counts([topic]) == {topic: 2}
    left = leave_open(cluster, topic, partitions=(0,), rows=3)
    where = [(topic, 0), (topic, 1), (topic, 7), ("no-such", 0)]
    assert client.high_watermarks(where) == dict(zip(where, (3, 0, None, None), strict=True))
    assert client.last_stable_offsets(where) == dict(zip(where, (0, 0, None, None), strict=True))
    (state,) = client.describe_producers([(topic, 0)])[topic, 0]
    assert (state.producer_id, state.open_since) == (left.identity.producer_id, 0)


def test_group_offsets_are_set_and_read_back(cluster, client, topic):
    group = f"g-{uuid.uuid4().hex[:8]}"
    assert client.stable_group_offsets(group, [(topic, 0)]).offsets == {}
    client.commit_group_offsets(group, {(topic, 0): 5, (topic, 1): 7})
    found = client.stable_group_offsets(group, [(topic, 0), (topic, 1)])
    assert found.offsets == {(topic, 0): 5, (topic, 1): 7}
    assert not found.pending
    client.commit_group_offsets(group, {})


def test_group_offsets_in_an_open_transaction_are_pending(cluster, client, topic):
    group = f"g-{uuid.uuid4().hex[:8]}"
    client.commit_group_offsets(group, {(topic, 0): 5, (topic, 1): 7})
    left = leave_open(cluster, topic)
    consumer = confluent_kafka.Consumer({**cluster.client_settings(), "group.id": group})
    left.producer.send_offsets_to_transaction(
        [confluent_kafka.TopicPartition(topic, 0, 9)], consumer.consumer_group_metadata(), SECONDS
    )
    where = [(topic, 0), (topic, 1)]
    found = client.stable_group_offsets(group, where)
    assert (found.offsets, found.pending) == ({(topic, 1): 7}, {(topic, 0)})
    client.end(*left.identity, commit=True)
    eventually(lambda: not client.stable_group_offsets(group, where).pending)
    assert client.stable_group_offsets(group, where).offsets == {(topic, 0): 9, (topic, 1): 7}


def test_a_group_with_live_members_is_not_touched(cluster, client, topic):
    group = f"g-{uuid.uuid4().hex[:8]}"
    consumer = confluent_kafka.Consumer({**cluster.client_settings(), "group.id": group})
    consumer.subscribe([topic])
    eventually(lambda: consumer.poll(0.1) is None and bool(consumer.assignment()))
    with pytest.raises(UsageError, match=f"{group}.*live members"):
        client.commit_group_offsets(group, {(topic, 0): 5})
    consumer.close()


def test_the_facts_of_the_cluster_are_read(client):
    assert client.features()["transaction.version"] >= 2
    assert client.max_version("EndTxn") >= 5
    (broker,) = client.brokers().values()
    assert broker.release >= (4, 0)
    config = client.broker_config(["transaction.max.timeout.ms", "message.max.bytes", "no.such"])
    assert config.values is not None
    assert config.values["transaction.max.timeout.ms"] == ("900000",)
    assert config.values["no.such"] == ()


def test_a_call_to_a_silent_broker_ends_in_time(cluster, topic):
    left = leave_open(cluster, topic)
    with Probe(cluster.client_settings(), time_limit=1) as client:
        assert client.describe([left.id])[left.id] is not None
        cluster.pause(1)
        try:
            assert client.end(*left.identity, commit=True) is Answer.UNREACHABLE
        finally:
            cluster.resume(1)
        eventually(lambda: client.end(*left.identity, commit=True) is Answer.DONE)
