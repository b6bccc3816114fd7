"""How a bug is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from poundlock.core import protocol
from poundlock.core.protocol import Action, BranchState, Stage

from ..schedule import Schedule

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A bug, the family of schedules that finds it, and what the model says then."""

    name: str
    bug: str
    family: Callable[[], Iterator[Schedule]]
    says: str  # a regular expression
    plant: Callable[[Patch], None]


MUTANTS: list[Mutant] = []


def mutant(
    family: Callable[[], Iterator[Schedule]], bug: str, says: str
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(plant.__name__, bug, family, says, plant))
        return plant

    return add


def change_recovery(patch: Patch, stage: Stage, state: BranchState, action: Action) -> None:
    """Change one cell of the recovery table."""
    table = {**protocol.RECOVERY, stage: {**protocol.RECOVERY[stage], state: action}}
    patch.setattr(protocol, "RECOVERY", table)
