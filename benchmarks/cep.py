"""How fast patterns are matched, and whether more partial matches make it slower.

A stream of readings at a fixed rate goes through a pattern of three stages with conditions in Python,
for several lengths of `within`. A longer `within` means more partial matches at a time. One part runs
only the matcher, with one key. The other runs pages as Spark does: with many keys, batches, a
watermark, and state that each batch reads and writes as bytes. Speeds are per second of this process's
CPU time, so that other programs on the machine matter less.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.rounds import alternate, commit
from poundlock.stream.machine import Machine
from poundlock.stream.matching import MatchOperator
from poundlock.stream.nfa import Matcher
from poundlock.stream.operator import Event, Page, read_key, read_page
from poundlock.stream.pattern import Pattern, begin
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock

RESULTS = Path(__file__).parent / "results"
LENGTHS = ("1 s", "10 s", "1 min", "5 min")
PER_SECOND, KEYS, BATCH, LAG_MS = 1000, 100, 10_000, 1000

Reading = row_type(("id", "number", "celsius"))


def pattern(within: str) -> Pattern:
    """One row in ten starts a match, one in a thousand continues it, one in fifty thousand ends it."""
    return (
        begin("warm")
        .where(lambda row: row.celsius > 90)
        .followed_by("hot")
        .where(lambda row: row.celsius > 99.9)
        .followed_by("fire")
        .where(lambda row: row.celsius > 99.998)
        .within(within)
    )


def readings(rows: int) -> list[Event]:
    draw = random.Random(2026)
    step = 1000 / PER_SECOND
    return [
        Event(int(number * step), Reading((f"s{number % KEYS}", number, draw.random() * 100)))
        for number in range(rows)
    ]


def alone(events: list[Event], within: str) -> dict[str, Any]:
    """Run only the matcher, with all rows under one key."""
    matcher = Matcher(Machine(pattern(within), Reading._fields))
    matches, left = 0, iter(events)
    began = time.process_time()
    while batch := list(islice(left, BATCH)):
        matcher.feed([event.time for event in batch], [event.row for event in batch])
        matches += len(matcher.matches)
        matcher.matches.clear()
    took = time.process_time() - began
    return _measured(len(events), took, matches, _waiting(matcher.dump()), 0)


def pages(events: list[Event], within: str) -> dict[str, Any]:
    """Run the operator over batches. Each batch gets the page that the previous one left."""
    operator = MatchOperator(
        pattern(within),
        columns=Reading._fields,
        key_fields=("id",),
        select=lambda match, ctx: (ctx.key.id, match["fire"][0].number),
        fields=("id", "number"),
    )
    batches: list[tuple[int, dict[tuple[Any, ...], list[Event]]]] = []
    for at in range(0, len(events), BATCH):
        by_key: dict[tuple[Any, ...], list[Event]] = {}
        for event in events[at : at + BATCH]:
            by_key.setdefault((event.row.id,), []).append(event)
        batches.append((events[at].time - LAG_MS, by_key))
    data, matches = None, 0
    began = time.process_time()
    for watermark, rows in batches:
        done = Page(operator, data, Clock(watermark)).run(rows)
        data, matches = done.data, matches + len(done.outputs.get("main", ()))
    took = time.process_time() - began
    _, entries = read_page(data)
    waiting = sum(_waiting(read_key(key, e)[1].get("match")) for key, e in entries.items())
    return _measured(len(events), took, matches, waiting, len(data or b""))


def _waiting(state: dict[str, Any] | None) -> int:
    return sum(len(nodes) - 1 for nodes in state["waiting"]) if state else 0


def _measured(rows: int, took: float, matches: int, waiting: int, size: int) -> dict[str, Any]:
    speed = round(rows / took)
    found = {"rows_per_second": speed, "matches": matches, "waiting_at_the_end": waiting}
    return found | ({"state_bytes": size} if size else {})


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the median speeds for each length of `within`."""
    medians = results["medians"]
    top = max(medians.values()) * 1.1
    slot = (plot._WIDTH - plot._LEFT - 20) / len(LENGTHS)
    parts = [plot._axis(top)]
    colours = dict(zip(("alone", "pages"), plot._COLOURS.values(), strict=True))
    for number, within in enumerate(LENGTHS):
        left = plot._LEFT + number * slot
        for place, (kind, colour) in enumerate(colours.items()):
            speed = medians[f"{kind}, {within}"]
            height = (plot._BASE - 50) * speed / top
            x, y, width = left + slot * (0.12 + 0.38 * place), plot._BASE - height, slot * 0.36
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
            parts.append(plot._text(x + width / 2, y - 6, f"{speed / 1000:,.0f}k", size=11))
        parts.append(plot._text(left + slot / 2, plot._BASE + 20, f"within {within}"))
    title = "A pattern of three stages: rows per second on one core"
    parts.append(plot._text(plot._WIDTH / 2, 24, title, size=15))
    names = {
        "alone": "The matcher alone, one key",
        "pages": f"Pages of {KEYS} keys, state as bytes",
    }
    for place, (kind, colour) in enumerate(colours.items()):
        x = plot._LEFT + place * 300
        parts.append(
            f'<rect x="{x}" y="{plot._BASE + 38}" width="14" height="14" fill="{colour}"/>'
        )
        parts.append(plot._text(x + 22, plot._BASE + 50, names[kind], anchor="start"))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plot._WIDTH} {plot._HEIGHT}" '
        f'font-family="sans-serif" role="img" aria-label="{escape(title)}">'
        f'<rect width="{plot._WIDTH}" height="{plot._HEIGHT}" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    events = readings(chosen.rows)
    runs = {"alone": alone, "pages": pages}
    sides = [f"{kind}, {within}" for kind in runs for within in LENGTHS]

    def run(side: str) -> dict[str, Any]:
        kind, within = side.split(", ")
        return runs[kind](events, within)

    measured = alternate(sides, chosen.rounds, run)
    medians = measured["medians"]
    flatness = {
        f"slowest_to_fastest_{kind}": min(speeds) / max(speeds)
        for kind in runs
        if (speeds := [medians[f"{kind}, {within}"] for within in LENGTHS])
    }
    results = {
        "commit": commit(),
        "rows": chosen.rows,
        "rows_per_second_of_event_time": PER_SECOND,
        "keys_of_pages": KEYS,
        "rows_per_batch": BATCH,
        **flatness,
        "medians": medians,
        "rounds": measured["rounds"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cep.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(results, RESULTS / "cep.svg")
    print(json.dumps({key: value for key, value in results.items() if key != "rounds"}, indent=2))


if __name__ == "__main__":
    main()
