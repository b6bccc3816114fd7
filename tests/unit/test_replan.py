"""A plan of Spark is withdrawn only if its batch is undecided, and is then never decided."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from poundlock.cli import poundlock
from poundlock.core.disk import Disk
from poundlock.core.log import FileLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    Receipt,
    Withdrawn,
)
from poundlock.core.protocol import Stage, enter
from poundlock.errors import Fenced, LogMismatch, PoundlockError
from poundlock.txn.audit import Trail


def hash_of(plan: bytes) -> str:
    return hashlib.sha256(plan).hexdigest()


NAMESPACE = Namespace("sensors", "0123456789abcdef")


class Place:
    """A checkpoint with its log: batch 0 is finished, and batch 1 is planned and undecided."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("offsets", "commits"):
            (root / name).mkdir(parents=True)
        (root / "metadata").write_text('{"id":"query"}')
        self.log = FileLog(root / "poundlock")
        self.log.append(Generation(1, NAMESPACE, self.log.uri, "query", "host:1"))
        self.plan(0)
        self.decide(0)
        self.log.append(Finished(0))
        (root / "commits" / "0").write_text("v1")
        self.plan(1)

    def plan(self, batch: int, text: str = "") -> str:
        data = f"v1\n{{}}\nplan {batch}{text}".encode()
        (self.root / "offsets" / str(batch)).write_bytes(data)
        (self.root / "offsets" / f".{batch}.crc").write_bytes(b"crc")
        return hash_of(data)

    def decide(self, batch: int) -> None:
        mark = hash_of((self.root / "offsets" / str(batch)).read_bytes())
        receipt = Receipt("out", f"branch {batch}", 0, Fingerprint(1, 1))
        self.log.append(Decided(batch, 1, 1, mark, (receipt,), {"out": Fingerprint(1, 1)}))

    def replan(self, batch: int, *options: str, answer: str | None = None) -> Result:
        arguments = ["txn", "replan", "--log", str(self.root), "--batch", str(batch)]
        yes = () if answer else ("--yes",)
        return CliRunner().invoke(poundlock, [*arguments, *yes, *options], input=answer)

    def plans(self) -> list[str]:
        return sorted(file.name for file in (self.root / "offsets").iterdir())

    def records(self) -> list[type]:
        return [type(entry.record) for entry in FileLog(self.root / "poundlock").entries()]

    def refused(self, batch: int, words: str) -> None:
        before = self.plans(), self.records()
        done = self.replan(batch)
        assert isinstance(done.exception, PoundlockError) and words in str(done.exception)
        assert (self.plans(), self.records()) == before
        assert Trail(self.log).read().entries == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "check point")


def test_the_plan_of_an_undecided_batch_is_set_aside(place: Place) -> None:
    mark = hash_of((place.root / "offsets" / "1").read_bytes())
    assert place.replan(1).exit_code == 0
    assert place.plans() == [".0.crc", "0"]
    [kept] = (place.root / "poundlock-withdrawn").iterdir()
    assert hash_of(kept.read_bytes()) == mark and kept.name == f"1-{mark[:12]}"
    [act] = Trail(place.log).read().acts()
    assert (act["action"], act["batch"], act["plan"], act["outcome"]) == (
        "replan",
        1,
        mark,
        "withdrawn",
    )
    assert place.records()[-1] is Withdrawn
    with pytest.raises(Fenced):  # the driver that was running
        place.log.append(Decided(1, 1, 1, mark, (), {}))
    done = place.replan(1)
    assert "has been withdrawn already: start the pipeline" in str(done.exception)


def test_a_withdrawn_plan_is_never_decided_but_another_is(place: Place) -> None:
    old, before = place.plan(1), place.plan(0)
    assert place.replan(1).exit_code == 0
    state = FileLog(place.root / "poundlock").load()
    with pytest.raises(LogMismatch, match="withdrawn Spark's plan of batch 1"):
        enter(state, 1, old, before)
    new = place.plan(1, ", smaller")
    assert enter(state, 1, new, before) is Stage.NONE
    log = FileLog(place.root / "poundlock")
    log.load()
    log.append(Decided(1, 1, 1, new, (), {}))
    assert log.state.withdrawn == {}


