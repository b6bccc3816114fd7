"""Who did what with `poundlock txn`: durable before the act, and chained."""

from __future__ import annotations

import getpass
import json
import os
import pwd
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from poundlock.cli import poundlock
from poundlock.core.disk import Disk
from poundlock.core.log import FileLog, MemoryLog, NumberTaken
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Generation,
    Namespace,
    OperatorDecision,
    Receipt,
)
from poundlock.errors import Fenced, NotAuthorised, PoundlockError, Unavailable, UsageError
from poundlock.txn.audit import Trail, description, whoami
from poundlock.txn.resolver import Resolver

NAMESPACE = Namespace("sensors", "0123456789abcdef")


def decided(log: FileLog) -> FileLog:
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    id_ = "poundlock.sensors.0123456789abcdef.1.out.7"
    receipt = Receipt("out", id_, 0, Fingerprint(1, 9), {}, 1000.0, None, "Kafka")
    log.append(Decided(0, 1, 1, "hash", (receipt,), {"out": Fingerprint(1, 9)}))
    return log


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    return decided(FileLog(tmp_path / "poundlock"))


def acted(log: FileLog, count: int) -> list[Path]:
    """Let an operator act, and return the files of the audit."""
    for number in range(count):
        with Trail(log).act("look", f"branch {number}"):
            pass
    return sorted((Path(log.uri.removeprefix("file://"))).glob("audit-*"))


def call(log: FileLog, *options: str) -> Result:
    return CliRunner().invoke(poundlock, ["txn", "audit", "--log", log.uri, *options])


# Who.


