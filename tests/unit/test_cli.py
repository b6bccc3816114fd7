"""The command line starts quickly, explains wrong calls, and has JSON output everywhere."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest

from poundlock.cli import _COMMANDS, poundlock
from poundlock.core.log import FileLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    Opened,
    OperatorDecision,
    Place,
    Receipt,
)
from poundlock.txn.audit import Trail
from program import call_program

NAMESPACE = Namespace("sensors", "0123456789abcdef")
ID = "poundlock.sensors.0123456789abcdef.1.out.7"
DONE = "poundlock.sensors.0123456789abcdef.1.out.6"
ROOT = Path(__file__).parents[2]


def call(*arguments: str, expect: int = 0, text: str | None = None) -> str:
    """Run the program, and return what it prints on standard output."""
    done = call_program(*arguments, text=text)
    assert (done.returncode, "Traceback" in done.stderr) == (expect, False), done
    return done.stdout


def refusal(*arguments: str) -> str:
    """Return the error of a call that the program calls wrong."""
    done = call_program(*arguments)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False), done
    return done.stderr


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    """A log with a finished batch and a decided one, whose driver has died."""
    log = FileLog(tmp_path / "checkpoint" / "poundlock")
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    for batch in (0, 1):
        id_ = ID if batch else DONE
        handle = {"producer_id": batch, "epoch": 0, "written": [["readings", 0, 9]]}
        receipt = Receipt("out", id_, 0, Fingerprint(10, 99), handle, 1000.0, None, "Kafka")
        log.append(Decided(batch, 1, 1, f"hash{batch}", (receipt,), {"out": Fingerprint(10, 99)}))
        if batch == 0:
            log.append(Finished(0))
    return log


def test_start_imports_neither_spark_nor_kafka() -> None:
    code = (
        "import sys; from poundlock.cli import poundlock; from click.testing import CliRunner;"
        "r = CliRunner().invoke(poundlock, ['--help']); assert r.exit_code == 0, r.output;"
        "heavy = {'pyspark', 'kafka', 'confluent_kafka', 'rich', 'pyarrow'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_every_command_has_help(command: str) -> None:
    assert "Usage:" in call(command, "--help")


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that have no subcommands."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        under = command.get_command(context, each)
        assert under is not None
        yield from leaves(under, f"{name} {each}")


def test_every_command_has_a_json_option() -> None:
    named = {name: {p.name for p in command.params} for name, command in leaves(poundlock, "")}
    assert [name for name, parameters in named.items() if "as_json" not in parameters] == []


def test_every_command_is_called_in_a_process_of_its_own() -> None:
    """A command that works only where another has run before fails for its users alone."""
    files = [it for it in (ROOT / "tests").rglob("test_*.py") if _IMPORT in it.read_text()]
    called = {words for file in files for words in calls(file)}
    missing = {
        name
        for name, _ in leaves(poundlock, "")
        if not any(words[: len(name.split())] == tuple(name.split()) for words in called)
    }
    assert missing == set()


_IMPORT = "from program import call_program\n"


def calls(file: Path) -> Iterator[tuple[str, ...]]:
    """Yield the words with which calls in a test file begin, of `call_program` or of what calls it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            words = takewhile(lambda each: isinstance(each, ast.Constant), node.args)
            yield tuple(str(word.value) for word in words if isinstance(word, ast.Constant))


def test_guarantee_table_is_printed_as_json() -> None:
    table = json.loads(call("guarantee", "--table", "--json"))
    assert table["transactional"] == {
        "not_replayable": "at_most_once",
        "replayable": "exactly_once",
    }
    assert table["any"]["replayable"] == "at_least_once"


def test_guarantee_table_explains_each_cell() -> None:
    output = " ".join(call("guarantee", "--table").split())
    assert (
        "cannot be replayed (write-ahead log): rows that the source has delivered are gone"
        in output
    )


def test_list_shows_only_unfinished_branches(log: FileLog, tmp_path: Path) -> None:
    lines = json.loads(call("txn", "list", "--log", str(tmp_path / "checkpoint"), "--json"))
    assert [(line["id"], line["batch"], line["decision"]) for line in lines] == [(ID, 1, "commit")]
    assert lines[0]["generation"] == 1
    assert lines[0]["owner"] == "host:1"
    assert lines[0]["age_s"] > 0


