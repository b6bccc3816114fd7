"""The subject of every sink, by name. A new sink adds one line."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from poundlock.compliance import FAULTS, Subject

# The name of each subject, and its label in docs/failures.md.
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


def module(name: str) -> Any:
    return import_module(f".subject_{name}", __package__)


def documented(label: str) -> dict[str, str]:
    """Read the line of a sink in docs/failures.md: the outcome of each fault."""
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    # The table of faults comes first. A later one has lines of the same names.
    line, *_ = [it for it in text.splitlines() if it.startswith(f"| {label} |")]
    words = [word.strip() for word in line.strip("|").split("|")][1:]
    tried = [fault for fault in FAULTS if fault != "killed_task"]
    return dict(zip(tried, words, strict=True))


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """Start a subject: the function `started(directory)` of `subject_NAME` runs its server."""
    name: str = request.param

    def outcome(fault: str, word: str) -> None:
        if label := SUBJECTS[name]:
            assert documented(label)[fault] == word

    with module(name).started(tmp_path_factory.mktemp(name)) as started:
        started.not_applicable, started.outcome = module(name).NOT_APPLICABLE, outcome
        yield started
