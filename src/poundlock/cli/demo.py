"""`poundlock demo`: kill a pipeline again and again, and count the rows."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click


@click.command(context_settings={"show_default": True})
@click.option(
    "--rows", type=click.IntRange(min=1000), default=240_000, help="The number of sensor lines."
)
@click.option(
    "--kills", type=click.IntRange(min=3), default=5, help="The number of kills of each side."
)
@click.option(
    "--seed", type=int, default=1, help="Seed that chooses the batches and steps of the kills."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/demo",
    help="The directory for the reports.",
)
@click.option("--keep", is_flag=True, help="Keep the broker's data and the checkpoints.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the report as JSON, and everything else on stderr.",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=1),
    default=900,
    help="Seconds after which the demo gives up.",
)
@click.pass_context
def demo(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Kill a pipeline again and again, and count the rows.

    Sensor lines flow from one Kafka topic to two others: through Poundlock, and through Spark's own
    sink. Both are killed with SIGKILL in the middle of their batches. The demo needs only Java 17.
    """
    from poundlock.demo import director, report, screen
    from poundlock.demo.result import Order
    from poundlock.terminal import console, say, say_json

    shown = console(stderr=as_json)
    order = Order(**options)
    with _ended_by_signals():
        result = director.run(order, screen.Screen(shown))
    report.write(result, order.out)
    screen.show(shown, result)
    shown.print(f"report: {(order.out / 'report.html').absolute()}", soft_wrap=True)
    if order.keep:
        shown.print(f"kept:   {(order.out / 'kept').absolute()}", soft_wrap=True)
    if as_json:
        say_json(result.to_json())
    for failure in result.failures:
        say(f"the demo failed: {failure}", err=True)
    ctx.exit(1 if result.failures else 0)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that everything that the demo started ends."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