def test_state_of_the_first_batch_is_set_aside_with_its_plan(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    (root / "offsets").mkdir(parents=True)
    (root / "state" / "0").mkdir(parents=True)
    (root / "state" / "0" / "1.delta").write_text("rows of the old plan")
    (root / "offsets" / "0").write_text("v1")
    (root / "metadata").write_text('{"id":"query"}')
    log = FileLog(root / "poundlock")
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    arguments = ["txn", "replan", "--log", str(root), "--batch", "0", "--yes"]
    assert CliRunner().invoke(poundlock, arguments).exit_code == 0
    assert not (root / "state").exists() and list((root / "offsets").iterdir()) == []
    aside = sorted((root / "poundlock-withdrawn").iterdir())
    assert [file.is_dir() for file in aside] == [False, True]
    assert (aside[1] / "0" / "1.delta").exists()


def test_nothing_is_done_without_a_yes(place: Place) -> None:
    before = place.plans(), place.records()
    assert place.replan(1, answer="n\n").exit_code == 1
    assert (place.plans(), place.records()) == before


def test_a_decided_or_finished_batch_is_refused(place: Place) -> None:
    place.decide(1)
    place.refused(1, "batch 1 is decided: its rows are fixed")
    place.log.append(Finished(1))
    place.refused(1, "batch 1 is finished: its rows are fixed")


def test_only_the_newest_plan_can_be_made_anew(place: Place) -> None:
    place.refused(0, "the newest is that of batch 1")
    place.refused(2, "the newest is that of batch 1")


def test_a_batch_that_spark_has_committed_is_refused(place: Place) -> None:
    (place.root / "commits" / "1").write_text("v1")
    place.refused(1, "batch 1 is committed")


def test_another_checkpoint_is_refused(place: Place) -> None:
    (place.root / "metadata").write_text('{"id":"another"}')
    place.refused(1, "belongs to Spark's query query, but the checkpoint to query another")


def test_a_log_elsewhere_needs_the_checkpoint(place: Place, tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    arguments = ["txn", "replan", "--log", str(tmp_path / "log"), "--batch", "1", "--yes"]
    done = CliRunner().invoke(poundlock, arguments)
    assert "give --checkpoint LOCATION too" in str(done.exception)
    done = CliRunner().invoke(poundlock, [*arguments, "--checkpoint", place.root.as_uri()])
    assert done.exit_code == 0 and place.plans() == [".0.crc", "0"]


@pytest.mark.parametrize("step", ["write", "rename"])
def test_an_interrupted_command_can_be_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    original = getattr(Disk, step)

    def interrupted(self: Disk, *paths: Any) -> None:
        if "poundlock-withdrawn" in paths[0] or "offsets/" in paths[0]:
            raise KeyboardInterrupt
        original(self, *paths)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, step, interrupted)
        assert place.replan(1).exit_code == 1
    old, before = place.plan(1), place.plan(0)
    with pytest.raises(LogMismatch, match="to its end"):
        enter(FileLog(place.root / "poundlock").load(), 1, old, before)
    assert place.replan(1).exit_code == 0
    assert place.plans() == [".0.crc", "0"]
    outcomes = [act["outcome"] for act in Trail(place.log).read().acts()]
    assert outcomes == ["unknown: KeyboardInterrupt", "withdrawn"]
    assert place.records().count(Withdrawn) == 1


def test_the_plan_is_durable_elsewhere_before_it_is_removed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("sync", "rename"):
        original = getattr(Disk, name)

        def watched(self: Disk, *paths: str, name: str = name, original: Any = original) -> None:
            original(self, *paths)
            if "/poundlock/" not in paths[-1] and not paths[-1].endswith("/poundlock"):
                steps.append(f"{name} {Path(paths[-1]).relative_to(place.root).parts[:1]}")

        monkeypatch.setattr(Disk, name, watched)
    assert place.replan(1).exit_code == 0
    aside, plans, root = "('poundlock-withdrawn',)", "('offsets',)", "()"
    moved = [f"sync {aside}", f"rename {aside}", f"sync {aside}", f"sync {root}"]
    assert steps[-7:] == [*moved, f"rename {plans}", f"sync {plans}", f"sync {root}"]


def test_a_repeated_command_sets_aside_what_late_tasks_have_written(tmp_path: Path) -> None:
    """Spark refuses to plan the first batch while there is state."""
    root = tmp_path / "checkpoint"
    (root / "offsets").mkdir(parents=True)
    (root / "offsets" / "0").write_text("v1")
    (root / "metadata").write_text('{"id":"query"}')
    log = FileLog(root / "poundlock")
    log.append(Generation(1, NAMESPACE, log.uri, "query", "host:1"))
    arguments = ["txn", "replan", "--log", str(root), "--batch", "0", "--yes"]
    assert CliRunner().invoke(poundlock, arguments).exit_code == 0
    done = CliRunner().invoke(poundlock, arguments)
    assert "has been withdrawn already: start the pipeline" in str(done.exception)
    (root / "state" / "0").mkdir(parents=True)
    (root / "state" / "0" / "1.delta").write_text("rows of the old plan")
    assert CliRunner().invoke(poundlock, arguments).exit_code == 0
    assert not (root / "state").exists()
    (aside,) = (root / "poundlock-withdrawn").glob("0-state-*")
    assert (aside / "0" / "1.delta").exists()
    records = [type(entry.record) for entry in FileLog(root / "poundlock").entries()]
    assert records == [Generation, Withdrawn, Withdrawn]  # the second fences a driver, too
    outcomes = [act["outcome"] for act in Trail(log).read().acts()]
    assert outcomes == ["withdrawn", "withdrawn"]
