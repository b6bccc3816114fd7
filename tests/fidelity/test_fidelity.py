"""Every value through every sink, and the tables of types in docs/sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from poundlock.compliance.fidelity import *  # noqa: F403
from poundlock.compliance.fidelity import Known, Line, Shape, table

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