def test_an_id_can_be_copied_from_the_list(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    log.append(
        Decided(
            2,
            1,
            1,
            "hash2",
            tuple(
                Receipt(sink, f"{ID[:-1]}{task}", task, Fingerprint(5, 1), {}, 1000.0, None)
                for task, sink in ((8, "cache"), (9, "cache"))
            ),
            {"cache": Fingerprint(10, 2)},
        )
    )
    listed = call("txn", "list", "--log", log.uri).splitlines()
    assert [line for line in listed if line.startswith("poundlock.")] == [
        ID,
        f"{ID[:-1]}8",
        f"{ID[:-1]}9",
    ]
    assert "  sink out, Kafka, batch 1, decision commit, state not asked" in listed
    assert "  sink cache, batch 2, decision commit, state waits for the pipeline" in listed
    assert max(map(len, listed[1:3])) < 80
    assert [line for line in listed if line.startswith("next: ")] == [
        "next: is committed when the pipeline starts; to see it, or to do it now, give the address "
        "of its Kafka",
        "next: is committed when the pipeline starts, and only then",
    ]


def test_show_prints_the_records_of_a_branch(log: FileLog) -> None:
    known = json.loads(call("txn", "show", ID, "--log", log.uri, "--json"))
    assert known["log"][0]["kind"] == "Decided"
    assert known["log"][0]["stage"] == "decided"
    [line] = json.loads(call("txn", "list", "--log", log.uri, "--json"))
    assert {**known["branch"], "age_s": line["age_s"]} == line


@pytest.mark.parametrize(("id_", "batch", "decision"), [(ID, 1, "commit"), (DONE, 0, "finished")])
def test_show_prints_lines_for_people(log: FileLog, id_: str, batch: int, decision: str) -> None:
    shown = call("txn", "show", id_, "--log", log.uri).splitlines()
    assert shown[:2] == [
        id_,
        f"  sink out, Kafka, batch {batch}, decision {decision}, state not asked",
    ]
    assert f"record {batch * 2 + 1} of the log: Decided, at " in shown[3]
    assert shown[-1].startswith("next: ")
    assert not [line for line in shown if set(line) & set("{}[]")], "no JSON unasked"


def test_no_refusal_sends_from_commit_to_abort_or_back(log: FileLog) -> None:
    there = ("--log", log.uri, "--yes")
    for refused in (
        refusal("txn", "abort", ID, *there),
        refusal("txn", "commit", f"{ID}7", *there),
    ):
        assert "'poundlock txn list'" in refused
        assert "txn commit" not in refused and "txn abort" not in refused


def test_a_removed_sink_is_forgotten(log: FileLog) -> None:
    there = ("--log", log.uri)
    log.append(Opened((Place("old", "Redis", "somewhere"),)))
    assert "it knows old" in refusal("txn", "forget", "--sink", "new", *there)
    call("txn", "forget", "--sink", "old", *there, expect=1, text="n\n")
    assert call("txn", "forget", "--sink", "old", *there, "--yes") == "sink old is forgotten\n"
    assert FileLog(log.uri.removeprefix("file://")).load().places == ()


def test_only_an_undecided_batch_is_planned_anew(log: FileLog) -> None:
    refused = call_program("txn", "replan", "--batch", "1", "--log", log.uri, "--yes")
    assert refused.returncode in (1, 2) and refused.stderr.startswith("poundlock: ")
    assert "Traceback" not in refused.stderr


def test_audit_prints_who_did_what(log: FileLog) -> None:
    call("txn", "commit", "--log", log.uri, "--batch", "1", "--accept-loss", "--yes")
    shown = call("txn", "audit", "--log", log.uri).splitlines()
    assert "decide batch 1" in shown[0] and "outcome: done" in shown[2]
    assert json.loads(call("txn", "audit", "--log", log.uri, "--json"))["problems"] == []


def test_an_operator_decision_is_confirmed_and_audited(log: FileLog) -> None:
    arguments = ("txn", "commit", "--log", log.uri, "--batch", "1", "--accept-loss")
    call(*arguments, expect=1, text="n\n")
    assert FileLog(log.uri.removeprefix("file://")).load().batches[1].operator_decisions == {}
    call(*arguments, text="y\n")
    after = FileLog(log.uri.removeprefix("file://"))
    decisions = after.load().batches[1].operator_decisions
    assert decisions == {"out": OperatorDecision.ACCEPT_LOSS}
    [act] = Trail(after).read().acts()
    assert (act["action"], act["sinks"], act["decision"], act["outcome"]) == (
        "decide",
        ["out"],
        "accept_loss",
        "done",
    )


def test_a_decided_branch_cannot_be_aborted(log: FileLog) -> None:
    servers = ("--bootstrap-servers", "127.0.0.1:1")
    assert "may not be aborted" in refusal("txn", "abort", ID, "--log", log.uri, "--yes", *servers)


@pytest.mark.parametrize(
    ("id_", "reason"),
    [
        (DONE, "already finished"),
        ("poundlock.sensors.0123456789abcdef.1.out.9", "has not decided"),
        ("poundlock.sensors.0123456789abcdef.1.out", "has not decided"),
    ],
)
def test_only_a_decided_branch_can_be_committed(log: FileLog, id_: str, reason: str) -> None:
    servers = ("--bootstrap-servers", "127.0.0.1:1")
    assert reason in refusal("txn", "commit", id_, "--log", log.uri, "--yes", *servers)


def test_a_moved_log_is_adopted_once(log: FileLog, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(log.uri.removeprefix("file://")).rename(moved)
    call("txn", "adopt", "--log", str(moved), "--yes")
    assert FileLog(moved).load().generation.uri == moved.as_uri()  # pyright: ignore
    assert "was not moved" in refusal("txn", "adopt", "--log", str(moved), "--yes")


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    assert "--log" in refusal("txn", "list")
    assert "there is no log" in refusal("txn", "list", "--log", str(tmp_path / "none"))


def test_main_prints_an_error_in_one_line_and_sets_the_exit_status(tmp_path: Path) -> None:
    done = call_program("txn", "list", "--log", str(tmp_path / "none"))
    assert done.returncode == 2, "the call was wrong"
    assert done.stderr.startswith("poundlock: UsageError: there is no log")
    assert "Traceback" not in done.stderr
    assert call_program("txn", "commit").returncode == 2, (
        "click reports a wrong call in the same way"
    )


def test_main_prints_what_led_to_an_error_only_if_asked(tmp_path: Path) -> None:
    done = call_program("--debug", "txn", "list", "--log", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "resolver.py" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("poundlock: UsageError: there is no log")


def test_main_exits_with_the_status_of_the_command(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/false")
    done = call_program("doctor")
    assert (done.returncode, "BAD" in done.stdout) == (1, True), done
    done = call_program("txn", "list", "--log", log.uri)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_secret_is_read_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from poundlock.errors import UsageError
    from poundlock.secret import resolve_all

    monkeypatch.setenv("KAFKA_PASSWORD", "from the environment")
    (tmp_path / "secret").write_text("from a file\n")
    settings = {"a": "env:KAFKA_PASSWORD", "b": f"file:{tmp_path}/secret", "c": "plain"}
    assert list(resolve_all(settings).values()) == ["from the environment", "from a file", "plain"]
    with pytest.raises(UsageError, match="NOT_SET is not set"):
        resolve_all({"sasl.password": "env:NOT_SET"})


def test_a_secret_is_read_inside_lists_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from poundlock.secret import resolve_within

    monkeypatch.setenv("PW", "hunter2")
    assert resolve_within("http_auth", ["admin", "env:PW"]) == ["admin", "hunter2"]
    assert resolve_within("http_auth", ("admin", "env:PW")) == ("admin", "hunter2")
    headers = {"Authorization": "env:PW", "n": 1}
    assert resolve_within("headers", headers) == {"Authorization": "hunter2", "n": 1}
