"""The driver's Kafka client without a broker: how it interprets each answer."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from scripted_broker import SECRET, coordinators, listing, metadata, wired

from kafka import errors
from poundlock.errors import NotAuthorised, Unavailable, UsageError
from poundlock.sinks.kafka.client import TryAgain, _raise_if_refused, check_error
from poundlock.sinks.kafka.cluster import parse_topic_id, spell_topic_id
from poundlock.sinks.kafka.transactions import (
    ANSWERS,
    END_TXN_VERSION,
    Answer,
    end,
    list_by_prefix,
    read_answer,
)
from poundlock.sinks.kafka.types import TransactionIdentity

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
def test_definite_answers_decide_the_outcome(code: int, answer: Answer):
    assert read_answer(code, "id") is answer


def test_only_an_answer_without_error_means_success():
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
def test_the_client_retries_after_other_answers(code: int, name: str, stale: bool):
    again = read_answer(code, "id")
    assert isinstance(again, TryAgain)
    assert (str(again), again.stale) == (name, stale)


@pytest.mark.parametrize("code", [53, 31])
def test_a_missing_permission_is_raised_with_its_name(code: int):
    with pytest.raises(NotAuthorised, match="WRITE on TransactionalId my-id"):
        read_answer(code, "my-id")


@pytest.mark.parametrize("code", [5, 6, 14, 15, 16, 56, 74, 78])
def test_the_client_retries_after_a_transient_error(code: int):
    assert isinstance(check_error(code, "it", "READ"), TryAgain)


def test_a_permanent_error_is_raised():
    assert check_error(0, "it", "READ") is None
    with pytest.raises(NotAuthorised, match=r"refused it .*grant READ on Topic t"):
        check_error(29, "it", "READ on Topic t")
    with pytest.raises(Unavailable, match="INVALID_REQUEST"):
        check_error(42, "it", "READ")


def test_topic_ids_are_spelled_as_kafka_spells_them():
    spelled = "w6uTz_0tRRebSn6VE0079Q"
    assert spell_topic_id(parse_topic_id(spelled)) == spelled


def test_a_refused_login_is_not_an_outage():
    with pytest.raises(NotAuthorised, match=r"sasl\.username"):
        _raise_if_refused(errors.SaslAuthenticationFailedError(SECRET))
    _raise_if_refused(errors.KafkaConnectionError("reset"))


# Requests to scripted brokers.


def test_one_broker_is_asked_about_a_thousand_transactions_at_once():
    client, _ = wired(lambda node, request: None)
    rounds = list[int]()

    async def locate(items):
        return dict.fromkeys(items, 1)

    async def ask(node, items):
        rounds.append(len(items))
        return dict.fromkeys(items, True)

    collected = asyncio.run(client.collect(range(1500), locate, ask))
    assert (rounds, len(collected.answers)) == ([1000, 500], 1500)


def test_a_listing_asks_every_broker_and_filters_the_answers():
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
    for leader in (-1, 3):  # no broker, and one that is not listed
        client, _ = wired(lambda node, request, leader=leader: metadata({0: 1, 1: leader}))
        with pytest.raises(TryAgain, match=r"partitions \[1\] of __transaction_state"):
            asyncio.run(list_by_prefix(client, "a."))


def test_a_listing_while_coordinators_move_does_not_count():
    views = iter([metadata({0: 1}), metadata({0: 2})])

    def answer(node, request):
        return next(views) if node is None else listing()

    with pytest.raises(TryAgain, match="moved"):
        asyncio.run(list_by_prefix(wired(answer)[0], "a."))


def test_a_request_is_repeated_until_its_time_is_up():
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


def test_end_txn_follows_a_moved_coordinator():
    homes = iter([1, 2])

    def answer(node, request):
        if node is None:
            return coordinators(request, next(homes))
        assert (request._min_version, request._max_version) == (5, 5)
        return SimpleNamespace(error_code=16 if node == 1 else 0)  # NOT_COORDINATOR

    client, script = wired(answer)
    assert asyncio.run(end(client, [TransactionIdentity("id", 7, 3)], commit=True)) == [Answer.DONE]
    assert [node for node, name in script.asked if name == "EndTxnRequest"] == [1, 2]


def test_a_coordinator_is_looked_up_once_and_cached():
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
def test_end_txn_without_a_result_is_reported_when_the_time_is_up(code: int, answer: Answer):
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
