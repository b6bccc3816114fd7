"""What the demo shows while it runs: a live table on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from poundlock.demo.history import Event, What, place_of

if TYPE_CHECKING:
    from poundlock.demo.result import Result
    from poundlock.demo.side import Side

_REFRESH_S = 0.15
_LINES = 8
_STATES = {"starting": "yellow", "running": "green", "killed": "bold red", "done": "bold green"}


class Screen:
    """Shows the demo on one console."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._sides: Sequence[Side] = ()
        self._lines: deque[Text] = deque(maxlen=_LINES)
        self._refreshed = 0.0

    def print(self, line: str) -> None:
        self._console.print(Text(f"  {line}", style="dim"))

    @contextlib.contextmanager
    def live(self, sides: Sequence[Side]) -> Iterator[None]:
        """Show the table on the terminal until both sides are done."""
        self._sides = sides
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
            self._refreshed = 0.0
            self.update()
        self._live = None

    def show_event(self, side: Side, event: Event) -> None:
        """Show an event in a line."""
        line = _line(side, event)
        if line is None:
            return
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._lines.append(line)

    def update(self) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._refreshed > _REFRESH_S:
            self._refreshed = now
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for name in ("", "state", "batch", "step", "rows in", "rows out", "kills", "restarts"):
            number = name in ("batch", "rows in", "rows out", "kills", "restarts")
            width = {"state": 8, "step": 13}.get(name)  # so that nothing moves
            justify = "right" if number else "left"
            table.add_column(name, justify=justify, min_width=width, no_wrap=True)
        for side in self._sides:
            table.add_row(
                Text(side.title, style="bold"),
                Text(side.state, style=_STATES.get(side.state, "")),
                "" if side.batch is None else str(side.batch),
                side.step,
                f"{side.rows_in:,}",
                f"{side.rows_out:,}",
                f"{side.kills}/{len(side.scene.kills)}",
                str(max(side.starts - 1, 0)),
            )
        return Group(Text(), table, Text(), *self._lines)


def _line(side: Side, event: Event) -> Text | None:
    """Describe an event in one line; None for those that only the picture shows."""
    wanted = len(side.scene.kills)
    style = ""
    match event.what:
        case What.STARTED:
            text = "started" if side.starts == 1 else f"started again ({side.starts - 1})"
        case What.KILLED:
            style = "red"
            text = f"kill {side.kills} of {wanted}: batch {event.batch}, {place_of(event)}"
        case What.ENDED:
            style, text = "green", "done: all input is read"
        case _:
            return None
    return Text.assemble(
        (f"{event.at:7.1f} s  ", "dim"), (f"{side.title:<20}", "bold"), (text, style)
    )


def show(console: Console, result: Result) -> None:
    """Print the counts and the verdict."""
    table = Table(
        title="Counted from the topics, isolation.level=read_committed", title_style="dim"
    )
    table.add_column("")
    for name in ("rows in", "rows out", "lost", "repeated", "kills"):
        table.add_column(name, justify="right")
    for side in result.sides:
        count = side.count
        table.add_row(
            Text(side.title, style="bold"),
            f"{count.rows_in:,}",
            f"{count.rows_out:,}",
            _alarming(count.lost),
            _alarming(count.repeated),
            str(side.kills),
        )
    console.print()
    console.print(table)
    console.print()
    for line in result.verdict:
        console.print(Text(line), soft_wrap=True)


def _alarming(number: int) -> Text:
    return Text(f"{number:,}", style="bold red" if number else "bold green")
