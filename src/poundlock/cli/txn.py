"""`poundlock txn`: transactions in doubt, for a person to look at and to rule on."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from poundlock.core.inspector import Inspector
    from poundlock.txn.resolver import Line, Resolver


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where to look; the command gets them as one `Where`."""

    @functools.wraps(command)
    def wrapped(
        log: str | None,
        bootstrap_servers: str | None,
        settings: tuple[str, ...],
        postgres: tuple[str, ...],
        mysql: tuple[str, ...],
        **others: Any,
    ) -> Any:
        return command(where=Where(log, bootstrap_servers, settings, postgres, mysql), **others)

    made: Callable[..., Any] = wrapped
    for option in reversed(_OPTIONS):
        made = option(made)
    return made


_OPTIONS = [
    click.option("--log", "log", metavar="LOCATION", help="The log, or the checkpoint it is in."),
    click.option("--bootstrap-servers", metavar="HOST:PORT", help="The Kafka brokers."),
    click.option(
        "--setting",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        help="A setting of librdkafka; say secrets as NAME=env:VARIABLE or NAME=file:PATH.",
    ),
    click.option(
        "--postgres", metavar="DSN", multiple=True, help="A PostgreSQL; best as env:VARIABLE."
    ),
    click.option(
        "--mysql", metavar="URL", multiple=True, help="A MySQL or MariaDB; best as env:VARIABLE."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
]


@dataclass(frozen=True)
class Where:
    """Where to look."""

    log: str | None = None
    bootstrap_servers: str | None = None
    settings: tuple[str, ...] = ()
    postgres: tuple[str, ...] = ()
    mysql: tuple[str, ...] = ()

    def resolver(self) -> Resolver:
        from poundlock.txn.resolver import Resolver, open_log

        return Resolver(open_log(self.log) if self.log else None, self._systems())

    def _systems(self) -> list[Inspector]:
        found: list[Inspector] = []
        if self.bootstrap_servers is not None:
            from poundlock.sinks.kafka.inspector import KafkaInspector

            found.append(KafkaInspector(self._kafka_settings(self.bootstrap_servers)))
        elif self.settings:
            raise click.UsageError("--setting goes with --bootstrap-servers")
        if self.postgres:
            from poundlock.sinks.postgres.inspector import PostgresInspector

            found += [PostgresInspector(dsn) for dsn in self.postgres]
        if self.mysql:
            from poundlock.sinks.mysql.inspector import MySQLInspector

            found += [MySQLInspector(url) for url in self.mysql]
        return found

    def _kafka_settings(self, servers: str) -> dict[str, str]:
        from poundlock.secret import resolve

        pairs = [setting.partition("=") for setting in self.settings]
        if any(not separator for _, separator, _ in pairs):
            raise click.UsageError("--setting takes NAME=VALUE")
        known = {name: resolve(name, value) for name, _, value in pairs}
        return known | {"bootstrap.servers": servers}


@click.group()
def txn() -> None:
    """Transactions in doubt: what the log and the systems say, and what may be done about it."""


@txn.command("list")
@_where
def list_(where: Where, as_json: bool) -> None:
    """List branches that are decided but not finished, or open in a system."""
    with where.resolver() as resolver:
        lines = resolver.lines()
    if as_json:
        click.echo(json.dumps([line.to_json() for line in lines], indent=2))
    elif lines:
        _print(lines)
    elif not resolver.away:
        click.echo("nothing is in doubt")
    _tell_away(resolver)


def _print(lines: list[Line]) -> None:
    """Print a block for each branch, its id whole and alone: it is there to be copied."""
    advice = dict.fromkeys(line.next for line in lines)
    for text in advice:
        for line in lines:
            if line.next == text:
                click.echo(line.id)
                for facts in _facts(line):
                    click.echo(f"  {facts}")
        click.echo(f"next: {text}\n")


def _facts(line: Line) -> Iterator[str]:
    """Yield a line for where and what it is, and one for since when and whose."""
    known = [
        [("sink", line.sink), ("", line.system), ("batch", line.batch),
         ("decision", line.decision), ("state", line.state)],
        [("rows", line.rows), ("age", _seconds(line.age_s, "")),
         ("time left", _seconds(line.time_left_s, "no limit")),
         ("generation", line.generation), ("owner", line.owner)],
    ]  # fmt: skip
    for facts in known:
        yield ", ".join(f"{name} {fact}".strip() for name, fact in facts if fact not in (None, ""))


def _tell_away(resolver: Resolver) -> None:
    """End with a failure where a system could not be asked."""
    for system, why in resolver.away.items():
        click.echo(f"{system.system} cannot be asked: {why}", err=True)
    if resolver.away:
        raise click.exceptions.Exit(1)


def _seconds(value: float | None, none: str) -> str:
    return none if value is None else f"{value:,.0f} s"


@txn.command()
@click.argument("id")
@_where
def show(id: str, where: Where, as_json: bool) -> None:
    """Tell all that is known of one branch, by its exact id."""
    with where.resolver() as resolver:
        known = resolver.show(id)
    if as_json:
        click.echo(json.dumps(known, indent=2))
    else:
        from rich.console import Console
        from rich.json import JSON

        Console(soft_wrap=True).print(JSON.from_data(known))
    _tell_away(resolver)


@txn.command()
@click.argument("id", required=False)
@click.option("--batch", type=int, help="Rule on a batch that cannot be repaired, instead.")
@click.option(
    "--accept-loss", is_flag=True, help="With --batch: go on without lost or refused rows."
)
@click.option("--accept-replay", is_flag=True, help="With --batch: take the replay's rows.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_where
def commit(
    id: str | None,
    batch: int | None,
    accept_loss: bool,
    accept_replay: bool,
    yes: bool,
    where: Where,
    as_json: bool,
) -> None:
    """Commit a branch that the log has decided, or rule on a batch that cannot be repaired."""
    from poundlock.core.model import OperatorDecision

    if batch is None and id is None:
        raise click.UsageError("give the exact id of a branch, or --batch")
    with where.resolver() as resolver:
        if batch is None:
            assert id is not None
            _ask(yes, f"Commit {id}?")
            _outcome(as_json, id, resolver.commit(id).value, "committed")
            return
        if accept_loss == accept_replay or id is not None:
            raise click.UsageError(
                "--batch takes one of --accept-loss and --accept-replay, and no id"
            )
        operator_decision = (
            OperatorDecision.ACCEPT_LOSS if accept_loss else OperatorDecision.ACCEPT_REPLAY
        )
        _ask(
            yes,
            f"Rule {operator_decision.value} for batch {batch}? A running driver will be stopped.",
        )
        resolver.decide(batch, operator_decision)
        _say(
            as_json,
            {"batch": batch, "operator_decision": operator_decision.value},
            f"batch {batch}: {operator_decision.value}",
        )


@txn.command()
@click.argument("id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_where
def abort(id: str, yes: bool, where: Where, as_json: bool) -> None:
    """Abort an open branch that no decision names, by its exact id."""
    with where.resolver() as resolver:
        stray = resolver.abortable(id).stray
        _ask(yes, f"Abort {id}, {stray.state}, of generation {stray.generation}?")
        _outcome(as_json, id, resolver.abort(id).value, "aborted")


@txn.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--log", required=True, metavar="LOCATION", help="The log where it stands now.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def adopt(yes: bool, log: str, as_json: bool) -> None:
    """Accept that a log was moved. Never do this to a copy: both would write as one."""
    resolver = Where(log).resolver()
    _ask(yes, "Is this the only log of this pipeline, moved here for good?")
    resolver.adopt()
    _say(as_json, {"adopted": log}, f"the log at {log} is accepted where it stands")


def _ask(yes: bool, question: str) -> None:
    if not yes:
        click.confirm(question, abort=True, err=True)


def _outcome(as_json: bool, id: str, outcome: str, wanted: str) -> None:
    _say(as_json, {"id": id, "outcome": outcome}, f"{id}: {outcome}")
    if outcome != wanted:
        raise click.exceptions.Exit(1)


def _say(as_json: bool, data: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(data) if as_json else text)
