"""`poundlock state`: what the operators of a query have kept, read from its checkpoint."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from poundlock.spark.stream.state import OperatorState


@click.group()
def state() -> None:
    """Look at the state of a query. Nothing is changed, and the query may be running."""


@state.command()
@click.argument("checkpoint")
@click.option("--operator", type=int, help="Its number; the only one of ours by default.")
@click.option("--batch", type=int, help="The state after this batch, not after the last.")
@click.option("--limit", type=int, default=100, show_default=True, help="How many keys at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    checkpoint: str, operator: int | None, batch: int | None, limit: int, as_json: bool
) -> None:
    """Show the operators of a query, and what each key of one of them has kept.

    CHECKPOINT is the query's checkpoint_location. Times of timers are milliseconds since 1970.
    """
    from poundlock.errors import UsageError
    from poundlock.spark.session import session
    from poundlock.spark.stream import state as reading

    spark = session("local[1]", kafka=False, conf={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    found = reading.operators(spark, checkpoint)
    chosen = _chosen(found, operator)
    if operator is not None and chosen is None:
        raise UsageError(f"the query has no operator {operator}: it has {_numbers(found)}")
    kept: list[dict[str, Any]] = []
    if chosen is not None and chosen.ours:
        some = islice(reading.entries(spark, checkpoint, chosen.number, batch), limit)
        kept = [{"key": list(e.key), "state": e.state, "timers": e.timers} for e in some]
    elif chosen is not None:
        rows = reading.rows(spark, checkpoint, chosen.number, batch).limit(limit).collect()
        kept = [{"key": list(r.key), "state": r.value.asDict(), "timers": {}} for r in rows]
    if as_json:
        told = [_told(each) for each in found]
        number = None if chosen is None else chosen.number
        document = {"operators": told, "operator": number, "keys": _texts(kept)}
        click.echo(json.dumps(document, indent=2, default=str))
        return
    _print(found, chosen, kept)


def _texts(value: Any) -> Any:
    """Return a value as JSON can have it: keys of dictionaries are texts there."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): _texts(each) for k, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_texts(each) for each in value]
    return value


def _chosen(found: list[OperatorState], number: int | None) -> OperatorState | None:
    """Return the operator that was asked for, or the only one there is to look into."""
    if number is not None:
        return next((each for each in found if each.number == number), None)
    ours = [each for each in found if each.ours] or found
    return ours[0] if len(ours) == 1 else None


def _numbers(found: list[OperatorState]) -> str:
    return ", ".join(str(each.number) for each in found) or "none with state"


def _told(operator: OperatorState) -> dict[str, Any]:
    return {
        "operator": operator.number,
        "kind": operator.kind,
        "partitions": operator.partitions,
        "batches": list(operator.batches),
    }


def _print(
    found: list[OperatorState], chosen: OperatorState | None, kept: list[dict[str, Any]]
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("operator", "kind", "partitions", "batches")
    for each in found:
        first, last = each.batches
        table.add_row(str(each.number), each.kind, str(each.partitions), f"{first} to {last}")
    console.print(table)
    if chosen is None:
        console.print("Several operators have state: choose one with --operator.")
        return
    table = Table("key", "state", "timers", title=f"operator {chosen.number}")
    for each in kept:
        texts = [json.dumps(_texts(each[part]), default=str) for part in ("state", "timers")]
        table.add_row(", ".join(map(str, each["key"])), *texts)
    console.print(table)
