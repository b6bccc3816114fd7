"""Every value through every sink, and the tables of types in docs/sinks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from poundlock.compliance.fidelity import *  # noqa: F403
from poundlock.compliance.fidelity import Known, Line, Shape, table
from poundlock.compliance.values import FIRST_TIME, LAST_TIME, is_utf8

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
KNOWN: list[Known] = []


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