def test_the_environment_cannot_name_who_acted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER"):
        monkeypatch.setenv(name, "mallory")
    assert getpass.getuser() == "mallory", "what the environment says"
    it = whoami()
    assert it["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert (it["uid"], it["host"], it["pid"]) == (os.getuid(), socket.gethostname(), os.getpid())
    assert it["claims"] == {"SUDO_USER": "mallory"}
    assert description(it).endswith(", SUDO_USER claims mallory")


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert (whoami()["user"], whoami()["uid"]) == ("4000000000", 4_000_000_000)
    assert whoami()["effective_uid"] == os.geteuid()


# Before and after.


def test_the_intent_is_durable_before_the_act(tmp_path: Path) -> None:
    steps: list[str] = []

    class Watched(Disk):
        def sync(self, path: str) -> None:
            super().sync(path)
            steps.append(f"sync {'directory' if os.path.isdir(path) else 'file'}")

        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            steps.append(f"link {Path(target).name[:5]}")

    log = decided(FileLog(tmp_path / "poundlock", disk=Watched()))
    resolver = Resolver(log)
    del steps[:]
    resolver.decide(0, OperatorDecision.ACCEPT_LOSS)
    entry = ["sync file", "link audit", "sync directory"]
    wanted = ["sync directory", *entry, "sync file", "link 00000"]
    assert steps[: len(wanted)] == wanted
    assert steps.count("link audit") == 2


def test_nothing_is_done_that_could_not_be_recorded(tmp_path: Path) -> None:
    class Full(Disk):
        def write(self, path: str, data: bytes, like: str | None = None) -> None:
            if b'"step"' in data:
                raise OSError(28, "No space left on device")
            super().write(path, data, like)

    log = decided(FileLog(tmp_path / "poundlock", disk=Full()))
    with pytest.raises(
        Unavailable, match=r"was not begun: its intent could not be recorded.*space"
    ):
        Resolver(log).decide(0, OperatorDecision.ACCEPT_LOSS)
    assert FileLog(tmp_path / "poundlock").load().batches[0].operator_decisions == {}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UsageError("secret"), "refused: UsageError"),
        (Fenced("secret"), "refused: Fenced"),
        (Unavailable("secret"), "unknown: Unavailable"),
        (ValueError("secret"), "unknown: ValueError"),
        (KeyboardInterrupt(), "unknown: KeyboardInterrupt"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_act_has_an_outcome(log: FileLog, error: BaseException, outcome: str) -> None:
    with pytest.raises(type(error)), Trail(log).act("look", "x"):
        raise error
    [act] = Trail(log).read().acts()
    assert act["outcome"] == outcome
    assert not [note for note in log.notes().values() if b"secret" in note]


@pytest.mark.parametrize("error", [UsageError("x"), NotAuthorised("x"), Fenced("x")])
def test_what_fails_after_a_system_was_called_is_unknown(
    log: FileLog, error: PoundlockError
) -> None:
    class Sink:
        def commit(self, receipts: list[Receipt]) -> None:
            raise error  # after the commit: the witness cannot be read, for example

    resolver = Resolver(log)
    resolver._participant = lambda receipt: Sink()  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(type(error)):
        resolver.commit("poundlock.sensors.0123456789abcdef.1.out.7")
    assert Trail(log).read().acts()[0]["outcome"] == f"unknown: {type(error).__name__}"


def test_an_act_that_was_killed_is_shown_as_unknown(log: FileLog) -> None:
    pid = os.fork()
    if pid == 0:
        with Trail(log).act("commit", "branch 1"):
            os._exit(0)
    os.waitpid(pid, 0)
    done = call(log)
    assert done.exit_code == 0, "the chain is whole"
    assert "outcome: not known" in done.output
    assert json.loads(call(log, "--json").output)["acts"][0]["outcome"] is None


def test_an_outcome_that_cannot_be_recorded_is_told(log: FileLog) -> None:
    def act() -> None:
        with Trail(log).act("look", "x") as act:
            act.outcome = "seen"
            log._disk = Broken()

    with pytest.raises(Unavailable, match="look of x has ended, seen: only this outcome could not"):
        act()
    log._disk = Disk()
    assert Trail(log).read().acts()[0]["outcome"] is None


class Broken(Disk):
    def write(self, path: str, data: bytes, like: str | None = None) -> None:
        raise OSError(30, "Read-only file system")


def test_two_operators_at_once_make_one_chain() -> None:
    log = MemoryLog()

    class Raced(MemoryLog):
        """Another operator takes the number first."""

        raced = False

        def put_note(self, name: str, data: bytes) -> None:
            if not self.raced:
                self.raced = True
                with Trail(log).act("look", "theirs"):
                    pass
                raise NumberTaken
            super().put_note(name, data)

    mine = Raced()
    mine._notes = log._notes
    with Trail(mine).act("look", "ours"):
        pass
    chain = Trail(log).read()
    assert chain.problems == []
    assert [act["id"] for act in chain.acts()] == ["theirs", "ours"]


def test_an_entry_with_an_unknown_outcome_is_not_repeated() -> None:
    class Lost(MemoryLog):
        """The answers to writes are lost."""

        lost = 2

        def put_note(self, name: str, data: bytes) -> None:
            super().put_note(name, data)
            if self.lost:
                self.lost -= 1
                raise OSError("no answer")

    log = Lost()
    with Trail(log).act("look", "x"):
        pass
    assert (len(log.notes()), Trail(log).read().problems) == (2, [])


# The chain.


def test_a_whole_chain_is_shown(log: FileLog) -> None:
    files = acted(log, 2)
    assert len(files) == 4
    done = call(log)
    assert (done.exit_code, done.output.count("look branch")) == (0, 2)
    assert f"(uid {os.getuid()}) on {socket.gethostname()}" in done.output
    data = json.loads(call(log, "--json").output)
    assert data["problems"] == [] and data["head"] in done.output


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_changed_entry_breaks_the_chain(log: FileLog, victim: int) -> None:
    file = acted(log, 2)[victim]
    file.write_bytes(file.read_bytes().replace(b'"host"', b'"most"').replace(b"done", b"gone"))
    done = call(log)
    assert done.exit_code == 1
    assert f"the chain is broken: entry {victim + 1} does not follow what is before" in done.output


@pytest.mark.parametrize(
    ("removed", "told"),
    [([0], "0 is missing"), ([1], "1 is missing"), ([1, 2], "entries 1 to 2 are")],
)
def test_a_removed_entry_breaks_the_chain(log: FileLog, removed: list[int], told: str) -> None:
    files = acted(log, 2)
    for number in removed:
        files[number].unlink()
    done = call(log)
    assert done.exit_code == 1 and told in done.output


def test_damage_and_strangers_are_told(log: FileLog) -> None:
    files = acted(log, 2)
    files[1].write_bytes(b"[]")
    (files[0].parent / "audit-x.json").write_bytes(b"{}")
    done = call(log)
    assert done.exit_code == 1
    assert "entry 1 cannot be read" in done.output and "audit-x.json is not an entry" in done.output


@pytest.mark.parametrize(
    "change",
    [
        {"act": []},
        {"act": [], "step": "outcome"},
        {"step": []},
        {"step": "other"},
        {"at": "yesterday"},
        {"at": 1e300},
        {"at": float("nan")},
        {"before": {}},
        {"id": None},
        {"action": None},
        {"by": None},
        {"by": []},
        {"by": {"claims": ["x"]}},
        {"step": "outcome", "outcome": None},
    ],
    ids=str,
)
def test_an_entry_of_another_shape_is_told(log: FileLog, change: dict[str, object]) -> None:
    file = acted(log, 2)[0]
    entry = json.loads(file.read_text()) | change
    for gone in [key for key, value in change.items() if value is None]:
        del entry[gone]
    file.write_text(json.dumps(entry))
    for options in ((), ("--json",)):
        done = call(log, *options)
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert "the chain is broken: entry 0 cannot be read" in call(log).output
    Resolver(log).decide(0, OperatorDecision.ACCEPT_LOSS)


def test_an_entry_too_deep_to_read_is_told(log: FileLog) -> None:
    acted(log, 2)[0].write_text("[" * 100_000)
    assert "entry 0 cannot be read" in call(log).output


def test_an_act_beside_a_broken_chain_says_so(
    log: FileLog, caplog: pytest.LogCaptureFixture
) -> None:
    acted(log, 1)[0].unlink()
    Resolver(log).decide(0, OperatorDecision.ACCEPT_LOSS)
    assert "is broken: entry 0 is missing" in caplog.text
