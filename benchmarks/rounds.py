"""Shared by all comparisons: sides that alternate in one run, and the medians of their rounds."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any


def alternate(
    sides: Sequence[str], rounds: int, run: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Run every side in each round, starting with another side each time. The first round warms up.

    `run(side)` returns at least `rows_per_second`. The first side is ours. Its ratio to another is the
    median of the rounds' ratios, because a slow moment affects both sides of a round.
    """
    history: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        turn = number % len(sides)
        taken = {side: run(side) for side in (*sides[turn:], *sides[:turn])}
        history.append(taken)
        speeds = {side: f"{taken[side]['rows_per_second']:,.0f}" for side in sides}
        print(f"round {number}{' (warm-up)' if number == 0 else ''}: rows/s {speeds}", flush=True)
    medians = {
        side: statistics.median(taken[side]["rows_per_second"] for taken in history[1:])
        for side in sides
    }
    ours, *others = sides
    ratios = {
        f"ratio_vs_{side}": statistics.median(
            taken[ours]["rows_per_second"] / taken[side]["rows_per_second"] for taken in history[1:]
        )
        for side in others
    }
    return {"rounds": history, "medians": medians, **ratios}


def commit() -> str:
    """Return the commit that was measured."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
