"""No text from outside moves a terminal's cursor, colours it, or is taken for markup."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from rich.table import Table
from rich.text import Text

from poundlock import terminal
from poundlock.cli import poundlock
from poundlock.core.log import FileLog
from poundlock.core.model import Decided, Fingerprint, Generation, Namespace, Receipt
from poundlock.demo.screen import Screen
from poundlock.servers import base
from poundlock.sinks.console import _grid
from poundlock.terminal import visible
from program import call_program

# Escape sequences of both kinds, a new title, a clipboard, a carriage return, a reversal of text, an
# invisible character, another line, and markup that rich cannot parse.
HOSTILE = (
    "a\x1b[2Jb\x9b31mc\x1b]0;title\x07d\x1b]52;c;YQ==\x07\re\u202ef\u200bg\u2028h\x7f"
    "[/x][bold red][link=x]i:boom:"
)
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def check(shown: str) -> None:
    """Check that the hostile text was printed, and nothing that a terminal obeys."""
    left = {c for c in shown if c != "\n" and unicodedata.category(c) in OBEYED}
    assert not left, (left, shown)
    assert "[/x][bold red][link=x]i:boom:" in shown.replace("\n", ""), shown
    assert "\\x1b[2Jb" in shown.replace("\n", "") or "\\u001b[2Jb" in shown, shown


def test_everything_that_a_terminal_obeys_is_made_visible() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in OBEYED:
            assert visible(character).isascii() and visible(character).startswith("\\")
        else:
            assert visible(character) == character
    assert visible("größe 東京 \N{PARTY POPPER} [x]") == "größe 東京 \N{PARTY POPPER} [x]"
    assert visible("a\nb\tc") == "a\\nb\\tc"
    assert visible("a\nb\tc", lines=True) == "a\nb\\tc"


@pytest.mark.parametrize(
    "thing", [HOSTILE, Text(HOSTILE), Table(HOSTILE, title=HOSTILE)], ids=["text", "rich", "table"]
)
@pytest.mark.parametrize("tty", [True, False])
def test_richs_console_obeys_nothing(thing: object, tty: bool) -> None:
    out = io.StringIO()
    options = {"file": out, "width": 400, "force_terminal": tty, "color_system": None}
    if isinstance(thing, Table):
        thing.add_row(HOSTILE)
        thing.title_style = thing.header_style = ""
    terminal.console(**options, no_color=True).print(thing)
    check(out.getvalue())


def test_a_json_document_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_json({"a": HOSTILE})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"a": HOSTILE}
    check(printed)


def call(*arguments: str) -> str:
    """Call a command, and return what the program prints of it and of its error."""
    done = call_program(*arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    """The log of a driver that wrote hostile text wherever a record takes any text."""
    log = FileLog(tmp_path / "checkpoint" / "poundlock")
    log.append(Generation(1, Namespace("p", "0123456789abcdef"), log.uri, "query", HOSTILE))
    receipt = Receipt("out", HOSTILE, 0, Fingerprint(1, 1), {"x": HOSTILE}, 1.0, None, HOSTILE)
    log.append(Decided(0, 1, 1, "hash", (receipt,), {"out": Fingerprint(1, 1)}))
    return log


def test_txn_list_and_show(log: FileLog) -> None:
    check(call("txn", "list", "--log", log.uri))
    check(call("txn", "list", "--log", log.uri, "--json"))
    check(CliRunner().invoke(poundlock, ["txn", "show", HOSTILE, "--log", log.uri]).output)


@pytest.mark.parametrize("act", ["show", "commit", "abort"])
def test_an_error_of_txn(log: FileLog, act: str) -> None:
    yes = [] if act == "show" else ["--yes"]
    check(call("txn", act, f"{HOSTILE}!", "--log", log.uri, *yes))


def test_a_question_of_txn(log: FileLog) -> None:
    asked = CliRunner().invoke(poundlock, ["txn", "commit", HOSTILE, "--log", log.uri], input="n\n")
    check(asked.output.rstrip("\r\n"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", HOSTILE),
        ("guarantee", HOSTILE),
        ("servers", "status", HOSTILE),
        ("doctor", "--postgres", f"env:{HOSTILE}"),
        ("doctor", "--mysql", f"env:{HOSTILE}"),
        ("txn", "adopt", "--log", HOSTILE),
    ],
    ids=lambda arguments: " ".join(arguments[:2]).split(HOSTILE[:2])[0],
)
def test_an_error_of_a_command(arguments: tuple[str, ...]) -> None:
    check(call(*arguments))


def test_servers_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status = base.Status(
        created=True,
        running=True,
        url=HOSTILE,
        directory=HOSTILE,
        nodes={HOSTILE: {"pid": 1, "log": HOSTILE}},
    )
    monkeypatch.setattr(base, "status", lambda home: status)
    for options in ([], ["--json"]):
        check(CliRunner().invoke(poundlock, ["servers", "status", "kafka", *options]).output)


def test_the_console_sink() -> None:
    table = pa.table({HOSTILE: [HOSTILE]})
    lines = _grid(table, truncate=0)
    check("\n".join(lines))
    assert len({len(line) for line in lines}) == 1


def test_the_demo() -> None:
    out = io.StringIO()
    Screen(terminal.console(file=out, width=400)).print(HOSTILE)
    check(out.getvalue())


def test_a_warning_of_a_command() -> None:
    code = (
        "import logging; from poundlock.terminal import guard; guard();"
        f"logging.getLogger('poundlock').warning('%s', {HOSTILE!r}); raise ValueError({HOSTILE!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    warning, _, error = done.stderr.partition("Traceback")
    check(warning)
    check(error)
    assert logging.lastResort is not None


def test_what_a_program_prints_is_visible_as_long_as_it_runs() -> None:
    """A JVM is started inside the block, and prints long after it."""
    code = """
import os, subprocess, sys
from poundlock.terminal import shown_output
with shown_output():
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    noisy = subprocess.Popen(["sh", "-c", "cat >&2"], stdin=subprocess.PIPE)
print("of this program, on standard output", flush=True)
for each in (program, noisy):
    each.communicate(os.environb[b"HOSTILE"] + b"\\n\\tat half \\xe2\\x82")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HOSTILE": HOSTILE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "of this program, on standard output\n"
    check(done.stderr)
    assert done.stderr.count("[/x][bold red]") == 2 and "\n    at half" in done.stderr


def test_a_program_that_cannot_start_says_why() -> None:
    code = """
import subprocess
from poundlock.terminal import shown_output
with shown_output():
    subprocess.run(["sh", "-c", "echo no Java >&2; exit 1"], check=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no Java" in done.stderr and done.returncode == 1
