"""The command line. Each command is loaded when it is called: `--help` must not wait for Spark."""

from __future__ import annotations

import logging
import sys
import traceback
from importlib import import_module

import click

from poundlock import __version__
from poundlock.errors import PoundlockError, UsageError
from poundlock.terminal import guard, say

_logger = logging.getLogger("poundlock")

_COMMANDS = {
    "demo": ("poundlock.cli.demo", "demo", "Kill a pipeline again and again, and count the rows."),
    "doctor": ("poundlock.cli.doctor", "doctor", "Check this machine, and report what is missing."),
    "guarantee": (
        "poundlock.cli.guarantee",
        "guarantee",
        "What a pipeline or each kind of sink guarantees, and why.",
    ),
    "servers": (
        "poundlock.cli.servers",
        "servers",
        "Real servers on this machine, without Docker.",
    ),
    "sql": ("poundlock.cli.sql", "sql", "Pipelines as SQL, from a file or in a shell."),
    "state": ("poundlock.cli.state", "state", "The state of a query's operators."),
    "txn": ("poundlock.cli.txn", "txn", "Transactions in doubt: list, show, commit, abort."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        return getattr(import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in sorted(_COMMANDS)])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="poundlock")
@click.option("--debug", is_flag=True, help="Show all that led to a failure.")
def poundlock(debug: bool) -> None:
    """Exactly-once output for Apache Spark Structured Streaming.

    Exit status: 0 for success, 1 if a check failed or a system refused, 2 if the call was wrong.
    """
    if debug:
        _logger.setLevel(logging.DEBUG)


def main() -> None:
    guard()
    try:
        status = poundlock.main(standalone_mode=False)
    except click.exceptions.Abort as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # not of a question
            say("interrupted: what the command had begun may be done or not", err=True)
        else:
            say("stopped; nothing was changed", err=True)
        sys.exit(1)
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is not None:
            say(error.ctx.get_usage(), lines=True, err=True)
        say(f"Error: {error.format_message()}", lines=True, err=True)
        sys.exit(error.exit_code)
    except PoundlockError as error:
        if _logger.isEnabledFor(logging.DEBUG):
            say(traceback.format_exc(), lines=True, err=True)
        say(f"poundlock: {type(error).__name__}: {error}", lines=True, err=True)
        sys.exit(2 if type(error) is UsageError else 1)  # a subclass means that a system refused
    sys.exit(status)  # without standalone mode, click returns the status of an Exit
