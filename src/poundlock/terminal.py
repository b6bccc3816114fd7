"""The one door to the terminal. What rows, keys and servers say is shown there and never obeyed.

A terminal obeys control characters: they move the cursor, hide text, set the clipboard or the title.
Rich obeys markup. Every other module prints through this one, so no text has to be checked where it is
printed. `tests/unit/test_tidy.py` enforces this.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import json
import logging
import os
import sys
import threading
import traceback
import unicodedata
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters (C0, DEL, C1), invisible ones and those that change the direction of text, halves
# of surrogate pairs, and separators of lines and paragraphs.
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(value: object, *, lines: bool = False) -> str:
    r"""Return text that a terminal shows and does not obey. Escape becomes `\x1b`.

    Line feeds are kept only if `lines` is set: for text whose lines are made here.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if (lines and character == "\n") or unicodedata.category(character) not in _OBEYED:
        return character
    return character.encode("unicode_escape").decode("ascii")


def say(
    text: object = "",
    *,
    lines: bool = False,
    err: bool = False,
    fg: str | None = None,
    nl: bool = True,
) -> None:
    """Print text, on standard error if `err` is set, in a colour if `fg` names one."""
    import click

    click.secho(visible(text, lines=lines), err=err, fg=fg, nl=nl)


def say_json(data: object, *, indent: int | None = 2) -> None:
    """Print data as JSON. Values of other types are printed as text."""
    import click

    # JSON escapes every control character except this one.
    click.echo(json.dumps(data, indent=indent, default=str).replace("\x7f", "\\u007f"))


def write(text: str, stream: TextIO) -> None:
    """Print lines to a stream. What its encoding does not know is replaced."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    known = visible(text, lines=True).encode(encoding, errors="replace").decode(encoding)
    print(known, file=stream, flush=True)


def confirm(question: str) -> None:
    """Ask on standard error. Any other answer than yes ends the command."""
    import click

    click.confirm(visible(question), abort=True, err=True)


def console(**options: Any) -> Console:
    """Return rich's console without markup, whose every character is visible."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class Visible(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            # Before rich measures it: what is wider than rich believes destroys a table.
            return super().render_str(visible(text, lines=True), **how)

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:  # of rich itself
                    yield segment
                else:
                    yield Segment(visible(segment.text, lines=True), segment.style)

    return Visible(markup=False, emoji=False, highlight=False, **options)


@contextlib.contextmanager
def shown_output() -> Generator[None]:
    """Make visible, on standard error, what programs print that are started inside the block.

    A JVM of Spark prints rows in its errors, and so do the workers that it starts. It holds on to what
    it was started with, so its output stays visible after the block.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    read, write = os.pipe()
    pump = threading.Thread(target=_pump, args=(read, os.dup(2)), daemon=True)
    pump.start()
    atexit.register(pump.join, _LAST_WORDS_S)
    try:
        for number in kept:
            os.dup2(write, number)
        os.close(write)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, old in kept.items():
            os.dup2(old, number)
            os.close(old)


_LAST_WORDS_S = 0.5  # for what a program that has ended left in its pipe


def _pump(read: int, target: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ended = False
    while not ended:
        data = os.read(read, 1 << 16)
        ended = not data
        text = decoder.decode(data, ended).replace("\r\n", "\n").replace("\t", "    ")
        left = visible(text, lines=True).encode()
        with contextlib.suppress(OSError):  # nobody reads it, but the program must not wait
            while left:
                left = left[os.write(target, left) :]
    os.close(read)
    os.close(target)


def guard() -> None:
    """Make warnings and unexpected errors of this program visible too."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        say("".join(traceback.format_exception(kind, error, where)), lines=True, err=True, nl=False)

    sys.excepthook = show


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), lines=True)
