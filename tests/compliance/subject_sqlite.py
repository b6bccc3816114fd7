"""The template of a custom sink: two files outside the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from poundlock.compliance import Subject

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    """Import a file of examples/ from the path, where pickle finds it again."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return import_module(name)


NOT_APPLICABLE = example("test_sqlite_sink").SqliteSubject.not_applicable


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield example("test_sqlite_sink").SqliteSubject(directory)
