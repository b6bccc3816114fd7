"""The model finds every planted bug, so it would also find the same bug made by mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .families import FAMILIES
from .mutants import MUTANTS, Mutant
from .schedule import Schedule, schedules
from .world import Violation, World

MOST_RANDOM = 2000


def first_violation(mutant: Mutant, model_seed: int) -> tuple[int, str]:
    """Play the schedules of `test_model` until one fails. Return their number and the failure."""
    played = 0

    def play(schedule: Schedule) -> None:
        nonlocal played
        played += 1
        World(schedule).run()

    @seed(model_seed)
    @settings(
        max_examples=MOST_RANDOM,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def play_any(schedule: Schedule) -> None:
        play(schedule)

    try:
        for family in (mutant.family, *FAMILIES):
            for schedule in family():
                play(schedule)
        play_any()
    except Violation as violation:
        return played, str(violation)
    pytest.fail(f"{played} schedules, and the mutant is alive: the model is too weak")


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 14
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(
    mutant: Mutant, model_seed: int, monkeypatch: pytest.MonkeyPatch, report: Callable[[str], None]
) -> None:
    mutant.plant(monkeypatch)
    played, violation = first_violation(mutant, model_seed)
    report(f"mutant {mutant.name}: caught by schedule {played}: {violation.splitlines()[0]}")
