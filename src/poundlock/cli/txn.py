"""`poundlock txn`: shows transactions in doubt, and lets an operator resolve them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from poundlock.terminal import confirm, say, say_json

if TYPE_CHECKING:
    from poundlock.core.inspector import Inspector
    from poundlock.txn.resolver import Line, Resolver


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the log and the systems. The command receives them as one `Where`."""

    @functools.wraps(command)
    def made(**options: Any) -> Any:
        given = {each.name: options.pop(each.name) for each in fields(Where)}
        return command(where=Where(**given), **options)

    for option in reversed(_OPTIONS):
        made = option(made)
    return made


_OPTIONS = [
    click.option(
        "--log", "log", metavar="LOCATION", help="The location of the log or of its checkpoint."
    ),
    click.option("--bootstrap-servers", metavar="HOST:PORT", help="The Kafka brokers."),
    click.option(
        "--setting",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        help="A setting of librdkafka; pass secrets as NAME=env:VARIABLE or NAME=file:PATH.",
    ),
    click.option(
        "--postgres",
        metavar="DSN",
        multiple=True,
        help="The DSN of a PostgreSQL, preferably as env:VARIABLE.",
    ),
    click.option(
        "--mysql",
        metavar="URL",
        multiple=True,
        help="The URL of a MySQL or MariaDB, preferably as env:VARIABLE.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
]


@dataclass(frozen=True)
class Where:
    """The log and the systems of a command."""

    log: str | None = None
    bootstrap_servers: str | None = None
    settings: tuple[str, ...] = ()
    postgres: tuple[str, ...] = ()
    mysql: tuple[str, ...] = ()

    def resolver(self) -> Resolver:
        from poundlock.txn.resolver import Resolver, open_log

        return Resolver(open_log(self.log) if self.log else None, self._systems())

    def _systems(self) -> list[Inspector]:
        from poundlock.sinks import driver_needed

        found: list[Inspector] = []
        if self.bootstrap_servers is not None:
            with driver_needed("Kafka"):
                from poundlock.sinks.kafka.inspector import KafkaInspector

            found.append(KafkaInspector(self._kafka_settings(self.bootstrap_servers)))
        elif self.settings:
            raise click.UsageError("--setting requires --bootstrap-servers")
        if self.postgres:
            with driver_needed("Postgres"):
                from poundlock.sinks.postgres.inspector import PostgresInspector

            found += [PostgresInspector(dsn) for dsn in self.postgres]
        if self.mysql:
            with driver_needed("MySQL"):
                from poundlock.sinks.mysql.inspector import MySQLInspector

            found += [MySQLInspector(url) for url in self.mysql]
        return found

    def _kafka_settings(self, servers: str) -> dict[str, str]:
        pairs = [setting.partition("=") for setting in self.settings]
        if any(not separator for _, separator, _ in pairs):
            raise click.UsageError("--setting must have the form NAME=VALUE")
        known = {name: value for name, _, value in pairs}
        return known | {"bootstrap.servers": servers}


@click.group()
def txn() -> None:
    """Show transactions in doubt, as the log and the systems see them, and resolve them."""


@txn.command("list")
@_where
def list_(where: Where, as_json: bool) -> None:
    """List branches that are decided but not finished, or open in a system."""
    with where.resolver() as resolver:
        lines = resolver.lines()
    if as_json:
        say_json([line.to_json() for line in lines])
    elif lines:
        _print(lines)
    elif not resolver.away:
        say("nothing is in doubt")
    _report_unreachable(resolver)


def _print(lines: list[Line]) -> None:
    """Print a block for each branch, with its id on a line of its own, so that it can be copied."""
    advice = dict.fromkeys(line.next for line in lines)
    for text in advice:
        for line in lines:
            if line.next == text:
                say(line.id)
                for facts in _facts(line):
                    say(f"  {facts}")
        say(f"next: {text}")
        say()


def _facts(line: Line) -> Iterator[str]:
    """Yield a line with the place and state of a branch, and one with its size, age and owner."""
    over = "none" if line.decision == "finished" else ""
    known = [
        [
            ("sink", line.sink),
            ("", line.system),
            ("batch", line.batch),
            ("decision", line.decision),
            ("state", line.state),
        ],
        [
            ("rows", line.rows),
            ("age", _seconds(line.age_s, "")),
            ("time left", over or _seconds(line.time_left_s, "no limit")),
            ("generation", line.generation),
            ("owner", line.owner),
        ],
    ]
    for facts in known:
        yield ", ".join(f"{name} {fact}".strip() for name, fact in facts if fact not in (None, ""))


def _report_unreachable(resolver: Resolver) -> None:
    """Report systems that could not be reached, and fail if there are any."""
    for system, why in resolver.away.items():
        say(f"{system.system} cannot be asked: {why}", err=True)
    if resolver.away:
        raise click.exceptions.Exit(1)


def _seconds(value: float | None, none: str) -> str:
    return none if value is None else f"{value:,.0f} s"


@txn.command()
@click.argument("id")
@_where
def show(id: str, where: Where, as_json: bool) -> None:
    """Show everything that is known about one branch, by its exact id."""
    with where.resolver() as resolver:
        known = resolver.show(id)
    if as_json:
        say_json(known)
    else:
        _print_branch(known)
    _report_unreachable(resolver)


def _print_branch(known: dict[str, Any]) -> None:
    from poundlock.txn.resolver import Line

    say(known["id"])
    line = Line(**known["branch"]) if known["branch"] else None
    for facts in _facts(line) if line else ():
        say(f"  {facts}")
    if known["system"]:
        facts = dict(known["system"])
        say(f"{facts.pop('system')} says: {_pairs(facts)}")
    for record in known["log"]:
        receipt = record["receipt"]
        say(f"record {record['record']} of the log: {record['kind']}, at {_time(record['at'])}")
        say(f"  batch {record['batch']}, {record['stage']}; sink {receipt['sink']}")
    for act in known["audit"]:
        say(f"entry {act['number']} of the audit: {act['action']}, at {_time(act['at'])}")
        _print_outcome(act)
    if line:
        say(f"next: {line.next}")


def _pairs(facts: dict[str, Any]) -> str:
    """Return facts as text, without those that are empty or not known."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_time(fact) if name.endswith('_at') else _fact(fact)}"
        for name, fact in facts.items()
        if fact not in (None, [], "")
    )


def _fact(fact: Any) -> str:
    if not isinstance(fact, list):
        return str(fact)
    return " ".join(
        "-".join(map(str, each)) if isinstance(each, list) else str(each) for each in fact
    )


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")


def _print_outcome(act: dict[str, Any]) -> None:
    from poundlock.txn.audit import description

    say(f"  by {description(act['by'])}")
    say(f"  outcome: {act['outcome'] or _NO_OUTCOME}")


@txn.command()
@click.argument("id", required=False)
@click.option(
    "--batch", type=int, help="Decide about a batch that cannot be repaired, instead of a branch."
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="With --batch: try once more to commit, then continue without what is not committed.",
)
@click.option("--accept-replay", is_flag=True, help="With --batch: use the rows of the replay.")
@click.option(
    "--sink",
    "sinks",
    metavar="NAME",
    multiple=True,
    help="With --batch: a sink to decide about. Needed if the batch has several; may be repeated.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_where
def commit(
    id: str | None,
    batch: int | None,
    accept_loss: bool,
    accept_replay: bool,
    sinks: tuple[str, ...],
    yes: bool,
    where: Where,
    as_json: bool,
) -> None:
    """Commit a branch that the log has decided, or decide about a batch that cannot be repaired."""
    from poundlock.core.model import OperatorDecision

    if batch is None and id is None:
        raise click.UsageError("give the exact id of a branch, or --batch")
    with where.resolver() as resolver:
        if batch is None:
            assert id is not None
            if sinks:
                raise click.UsageError("--sink requires --batch")
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
        meant = resolver.in_doubt(batch, sinks)
        names = ", ".join(meant)
        _ask(
            yes,
            f"Record {operator_decision.value} for sink {names} of batch {batch}? A running driver "
            "will be stopped.",
        )
        resolver.decide(batch, operator_decision, meant)
        _say(
            as_json,
            {"batch": batch, "sinks": meant, "operator_decision": operator_decision.value},
            f"batch {batch}, sink {names}: {operator_decision.value}",
        )


@txn.command()
@click.argument("id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_where
def abort(id: str, yes: bool, where: Where, as_json: bool) -> None:
    """Abort an open branch that no decision names, by its exact id."""
    with where.resolver() as resolver:
        found = resolver.abortable(id)
        stray, stops = found.stray, resolver.stops_driver(found)
        also = " A running driver will be stopped." if stops else ""
        _ask(yes, f"Abort {id}, {stray.state}, of generation {stray.generation}?{also}")
        _outcome(as_json, id, resolver.abort(id).value, "aborted")


@txn.command()
@click.option("--sink", required=True, metavar="NAME", help="The sink, by its former name.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_where
def forget(sink: str, yes: bool, where: Where, as_json: bool) -> None:
    """Accept that a sink, which the pipeline no longer has, has left no branch open.

    Give the address of its system too, if it still exists: then it is checked.
    """
    with where.resolver() as resolver:
        places = resolver.forgettable(sink)
        named = ", ".join(f"{place.system} ({place.id})" for place in places)
        _report_unreachable(resolver)
        _ask(yes, f"Is nothing of sink {sink} open in {named}? A running driver will be stopped.")
        resolver.forget(sink)
    _say(as_json, {"forgotten": sink}, f"sink {sink} is forgotten")


@txn.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--log", required=True, metavar="LOCATION", help="The current location of the log.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def adopt(yes: bool, log: str, as_json: bool) -> None:
    """Accept that a log was moved. Never do this with a copy: both would write as one pipeline."""
    resolver = Where(log).resolver()
    _ask(yes, "Is this the only log of this pipeline, moved here for good?")
    resolver.adopt()
    _say(as_json, {"adopted": log}, f"the log is accepted at {log}")


@txn.command()
@click.option("--batch", type=int, required=True, help="The batch, whose plan must be the newest.")
@click.option(
    "--log", required=True, metavar="LOCATION", help="The location of the log or of its checkpoint."
)
@click.option(
    "--checkpoint", metavar="LOCATION", help="The checkpoint, if the log is not inside it."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replan(batch: int, log: str, checkpoint: str | None, yes: bool, as_json: bool) -> None:
    """Have Spark plan an undecided batch anew, after the limits of its source were lowered.

    For a batch that takes longer than its transactions may stay open. Stops a running driver.
    """
    kept = Where(log).resolver().replan(batch, checkpoint, functools.partial(_ask, yes))
    _say(
        as_json,
        {"batch": batch, "kept": kept},
        f"batch {batch} is planned anew when the pipeline starts; its old plan is kept in {kept}",
    )


@txn.command()
@click.option("--log", required=True, metavar="LOCATION", help="The location of the log.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit(log: str, as_json: bool) -> None:
    """Show who did what with these commands, and check that nothing of it was changed since.

    Exit status: 1 if an entry was changed, removed or inserted.
    """
    chain = Where(log).resolver().audit()
    acts = chain.acts()
    if as_json:
        say_json({"acts": acts, "problems": chain.problems, "head": chain.head})
    else:
        for act in acts:
            say(f"{act['number']}  {_time(act['at'])}  {act['action']} {act['id']}")
            _print_outcome(act)
        say(f"{len(chain.entries)} entries; the hash of the last is {chain.head}")
    for problem in chain.problems:
        say(f"the chain is broken: {problem}", err=True)
    if chain.problems:
        raise click.exceptions.Exit(1)


_NO_OUTCOME = "not known, because the command ended before it could record it"


def _ask(yes: bool, question: str) -> None:
    if not yes:
        confirm(question)


def _outcome(as_json: bool, id: str, outcome: str, wanted: str) -> None:
    _say(as_json, {"id": id, "outcome": outcome}, f"{id}: {outcome}")
    if outcome != wanted:
        raise click.exceptions.Exit(1)


def _say(as_json: bool, data: dict[str, Any], text: str) -> None:
    if as_json:
        say_json(data, indent=None)
    else:
        say(text)
