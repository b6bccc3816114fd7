"""What goes wrong, on every sink of ours; and the table that tells users what comes of it."""

from __future__ import annotations

import pytest

from poundlock.compliance import FAULTS
from poundlock.compliance.faults import *  # noqa: F403

from .conftest import SUBJECTS, documented, module


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_excuse_is_of_a_trouble(name: str) -> None:
    assert module(name).NOT_APPLICABLE.keys() <= FAULTS.keys()


@pytest.mark.parametrize("name", [name for name, label in SUBJECTS.items() if label])
def test_the_table_shows_what_cannot_befall(name: str) -> None:
    line = documented(str(SUBJECTS[name]))
    assert {trouble for trouble, word in line.items() if word == "-"} == set(
        module(name).NOT_APPLICABLE
    )
