"""The history of both sides as one SVG picture, in the colours of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poundlock.core.protocol import Step
from poundlock.demo.history import Attempt, Death, Event, Run, What, place_of
from poundlock.demo.result import Outcome

_WIDTH = 1160
_LEFT, _RIGHT = 96, 16
_TITLE, _ROW, _GAP, _AXIS = 30, 30, 26, 30
_TICKS = 12  # about this many


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts seconds to pixels."""

    seconds: float

    def x(self, at: float) -> float:
        return round(_LEFT + at / self.seconds * (_WIDTH - _LEFT - _RIGHT), 1)

    @property
    def tick(self) -> float:
        """The seconds between two ticks: 1, 2 or 5 times a power of ten."""
        raw = max(self.seconds, 0.1) / _TICKS
        power = 10 ** math.floor(math.log10(raw))
        return next(power * step for step in (1, 2, 5, 10) if power * step >= raw)


def draw(sides: Sequence[Outcome], seconds: float) -> str:
    """Draw both sides above one axis."""
    scale = Scale(max(seconds, 1.0))
    shapes: list[str] = []
    top = 0
    for side in sides:
        lane, height = _lane(side, scale, top)
        shapes += lane
        top += height + _GAP
    axis = _axis(scale, top - _GAP)
    height = top - _GAP + _AXIS
    label = "Timeline of both sides: runs, batches, kills, decisions and commits"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        + "".join([*axis, *shapes])
        + "</svg>"
    )


def _lane(side: Outcome, scale: Scale, top: int) -> tuple[list[str], int]:
    history = side.history
    rows: list[tuple[str, list[str]]] = [
        ("driver", [_run(run, scale) for run in history.runs()]),
        ("batches", [_attempt(attempt, scale) for attempt in history.attempts()]),
    ]
    if marks := history.marks(Step.DECIDED):
        rows.append(("decided", [_mark(it, scale, "decided", "decided") for it in marks]))
    if marks := history.marks(Step.COMMITTED):
        rows.append(("committed", [_mark(it, scale, "sealed", "all committed") for it in marks]))
    logged = [event for event in history.events if event.what is What.COMMITTED]
    rows.append(("in Spark", [_mark(it, scale, "logged", "in Spark's log") for it in logged]))
    height = _TITLE + _ROW * len(rows)
    shapes = [_text(0, top + 18, side.title, "lane")]
    for number, (name, drawn) in enumerate(rows):
        y = top + _TITLE + _ROW * number
        shapes.append(_text(0, y + 19, name, "row"))
        shapes.append(f'<g transform="translate(0 {y})">{"".join(drawn)}</g>')
    shapes += [_kill(death, scale, top + _TITLE, height - _TITLE) for death in history.deaths()]
    return shapes, height


def _run(run: Run, scale: Scale) -> str:
    ready = run.ended if run.running is None else run.running
    ending = "killed" if run.killed else "ended by itself"
    starting = f"driver starting, {run.started:.1f} to {ready:.1f} s"
    running = f"query running, {ready:.1f} to {run.ended:.1f} s, then {ending}"
    return _bar(scale, run.started, ready, "starting", 10, starting) + _bar(
        scale, ready, run.ended, "running", 10, running
    )


def _attempt(attempt: Attempt, scale: Scale) -> str:
    kind = "cut" if attempt.killed else "again" if attempt.again else "batch"
    words = {
        "batch": "done",
        "again": "run again after a kill, done",
        "cut": "cut short by a kill",
    }[kind]
    title = f"batch {attempt.batch}: {words}, {attempt.started:.1f} to {attempt.ended:.1f} s"
    bar = _bar(scale, attempt.started, attempt.ended, kind, 18, title)
    middle = (scale.x(attempt.started) + scale.x(attempt.ended)) / 2
    wide = scale.x(attempt.ended) - scale.x(attempt.started) > 16
    return bar + (_text(middle, 20, str(attempt.batch), "number") if wide else "")


def _mark(event: Event, scale: Scale, kind: str, word: str) -> str:
    x, title = scale.x(event.at), f"batch {event.batch} {word} at {event.at:.1f} s"
    return f'<path class="{kind}" d="M{x} 8l6 7l-6 7l-6-7z">{_title(title)}</path>'


def _kill(death: Death, scale: Scale, top: int, height: int) -> str:
    event, x = death.event, scale.x(death.event.at)
    title = f"kill {death.number} at {event.at:.1f} s: batch {event.batch}, {place_of(event)}"
    return (
        f'<g class="kill">{_title(title)}<path d="M{x} {top - 4}V{top + height}"/>'
        f'<circle cx="{x}" cy="{top - 10}" r="8"/>'
        + _text(x, top - 6, str(death.number), "badge")
        + "</g>"
    )


def _axis(scale: Scale, height: int) -> Iterable[str]:
    count = int(scale.seconds / scale.tick)
    for at in (number * scale.tick for number in range(count + 1)):
        x = scale.x(at)
        yield f'<path class="grid" d="M{x} {_TITLE - 4}V{height}"/>'
        yield _text(x, height + 20, f"{at:g} s", "tick")


def _bar(scale: Scale, start: float, end: float, kind: str, height: int, title: str) -> str:
    x = scale.x(start)
    width = max(round(scale.x(end) - x, 1), 1.5)
    y = (_ROW - height) // 2
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="2">'
        f"{_title(title)}</rect>"
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"
