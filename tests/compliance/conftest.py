"""Every sink's subject, by its name. A new sink adds one line."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from .subject import Subject

SUBJECTS = [
    "memory",
    "kafka",
    "files",
    "writeahead",
    "sqlite",
    "redis",
    "redis_counter",
    "opensearch",
    "mysql_xa",
    "mysql_staged",
    "postgres",
    "postgres_staged",
    "postgres_upsert",
    "twophase",
    "twophase_psycopg2",
]


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """The module `subject_NAME` has `started(directory)`, which runs the server while it yields."""
    module = import_module(f".subject_{request.param}", __package__)
    with module.started(tmp_path_factory.mktemp(request.param)) as started:
        yield started
