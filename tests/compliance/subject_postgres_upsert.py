"""PostgreSQL, rows upserted by key, staged in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from poundlock.compliance import Subject

from . import subject_postgres

NOT_APPLICABLE: Mapping[str, str] = {
    "no_room": "The server holds no branch: there are as many as there is room for tables."
}


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with subject_postgres.started(directory, {"key": ["number"], "order_by": None}) as subject:
        yield subject
