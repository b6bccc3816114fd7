"""`poundlock doctor`: checks this machine, brokers, databases and settings, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict

import click

from poundlock.cli import environment
from poundlock.cli.environment import Finding
from poundlock.terminal import say, say_json

_ENCRYPTED = {True: "encrypted", False: "not encrypted"}


@click.command()
@click.option("--bootstrap-servers", metavar="HOST:PORT", help="Check these Kafka brokers too.")
@click.option(
    "--setting",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of librdkafka, as for a Kafka sink.",
)
@click.option("--topic", "topics", multiple=True, help="A topic that a pipeline will write to.")
@click.option(
    "--postgres",
    metavar="DSN",
    multiple=True,
    help="Check the connection to this PostgreSQL too, and say what its sslmode protects from.",
)
@click.option(
    "--mysql",
    metavar="URL",
    multiple=True,
    help="Check the connection to this MySQL or MariaDB too, and say what its ssl_mode protects from.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    bootstrap_servers: str | None,
    settings: tuple[str, ...],
    topics: tuple[str, ...],
    postgres: tuple[str, ...],
    mysql: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check this machine, the brokers and the databases, and say how to solve each problem.

    A driver that is missing is needed only for its own sink. What Spark's workers run is asked too:
    PYSPARK_PYTHON, if it is set.

    Exit status: 1 if something that every pipeline needs is bad, or an address that was given.

    Give a DSN or URL as env:NAME or file:PATH, because every user can read a command line.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        environment.python,
        environment.packages,
        environment.drivers,
        _java,
        _jars,
        environment.workers,
    ]
    findings = [finding for check in checks for finding in check()]
    if bootstrap_servers:
        if any("=" not in setting for setting in settings):
            raise click.UsageError("--setting must have the form NAME=VALUE")
        pairs = dict(setting.split("=", 1) for setting in settings)
        findings += list(_kafka(bootstrap_servers, pairs, topics))
    for dsn in postgres:
        findings += _database("PostgreSQL", dsn, _postgres)
    for url in mysql:
        findings += _database("MySQL", url, _mysql)
    if as_json:
        say_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _print(finding)
    if any(finding.needed and not finding.good for finding in findings):
        raise click.exceptions.Exit(1)


def _print(finding: Finding) -> None:
    mark, colour = ("good", "green") if finding.good else ("BAD ", "red")
    if not finding.good and not finding.needed:
        mark, colour = "note", "yellow"
    say(mark, fg=colour, nl=False)
    say(f"  {finding.what}: {finding.found}")
    if not finding.good:
        say(f"      {finding.cure}", lines=True)


def _java() -> Iterator[Finding]:
    from poundlock.errors import PoundlockError
    from poundlock.jvm import java

    try:
        yield Finding("Java", True, str(java.executable()))
    except PoundlockError as error:
        yield Finding("Java", False, "no Java 17 or later", str(error))


def _jars() -> Iterator[Finding]:
    from poundlock.jvm import jars

    for name in ("spark-kafka", "kafka-server"):
        here = not jars.missing(name)
        found = "fetched" if here else "not fetched yet; they are fetched on first use"
        yield Finding(f"jars {name}", True, found)


def _kafka(servers: str, settings: dict[str, str], topics: tuple[str, ...]) -> Iterator[Finding]:
    from poundlock.errors import PoundlockError

    for topic in topics or (None,):
        what = f"Kafka at {servers}" + (f", topic {topic}" if topic else "")
        try:
            from poundlock.sinks import Kafka  # which may lack its driver

            sink = Kafka(topic, bootstrap_servers=servers, name="doctor", settings=settings)
            warnings = sink.preflight()
        except PoundlockError as error:
            yield Finding(what, False, type(error).__name__, str(error))
            continue
        limit = f"transactions may stay open for {sink.timeout_ms / 1000:,.0f} s"
        yield Finding(what, True, limit)
        for warning in warnings:
            yield Finding(what, True, f"warning: {warning}")


def _database(system: str, address: str, connect: Callable[[str], str]) -> Iterator[Finding]:
    from poundlock.errors import PoundlockError

    # Any other address may hold a password.
    what = f"{system} at {address}" if address.startswith(("env:", "file:")) else system
    try:
        found = connect(address)
    except PoundlockError as error:
        yield Finding(what, False, type(error).__name__, str(error))
    else:
        yield Finding(what, True, found)


def _postgres(dsn: str) -> str:
    from poundlock.sinks import driver_needed

    with driver_needed("Postgres"):
        from poundlock.sinks.postgres.link import connect
        from poundlock.sinks.postgres.tls import protection

    with closing(connect(dsn)) as link:
        found = protection(link)
    return f"{_ENCRYPTED[found.encrypted]}; sslmode={found.mode}: {found.text}"


def _mysql(url: str) -> str:
    from poundlock.sinks import driver_needed

    with driver_needed("MySQL"):
        from poundlock.sinks.mysql.link import connect
        from poundlock.sinks.mysql.tls import MODES

    with closing(connect(url, sink="doctor", lock_timeout=10)) as link:
        mode = link.tls.mode
        return f"{_ENCRYPTED[link.encrypted]}; ssl_mode={mode}: {MODES[mode]}"
