"""Faults at named points of a pipeline's life: reported durably, then carried out.

Runs inside the child: on the driver, and in its tasks, to which it travels by pickling. The points:

    the members of `Step`     by their values: "decided", "committed-one", ...
    log:KIND:aside            a record of the log (Generation, Decided, ...) is written aside and synced
    log:KIND:linked           the record has its name, but the directory is not synced yet
    commit:sent               EndTxn was answered; the partitions have not been checked yet
    sweep:aborted-one         one stray of several is aborted
    offsets:prepared          the source's offsets are in their transaction; no receipt yet
    task:beginning            in a task, for each sink: it has rows, and nothing is open yet
    task:began, task:wrote, task:prepared     the same, after the effect
    task:refused              in a task: writing or preparing failed, for the reason in its facts

The facts of a point, for `match`, are: phase ("take-over" or "batch") and those of the step (batch,
sink, ...); in a task batch, attempt, sink, task and retry.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from poundlock import sinks
from poundlock.core.log import Disk
from poundlock.core.model import Branch, Receipt, Stray
from poundlock.core.participant import Participant, PreparedBranch, Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Rejected, Unavailable

_POLL_S = 0.01


@dataclass
class Faults:
    """The faults of one pipeline in one run of the driver."""

    pipeline: str
    wanted: Sequence[Mapping[str, Any]]  # as `harness.Fault` spells them
    reports: str  # the directory with the reports of this run
    killers: Sequence[str]  # reports that must all exist before the driver is killed
    driver: int  # process id, and the id of the driver's group
    phase: str = "take-over"
    _seen: Counter[int] = field(default_factory=Counter)

    def reached(self, point: str, **facts: Any) -> None:
        """Carry out the fault that is planned here, if there is one, once in a run."""
        facts = {"phase": self.phase} | facts
        for index, fault in enumerate(self.wanted):
            if fault["at"] != point or any(facts.get(k) != v for k, v in fault["match"].items()):
                continue
            self._seen[index] += 1
            name = f"{self.pipeline}@{fault['name']}"
            if self._seen[index] == fault["nth"] and self._report(name, fault, facts):
                getattr(self, "_" + fault["then"].replace("-", "_"))(name)

    def _report(self, name: str, fault: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
        """Write the report durably. Return False if another process was first.

        A report gets its name only when it is complete, because the last pipeline to arrive kills
        all others as soon as it sees their reports.
        """
        body = {
            "pipeline": self.pipeline,
            "name": fault["name"],
            "point": fault["at"],
            "facts": facts,
            "pid": os.getpid(),
            "at": time.time(),
        }
        aside = Path(self.reports, f"{name}.{os.getpid()}-{threading.get_ident()}.aside")
        with aside.open("w") as file:
            json.dump(body, file, default=str)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, Path(self.reports, name))
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    # The actions at a point.

    def _kill(self, name: str) -> None:
        """Kill Python and JVM of the driver together, when all pipelines are at their points."""
        self._end(lambda: os.killpg(self.driver, signal.SIGKILL))

    def _kill_python(self, name: str) -> None:
        """Kill only the driver's Python. Its JVM continues as a zombie until it notices."""
        self._end(lambda: os.kill(self.driver, signal.SIGKILL))

    def _end(self, kill: Callable[[], None]) -> None:
        if all(Path(self.reports, killer).exists() for killer in self.killers):
            kill()
        while True:  # nothing may happen after this point until the last pipeline kills the driver
            time.sleep(_POLL_S)

    def _note(self, name: str) -> None:
        """Do nothing except the report."""

    def _hold(self, name: str) -> None:
        """Wait until the harness releases us."""
        while not Path(self.reports, f"{name}.go").exists():
            time.sleep(_POLL_S)

    def _outlive(self, name: str) -> None:
        """Wait likewise, and stay alive when the executor dies (only in a task)."""
        os.setpgid(0, 0)  # a daemon kills its group when its executor has died
        self._hold(name)

    def _kill_worker(self, name: str) -> None:
        """Kill this Python worker (only in a task)."""
        assert os.getpid() != self.driver
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_executor(self, name: str) -> None:
        """Kill the JVM of this task's executor: the parent of the daemon that forked us."""
        assert os.getpid() != self.driver
        executor = _executor()
        assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_bytes()
        os.kill(executor, signal.SIGKILL)
        while True:
            time.sleep(_POLL_S)

    def _cut_off(self, name: str) -> None:
        """From now on, no task on this executor reaches the sink (only in a task)."""
        assert os.getpid() != self.driver
        Path(self.reports, f"{name}.{_executor()}.cut-off").touch()
        self.check_reachable()

    def check_reachable(self) -> None:
        """Raise the error of a sink that this executor cannot reach, if `cut-off` was carried out."""
        if any(Path(self.reports).glob(f"{self.pipeline}@*.{_executor()}.cut-off")):
            raise Unavailable("no route to the system from this executor\nconnection refused")

    def _fail(self, name: str) -> None:
        """Raise an exception that Poundlock does not expect."""
        raise RuntimeError(f"injected at {name}")

    def _reject(self, name: str) -> None:
        raise Rejected(f"injected at {name}")


def _executor() -> int:
    """Return the JVM of this task's executor: the parent of the daemon that forked us."""
    return _parent(os.getppid())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


class Watched(Participant):
    """A sink under test, with points around its calls."""

    faults: Faults

    def begin(self, branch: Branch) -> Writer:
        reached = partial(
            self.faults.reached,
            batch=branch.transaction.batch,
            attempt=branch.transaction.attempt,
            sink=branch.sink,
            task=branch.task,
            retry=branch.retry,
        )
        self.faults.check_reachable()
        reached("task:beginning")
        writer = WatchedWriter(super().begin(branch), reached)
        reached("task:began")
        return writer

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states: list[BranchState] = []
        for stray in strays:
            states += super().abort([stray])
            if len(states) < len(strays):
                self.faults.reached("sweep:aborted-one", sink=self.name)
        return states


class WatchedKafka(Watched, sinks.Kafka):
    def _read_settlements(self, receipts: Sequence[Receipt]) -> dict[str, BranchState]:
        if receipts:
            self.faults.reached("commit:sent", sink=self.name)
        return super()._read_settlements(receipts)


class WatchedPostgres(Watched, sinks.Postgres):
    pass


class WatchedMySQL(Watched, sinks.MySQL):
    pass


class WatchedRedis(Watched, sinks.Redis):
    pass


class WatchedOpenSearch(Watched, sinks.OpenSearch):
    pass


class WatchedWriter(Writer):
    """One branch in a task."""

    def __init__(self, writer: Writer, reached: Callable[..., None]):
        self._writer = writer
        self._reached = reached

    def write(self, rows: Any) -> None:
        with self._refusals():
            self._writer.write(rows)
        self._reached("task:wrote")

    def prepare(self) -> PreparedBranch | None:
        with self._refusals():
            prepared = self._writer.prepare()
        self._reached("task:prepared")
        return prepared

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except PoundlockError as refusal:
            self._reached("task:refused", reason=type(refusal).__name__)
            raise

    def abort(self) -> None:
        self._writer.abort()


class FaultyDisk(Disk):
    """The disk under the log, with points around the call that publishes a record."""

    def __init__(self, faults: Faults):
        self._faults = faults

    def link(self, source: str, target: str) -> None:
        kind = json.loads(Path(source).read_text().splitlines()[0])["body"]["record"]["kind"]
        self._faults.reached(f"log:{kind}:aside")
        super().link(source, target)
        self._faults.reached(f"log:{kind}:linked")
