"""The driver's Kafka client without a broker: settings, secrets, and the tables of answers."""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
import time
from types import SimpleNamespace

import pytest
from kafka.record.util import calc_crc32c

from kafka import errors
from kafka_probe import read_outcome
from poundlock.errors import NotAuthorised, Unavailable, UsageError
from poundlock.sinks.kafka import kafka_python as _kafka_python
from poundlock.sinks.kafka import witness
from poundlock.sinks.kafka.branches import shows_abort
from poundlock.sinks.kafka.client import KafkaClient, TryAgain, _raise_if_refused, check_error
from poundlock.sinks.kafka.cluster import parse_topic_id, spell_topic_id
from poundlock.sinks.kafka.settings import to_kafka_python
from poundlock.sinks.kafka.transactions import (
    ANSWERS,
    END_TXN_VERSION,
    Answer,
    Progress,
    TxnDescription,
    end,
    list_by_prefix,
    read_answer,
    settlements,
)
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity
from poundlock.sinks.kafka.witness import Evidence, Outcome, combine

SERVERS = {"bootstrap.servers": "a:9092, b:9093"}
SECRET = "hunter2-very-secret"
LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": SECRET}


# Settings.


def test_plain_settings_need_only_servers():
    assert to_kafka_python(SERVERS) == {
        "bootstrap_servers": ["a:9092", "b:9093"],
        "security_protocol": "PLAINTEXT",
    }


@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms"])
def test_sasl_is_translated_under_both_of_its_names(name: str):
    config = to_kafka_python(
        {
            **SERVERS,
            "security.protocol": "sasl_plaintext",
            name: "scram-sha-512",
            "sasl.username": "me",
            "sasl.password": SECRET,
        }
    )
    assert config["security_protocol"] == "SASL_PLAINTEXT"
    assert config["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl_plain_username"], config["sasl_plain_password"]) == ("me", SECRET)


def test_tls_verifies_certificate_and_host_name_by_default():
    context = to_kafka_python({**SERVERS, "security.protocol": "SSL"})["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2

    nameless = {**SERVERS, "security.protocol": "ssl"}
    nameless["ssl.endpoint.identification.algorithm"] = "none"
    context = to_kafka_python(nameless)["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.check_hostname

    trusting = {**SERVERS, "security.protocol": "SASL_SSL", **LOGIN}
    trusting["enable.ssl.certificate.verification"] = "false"
    assert to_kafka_python(trusting)["ssl_context"].verify_mode is ssl.CERT_NONE


def test_settings_that_only_tune_a_producer_are_ignored():
    tuned = {"linger.ms": "5", "compression.type": "zstd", "transaction.timeout.ms": "60000"}
    assert to_kafka_python({**SERVERS, **tuned}) == to_kafka_python(SERVERS)


@pytest.mark.parametrize(
    "name",
    [
        "sasl.oauthbearer.method",
        "sasl.kerberos.keytab",
        "ssl.keystore.location",
        "ssl.key.pem",
        "ssl.engine.location",
        "ssl.curves.list",
        "enable.sasl.oauthbearer.unsecure.jwt",
        "security.something.new",
        "https.ca.location",
    ],
)
def test_an_unsupported_security_setting_is_refused_by_name(name: str):
    with pytest.raises(UsageError, match=name.replace(".", r"\.")) as caught:
        to_kafka_python({**SERVERS, name: SECRET})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", "AWS_MSK_IAM"])
def test_an_unsupported_sasl_mechanism_is_refused_by_name(mechanism: str):
    with pytest.raises(UsageError, match=mechanism):
        to_kafka_python({**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": mechanism})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"bootstrap\.servers is missing"),
        ({"bootstrap.servers": "SSL://a:1"}, r"security\.protocol"),
        ({**SERVERS, "security.protocol": "TLS"}, "SASL_SSL"),
        ({**SERVERS, "security.protocol": "SASL_SSL"}, "GSSAPI"),
        (
            {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
            r"sasl\.username and sasl\.password",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.ca.location": "/no/such"},
            r"ssl\.ca\.location.*FileNotFoundError",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.key.location": "/no/such"},
            r"ssl\.certificate\.location",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "x"},
            "https or none",
        ),
        (
            {**SERVERS, "security.protocol": "SSL", "enable.ssl.certificate.verification": "x"},
            "true or false",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, said: str):
    with pytest.raises(UsageError, match=said):
        KafkaClient(settings)


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture):
    client = KafkaClient({**SERVERS, "security.protocol": "SASL_PLAINTEXT", **LOGIN})
    assert SECRET not in repr(client)
    assert repr(client) == "KafkaClient(a:9092,b:9093)"
    _kafka_python._silence_wire_dumps()
    with caplog.at_level(logging.DEBUG):
        for name in ("kafka.protocol.parser", "kafka.net.connection"):
            logging.getLogger(name).debug("Send: %r", SECRET)
            logging.getLogger(name).info("still heard")
    assert SECRET not in caplog.text
    assert "still heard" in caplog.text


def test_a_pem_instead_of_a_path_is_not_quoted():
    with pytest.raises(UsageError) as caught:
        to_kafka_python({**SERVERS, "security.protocol": "SSL", "ssl.ca.pem": SECRET})
    assert SECRET not in str(caught.value)


# kafka-python.


def test_a_release_of_kafka_python_without_a_method_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delattr(_kafka_python._Manager, "send")
    with pytest.raises(UsageError, match=r"KafkaConnectionManager\.send\(node_id"):
        KafkaClient(SERVERS)


def test_a_release_of_kafka_python_with_other_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_kafka_python._Manager, "send", lambda self, request, node_id: None)
    with pytest.raises(UsageError, match="request_timeout_ms"):
        KafkaClient(SERVERS)


# EndTxn.


def test_only_version_5_of_end_txn_is_sent():
    assert END_TXN_VERSION == 5


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (0, Answer.DONE),
        (48, Answer.CONTRADICTED),  # INVALID_TXN_STATE
        (90, Answer.FORGOTTEN),  # PRODUCER_FENCED
        (47, Answer.FORGOTTEN),  # INVALID_PRODUCER_EPOCH
        (49, Answer.FORGOTTEN),  # INVALID_PRODUCER_ID_MAPPING
        (105, Answer.FORGOTTEN),  # TRANSACTIONAL_ID_NOT_FOUND
    ],
)
def test_answers_that_decide(code: int, answer: Answer):
    assert read_answer(code, "id") is answer


