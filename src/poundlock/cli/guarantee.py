"""`poundlock guarantee`: the table of what kinds of source and sink promise together."""

from __future__ import annotations

import json

import click


@click.command()
@click.option(
    "--table", "whole", is_flag=True, default=True, help="The general table (the default)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def guarantee(whole: bool, as_json: bool) -> None:
    """Show what each kind of sink promises, with sources that can and cannot be replayed."""
    from poundlock.core import guarantee as core

    if as_json:
        click.echo(json.dumps(core.table(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("sink", "source cannot be replayed", "source can be replayed", "because")
    for kind, cells in core.table().items():
        words = [cells[key].replace("_", " ") for key in ("not_replayable", "replayable")]
        table.add_row(kind, *words, core.cell(kind, replayable=True).reason)
    Console().print(table)
