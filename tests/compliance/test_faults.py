"""Runs the faults of `poundlock.compliance` for each of our sinks, and checks docs/failures.md."""

from __future__ import annotations

import pytest

from poundlock.compliance import FAULTS
from poundlock.compliance.faults import *  # noqa: F403

from .conftest import SUBJECTS, documented, module


@pytest.mark.parametrize("name", SUBJECTS)
def test_only_known_faults_are_not_applicable(name: str) -> None:
    assert module(name).NOT_APPLICABLE.keys() <= FAULTS.keys()


@pytest.mark.parametrize("name", [name for name, label in SUBJECTS.items() if label])
def test_the_table_shows_which_faults_are_not_applicable(name: str) -> None:
    line = documented(str(SUBJECTS[name]))
    dashes = {fault for fault, word in line.items() if word == "-"}
    assert dashes == set(module(name).NOT_APPLICABLE)
