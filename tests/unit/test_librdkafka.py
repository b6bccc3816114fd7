"""The Arrow producer, without a broker."""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import threading
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pytest

from poundlock import errors
from poundlock.sinks.kafka import columns, librdkafka
from poundlock.sinks.kafka.librdkafka import Failure, translate_error
from poundlock.sinks.kafka.producer import ArrowProducer
from poundlock.sinks.kafka.reports import Delivered, Ledger, Problem, Trouble
from poundlock.sinks.kafka.settings import check_settings
from poundlock.sinks.kafka.types import ProducerIdentity

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "log_level": "0"}
ROWS = [b"one", None, b"", b"\x00\xff four", b"five" * 100]


def seen_by_c(column: pa.Array) -> list[bytes | None]:
    """Read a column as the library does, only through addresses and lengths."""
    flat = columns.flat(column, "value")
    return [
        ctypes.string_at(int(address), int(length)) if address else None
        for address, length in zip(*columns.spans(flat), strict=True)
    ]


def codes() -> dict[str, int]:
    """Every error of the library, by name."""
    library = librdkafka.load()
    return {librdkafka.decode(library.err2name(code)): code for code in range(-200, 200)}


# Columns.


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_spans_of_binary_columns_contain_their_bytes(kind):
    assert seen_by_c(pa.array(ROWS, kind)) == ROWS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_spans_of_text_contain_its_utf8(kind):
    assert seen_by_c(pa.array(["grüße", None, ""], kind)) == ["grüße".encode(), None, b""]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize(("start", "length"), [(0, 0), (1, 3), (2, 1), (4, 1), (5, 0)])
def test_spans_of_a_slice_contain_only_its_rows(kind, start, length):
    assert seen_by_c(pa.array(ROWS, kind).slice(start, length)) == ROWS[start : start + length]


def test_spans_of_a_nested_slice_contain_only_its_rows():
    assert seen_by_c(pa.array(ROWS * 3).slice(2, 11).slice(4, 5)) == (ROWS * 3)[6:11]


def test_an_empty_value_is_not_a_null_even_without_a_buffer():
    assert seen_by_c(pa.array([b"", b"", None])) == [b"", b"", None]
    bare = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(bytes(12)), pa.py_buffer(b"")])
    assert seen_by_c(bare) == [b"", b""]


def test_a_null_with_bytes_in_its_buffer_is_a_null():
    places = pa.array([0, 3, 6], pa.int32()).buffers()[1]
    hidden = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x02"), places, pa.py_buffer(b"abcdef")]
    )
    assert seen_by_c(hidden) == [None, b"def"]


def test_a_column_of_type_null_has_only_nulls():
    assert seen_by_c(pa.nulls(2)) == [None, None]


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.int8())], ids=str
)
def test_a_column_of_a_wrong_type_is_reported_with_its_type(kind):
    with pytest.raises(errors.UsageError, match=r"key column is .*cast it to string or binary"):
        columns.flat(pa.nulls(1, kind), "key")


def test_a_null_partition_means_any_partition():
    numbers = columns.partition_numbers(pa.array([2, None, 0], pa.int32()), "t", 3)
    assert numbers.tolist() == [2, -1, 0] and numbers.dtype == "int32"
    assert columns.partition_numbers(pa.array([], pa.int32()), "t", 3).tolist() == []


@pytest.mark.parametrize("number", [3, -1, 2**40])
def test_a_missing_partition_is_reported(number):
    with pytest.raises(errors.BadRow, match=r"topic 't' has the partitions 0 to 2"):
        columns.partition_numbers(pa.array([0, number, None], pa.int64()), "t", 3)


def test_a_null_timestamp_means_now():
    assert columns.timestamps_ms(pa.array([5, None]), "t").tolist() == [5, 0]
    with pytest.raises(errors.BadRow, match="1 rows for topic 't'"):
        columns.timestamps_ms(pa.array([5, 0]), "t")
    with pytest.raises(errors.UsageError, match="timestamp column is double"):
        columns.timestamps_ms(pa.array([1.5]), "t")


