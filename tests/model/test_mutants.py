"""The model finds every planted bug, so it would also find the same bug made by mistake.

Each bug is found by its own family of schedules, and for its own reason: a planted bug that fails
because it was planted badly proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from .mutants import MUTANTS, Mutant
from .world import Violation, World


def first_violation(mutant: Mutant) -> tuple[int, str]:
    """Play the mutant's family until a schedule fails. Return how many were played, and the failure."""
    played = 0
    try:
        for schedule in mutant.family():  # to enumerate them, it plays an undisturbed run
            played += 1
            World(schedule).run()
    except Violation as violation:
        return played, str(violation)
    pytest.fail(f"{played} schedules, and the mutant is alive: the model is too weak")


def test_no_mutant_was_dropped() -> None:
    assert len(MUTANTS) >= 78
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, report: Callable[[str], None]
) -> None:
    mutant.plant(monkeypatch)
    played, violation = first_violation(mutant)
    assert re.search(mutant.says, violation), f"{mutant.bug}: caught for another reason"
    report(f"mutant {mutant.name}: caught by schedule {played}: {violation.splitlines()[0]}")
