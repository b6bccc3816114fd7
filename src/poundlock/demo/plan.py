"""When each kill is due: the same batches on both sides, chosen by a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from poundlock.core.protocol import Step

# The way of a batch from the last vote to Spark's own commit, in three stretches. A crash in each leads
# to another recovery: abort and write again; commit what was decided; nothing left to do.
UNDECIDED = (Step.PREPARED, Step.CHECKED, Step.DECIDING)
DECIDED = (Step.DECIDED, Step.COMMITTING, Step.COMMITTED_ONE, Step.COMMITTED, Step.FINISHING)
FINISHED = (Step.FINISHED, Step.RETURNING)
STRETCHES = (UNDECIDED, DECIDED, FINISHED)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill to come."""

    batch: int
    step: Step  # where it hits Poundlock
    share: float  # of the batch's rows, that Spark's own sink has written when it hits there


def batches(kills: int) -> int:
    """Return into how many batches the input is cut: twice the kills, and two in peace at the end."""
    return 2 * kills + 2


def kills(count: int, seed: int) -> list[Kill]:
    """Choose `count` kills, each in a batch of its own, at steps of every stretch in turn."""
    chance = random.Random(seed)
    turns = [itertools.cycle(chance.sample(steps, len(steps))) for steps in STRETCHES]
    steps = [next(turn) for turn in itertools.islice(itertools.cycle(turns), count)]
    chance.shuffle(steps)
    when = sorted(chance.sample(range(2 * count), count))
    return [
        Kill(batch, step, chance.uniform(0.2, 0.7)) for batch, step in zip(when, steps, strict=True)
    ]
