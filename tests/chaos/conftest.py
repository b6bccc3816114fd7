"""What every test of this folder needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Child


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    """End the drivers that a failed test left running."""
    yield
    while Child.all:
        child = Child.all.pop()
        child.kill()
        child.process.wait()
