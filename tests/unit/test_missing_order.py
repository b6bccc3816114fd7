"""A sink that keeps one row for each key says at a start that it has no order, and what to set."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from poundlock.core.participant import Participant
from poundlock.sinks import Elasticsearch, Files, Kafka, MySQL, OpenSearch, Postgres, Redis
from poundlock.spark.pipeline.checks import warn_of_missing_order

REFUSED, CHANCE = "the batch is refused", "chance decides which of them stays"
REDIS = "redis://127.0.0.1:1/0"
SEARCH = "http://127.0.0.1:1"
MYSQL = "mysql://root@127.0.0.1:1/test"
LOOSE = "at_least_once"


def postgres(**options: object) -> Participant:
    return Postgres("readings", dsn="env:PG_DSN", **options)  # type: ignore[arg-type]


def mysql(**options: object) -> Participant:
    return MySQL("readings", url=MYSQL, **options)  # type: ignore[arg-type]


def redis(**options: object) -> Participant:
    return Redis(url=REDIS, name="readings", **options)  # type: ignore[arg-type]


def search(**options: object) -> Participant:
    return OpenSearch("readings", url=SEARCH, **options)  # type: ignore[arg-type]


def elastic(**options: object) -> Participant:
    return Elasticsearch("readings", url=SEARCH, **options)  # type: ignore[arg-type]


HASH = {"hash": "h", "field": "id", "value": "v"}

# A sink without an order; its key; what becomes of two rows of a batch; the option that is missing.
UNORDERED = [
    (postgres, {"key": ["id", "ts"]}, "id, ts", REFUSED, "order_by"),
    (mysql, {"key": "id"}, "id", REFUSED, "order_by"),
    (redis, HASH, "id", CHANCE, "order_by"),
    (redis, {"key": "id", "prefix": "p:"}, "id", CHANCE, "order_by"),
    (redis, {"key": "id", "prefix": "p:", "value": "v"}, "id", CHANCE, "order_by"),
    (search, {"id": "id"}, "id", REFUSED, "version"),
    (elastic, {"id": "id"}, "id", REFUSED, "version"),
    (search, {"id": "id", "semantic": LOOSE}, "id", CHANCE, "version"),
]

# Sinks that keep every row, add the rows up, or have an order.
ORDERED = [
    (postgres, {}),
    (postgres, {"key": "id", "order_by": "ts"}),
    (mysql, {}),
    (mysql, {"key": "id", "order_by": "ts"}),
    (redis, HASH | {"order_by": "ts"}),
    (redis, HASH | {"operation": "increment"}),
    (redis, {"key": "id", "value": "v", "operation": "increment"}),
    (redis, {"list": "l", "value": "v"}),
    (redis, {"stream": "s"}),
    (redis, {"counter": "c", "value": "n"}),
    (search, {"id": "id", "version": "ts"}),
    (search, {"semantic": LOOSE}),
]


@pytest.mark.parametrize(("make", "options", "key", "fate", "option"), UNORDERED)
def test_a_sink_without_an_order_says_what_to_set(
    make: Callable[..., Participant],
    options: dict[str, object],
    key: str,
    fate: str,
    option: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_missing_order([make(**options)], "append", stateful=False)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"sink readings: it keeps one row for each {key}, but has no order. If two rows of a batch "
        f"have the same {key}, {fate}. Set {option}= to a column: the row with its greatest value "
        "stays"
    )


@pytest.mark.parametrize(("make", "options"), ORDERED)
def test_a_sink_that_needs_no_order_says_nothing(
    make: Callable[..., Participant], options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_missing_order([make(**options)], "append", stateful=False)
    assert not caplog.records


def test_sinks_that_only_add_rows_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sinks = [Files("/tmp/readings"), Kafka("readings", bootstrap_servers="127.0.0.1:1", key="id")]
    warn_of_missing_order(sinks, "append", stateful=False)
    assert not caplog.records


def test_results_that_are_given_anew_need_no_order(caplog: pytest.LogCaptureFixture) -> None:
    """An aggregate in update or complete mode has one row for each group in a batch."""
    sinks = [postgres(key="id")]
    for mode in ("update", "Complete"):
        warn_of_missing_order(sinks, mode, stateful=True)
    assert not caplog.records
    warn_of_missing_order(sinks, "update", stateful=False)
    warn_of_missing_order(sinks, "append", stateful=True)
    assert len(caplog.records) == 2
