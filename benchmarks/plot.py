"""Plots of the results as plain SVG, without a plotting library."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

_COLOURS = {"poundlock": "#1f6f8b", "spark_sink": "#c98b3c"}
_NAMES = {"poundlock": "Poundlock, exactly once", "spark_sink": "Spark's own sink, at least once"}
_WIDTH, _HEIGHT, _LEFT, _BASE = 760, 360, 90, 290


def kafka(results: dict[str, Any], path: Path) -> None:
    """Draw rows per second round by round, both sinks side by side."""
    rounds = results["rounds"]
    speeds = [taken[side]["rows_per_second"] for taken in rounds for side in _COLOURS]
    top = max(speeds) * 1.1
    slot = (_WIDTH - _LEFT - 20) / len(rounds)
    parts = [_axis(top)]
    for number, taken in enumerate(rounds):
        left = _LEFT + number * slot
        for place, side in enumerate(_COLOURS):
            speed = taken[side]["rows_per_second"]
            parts.append(_bar(left + slot * (0.12 + 0.38 * place), slot * 0.36, speed, top, side))
        label = "warm-up" if number == 0 else f"round {number}"
        parts.append(_text(left + slot / 2, _BASE + 20, label))
    title = (
        f"{results['rows']:,} rows from Kafka to Kafka: {results['ratio_vs_spark_sink']:.2f} times "
        "the speed of Spark's own sink"
    )
    parts.append(_text(_WIDTH / 2, 24, title, size=15))
    for place, side in enumerate(_COLOURS):
        x = _LEFT + place * 300
        parts.append(
            f'<rect x="{x}" y="{_BASE + 38}" width="14" height="14" fill="{_COLOURS[side]}"/>'
        )
        parts.append(_text(x + 22, _BASE + 50, _NAMES[side], anchor="start"))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" role="img" aria-label="{escape(title)}">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _bar(x: float, width: float, speed: float, top: float, side: str) -> str:
    height = (_BASE - 50) * speed / top
    label = _text(x + width / 2, _BASE - height - 6, f"{speed / 1000:,.0f}k", size=11)
    return (
        f'<rect x="{x:.1f}" y="{_BASE - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{_COLOURS[side]}"><title>{_NAMES[side]}: {speed:,.0f} rows/s</title></rect>{label}'
    )


def _axis(top: float) -> str:
    lines: list[str] = []
    for share in (0.25, 0.5, 0.75, 1.0):
        y = _BASE - (_BASE - 50) * share
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e2e2"/>'
        )
        lines.append(_text(_LEFT - 8, y + 4, f"{top * share / 1000:,.0f}k", anchor="end"))
    lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{_BASE}" y2="{_BASE}" stroke="#555"/>')
    lines.append(_text(_LEFT - 8, 44, "rows/s", anchor="end"))
    return "".join(lines)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="#222">{escape(text)}</text>'
    )