def test_headers_of_a_wrong_type_are_refused():
    with pytest.raises(errors.UsageError, match="headers column is list<"):
        columns.Headers(pa.array([["a"]]), "t")


def test_rows_fill_the_messages_in_parts():
    import numpy as np

    messages = np.zeros(2, librdkafka.MESSAGE)
    rows = columns.Rows("t", 9, pa.array([b"k", None, b"kkk"]), pa.array([b"", b"vv", None]))
    parts = [(start, part.copy()) for start, part in rows.fill(messages)]
    assert [(start, len(part)) for start, part in parts] == [(0, 2), (2, 1)]
    assert [size for _, part in parts for size in part["key_len"]] == [1, 0, 3]
    assert [size for _, part in parts for size in part["value_len"]] == [0, 2, 0]
    assert [bool(at) for _, part in parts for at in part["key"]] == [True, False, True]
    assert [bool(at) for _, part in parts for at in part["value"]] == [True, True, False]
    assert {number for _, part in parts for number in part["partition"]} == {-1}


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="columns of 1 and of 2 rows"):
        columns.Rows("t", 9, pa.array([b"k"]), pa.array([b"v", b"v"]))


# Settings.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transactional.id", "x"),
        ("statistics.interval.ms", "0"),
        ("enable.idempotence", "false"),
        ("acks", "1"),
        ("request.required.acks", "0"),
        ("delivery.report.only.error", "true"),
        ("enable.gapless.guarantee", "true"),
        ("test.mock.num.brokers", "3"),
        ("dr_msg_cb", "x"),
        ("no.such.setting", "1"),
        ("linger.ms", "soon"),
        ("client.id", "a\0b"),
    ],
)
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(errors.UsageError, match=name):
        check_settings(NOBODY | {name: value})


def test_correct_settings_are_accepted():
    check_settings(
        NOBODY
        | {
            "acks": "all",
            "enable.idempotence": "true",
            "compression.type": "zstd",
            "partitioner": "consistent_random",
            "transaction.timeout.ms": "2147483647",
            "queue.buffering.max.messages": "10",
        }
    )
    check_settings(NOBODY | {"acks": "1", "enable.idempotence": "false"}, transactional=False)


def test_conflicting_settings_are_named():
    with pytest.raises(errors.UsageError, match=r"max\.in\.flight"):
        ArrowProducer(NOBODY | {"max.in.flight": "10"}, transactional_id="x")


def test_bootstrap_servers_are_required():
    with pytest.raises(errors.UsageError, match=r"bootstrap\.servers"):
        check_settings({})


def test_messages_and_repr_contain_no_secret():
    secret = "hunter2\0"  # the NUL makes the setting invalid
    with pytest.raises(errors.UsageError) as caught:
        check_settings(NOBODY | {"sasl.password": secret})
    assert "hunter2" not in str(caught.value) and "sasl.password" in str(caught.value)
    with pytest.raises(errors.UsageError) as caught:
        ArrowProducer(
            NOBODY | {"security.protocol": "ssl", "ssl.key.pem": "hunter2"}, transactional_id="x"
        )
    assert "hunter2" not in str(caught.value)
    with ArrowProducer(NOBODY | {"ssl.key.password": "hunter2"}, transactional_id="x") as producer:
        assert "hunter2" not in repr(producer)
        echo = producer._error(Failure(-195, "said hunter2"), "it was tried")
        assert "said ***" in str(echo)


# Errors.

