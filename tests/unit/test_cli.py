"""The command line starts quickly, explains wrong calls, and has JSON output everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from poundlock.cli import _COMMANDS, poundlock
from poundlock.core.log import FileLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    OperatorDecision,
    Receipt,
)
from poundlock.txn.audit import Trail

NAMESPACE = Namespace("sensors", "0123456789abcdef")
ID = "poundlock.sensors.0123456789abcdef.1.out.7"


def call(*arguments: str, expect: int = 0, text: str | None = None) -> str:
    result = CliRunner().invoke(poundlock, arguments, input=text)
    assert result.exit_code == expect or (expect and result.exception), result.output
    return result.output


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    """A log with a finished batch and a decided one, whose driver has died."""
    log = FileLog(tmp_path / "checkpoint" / "poundlock")
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    for batch in (0, 1):
        id_ = ID if batch else "poundlock.sensors.0123456789abcdef.1.out.6"
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
    result = CliRunner().invoke(
        poundlock, ["txn", "abort", ID, "--log", log.uri, "--yes", *servers]
    )
    assert "may not be aborted" in str(result.exception)


@pytest.mark.parametrize(
    ("id_", "reason"),
    [
        ("poundlock.sensors.0123456789abcdef.1.out.6", "already finished"),
        ("poundlock.sensors.0123456789abcdef.1.out.9", "has not decided"),
        ("poundlock.sensors.0123456789abcdef.1.out", "has not decided"),
    ],
)
def test_only_a_decided_branch_can_be_committed(log: FileLog, id_: str, reason: str) -> None:
    servers = ("--bootstrap-servers", "127.0.0.1:1")
    result = CliRunner().invoke(
        poundlock, ["txn", "commit", id_, "--log", log.uri, "--yes", *servers]
    )
    assert reason in str(result.exception)


def test_a_moved_log_is_adopted_once(log: FileLog, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(log.uri.removeprefix("file://")).rename(moved)
    call("txn", "adopt", "--log", str(moved), "--yes")
    assert FileLog(moved).load().generation.uri == moved.as_uri()  # pyright: ignore
    again = CliRunner().invoke(poundlock, ["txn", "adopt", "--log", str(moved), "--yes"])
    assert "was not moved" in str(again.exception)


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(poundlock, ["txn", "list"])
    assert "--log" in str(result.exception)
    result = CliRunner().invoke(poundlock, ["txn", "list", "--log", str(tmp_path / "none")])
    assert "there is no log" in str(result.exception)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the program itself, because `CliRunner` bypasses `main`."""
    command = [sys.executable, "-c", "from poundlock.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_main_prints_an_error_in_one_line_and_sets_the_exit_status(tmp_path: Path) -> None:
    done = run("txn", "list", "--log", str(tmp_path / "none"))
    assert done.returncode == 2, "the call was wrong"
    assert done.stderr.startswith("poundlock: UsageError: there is no log")
    assert "Traceback" not in done.stderr
    assert run("txn", "commit").returncode == 2, "click reports a wrong call in the same way"


def test_main_exits_with_the_status_of_the_command(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/false")
    done = run("doctor")
    assert (done.returncode, "BAD" in done.stdout) == (1, True), done
    done = run("txn", "list", "--log", log.uri)
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


def test_doctor_finds_no_problem_on_this_machine() -> None:
    findings = json.loads(call("doctor", "--json"))
    assert {finding["what"] for finding in findings} >= {"Python", "Java", "pyspark"}
    assert all(finding["good"] for finding in findings), findings


def test_doctor_explains_how_to_fix_a_wrong_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/false")
    findings = json.loads(call("doctor", "--json", expect=1))
    bad = [finding for finding in findings if not finding["good"]]
    assert [finding["what"] for finding in bad] == ["PYSPARK_PYTHON"]
    assert sys.executable in bad[0]["cure"]
