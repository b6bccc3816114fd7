"""`poundlock demo`: kill a pipeline again and again, and count the rows."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click


@click.command()
@click.option(
    "--rows",
    type=click.IntRange(min=1000),
    default=240_000,
    show_default=True,
    help="The number of sensor lines.",
)
@click.option(
    "--kills",
    type=click.IntRange(min=3),
    default=5,
    show_default=True,
    help="The number of kills of each side.",
)
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    help="Seed that chooses the batches and steps of the kills.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/demo",
    show_default=True,
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
    type=click.FloatRange(min=1),
    default=900,
    show_default=True,
    help="Seconds after which the demo gives up.",
)
@click.pass_context
def demo(
    ctx: click.Context,
    rows: int,
    kills: int,
    seed: int,
    out: Path,
    keep: bool,
    as_json: bool,
    time_limit: float,
) -> None:
    """Kill a pipeline again and again, and count the rows.

    Sensor lines flow from one Kafka topic to two others: through Poundlock, and through Spark's own
    sink. Both are killed with SIGKILL in the middle of their batches. The demo needs only Java 17.
    """
    from rich.console import Console

    from poundlock.demo import director, report, screen
    from poundlock.demo.result import Order

    console = Console(stderr=as_json, highlight=False)
    order = Order(rows, kills, seed, out, keep, time_limit)
    with _ended_by_signals():
        result = director.run(order, screen.Screen(console))
    report.write(result, out)
    screen.show(console, result)
    console.print(f"report: {(out / 'report.html').absolute()}", soft_wrap=True)
    if keep:
        console.print(f"kept:   {(out / 'kept').absolute()}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    for failure in result.failures:
        click.echo(f"the demo failed: {failure}", err=True)
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
