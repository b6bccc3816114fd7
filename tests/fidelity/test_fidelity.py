"""Every value through every sink, and the tables of types in docs/sinks."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from poundlock.compliance.fidelity import *  # noqa: F403
from poundlock.compliance.fidelity import Known, Line, Shape, table
from poundlock.compliance.values import FIRST_TIME, LAST_TIME, has_nul, is_utf8

from . import (
    shapes_delta,
    shapes_files,
    shapes_kafka,
    shapes_letters,
    shapes_mysql,
    shapes_opensearch,
    shapes_postgres,
    shapes_redis,
    shapes_twophase,
)

DOCS = Path(__file__).parents[2] / "docs"
# For each system: how its shapes are made, and the tables of its page by their heading.
SYSTEMS: dict[str, tuple[Callable[[Any, Path], list[Shape]], dict[str, Sequence[Line]]]] = {
    "files": (lambda _, place: shapes_files.files(place), shapes_files.PAGE),
    "postgres": (
        lambda server, _: shapes_postgres.postgres(server("postgres_server").dsn()),
        shapes_postgres.PAGE,
    ),
    "kafka": (lambda server, _: shapes_kafka.kafka(server("kafka")), shapes_kafka.PAGE),
    "redis": (
        lambda server, _: shapes_redis.redis_shapes(server("valkey_server").address),
        shapes_redis.PAGE,
    ),
    "opensearch": (
        lambda server, _: shapes_opensearch.opensearch(server("opensearch_server").url),
        shapes_opensearch.PAGE,
    ),
    "twophase": (
        lambda server, _: shapes_twophase.twophase(server("postgres_server").dsn()),
        shapes_twophase.PAGE,
    ),
    "letters": (lambda _, place: shapes_letters.letters(place), shapes_letters.PAGE),
    "delta": (lambda _, place: shapes_delta.delta(place), shapes_delta.PAGE),
    "mysql": (lambda server, _: shapes_mysql.mysql(server("mariadb_server")), shapes_mysql.PAGE),
}


def not_utf8(value: Any, zone: str) -> bool:
    return not is_utf8(value)


def has_seconds(value: Any, zone: str) -> bool:
    """Return whether a zone's offset had seconds at a time, or at one within a value."""
    if isinstance(value, dict):
        value = value["t"]
    times = [it for it in (value if isinstance(value, list) else [value]) if it is not None]
    first, last = FIRST_TIME + 2 * 86_400_000_000, LAST_TIME - 2 * 86_400_000_000
    start = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
    moments = (start + dt.timedelta(0, 0, min(max(it, first), last)) for it in times)
    offsets = (it.astimezone(ZoneInfo(zone)).utcoffset() or dt.timedelta() for it in moments)
    return any(it.total_seconds() % 60 for it in offsets)


# What the sinks are known to do wrong. A test fails when one of these no longer happens.
KNOWN = [
    Known(
        "files-(json|csv)|kafka-json|redis-json|opensearch",
        "(string|array|map|struct|deep)(_.*)?",
        "a text that is not UTF-8 becomes another text",
        not_utf8,
    ),
    Known(
        "redis-(keys|stream)|my-.*",
        "(array|map|struct|deep)(_.*)?",
        "a text inside that is not UTF-8 becomes another text",
        not_utf8,
    ),
    Known(
        "pg-.*|two-phase",
        "(array|map|struct|deep)_.*",
        "a text inside that is not UTF-8 becomes another text",
        lambda value, _: not is_utf8(value) and not has_nul(value),  # jsonb refuses a NUL
    ),
    Known(
        "files-(json|csv)|kafka-json|redis-.*|opensearch|letters",
        "(timestamp(?!_ntz)|times|struct)(_.*)?",
        "the seconds of an offset are cut off",
        has_seconds,
    ),
    Known(
        "(pg|my)-.*|two-phase",
        "(times|struct)_.*",
        "the seconds of an offset are cut off",
        has_seconds,
    ),
    Known(
        "my-.*",
        "string_.*",
        "a surrogate, which is no UTF-8, is stored: other clients cannot read the text",
        lambda it, _: not is_utf8(it) and b"\xed\xa0\x80" in it and len(it) <= 5,
    ),
    Known(
        "my-.*",
        "float_double",
        "a float becomes the double that its short text means",
        lambda it, _: math.isfinite(it) and float(str(np.float32(it))) != it,
    ),
    Known(
        "letters",
        "timestamp|timestamp_ntz",
        "a time beyond the year 32767 becomes another text",
        lambda value, _: abs(value / 86_400_000_000 / 365.2425 + 1970) > 32767,
    ),
    Known(
        "kafka-key-timestamp",
        "timestamp",
        "the text of a timestamp has no offset",
        lambda value, zone: True,
    ),
    Known(
        "kafka-timestamp",
        "timestamp",
        "a timestamp before 1970 stops the batch, whatever on_bad_row says",
        lambda it, _: it < 1000,
        stops="first millisecond of 1970",
    ),
    Known(
        "redis-(hash|key)-add-(int|bigint)",
        "int|bigint",
        "an increment by a negative multiple of 10^9 fails in the middle of the move",
        lambda it, _: it < 0 and it % 10**9 == 0,
        stops="not an integer or out of range",
    ),
    Known("pg-.*", "xml_xml", "the declared encoding is believed", lambda it, _: b"8859" in it),
    Known(
        "pg-.*",
        "string_varchar_5",
        "blanks after the last place are cut",
        lambda it, _: it == b"abc   ",
    ),
    Known(
        "files-by-string",
        "string",
        "a text that means null becomes null",
        lambda value, _: value in (b"", b"__HIVE_DEFAULT_PARTITION__"),
    ),
    Known(
        "files-by-timestamp",
        "timestamp",
        "the second of two equal hours becomes the first",
        lambda value, zone: shapes_files.read_again(value, zone) != value,
    ),
    Known(
        "files-parquet|letters",
        "strict|stricts",
        "a null struct whose field is never null cannot be written",
        stops="An exception was thrown from the Python worker",
    ),
]


@pytest.fixture
def known() -> Sequence[Known]:
    return KNOWN


@pytest.fixture(params=SYSTEMS)
def shapes(request: pytest.FixtureRequest, tmp_path: Path) -> list[Shape]:
    make, _ = SYSTEMS[request.param]
    return make(request.getfixturevalue, tmp_path)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_the_tables_of_types(system: str) -> None:
    page = "bad-rows" if system == "letters" else f"sinks/{system}"
    text = (DOCS / f"{page}.md").read_text()
    for heading, lines in SYSTEMS[system][1].items():
        assert table(heading, lines) in text, table(heading, lines)
