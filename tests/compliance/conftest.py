"""Every sink's subject, by its name. A new sink adds one line."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from .subject import Subject

# The name of each, and what docs/troubles.md calls it.
SUBJECTS = {
    "memory": None,
    "kafka": "Kafka",
    "files": "Files",
    "delta": "Delta",
    "writeahead": "WriteAhead",
    "sqlite": "the template",
    "redis": "Redis, values",
    "redis_counter": "Redis, counters",
    "opensearch": "OpenSearch",
    "mysql_xa": "MySQL, XA",
    "mysql_staged": "MySQL, staged",
    "postgres": "Postgres, prepared",
    "postgres_staged": "Postgres, staged",
    "postgres_upsert": "Postgres, upsert",
    "twophase": "TwoPhase, psycopg",
    "twophase_psycopg2": "TwoPhase, psycopg2",
}


def _module(name: str) -> Any:
    return import_module(f".subject_{name}", __package__)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot befall a sink: its module says why."""
    excused = [item for item in items if _is_excused(item)]
    config.hook.pytest_deselected(items=excused)
    items[:] = [item for item in items if item not in excused]


def _is_excused(item: pytest.Item) -> bool:
    params: dict[str, str] = getattr(getattr(item, "callspec", None), "params", {})
    return "trouble" in params and params["trouble"] in _module(params["subject"]).EXCUSED


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """The module `subject_NAME` has `started(directory)`, which runs the server while it yields."""
    with _module(request.param).started(tmp_path_factory.mktemp(request.param)) as started:
        yield started
