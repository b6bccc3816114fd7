"""An operator who withdraws Spark's plan of a batch, as `poundlock txn replan` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poundlock.core.checkpoint import Plan
from poundlock.core.model import Withdrawn
from poundlock.core.protocol import Stage, enter
from poundlock.errors import LogMismatch, PoundlockError

if TYPE_CHECKING:
    from .world import World

_REFUSED = "has withdrawn Spark's plan"
BOTH, RECORD, MOVE = range(3)  # the steps of the command: other drivers may run between the two


class Withdrawal:
    """The command, and how far it has come."""

    def __init__(self) -> None:
        self.used = False
        self._recorded: tuple[int, str] | None = None

    def perform(self, world: World, step: int) -> None:
        if step != MOVE:
            self._recorded = self._record(world)
        if step != RECORD and self._recorded is not None:
            batch, plan = self._recorded
            plans = world.checkpoint.plans
            if batch in plans and Plan(plans[batch]).hash == plan:
                del plans[batch]
                world.checkpoint.put(world.checkpoint.query, plans, world.checkpoint.commits)
                world.oracle.count("plan set aside")
            self._recorded = None

    def repeat(self, world: World, error: PoundlockError) -> None:
        """Complete what the error says."""
        if _REFUSED in str(error):
            self.perform(world, BOTH)

    def _record(self, world: World) -> tuple[int, str] | None:
        checkpoint, log = (
            world.checkpoint,
            world.open_log(lambda label, request: request(), "operator"),
        )
        state, batch = log.load(), max(checkpoint.plans, default=-1)
        if state.generation is None or batch < 0 or batch in checkpoint.commits:
            return None
        plan = Plan(checkpoint.plans[batch]).hash
        if state.withdrawn.get(batch) != plan:
            try:
                undecided = enter(state, batch, plan) is Stage.NONE
            except LogMismatch:
                undecided = False
            if not undecided:
                world.oracle.count("withdrawal refused")
                return None
            log.append(Withdrawn(batch, plan, by="operator"))
            self.used = True
            world.oracle.count("plan withdrawn")
        return batch, plan


def withdrawn(error: PoundlockError) -> bool:
    """Return whether a driver stopped because its plan was withdrawn, or is gone already."""
    return _REFUSED in str(error) or "is not in its checkpoint" in str(error)
