"""report.json and report.html: the counts, the picture, and what happened at every kill."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from string import Template

from poundlock.demo import plan, timeline
from poundlock.demo.history import Death, place_of
from poundlock.demo.result import Outcome, Result

TEMPLATE = files("poundlock.demo") / "report.html"
_COUNTED = ("rows_in", "rows_out", "lost", "repeated", "kills")
_STRETCHES = (
    ("not decided", "a restart aborts open branches and writes the batch again", plan.UNDECIDED),
    ("decided", "a restart commits what was decided", plan.DECIDED),
    ("finished", "a restart has nothing to do", plan.FINISHED),
)


def write(result: Result, out: Path) -> None:
    """Write both reports to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    (out / "report.html").write_text(render(result))


def render(result: Result) -> str:
    """Return the page, a single file without external resources."""
    ours, theirs = result.sides
    return Template(TEMPLATE.read_text()).substitute(
        verdict=_paragraphs(result.failures or result.verdict),
        mood="bad" if result.failures else "good",
        rows=f"{result.order.rows:,}",
        kills=result.order.kills,
        batches=plan.batches(result.order.kills),
        seed=result.order.seed,
        seconds=f"{result.seconds:.0f}",
        counts="".join(map(_count, result.sides)),
        timeline=timeline.draw(result.sides, result.seconds),
        track=_track(ours.history.deaths()),
        our_kills=_table(_our_kill(death) for death in ours.history.deaths()),
        their_kills=_table(_their_kill(death) for death in theirs.history.deaths()),
        their_title=html.escape(theirs.title),
    )


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)


def _count(side: Outcome) -> str:
    numbers = side.to_json()
    cells = "".join(
        f'<td class="{_mood(name, numbers[name])}">{numbers[name]:,}</td>' for name in _COUNTED
    )
    title, topic = html.escape(side.title), html.escape(side.topic)
    return f'<tr><th scope="row">{title}<small>topic {topic}</small></th>{cells}</tr>'


def _mood(name: str, number: int) -> str:
    if name not in ("lost", "repeated"):
        return ""
    return "bad" if number else "good"


def _track(deaths: Iterable[Death]) -> str:
    """Draw the steps of a batch, with each kill at the step that it hit."""
    hits: dict[object, list[int]] = {}
    for death in deaths:
        hits.setdefault(death.event.step, []).append(death.number)
    stretches: list[str] = []
    for name, meaning, steps in _STRETCHES:
        stations = "".join(
            f'<li class="{"hit" if step in hits else ""}"><span>{html.escape(step.value)}</span>'
            + "".join(f"<b>{number}</b>" for number in hits.get(step, []))
            + "</li>"
            for step in steps
        )
        stretches.append(f"<section><h3>{name}</h3><ol>{stations}</ol><p>{meaning}</p></section>")
    return "".join(stretches)


def _table(rows: Iterable[tuple[Death, str]]) -> str:
    return "".join(
        f"<tr><td><b>{death.number}</b></td><td>{death.event.at:.1f} s</td>"
        f"<td>{death.event.batch}</td><td>{html.escape(place_of(death.event))}</td>"
        f"<td>{html.escape(after)}</td></tr>"
        for death, after in rows
    )


def _our_kill(death: Death) -> tuple[Death, str]:
    if death.rewritten:
        return death, f"aborted {death.aborted} open transactions and wrote the batch again"
    if death.recommitted:
        return death, "found the decision in the log and finished its commits"
    return death, "found the batch finished in the log and did nothing"


def _their_kill(death: Death) -> tuple[Death, str]:
    return death, f"wrote the batch again from its first row: {death.left:,} rows are there twice"
