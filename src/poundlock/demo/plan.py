"""When each kill is due: in the same batches on both sides, chosen by a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from poundlock.core.protocol import Step

# The steps of a batch from the last vote to Spark's own commit, in three stretches. Each has its own
# recovery after a crash: abort and write again; commit what was decided; nothing.
UNDECIDED = (Step.PREPARED, Step.CHECKED, Step.DECIDING)
DECIDED = (Step.DECIDED, Step.COMMITTING, Step.COMMITTED_ONE, Step.COMMITTED, Step.FINISHING)
FINISHED = (Step.FINISHED, Step.RETURNING)
STRETCHES = (UNDECIDED, DECIDED, FINISHED)


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill."""

    batch: int
    step: Step  # where it hits Poundlock
    share: float  # the part of the batch that Spark's own sink has written when the kill hits it


def batches(kills: int) -> int:
    """Return the number of batches: twice the kills, and two without kills at the end."""
    return 2 * kills + 2


def kills(count: int, seed: int) -> list[Kill]:
    """Choose `count` kills, each in another batch, and at steps of each stretch in turn."""
    chance = random.Random(seed)
    turns = [itertools.cycle(chance.sample(steps, len(steps))) for steps in STRETCHES]
    steps = [next(turn) for turn in itertools.islice(itertools.cycle(turns), count)]
    chance.shuffle(steps)
    when = sorted(chance.sample(range(2 * count), count))
    return [
        Kill(batch, step, chance.uniform(0.2, 0.7)) for batch, step in zip(when, steps, strict=True)
    ]
