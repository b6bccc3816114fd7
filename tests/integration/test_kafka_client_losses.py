"""The driver's Kafka client while brokers are lost, and with several brokers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from open_transactions import SECONDS, eventually, leave_open, make_topic

from kafka_probe import Probe
from poundlock.errors import Unavailable
from poundlock.servers import kafka
from poundlock.sinks.kafka.transactions import Answer, Progress
from poundlock.sinks.kafka.witness import Outcome


def test_a_lost_broker_is_an_outage_and_its_return_is_noticed(tmp_path):
    with kafka.running() as cluster, Probe(cluster.client_settings(), time_limit=2) as client:
        topic = make_topic(cluster)
        left, other = leave_open(cluster, topic), leave_open(cluster, topic)
        assert client.end(*other.identity, commit=True) is Answer.DONE
        cluster.kill(1)
        assert client.end(*left.identity, commit=True) is Answer.UNREACHABLE
        with pytest.raises(Unavailable):
            client.list_open("")
        with pytest.raises(Unavailable):
            client.describe([left.id])
        cluster.start(1)
        eventually(lambda: client.end(*left.identity, commit=True) is Answer.DONE)
        assert client.end(*other.identity, commit=True) is Answer.DONE
        eventually(lambda: client.settled(left.identity, left.written).progress is Progress.SETTLED)


def test_an_address_without_a_broker_is_reported(tmp_path):
    with (
        Probe({"bootstrap.servers": "127.0.0.1:9"}, time_limit=1) as client,
        pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"),
    ):
        client.describe(["x"])


# Several brokers.


@pytest.fixture(scope="module")
def three() -> Iterator[kafka.Cluster]:
    with kafka.running(brokers=3) as running:
        yield running


def test_a_partition_without_a_leader_keeps_a_commit_pending(three: kafka.Cluster):
    name = f"t-{uuid.uuid4().hex[:8]}"
    admin = AdminClient(three.client_settings())
    spread = NewTopic(name, 2, replica_assignment=[[1], [3]])
    admin.create_topics([spread])[name].result(SECONDS)
    with Probe(three.client_settings(), time_limit=SECONDS) as client:

        def led() -> set[int]:
            found = client.topics([name])[name]  # a broker without news reports no leader
            return set(found.leaders) if found else set()

        eventually(lambda: led() == {0, 1})
        left = leave_open(three, name)
        three.kill(3)
        eventually(lambda: led() == {0})
        # The coordinator may have been on the dead broker. The client finds the next one.
        assert client.end(*left.identity, commit=True) is Answer.DONE
        settlement = client.settled(left.identity, left.written)
        assert settlement.progress is Progress.PENDING
        assert f"{name}-1" in settlement.why
        with pytest.raises(Unavailable, match=f"{name}-1|no leader"):
            Probe(three.client_settings(), time_limit=2).last_stable_offsets([(name, 1)])
        three.start(3)
        eventually(lambda: client.settled(left.identity, left.written).progress is Progress.SETTLED)
        assert client.witness_all(left.identity.producer_id, left.written).outcome is (
            Outcome.COMMITTED
        )


def test_a_broker_that_does_not_answer_hides_no_transaction(three: kafka.Cluster):
    topic = make_topic(three)
    space = uuid.uuid4().hex[:8]
    lefts = [leave_open(three, topic, id_=f"{space}.{n}") for n in range(9)]
    expected = [left.id for left in lefts]
    with Probe(three.client_settings(), time_limit=SECONDS) as client:
        assert [it.transactional_id for it in client.list_open(space)] == expected
        three.pause(2)
        try:
            hasty = Probe(three.client_settings(), time_limit=2)
            with hasty, pytest.raises(Unavailable):
                hasty.list_open(space)
        finally:
            three.resume(2)
        three.kill(2)

        def all_found() -> bool:
            try:
                return [it.transactional_id for it in client.list_open(space)] == expected
            except Unavailable:
                return False

        eventually(all_found)
        assert set(client.end_many([left.identity for left in lefts], commit=False)) == {
            Answer.DONE
        }
        three.start(2)
