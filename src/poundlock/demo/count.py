"""Compares the rows of the input with those of the output: what was lost, what was repeated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Reading = tuple[str, int, float]  # id, timestamp, temperature


@dataclass(frozen=True, slots=True)
class Count:
    """The rows that a reader of the output finds, compared with the input."""

    rows_in: int
    rows_out: int
    lost: int  # rows of the input that are missing
    repeated: int  # copies beyond the first
    foreign: int = 0  # rows that are not in the input

    @property
    def exact(self) -> bool:
        return self.lost == self.repeated == self.foreign == 0


def compare(sent: Iterable[Reading], received: Iterable[Reading]) -> Count:
    """Compare two topics as multisets of readings, since equal totals would prove nothing."""
    wanted, found = Counter(sent), Counter(received)
    missing, extra = wanted - found, found - wanted
    foreign = sum(copies for reading, copies in extra.items() if reading not in wanted)
    return Count(
        rows_in=wanted.total(),
        rows_out=found.total(),
        lost=missing.total(),
        repeated=extra.total() - foreign,
        foreign=foreign,
    )


def from_line(line: bytes) -> Reading:
    """Parse a sensor's line: `sensor_1,1547718199,35.8`."""
    id_, timestamp, temperature = line.decode().split(",")
    return id_, int(timestamp), float(temperature)


def from_json(value: bytes) -> Reading:
    """Parse a reading as both sides write it."""
    body = json.loads(value)
    return body["id"], body["timestamp"], body["temperature"]
