"""The input of a query, and the output that it must have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    i: int

    @property
    def sensor(self) -> str:
        return f"s{self.i % 5}"

    @property
    def seconds(self) -> int:
        return 1_700_000_040 + self.i  # the start of a minute

    @property
    def temperature(self) -> int:
        return self.i * 7 % 50

    def line(self) -> str:
        return f"{self.i},{self.sensor},{self.seconds},{self.temperature}"


def make_rows(count: int) -> list[Row]:
    return [Row(i) for i in range(count)]


def _stateless(batches: Sequence[Sequence[Row]]) -> list[list[str]]:
    return [
        [
            _json({"i": row.i, "sensor": row.sensor, "doubled": row.temperature * 2})
            for batch in batches
            for row in batch
        ]
    ]


def _outputs(batches: Sequence[Sequence[Row]]) -> list[list[str]]:
    rows = [row for batch in batches for row in batch]
    return [
        [_json({"i": row.i, "sensor": row.sensor}) for row in rows],
        [
            _json({"sensor": row.sensor, "i": row.i, "temperature": row.temperature})
            for row in rows
            if row.temperature > 30
        ],
        [str(row.i) for row in rows if row.i % 2 == 0],
        [str(row.i) for row in rows if row.i % 2 == 1],
    ]


def _stateful(batches: Sequence[Sequence[Row]]) -> list[list[str]]:
    """Each batch gives one row for every window that it changed. Counts grow, so all rows differ."""
    counts: Counter[tuple[str, int]] = Counter()
    totals: Counter[tuple[str, int]] = Counter()
    values: list[str] = []
    for batch in batches:
        changed: dict[tuple[str, int], None] = {}
        for row in batch:
            window = (row.sensor, row.seconds // 60 * 60)
            counts[window] += 1
            totals[window] += row.temperature
            changed[window] = None
        values += [
            _json({"sensor": w[0], "start": w[1], "n": counts[w], "total": totals[w]})
            for w in changed
        ]
    return [values]


def _five(batches: Sequence[Sequence[Row]]) -> list[list[str]]:
    return [
        [
            _json({"i": row.i, "sensor": row.sensor, "temperature": row.temperature})
            for batch in batches
            for row in batch
        ]
    ]


EXPECTED: Mapping[str, Callable[[Sequence[Sequence[Row]]], list[list[str]]]] = {
    "stateless": _stateless,
    "outputs": _outputs,
    "stateful": _stateful,
    "five": _five,
}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def assert_same(what: str, expected: Counter[str], found: Counter[str]) -> None:
    """Compare as multisets, and name the missing and the additional rows."""
    missing, extra = expected - found, found - expected
    assert not missing and not extra, (
        f"{what}: {missing.total()} of {expected.total()} rows are missing, such as "
        f"{list(missing)[:3]}; {extra.total()} are too many, such as {list(extra)[:3]}"
    )
