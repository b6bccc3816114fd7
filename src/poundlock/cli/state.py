"""`poundlock state`: shows the state of a query's operators, from its checkpoint."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from poundlock.errors import UsageError
from poundlock.terminal import console, say_json, shown_output

if TYPE_CHECKING:
    from poundlock.spark.stream.state import OperatorState


@click.group()
def state() -> None:
    """Read the state of a query. Changes nothing. The query may be running."""


@state.command()
@click.argument("checkpoint")
@click.option("--operator", type=int, help="The operator's number. Needed if there are several.")
@click.option("--batch", type=int, help="Show the state after this batch instead of the last.")
@click.option("--limit", type=int, default=100, show_default=True, help="The most keys to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    checkpoint: str, operator: int | None, batch: int | None, limit: int, as_json: bool
) -> None:
    """Show the operators of a query, and the state of each key of one operator.

    CHECKPOINT is the query's checkpoint_location. Timers are in milliseconds since 1970.
    """
    from poundlock.spark.session import session
    from poundlock.spark.stream import state as reader

    with shown_output():
        spark = session("local[1]", kafka=False, conf={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")  # what a task fails with is told by the error
    operators = reader.operators(spark, checkpoint)
    chosen = _choose(operators, operator)
    keys: list[dict[str, Any]] = []
    if chosen is not None and chosen.ours:
        some = islice(reader.entries(spark, checkpoint, chosen.number, batch), limit)
        keys = [{"key": list(e.key), "state": e.state, "timers": e.timers} for e in some]
    elif chosen is not None:
        rows = reader.rows(spark, checkpoint, chosen.number, batch, limit)
        keys = [{"key": list(r.key), "state": r.value.asDict(), "timers": {}} for r in rows]
    if not as_json:
        _print(operators, chosen, keys)
        return
    document = {
        "operators": [
            {
                "operator": each.number,
                "kind": each.kind,
                "partitions": each.partitions,
                "batches": list(each.batches),
            }
            for each in operators
        ],
        "operator": None if chosen is None else chosen.number,
        "keys": _to_json(keys),
    }
    say_json(document)


def _to_json(value: Any) -> Any:
    """Return a value in the types of JSON, where the keys of an object are text."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): _to_json(each) for k, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json(each) for each in value]
    return value


def _choose(operators: list[OperatorState], number: int | None) -> OperatorState | None:
    """Return the operator with this number. By default the only one, Poundlock's before Spark's."""
    if number is None:
        ours = [each for each in operators if each.ours] or operators
        return ours[0] if len(ours) == 1 else None
    for each in operators:
        if each.number == number:
            return each
    numbers = ", ".join(str(each.number) for each in operators)
    raise UsageError(f"the query has no operator {number}: it has {numbers}. Choose one of these")


def _print(
    operators: list[OperatorState], chosen: OperatorState | None, keys: list[dict[str, Any]]
) -> None:
    from rich.table import Table

    shown = console()
    table = Table("operator", "kind", "partitions", "batches")
    for each in operators:
        first, last = each.batches
        table.add_row(str(each.number), each.kind, str(each.partitions), f"{first} to {last}")
    shown.print(table)
    if chosen is None:
        shown.print("Several operators have state: choose one with --operator.")
        return
    table = Table("key", "state", "timers", title=f"operator {chosen.number}")
    for each in keys:
        cells = [json.dumps(_to_json(each[part]), default=str) for part in ("state", "timers")]
        table.add_row(", ".join(map(str, each["key"])), *cells)
    shown.print(table)