NAMED = {
    "MSG_SIZE_TOO_LARGE": (errors.BadRow, "max.message.bytes of topic 't'"),
    "INVALID_RECORD": (errors.BadRow, "a compacted topic needs a key"),
    "UNKNOWN_TOPIC_OR_PART": (errors.UsageError, "create topic 't'"),
    "_UNKNOWN_TOPIC": (errors.UsageError, "create topic 't'"),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": (errors.SequenceBroken, "lost acknowledged records"),
    "DUPLICATE_SEQUENCE_NUMBER": (errors.SequenceBroken, "nothing is lost"),
    "UNKNOWN_PRODUCER_ID": (errors.SequenceBroken, "nothing is lost"),
    "_FENCED": (errors.ProducerFenced, "second driver"),
    "INVALID_PRODUCER_EPOCH": (errors.ProducerFenced, "second driver"),
    "PRODUCER_FENCED": (errors.ProducerFenced, "second driver"),
    "TOPIC_AUTHORIZATION_FAILED": (errors.NotAuthorised, "Write and Describe on topic 't'"),
    "GROUP_AUTHORIZATION_FAILED": (errors.NotAuthorised, "Read on consumer group 'g'"),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": (errors.NotAuthorised, "on transactional id 'x'"),
    "CLUSTER_AUTHORIZATION_FAILED": (errors.NotAuthorised, "IdempotentWrite on the cluster"),
    "_AUTHENTICATION": (errors.NotAuthorised, "sasl.password"),
    "INVALID_TRANSACTION_TIMEOUT": (errors.UsageError, "transaction.max.timeout.ms"),
    "_TIMED_OUT": (errors.Unavailable, "brokers are up"),
    "_TRANSPORT": (errors.Unavailable, "brokers are up"),
    "_ALL_BROKERS_DOWN": (errors.Unavailable, "brokers are up"),
    "NOT_ENOUGH_REPLICAS": (errors.Unavailable, "brokers are up"),
    "_APPLICATION": (errors.Rejected, "runs again"),
}


@pytest.mark.parametrize("name", NAMED)
def test_each_error_code_raises_the_right_error(name):
    kind, advice = NAMED[name]
    failure = Failure(codes()[name], "so it was")
    error = translate_error(
        failure, "rows were not written", topic="t", group="g", transactional_id="x"
    )
    assert type(error) is kind
    assert str(error).startswith(f"rows were not written: {name}: so it was. What to do: ")
    assert advice in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error)


def test_every_error_name_exists_in_the_library():
    known = set(codes())
    assert set(librdkafka._RULE_BY_NAME) | librdkafka.CONSEQUENCES | librdkafka.TIMEOUTS <= known
    assert known >= set(NAMED)


def test_a_missing_driver_is_reported_with_the_install_command(monkeypatch):
    librdkafka.load.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    try:
        with pytest.raises(errors.UsageError, match=r"pip install 'poundlock\[kafka\]'"):
            librdkafka.load()
    finally:
        librdkafka.load.cache_clear()


def installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a copy of confluent-kafka's files, as far as the library needs them."""
    library = Path(librdkafka.load().path)
    record = metadata.distribution("confluent-kafka")
    copy = place / "confluent_kafka.libs" / library.name
    (place / "confluent_kafka").mkdir()
    copy.parent.mkdir()
    shutil.copy(library, copy)
    monkeypatch.setattr(metadata, "distribution", lambda name: record)
    return copy


def test_the_library_is_the_one_of_the_wheel(tmp_path, monkeypatch):
    copy = installed(tmp_path, monkeypatch)
    assert librdkafka._bundled(tmp_path / "confluent_kafka") == copy


def test_a_library_with_another_content_is_refused(tmp_path, monkeypatch):
    copy = installed(tmp_path, monkeypatch)
    with copy.open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        errors.UsageError, match="is not the file that confluent-kafka has installed"
    ):
        librdkafka._bundled(tmp_path / "confluent_kafka")
    copy.unlink()
    with pytest.raises(errors.UsageError, match="it is missing"):
        librdkafka._bundled(tmp_path / "confluent_kafka")


