"""What the demo was asked to do, the result, and what it means in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poundlock.demo.count import Count
from poundlock.demo.history import History


@dataclass(frozen=True, slots=True)
class Order:
    """What the demo was asked to do."""

    rows: int
    kills: int
    seed: int
    out: Path
    keep: bool = False
    time_limit_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one side: the counts, and the history."""

    key: str
    title: str
    topic: str
    count: Count
    kills: int
    history: History

    def to_json(self) -> dict[str, int]:
        count = self.count
        return {
            "rows_in": count.rows_in,
            "rows_out": count.rows_out,
            "lost": count.lost,
            "repeated": count.repeated,
            "kills": self.kills,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """The result of both sides."""

    order: Order
    poundlock: Outcome
    spark_sink: Outcome
    seconds: float

    @property
    def sides(self) -> tuple[Outcome, Outcome]:
        return self.poundlock, self.spark_sink

    @property
    def failures(self) -> list[str]:
        """Say what went wrong. The demo has failed if this is not empty."""
        found: list[str] = []
        if not self.poundlock.count.exact:
            found.append(f"Poundlock broke its promise: {_faults(self.poundlock.count)}")
        if self.spark_sink.count.lost or self.spark_sink.count.foreign:
            found.append(
                "Spark's own sink has a fault that no kill explains, so the demo itself is wrong: "
                + _faults(self.spark_sink.count)
            )
        found += [
            f"{side.title} was killed {side.kills} times, not {self.order.kills}: it finished before "
            "the next kill"
            for side in self.sides
            if side.kills != self.order.kills
        ]
        return found

    @property
    def verdict(self) -> list[str]:
        """Say what the counts mean, in one or two sentences for each side."""
        ours, theirs = self.poundlock, self.spark_sink
        if ours.count.exact:
            first = (
                f"Poundlock: killed {ours.kills} times, and every row arrived exactly once. None "
                "lost, none repeated."
            )
        else:
            first = f"Poundlock broke its promise: {_faults(ours.count)}."
        if theirs.count.repeated:
            second = (
                f"Spark's own sink: killed {theirs.kills} times, {_faults(theirs.count)}. It "
                "promises only at-least-once delivery."
            )
        elif theirs.count.exact:
            second = (
                "Spark's own sink: nothing repeated, this time. That was luck, because it promises "
                "only at-least-once delivery. Try another --seed."
            )
        else:
            second = f"Spark's own sink: {_faults(theirs.count)}."
        return [first, second]

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json."""
        return {
            "poundlock": self.poundlock.to_json(),
            "spark_sink": self.spark_sink.to_json(),
            "seed": self.order.seed,
            "seconds": round(self.seconds, 1),
        }


def _faults(count: Count) -> str:
    named = {"lost": count.lost, "repeated": count.repeated, "of unknown origin": count.foreign}
    return ", ".join(f"{number:,} rows {name}" for name, number in named.items() if number)