def test_only_no_error_means_done():
    assert [error for error, answer in ANSWERS.items() if answer is Answer.DONE] == [errors.NoError]
    done = [code for code in range(-1, 140) if meaning(code) is Answer.DONE]
    assert done == [0]


def meaning(code: int) -> object:
    try:
        return read_answer(code, "id")
    except NotAuthorised:
        return NotAuthorised


@pytest.mark.parametrize(
    ("code", "name", "stale"),
    [
        (51, "CONCURRENT_TRANSACTIONS", False),
        (14, "COORDINATOR_LOAD_IN_PROGRESS", True),
        (15, "COORDINATOR_NOT_AVAILABLE", True),
        (16, "NOT_COORDINATOR", True),
        (7, "REQUEST_TIMED_OUT", True),
        (-1, "UNKNOWN", True),
        (42, "INVALID_REQUEST", True),
        (9999, "error 9999", True),  # a code from the future
    ],
)
def test_after_other_answers_the_client_asks_again(code: int, name: str, stale: bool):
    again = read_answer(code, "id")
    assert isinstance(again, TryAgain)
    assert (str(again), again.stale) == (name, stale)


@pytest.mark.parametrize("code", [53, 31])
def test_a_missing_permission_is_raised_with_its_name(code: int):
    with pytest.raises(NotAuthorised, match="WRITE on TransactionalId my-id"):
        read_answer(code, "my-id")


@pytest.mark.parametrize("code", [5, 6, 14, 15, 16, 56, 74, 78])
def test_after_a_passing_error_the_client_asks_again(code: int):
    assert isinstance(check_error(code, "it", "READ"), TryAgain)


def test_a_lasting_error_is_raised():
    assert check_error(0, "it", "READ") is None
    with pytest.raises(NotAuthorised, match=r"refused it .*grant READ on Topic t"):
        check_error(29, "it", "READ on Topic t")
    with pytest.raises(Unavailable, match="INVALID_REQUEST"):
        check_error(42, "it", "READ")


# The witness.

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
        ("CompleteCommit", 7, 3, Outcome.COMMITTED),  # by a version below 5
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


def test_topic_ids_are_spelled_as_kafka_spells_them():
    spelled = "w6uTz_0tRRebSn6VE0079Q"
    assert spell_topic_id(parse_topic_id(spelled)) == spelled