def test_no_other_library_of_the_machine_is_used(tmp_path, monkeypatch):
    """Though one is loaded in this process, where a source build's would be too."""
    assert "librdkafka" in Path("/proc/self/maps").read_text()
    source = tmp_path / "confluent_kafka-2.16.1.dist-info"
    source.mkdir()
    (source / "METADATA").write_text("Name: confluent-kafka\nVersion: 2.16.1\n")
    (source / "RECORD").write_text("confluent_kafka/__init__.py,,\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(source))
    with pytest.raises(errors.UsageError, match="contains no librdkafka"):
        librdkafka._bundled(tmp_path / "confluent_kafka")


# The ledger.


def test_the_ledger_keeps_first_and_last_offsets():
    ledger = Ledger()
    for report in (
        Delivered(("t", 0), 10, 5),
        Delivered(("t", 1), 1, 0),
        Delivered(("t", 0), 3, 40),
    ):
        ledger.add(report)
    assert ledger.rows == 14
    assert ledger.offsets == {("t", 0): (5, 42), ("t", 1): (0, 0)}


def test_rows_without_offsets_are_remembered_until_later_rows_have_offsets():
    ledger = Ledger()
    ledger.add(Delivered(("t", 0), 10, None))
    assert ledger.rows == 10 and ledger.unplaced == {("t", 0)}
    ledger.add(Delivered(("t", 0), 10, 7))
    assert ledger.offsets == {("t", 0): (7, 16)} and not ledger.unplaced


def test_the_first_problem_is_kept_unless_it_is_only_a_consequence():
    purged, fenced, later = (
        Problem(Failure(codes()[name], ""), name)
        for name in ("_PURGE_QUEUE", "_FENCED", "_TRANSPORT")
    )
    ledger = Ledger()
    for report, kept in ((purged, purged), (fenced, fenced), (later, fenced), (purged, fenced)):
        ledger.add(report)
        assert ledger.problem is kept


def test_a_producer_id_that_changes_is_a_problem():
    ledger = Ledger()
    ledger.add(ProducerIdentity(7, 0))
    ledger.add(ProducerIdentity(7, 0))
    assert ledger.problem is None
    ledger.add(ProducerIdentity(7, 1))
    assert ledger.problem is not None and ledger.identity == (7, 0)


def test_a_transient_error_is_not_a_problem():
    ledger = Ledger()
    ledger.add(Trouble(Failure(codes()["_TRANSPORT"], "refused")))
    ledger.add(Trouble(Failure(codes()["_ALL_BROKERS_DOWN"], "1/1 brokers are down")))
    assert ledger.problem is None
    assert ledger.trouble is not None and ledger.trouble.text == "refused"


# A producer without a broker.


def test_an_unreachable_broker_is_named():
    with (
        ArrowProducer(NOBODY, transactional_id="x") as producer,
        pytest.raises(errors.Unavailable, match=r"could not begin.*127\.0\.0\.1:1.*refused"),
    ):
        producer.begin(0.5)


def test_calls_in_the_wrong_order_are_refused():
    with ArrowProducer(NOBODY, transactional_id="x") as producer:
        for call in (
            lambda: producer.write("t", keys=None, values=pa.array([b"v"])),
            lambda: producer.identity(),
            lambda: producer.send_offsets("g", {}),
        ):
            with pytest.raises(errors.UsageError, match="call begin"):
                call()
    with pytest.raises(errors.UsageError, match="dropped"):
        producer.begin(1)


def test_drop_is_fast_and_can_be_repeated():
    before = threading.active_count()
    producer = ArrowProducer(NOBODY, transactional_id="x")
    producer.drop()
    producer.drop()
    producer.abort(3600)
    assert threading.active_count() == before


def test_an_unreferenced_producer_is_garbage_collected():
    before = threading.active_count()
    producer = ArrowProducer(NOBODY, transactional_id="x")
    assert threading.active_count() == before + 1
    del producer
    assert threading.active_count() == before


def test_a_forked_child_does_not_touch_the_producer_of_its_parent():
    with ArrowProducer(NOBODY, transactional_id="x") as producer:
        child = os.fork()
        if child == 0:
            producer.drop()  # without the library's threads this would hang or crash
            os._exit(0 if not producer._handle.closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not producer._handle.closed
