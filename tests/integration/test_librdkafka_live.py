"""The Arrow producer against a real broker, read back by other clients."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from kafka.admin import KafkaAdminClient
from kafka.partitioner.default import murmur2
from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer import EndTxnRequest

from poundlock import errors
from poundlock.servers import kafka
from poundlock.sinks.kafka.producer import ArrowProducer
from poundlock.sinks.kafka.types import ProducerIdentity

SECONDS = 30
# A resource with access rules is closed to users without one. Other resources are open to all.
GUARDED = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "transaction.max.timeout.ms": "900000",
    "auto.create.topics.enable": "false",
}

Producers = Callable[..., ArrowProducer]


@pytest.fixture(scope="module")
def kafka_server() -> Iterator[kafka.Cluster]:
    """Start a broker in place of the shared one. The tests set access rules on it and kill it."""
    with kafka.running(properties=GUARDED) as cluster:
        yield cluster


@pytest.fixture
def admin(kafka_server: kafka.Cluster) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=kafka_server.bootstrap_servers)
    yield admin
    admin.close()


@pytest.fixture
def target(topic: Callable[..., str]) -> str:
    return topic(partitions=3)


@pytest.fixture
def producers(kafka_server: kafka.Cluster) -> Iterator[Producers]:
    """Make producers with an open transaction. The rest of them is dropped after the test."""
    made: list[ArrowProducer] = []

    def make(id: str | None = None, **more: str) -> ArrowProducer:
        more = {name.replace("_", "."): value for name, value in more.items()}
        settings = kafka_server.client_settings() | more
        made.append(ArrowProducer(settings, transactional_id=id or new()))
        made[-1].begin(SECONDS)
        return made[-1]

    yield make
    for producer in made:
        producer.drop()


def new(prefix: str = "p") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def read(kafka_server: kafka.Cluster, topic: str, *, committed: bool = True) -> list:
    """Return all messages of a topic, partition by partition."""
    consumer = Consumer(
        kafka_server.client_settings()
        | {
            "group.id": new("reader"),
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.partition.eof": "true",
        }
    )
    partitions = consumer.list_topics(topic, SECONDS).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    found, open_ends = [], len(partitions)
    while open_ends:
        message = consumer.poll(SECONDS)
        assert message is not None, "the reader waited in vain"
        if message.error() is None:
            found.append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            open_ends -= 1
    consumer.close()
    return sorted(found, key=lambda message: (message.partition(), message.offset()))


def finish(producer: ArrowProducer) -> ProducerIdentity:
    """End a task: flush, take the identity, leave the transaction open."""
    producer.flush(SECONDS)
    identity = producer.identity()
    producer.drop()
    return identity


def end(
    admin: KafkaAdminClient,
    transactional_id: str,
    identity: ProducerIdentity,
    *,
    commit: bool = True,
) -> None:
    """End a transaction of another producer, as the driver does."""

    async def ask() -> int:
        node = await admin._find_coordinator_id(transactional_id, CoordinatorType.TRANSACTION)
        request = EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            committed=commit,
            min_version=5,
            max_version=5,
        )
        return (await admin._manager.send(request, node_id=node)).error_code

    concurrent = 51
    while (code := admin._manager.run(ask)) == concurrent:
        time.sleep(0.01)
    assert code == 0
    until = time.monotonic() + SECONDS
    while state(admin, transactional_id).state not in ("CompleteCommit", "CompleteAbort"):
        assert time.monotonic() < until
        time.sleep(0.01)


def state(admin: KafkaAdminClient, transactional_id: str) -> Any:
    return admin.describe_transactions([transactional_id])[transactional_id]


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


# Writing rows.


def test_rows_stay_invisible_until_another_process_commits(kafka_server, admin, target, producers):
    keys = [b"a", None, b"", "ü".encode(), b"a"]
    values = [b"1", b"2", None, b"", b"\x00\xff"]
    producer = producers("commit-me")
    producer.write(target, keys=pa.array(keys), values=pa.array(values))
    identity = finish(producer)

    described = state(admin, "commit-me")
    assert described.state == "Ongoing"
    assert (described.producer_id, described.producer_epoch) == identity
    assert read(kafka_server, target) == []
    end(admin, "commit-me", identity)
    rows = read(kafka_server, target)
    assert sorted(((m.key(), m.value()) for m in rows), key=repr) == sorted(
        zip(keys, values, strict=True), key=repr
    )
    assert [m.value() for m in rows if m.key() == b"a"] == [b"1", b"\x00\xff"]


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string()],
    ids=str,
)
def test_slices_of_every_type_with_nulls_arrive(kafka_server, target, producers, kind):
    texts = [f"row {i}" if i % 7 else (None if i % 2 else "") for i in range(1000)]
    column = pa.array([t and (t.encode() if "binary" in str(kind) else t) for t in texts], kind)
    producer = producers()
    producer.write(target, keys=column.slice(100, 500), values=column.slice(101, 500))
    producer.flush(SECONDS)
    as_bytes = [t if t is None else t.encode() for t in texts]
    sent = list(itertools.pairwise(as_bytes[100:601]))
    got = [(m.key(), m.value()) for m in read(kafka_server, target, committed=False)]
    assert sorted(got, key=repr) == sorted(sent, key=repr)


def test_keys_go_to_the_same_partition_as_with_java(kafka_server, topic, producers):
    target = topic(partitions=7)
    keys = [b"", *(f"key-{i}".encode() for i in range(500))]
    producer = producers()
    producer.write(target, keys=pa.array(keys), values=pa.array(keys))
    producer.flush(SECONDS)
    for message in read(kafka_server, target, committed=False):
        assert message.partition() == (murmur2(message.key()) & 0x7FFFFFFF) % 7


def test_offsets_and_partitions_are_returned(kafka_server, target, producers):
    count = 25_000  # more than one call into the library, and more than one request
    numbers = [i % 3 if i % 5 else None for i in range(count)]
    values = [str(i).encode() for i in range(count)]
    producer = producers()
    producer.write(
        target,
        keys=pa.array(values),
        values=pa.array(values),
        partitions=pa.array(numbers, pa.int32()),
    )
    producer.flush(SECONDS)
    offsets, rows = defaultdict(list), defaultdict(list)
    for message in read(kafka_server, target, committed=False):
        wanted = numbers[int(message.value())]
        by_key = (murmur2(message.key()) & 0x7FFFFFFF) % 3
        assert message.partition() == (by_key if wanted is None else wanted)
        offsets[target, message.partition()].append(message.offset())
        rows[message.partition()].append(int(message.value()))
    assert producer.acknowledged == {
        place: (found[0], found[-1]) for place, found in offsets.items()
    }
    assert all(found == sorted(found) for found in rows.values())
    assert sum(map(len, rows.values())) == count


def test_two_topics_and_two_writes_share_a_transaction(kafka_server, topic, target, producers):
    other = topic(partitions=1)
    producer = producers()
    for i in range(3):
        producer.write(target, keys=None, values=pa.array([b"%d" % i]))
        producer.write(other, keys=None, values=pa.array([b"%d" % i] * 2))
    producer.flush(SECONDS)
    assert sorted(m.value() for m in read(kafka_server, target, committed=False)) == [
        b"0",
        b"1",
        b"2",
    ]
    assert producer.acknowledged[other, 0] == (0, 5)


def test_headers_and_timestamps_arrive(kafka_server, target, producers):
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = [[("a", b"1"), ("a", b"2"), ("b", None), ("", b"")], [], None, [("only", b"\x00")]]
    records = [h and [{"key": k, "value": v} for k, v in h] for h in headers]
    times = [1_600_000_000_000, None, 1_700_000_000_001, 5]
    producer = producers()
    start_ms = time.time() * 1000
    # Slices, to check that the offsets of nested columns are respected too.
    producer.write(
        target,
        keys=pa.array([b"0", None, b"2", b""]),
        values=pa.array([b"v0", b"v1", None, b""]),
        partitions=pa.array([0, 0, 0, None], pa.int32()),
        headers=pa.array([[{"key": "no", "value": b""}], *records], kind).slice(1),
        timestamps=pa.array([7, *times], pa.int64()).slice(1),
    )
    producer.write(
        target, keys=None, values=pa.array([b"bare"]), headers=pa.nulls(1, kind), timestamps=None
    )
    producer.flush(SECONDS)
    rows = read(kafka_server, target, committed=False)
    got = {row.value() if row.value() != b"" else "empty": row for row in rows}
    assert set(got) == {b"v0", b"v1", None, "empty", b"bare"}
    for i, name in enumerate([b"v0", b"v1", None, "empty"]):
        message = got[name]
        assert message.headers() == (headers[i] or None)
        assert message.key() == [b"0", None, b"2", b""][i]
        if times[i] is not None:
            assert message.timestamp()[1] == times[i]
        else:
            assert start_ms - 1 <= message.timestamp()[1] <= time.time() * 1000
    assert [got[name].partition() for name in (b"v0", b"v1", None)] == [0, 0, 0]


def test_a_header_without_a_key_ends_the_branch(target, producers):
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    producer = producers()
    headers = pa.array([[{"key": None, "value": b"x"}]], kind)
    with pytest.raises(errors.BadRow, match="header whose key is null"):
        producer.write(target, keys=None, values=pa.array([b"v"]), headers=headers)
    with pytest.raises(errors.BadRow, match="header whose key is null"):
        producer.flush(SECONDS)


@pytest.mark.parametrize("limit", ["messages", "kbytes"])
@pytest.mark.parametrize("road", ["fast", "slow"])
def test_the_order_is_kept_when_the_queue_is_always_full(
    kafka_server, target, producers, limit, road
):
    count, keys = 5000, 10
    small = {"queue_buffering_max_messages": "7"}
    if limit == "kbytes":
        small = {"queue_buffering_max_kbytes": "1"}
    producer = producers(linger_ms="0", **small)
    values = pa.array([f"{i:06d}".encode() for i in range(count)])
    producer.write(
        target,
        keys=pa.array([f"k{i % keys}".encode() for i in range(count)]),
        values=values,
        timestamps=pa.array([1000] * count) if road == "slow" else None,
    )
    producer.flush(SECONDS)
    by_key = defaultdict(list)
    for message in read(kafka_server, target, committed=False):
        by_key[message.key()].append(int(message.value()))
    assert by_key == {f"k{k}".encode(): list(range(k, count, keys)) for k in range(keys)}


def test_an_empty_branch_is_no_error(admin, producers):
    producer = producers("empty")
    producer.flush(SECONDS)
    assert producer.identity().epoch == 0 and producer.acknowledged == {}
    producer.drop()
    assert state(admin, "empty").state == "Empty"


def test_rows_without_a_transaction_are_visible_at_once(kafka_server, target):
    with ArrowProducer(kafka_server.client_settings(), transactional_id=None) as producer:
        producer.begin(SECONDS)
        producer.write(target, keys=None, values=pa.array([b"v"]))
        producer.flush(SECONDS)
        assert [m.value() for m in read(kafka_server, target)] == [b"v"]
        with pytest.raises(errors.UsageError, match="no transaction"):
            producer.identity()


def test_offsets_of_a_group_are_committed_with_the_rows(kafka_server, admin, target, producers):
    producer = producers("with-offsets")
    producer.write(target, keys=None, values=pa.array([b"v"]))
    producer.send_offsets("a-group", {(target, 0): 17, (target, 2): 4})
    identity = finish(producer)
    consumer = Consumer(kafka_server.client_settings() | {"group.id": "a-group"})
    places = [TopicPartition(target, number) for number in range(3)]
    end(admin, "with-offsets", identity)
    until = time.monotonic() + SECONDS
    while (found := [p.offset for p in consumer.committed(places, SECONDS)]) != [17, -1001, 4]:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    consumer.close()


# Aborting and dropping.


def test_an_abort_ends_the_transaction(kafka_server, admin, target, producers):
    producer = producers("abort-me")
    producer.write(target, keys=None, values=pa.array([b"v"]))
    producer.flush(SECONDS)
    assert state(admin, "abort-me").state == "Ongoing"
    producer.abort(SECONDS)
    assert state(admin, "abort-me").state in ("PrepareAbort", "CompleteAbort")
    assert len(read(kafka_server, target, committed=False)) == 1


def test_a_drop_does_not_wait_for_a_silent_broker(kafka_server, target, producers):
    producer = producers()
    producer.write(target, keys=None, values=pa.array([b"before"]))
    producer.flush(SECONDS)
    kafka_server.pause(1)
    try:
        producer.write(target, keys=None, values=pa.array([b"v"] * 1000))
        with pytest.raises(errors.Unavailable, match="1000 of 1001 rows are outstanding"):
            producer.flush(0.5)
        with pytest.raises(errors.Unavailable):
            producer.flush(0.5)
        producer.abort(0.5)  # the broker is resumed only after it
    finally:
        kafka_server.resume(1)
        kafka_server.wait_ready()


def test_a_stalled_queue_is_unavailable(kafka_server, target):
    settings = kafka_server.client_settings() | {"queue.buffering.max.messages": "10"}
    with ArrowProducer(settings, transactional_id=new(), stall_timeout_s=1) as producer:
        producer.begin(SECONDS)
        producer.write(target, keys=None, values=pa.array([b"before"]))
        kafka_server.pause(1)
        try:
            with pytest.raises(errors.Unavailable, match="no row was acknowledged for 1 s"):
                producer.write(target, keys=None, values=pa.array([b"v"] * 100))
        finally:
            kafka_server.resume(1)
            kafka_server.wait_ready()


def test_memory_is_freed_and_does_not_grow_with_the_batch(target, producers):
    values = pa.array([b"x" * 1000] * 10_000)

    def use(rows: int, times: int) -> float:
        producer = producers()
        for _ in range(times):
            producer.write(target, keys=None, values=values.slice(0, rows))
        top = resident_mb()
        producer.abort(SECONDS)
        return top

    use(10_000, 5)
    before, threads = resident_mb(), threading.active_count()
    assert use(10_000, 20) < before + 100  # although 200 MB were written
    for _ in range(50):
        use(1000, 1)
    assert resident_mb() < before + 50
    assert threading.active_count() == threads


# Errors by name.


def test_a_fenced_producer_raises(target, producers):
    old = producers("twice")
    old.write(target, keys=None, values=pa.array([b"old"]))
    old.flush(SECONDS)
    producers("twice")
    old.write(target, keys=None, values=pa.array([b"late"]))
    for _ in range(2):
        with pytest.raises(errors.ProducerFenced, match="same transactional id"):
            old.flush(SECONDS)
    with pytest.raises(errors.ProducerFenced):
        old.write(target, keys=None, values=pa.array([b"later"]))


@pytest.mark.parametrize("road", ["fast", "slow"])
def test_a_row_that_is_too_large_is_a_bad_row(target, producers, road):
    producer = producers()
    values = pa.array([b"small", b"x" * 1_000_000, b"small"])
    times = pa.array([1, 1, 1]) if road == "slow" else None
    with pytest.raises(
        errors.BadRow, match=rf"'{target}' is too large: .* 1000000 bytes, .*=1000000\. Make"
    ):
        producer.write(target, keys=None, values=values, timestamps=times)
    with pytest.raises(errors.BadRow, match="1000000 bytes"):
        producer.flush(SECONDS)


def test_a_batch_too_large_for_the_topic_is_refused(topic, producers):
    target = topic(**{"max.message.bytes": "5000"})
    producer = producers()
    producer.write(target, keys=None, values=pa.array([b"x" * 2000] * 100))
    with pytest.raises(errors.BadRow) as caught:
        producer.flush(SECONDS)
    for part in (f"max.message.bytes of topic '{target}'", "2000 bytes", "batch.size"):
        assert part in str(caught.value)


def test_a_compacted_topic_needs_keys(topic, producers):
    target = topic(**{"cleanup.policy": "compact"})
    producer = producers()
    producer.write(target, keys=None, values=pa.array([b"v"] * 3))
    with pytest.raises(errors.BadRow, match="needs a key"):
        producer.flush(SECONDS)


def test_an_unknown_topic_is_reported(producers):
    producer = producers()
    with pytest.raises(errors.UsageError, match=r"create topic 'nowhere'"):
        producer.write("nowhere", keys=None, values=pa.array([b"v"]))


@pytest.mark.parametrize("name", ["", "a\0b", "a b", "x" * 300])
def test_an_impossible_topic_name_is_refused(producers, name):
    with pytest.raises((errors.BadRow, errors.UsageError), match="topic"):
        producers().write(name, keys=None, values=pa.array([b"v"]))


def test_a_transaction_timeout_above_the_brokers_limit_is_refused(producers):
    with pytest.raises(errors.UsageError, match=r"raise transaction\.max\.timeout\.ms"):
        producers(transaction_timeout_ms="999999999")


def allow(
    kafka_server: kafka.Cluster, user: str, operation: AclOperation, kind: ResourceType, name: str
) -> None:
    """Allow this operation to `user`, which closes the resource to all other users."""
    admin = AdminClient(kafka_server.client_settings())
    where = (kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*")
    rule = AclBinding(*where, operation, AclPermissionType.ALLOW)
    admin.create_acls([rule])[rule].result(SECONDS)
    wanted = AclBindingFilter(*where, AclOperation.ANY, AclPermissionType.ANY)
    until = time.monotonic() + SECONDS
    while not admin.describe_acls(wanted).result(SECONDS):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_missing_permissions_are_named(kafka_server, topic, target, producers):
    others = ("somebody-else", AclOperation.ALL)
    closed = topic()
    allow(kafka_server, *others, ResourceType.TOPIC, closed)
    with pytest.raises(errors.NotAuthorised, match=f"Write and Describe on topic '{closed}'"):
        producers().write(closed, keys=None, values=pa.array([b"v"]))

    allow(kafka_server, *others, ResourceType.TRANSACTIONAL_ID, "not-yours")
    with pytest.raises(errors.NotAuthorised, match="Describe on transactional id 'not-yours'"):
        producers("not-yours")

    allow(kafka_server, *others, ResourceType.GROUP, "their-group")
    producer = producers()
    producer.write(target, keys=None, values=pa.array([b"v"]))
    with pytest.raises(errors.NotAuthorised, match="Read on consumer group 'their-group'"):
        producer.send_offsets("their-group", {(target, 0): 1})
    with pytest.raises(errors.NotAuthorised):
        producer.flush(SECONDS)


def test_a_missing_right_to_write_to_a_visible_topic_is_reported(kafka_server, target, producers):
    """The producer accepts the rows, and the transaction fails later."""
    allow(kafka_server, "ANONYMOUS", AclOperation.DESCRIBE, ResourceType.TOPIC, target)
    producer = producers()
    producer.write(target, keys=None, values=pa.array([b"v"] * 10))
    with pytest.raises(errors.NotAuthorised, match=f"Write and Describe on topic '{target}'"):
        producer.flush(SECONDS)


def test_tls_and_passwords_are_checked():
    with kafka.running(security="SASL_SSL", users={"writer": "s3cret-right"}) as kafka_server:
        admin = AdminClient(kafka_server.admin_settings())
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(SECONDS)
        for mechanism in ("PLAIN", "SCRAM-SHA-512"):
            settings = kafka_server.client_settings("writer", mechanism=mechanism)
            with ArrowProducer(settings, transactional_id=new()) as producer:
                producer.begin(SECONDS)
                producer.write("t", keys=None, values=pa.array([b"v"]))
                producer.flush(SECONDS)
                assert list(producer.acknowledged) == [("t", 0)]
        wrong = settings | {"sasl.password": "s3cret-wrong"}
        with ArrowProducer(wrong, transactional_id=new()) as producer:
            with pytest.raises(errors.NotAuthorised, match=r"sasl\.password") as caught:
                producer.begin(3600)  # at once, not after its timeout
            assert "s3cret" not in str(caught.value) + repr(producer)
        plain = {"bootstrap.servers": kafka_server.bootstrap_servers}
        with (
            ArrowProducer(plain, transactional_id=new()) as producer,
            pytest.raises(errors.Unavailable, match=r"security\.protocol"),
        ):
            producer.begin(2)


# Last, because it kills the broker.


def test_every_row_arrives_once_although_the_broker_is_killed(kafka_server, target, producers):
    batches, size = 20, 2000
    restart = threading.Thread(target=lambda: (kafka_server.kill(1), kafka_server.start(1)))
    producer = producers("survivor")
    for batch in range(batches):
        if batch == 5:
            restart.start()
        rows = pa.array([f"{batch * size + i}".encode() for i in range(size)])
        producer.write(target, keys=rows, values=rows)
        time.sleep(0.02)
    producer.flush(120)
    identity = finish(producer)
    restart.join()
    admin = KafkaAdminClient(bootstrap_servers=kafka_server.bootstrap_servers)
    end(admin, "survivor", identity)
    admin.close()
    found = sorted(int(m.value()) for m in read(kafka_server, target))
    assert found == list(range(batches * size))
