"""Exactly once under enumerated schedules and thousands of generated ones.

A failing schedule is printed. To replay it, from the folder above:

    python -c "from model.schedule import *; from model.world import World; World(Schedule(...)).run()"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings

from .families import FAMILIES
from .schedule import Schedule, schedules
from .world import Violation, World

LEAST_SCHEDULES = 10_000

# The model proves nothing about states that it never reaches. These are the oracle's names.
INTERESTING = (
    "Repaired",
    "Compacted",
    "OperatorDecided",
    "append of unknown outcome",
    "branch aborted by the protocol",  # by a sweep
    "branch lost after the decision",
    "batch out of time",
    "batches carried",
    "branches stuck for good",
    "checkpoint forgot something",
    "checkpoint tampered with: delete",
    "checkpoint tampered with: restore",
    "copy refused",
    "delay",
    "disk forgot something",
    "driver woke when all was over",
    "executor cut off",
    "former sink refused",
    "duplicate",
    "idle driver stopped",
    "interrupt_after",
    "late request arrived",
    "lose_answer",
    "lose_request",
    "log and checkpoint deleted together",
    "log and checkpoint restored together",
    "loss accepted for good",
    "machine crashed",
    "paused driver went on",
    "plan set aside",
    "Withdrawn",
    "withdrawal refused",
    "pipeline came through",
    "pipeline stopped for good",
    "record below the floor",
    "request repeated",
    "sinks exchanged",
    "sink changed: downgrade",
    "sink changed: remove",
    "sink changed: rename",
    "step aborted",
    "step drained",
    "step repeated in the same process",
    "stopped by Fenced",
    "stopped by InDoubt",
    "stopped by LogCorrupt",
    "stopped by LogMismatch",
    "stopped by GuaranteeBroken",
    "stopped by OutOfTime",
    "stopped by Unavailable",
    "system gone for good",
    "witness removed",
    "42704, witness aborted",
    "42704, witness committed",
    "EndTxn abort NONE",
    "EndTxn commit CONCURRENT_TRANSACTIONS",
    "EndTxn commit INVALID_PRODUCER_ID_MAPPING",
    "EndTxn commit INVALID_TXN_STATE",
    "EndTxn commit NONE",
    "EndTxn commit PRODUCER_FENCED",
    "witness aborted",
    "witness committed",
    "witness not stable",
    "witness None",
)


class Play:
    """Plays schedules and counts what they reach."""

    def __init__(self) -> None:
        self.schedules = self.effects = 0
        self.reached: Counter[str] = Counter()

    def __call__(self, schedule: Schedule) -> None:
        world = World(schedule)
        try:
            world.run()
        except Violation as violation:
            raise Violation(f"{violation}\n    {schedule}") from None
        self.schedules += 1
        self.effects += world.effects
        self.reached.update(world.oracle.counts)


def test_output_is_exact_under_every_schedule(
    model_seed: int, model_schedules: int, report: Callable[[str], None]
) -> None:
    play = Play()
    for family in FAMILIES:
        for schedule in family():
            play(schedule)

    @seed(model_seed)
    @settings(
        max_examples=model_schedules,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(schedules())
    def play_any(schedule: Schedule) -> None:
        play(schedule)

    play_any()
    report(f"model: {play.schedules} schedules with {play.effects} effects, none broke a promise")
    for state, times in sorted(play.reached.items()):
        report(f"    {times:8} {state}")
    assert play.schedules >= LEAST_SCHEDULES
    assert not [state for state in INTERESTING if not play.reached[state]]
