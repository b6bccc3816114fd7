"""`poundlock servers`: real local servers from the command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from poundlock.errors import PoundlockError
from poundlock.servers import NAMES, base, module
from poundlock.terminal import console, say, say_json

# The environment variable for the address of each server, and the attribute that has it.
_ADDRESSES = {
    "kafka": ("SERVERS", "bootstrap_servers"),
    "postgres": ("PG_DSN", "address"),
    "mariadb": ("MYSQL_URL", "address"),
    "valkey": ("REDIS_URL", "address"),
    "opensearch": ("OPENSEARCH_URL", "url"),
}


def _selection(command: Callable[..., None]) -> Callable[..., None]:
    """Add what all commands take: names of servers, their directory, and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts."),
        click.option(
            "--dir",
            "directory",
            type=click.Path(file_okay=False, path_type=Path),
            help="The directory of the servers' data. Default: POUNDLOCK_SERVERS_DIR, or "
            "~/.local/state/poundlock/servers",
        ),
        click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAMES]..."),
    ):
        command = option(command)
    return command


@click.group()
def servers() -> None:
    """Real local servers, without Docker or root: Kafka, databases, caches, search."""


@servers.command()
@_selection
@click.option(
    "--brokers",
    type=click.IntRange(1, 9),
    help="The number of Kafka brokers. Default: as before, or 1.",
)
def up(names: tuple[str, ...], directory: Path | None, as_json: bool, brokers: int | None) -> None:
    """Start servers, and print their addresses.

    The servers continue to run after the command. `down` and `up` keep their addresses and data.
    Without NAMES, start all. They listen on 127.0.0.1 only. Kafka and OpenSearch have no password
    there, so every user of this machine can use them. Started by root, all run as nobody.

    Exit status: 1 if a server could not be started. The others run all the same.
    """
    options = {"kafka": {"brokers": brokers}}
    problems: dict[str, str] = {}
    for name in names or NAMES:
        runs = base.status(base.home_of(name, directory)).running
        say(f"{name} runs already" if runs else f"Starting {name} ...", err=True)
        try:
            module(name).up(directory, **options.get(name, {}))
        except PoundlockError as error:  # the others do not need it
            problems[name] = str(error)
            say(f"{name} is not started: {error}", lines=True, err=True)
    if as_json:
        _print_json(names, directory, problems)
    else:
        for name in names or NAMES:
            if name not in problems:
                say(f"{name}  {base.status(base.home_of(name, directory)).url}")
    if problems:
        say(f"not started: {', '.join(problems)}. The reasons are above", err=True)
        raise click.exceptions.Exit(1)


@servers.command()
@_selection
@click.option("--wipe", is_flag=True, help="Delete their data as well.")
def down(names: tuple[str, ...], directory: Path | None, as_json: bool, wipe: bool) -> None:
    """Stop servers that `up` has started. Without NAMES, stop all."""
    done: dict[str, dict[str, bool]] = {}
    for name in names or NAMES:
        home = base.home_of(name, directory)
        created = base.status(home).created
        ended = created and bool(base.down(home, wipe=wipe))
        done[name] = {"created": created, "ended": ended, "wiped": created and wipe}
        if as_json:
            continue
        if not created:
            say(f"{name}  there is none in {home}")
            continue
        kept = "data deleted" if wipe else f"data kept in {home}"
        say(f"{name}  {'ended' if ended else 'was not running'}, {kept}")
    if as_json:
        say_json(done)


@servers.command()
@_selection
def status(names: tuple[str, ...], directory: Path | None, as_json: bool) -> None:
    """Show addresses, processes and logs. Without NAMES, show all."""
    if as_json:
        _print_json(names, directory)
        return
    for name in names or NAMES:
        _print_status(name, base.status(base.home_of(name, directory)))


@servers.command()
@_selection
def env(names: tuple[str, ...], directory: Path | None, as_json: bool) -> None:
    """Print the addresses of running servers, with their passwords, as shell variables.

    Example: eval "$(poundlock servers env)". Without NAMES, print all that run.
    """
    found: dict[str, str] = {}
    for name in names or NAMES:
        if not base.status(base.home_of(name, directory)).running:
            if names:
                raise click.ClickException(f"{name} is not running: poundlock servers up {name}")
            continue
        variable, attribute = _ADDRESSES[name]
        found[variable] = getattr(module(name).up(directory), attribute)
    if as_json:
        say_json(found)
        return
    for variable, address in found.items():
        say(f"export {variable}={shlex.quote(address)}")


def _print_status(name: str, it: base.Status) -> None:
    # Imported here: the command line must start quickly.
    from rich.text import Text

    # Without wrapping, so that addresses and paths can be copied.
    shown = console(soft_wrap=True)
    word = ("up", "green") if it.running else ("down", "red")
    if it.nodes and not it.running:
        word = ("in part", "yellow")
    address = it.url if it.created else "never started"
    shown.print(Text.assemble(f"{name}  ", word, f"  {address}"))
    for node, process in it.nodes.items():
        shown.print(f"  node {node}  pid {process['pid']}  {process['log']}")
    if it.created:
        shown.print(f"  data  {it.directory}")


def _print_json(
    names: tuple[str, ...], directory: Path | None, problems: Mapping[str, str] | None = None
) -> None:
    """Print the status of each server, with the reason for each that could not be started."""
    found = {name: asdict(base.status(base.home_of(name, directory))) for name in names or NAMES}
    for name, problem in (problems or {}).items():
        found[name]["problem"] = problem
    say_json(found)