def test_a_login_that_was_refused_is_not_an_outage():
    with pytest.raises(NotAuthorised, match=r"sasl\.username"):
        _raise_if_refused(errors.SaslAuthenticationFailedError(SECRET))
    _raise_if_refused(errors.KafkaConnectionError("reset"))


# Questions to scripted brokers.


class Script:
    """Stands in for the connections: a function from node and request to the answer."""

    def __init__(self, answer):
        self._answer = answer
        self.asked: list[tuple[int | None, str]] = []

    async def send(self, request, node, seconds):
        self.asked.append((node, type(request).__name__))
        answer = self._answer(node, request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def post(self, work):
        return work()

    async def sleep(self, seconds):
        time.sleep(seconds)


def wired(answer, seconds: float = 0.2) -> tuple[KafkaClient, Script]:
    client, script = KafkaClient(SERVERS, time_limit=seconds), Script(answer)
    client._link = script
    client._deadline = time.monotonic() + seconds
    return client, script


def metadata(leaders: dict[int, int], brokers: tuple[int, ...] = (1, 2)) -> SimpleNamespace:
    partitions = [
        SimpleNamespace(partition_index=number, leader_id=leader, leader_epoch=leader)
        for number, leader in leaders.items()
    ]
    return SimpleNamespace(
        brokers=[SimpleNamespace(node_id=node) for node in brokers],
        topics=[SimpleNamespace(partitions=partitions)],
    )


def listing(*ids: str, code: int = 0) -> SimpleNamespace:
    rows = [
        SimpleNamespace(transactional_id=i, producer_id=1, transaction_state="Ongoing") for i in ids
    ]
    return SimpleNamespace(error_code=code, transaction_states=rows)


def coordinators(request, node: int) -> SimpleNamespace:
    return SimpleNamespace(
        coordinators=[
            SimpleNamespace(key=key, node_id=node, error_code=0) for key in request.coordinator_keys
        ]
    )


def test_listing_asks_every_broker_and_filters_by_itself():
    def answer(node, request):
        if node is None:
            return metadata({0: 1, 1: 2})
        return listing("a.1", "ab.1") if node == 1 else listing("a.2")

    client, script = wired(answer)
    found = asyncio.run(list_by_prefix(client, "a."))
    assert [it.transactional_id for it in found] == ["a.1", "a.2"]
    assert {node for node, name in script.asked if name == "ListTransactionsRequest"} == {1, 2}


@pytest.mark.parametrize(
    "bad", [listing(code=14), listing(code=15), errors.KafkaConnectionError("reset")]
)
def test_a_broker_that_cannot_list_makes_the_listing_unavailable(bad):
    def answer(node, request):
        if node is None:
            return metadata({0: 1, 1: 2})
        return listing("a.1") if node == 1 else bad

    with pytest.raises(TryAgain, match="broker 2"):
        asyncio.run(list_by_prefix(wired(answer)[0], "a."))


def test_coordinators_without_a_leader_make_the_listing_unavailable():
    for leader in (-1, 3):  # nobody, and one that is not listed
        client, _ = wired(lambda node, request, leader=leader: metadata({0: 1, 1: leader}))
        with pytest.raises(TryAgain, match=r"partitions \[1\] of __transaction_state"):
            asyncio.run(list_by_prefix(client, "a."))


def test_a_listing_while_coordinators_move_does_not_count():
    views = iter([metadata({0: 1}), metadata({0: 2})])

    def answer(node, request):
        return next(views) if node is None else listing()

    with pytest.raises(TryAgain, match="moved"):
        asyncio.run(list_by_prefix(wired(answer)[0], "a."))


def test_a_question_is_repeated_until_the_time_is_up():
    client, _ = wired(lambda node, request: None)
    client._connected, tries = True, 0

    async def work():
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TryAgain("not yet")
        return tries

    assert asyncio.run(client._repeat(work)) == 3
    client._deadline = time.monotonic()
    tries = 0
    with pytest.raises(TryAgain, match="not yet"):
        asyncio.run(client._repeat(work))


def test_an_end_follows_its_coordinator():
    homes = iter([1, 2])

    def answer(node, request):
        if node is None:
            return coordinators(request, next(homes))
        assert (request._min_version, request._max_version) == (5, 5)
        return SimpleNamespace(error_code=16 if node == 1 else 0)  # NOT_COORDINATOR

    client, script = wired(answer)
    assert asyncio.run(end(client, [TransactionIdentity("id", 7, 3)], commit=True)) == [Answer.DONE]
    assert [node for node, name in script.asked if name == "EndTxnRequest"] == [1, 2]


def test_a_coordinator_is_looked_up_once_for_many_and_kept():
    def answer(node, request):
        return coordinators(request, 1) if node is None else SimpleNamespace(error_code=0)

    client, script = wired(answer, seconds=5)
    many = [TransactionIdentity(f"id-{n}", n, 0) for n in range(450)]
    for _ in range(2):
        assert asyncio.run(end(client, many, commit=True)) == [Answer.DONE] * 450
    names = [name for _, name in script.asked]
    assert (names.count("FindCoordinatorRequest"), names.count("EndTxnRequest")) == (1, 900)


@pytest.mark.parametrize(
    ("code", "answer"), [(51, Answer.BUSY), (14, Answer.UNREACHABLE), (-1, Answer.UNREACHABLE)]
)
def test_an_end_without_a_decision_is_reported_when_the_time_is_up(code: int, answer: Answer):
    def script(node, request):
        return coordinators(request, 1) if node is None else SimpleNamespace(error_code=code)

    client, _ = wired(script)
    identities = [TransactionIdentity("id", 7, 3)]
    assert asyncio.run(end(client, identities, commit=True)) == [answer]


def test_a_broker_too_old_for_version_5_is_refused():
    def answer(node, request):
        if node is None:
            return coordinators(request, 1)
        return errors.IncompatibleBrokerVersion("No version of EndTxn")

    with pytest.raises(UsageError, match=r"transaction\.version 2"):
        asyncio.run(end(wired(answer)[0], [TransactionIdentity("id", 7, 3)], commit=True))


# The witness, with scripted partitions.

TOPIC_ID = "w6uTz_0tRRebSn6VE0079Q"
COMMIT, ABORT = 1, 0


def batch(
    offset: int, producer_id: int, epoch: int, *, marker: int | None = None, rows: int = 1
) -> bytes:
    """Lay out one batch as a broker stores it; rows are not looked at, markers are."""
    attributes, body = 0x10, b"rows"
    if marker is not None:
        key = struct.pack(">hh", 0, marker)
        record = bytes([0, 0, 0, 2 * len(key)]) + key + bytes([0, 0])  # varints, small and even
        attributes, body = 0x30, bytes([2 * len(record)]) + record
    fields = (max(rows, 1) - 1, 0, 0, producer_id, epoch, -1, rows)
    checked = struct.pack(">hiqqqhii", attributes, *fields) + body
    rest = struct.pack(">ibI", 0, 2, calc_crc32c(checked)) + checked
    return struct.pack(">qi", offset, len(rest)) + rest


def ask_record(
    *batches: bytes, offset: int = 10, stable: int = 100, aborted: tuple[int, ...] = ()
) -> Evidence:
    """Ask the record at `offset` of producer 7; each fetch brings one of the batches."""
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


def test_the_first_marker_of_our_producer_decides():
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


def test_no_marker_and_readers_held_back_is_open():
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
def test_records_that_prove_nothing_are_unknown(batches: list[bytes], why: str):
    evidence = ask_record(*batches)
    assert evidence.outcome is Outcome.UNKNOWN
    assert why in evidence.why


def test_a_record_whose_topic_id_was_not_recorded_is_no_witness():
    client, _ = wired(lambda node, request: None)
    evidence = asyncio.run(witness.ask_record(client, LastRecord("t", "", 0, 10), 7))
    assert evidence.outcome is Outcome.UNKNOWN


# Settlements.


def progress(
    *, leader: int = 1, stable: int = 100, state: str = "CompleteCommit", topic_id=TOPIC_ID
):
    """Ask about a commit of producer 7 to t-0 and t-1; `leader` and `stable` are of the latter."""
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

    def offsets(request):
        row = request.topics[0]
        high = 100 if request.isolation_level == 0 else stable
        return SimpleNamespace(
            topics=[
                SimpleNamespace(
                    name="t",
                    partitions=[
                        SimpleNamespace(
                            partition_index=it.partition_index,
                            error_code=0,
                            offset=100 if it.partition_index == 0 else high,
                        )
                        for it in row.partitions
                    ],
                )
            ]
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
                return offsets(request)
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
    # As on Kafka 4.3.1, which calls the transaction complete meanwhile.
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
