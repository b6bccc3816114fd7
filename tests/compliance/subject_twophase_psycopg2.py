"""Any two-phase driver, here psycopg2, with other branch names and other exceptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg2

from poundlock.compliance import Subject

from . import subject_twophase

NOT_APPLICABLE: Mapping[str, str] = {}


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with subject_twophase.started(directory, psycopg2.connect) as subject:
        yield subject
