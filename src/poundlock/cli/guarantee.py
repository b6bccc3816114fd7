"""`poundlock guarantee`: what a pipeline guarantees, or the general table of sources and sinks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from poundlock.terminal import console, say, say_json

if TYPE_CHECKING:
    from poundlock.core.guarantee import Statement


@click.command()
@click.argument("job", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.argument("arguments", nargs=-1)
@click.option("--table", "whole", is_flag=True, help="The general table (the default without JOB).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def guarantee(job: Path | None, arguments: tuple[str, ...], whole: bool, as_json: bool) -> None:
    """Show what the pipeline of a JOB file guarantees for each sink, and why.

    JOB is a Python file that defines pipeline(spark, args) or a Pipeline of that name. ARGUMENTS are
    passed as args. The file is imported, but nothing is started: put start() under
    if __name__ == "__main__". Without JOB, show what each kind of sink guarantees with sources that can
    and cannot be replayed.

    Exit status: 1 if a sink cannot give the guarantee that the pipeline requires.
    """
    if job is None or whole:
        _print_table(as_json)
        return
    from poundlock.core.guarantee import require
    from poundlock.errors import UsageError
    from poundlock.jobfile import open_pipeline

    statement = open_pipeline(job, arguments).guarantee()
    if as_json:
        say_json(_to_json(statement))
    else:
        say(statement, lines=True)
    try:
        require(statement)
    except UsageError as refused:  # the pipeline is wrong, not this call
        raise click.ClickException(str(refused)) from refused


def _to_json(statement: Statement) -> dict[str, object]:
    return {
        "source": statement.source,
        "replayable": statement.replayable,
        "guarantee": statement.guarantee.value,
        "sinks": [
            {
                "sink": route.sink,
                "kind": route.kind,
                "asked": route.asked.value,
                "guarantee": route.cell.guarantee.value,
                "reason": route.cell.reason,
                "reader": route.reader,
                "after_restore": route.after_restore,
            }
            for route in statement.routes
        ],
    }


def _print_table(as_json: bool) -> None:
    from poundlock.core import guarantee as core

    if as_json:
        say_json(core.table())
        return
    from rich.table import Table

    table = Table("sink", "source cannot be replayed", "source can be replayed", "because")
    lost = dict[str, list[str]]()
    for kind, cells in core.table().items():
        words = [cells[key].replace("_", " ") for key in ("not_replayable", "replayable")]
        table.add_row(core.kind_name(kind), *words, core.cell(kind, replayable=True).reason)
        reason = core.cell(kind, replayable=False).reason
        lost.setdefault(reason, []).append(core.kind_name(kind))
    shown = console()
    shown.print(table)
    for reason, kinds in lost.items():
        shown.print(f"source cannot be replayed ({', '.join(kinds)}): {reason}")
