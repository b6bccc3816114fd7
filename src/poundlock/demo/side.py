"""One side of the demo. Its job is started, watched, killed and started again until it is done."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poundlock.core.protocol import Step
from poundlock.demo.history import Event, History, What
from poundlock.demo.plan import Kill
from poundlock.demo.process import Child
from poundlock.demo.topics import READINGS, SPARK_READINGS, Watch
from poundlock.errors import PoundlockError


@dataclass(frozen=True)
class Scene:
    """What both sides share."""

    servers: str
    checkpoints: Path
    logs: Path
    rows_per_batch: int
    kills: tuple[Kill, ...]
    began: float  # on the monotonic clock
    on_event: Callable[[Side, Event], None]

    def now(self) -> float:
        return time.monotonic() - self.began


class Side:
    """What both sides share. `poll` is called every few milliseconds and never waits."""

    key: str
    title: str
    topic: str

    def __init__(self, scene: Scene):
        self.scene = scene
        self.history = History()
        self.rows_in = 0
        self.rows_out = 0
        self.kills = 0
        self.starts = 0
        self.state = "waiting"
        self.step = ""
        self.done = False
        self._child: Child | None = None
        self._checkpoint = scene.checkpoints / self.key
        self._planned = -1  # the last batch that Spark has written offsets/N for
        self._committed = -1  # and commits/N

    @property
    def batch(self) -> int | None:
        """The current batch, or the last one."""
        return None if self._planned < 0 else self._planned

    @property
    def log(self) -> Path:
        return self.scene.logs / f"{self.key}.log"

    def poll(self) -> None:
        """Record what has happened since the last call, and do what is due."""
        if self.done:
            return
        if self._child is None:
            self._start()
            return
        ended = self._child.ended  # asked before reading, so that no message is missed
        for message in self._child.messages():
            self._receive(message)
        self._read_checkpoint()
        if ended:
            self._finish()
        elif self._next is not None and self._is_due(self._next):
            self._kill()

    def close(self) -> None:
        """End the job if it runs."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    # The differences between the sides.

    def _arguments(self) -> list[str]:
        return []

    def _receive(self, message: dict[str, Any]) -> None:
        what = What(message["what"])
        if what is not What.STEP:
            self._record(what)

    def _is_due(self, kill: Kill) -> bool:
        raise NotImplementedError

    # What both share.

    @property
    def _next(self) -> Kill | None:
        """The next kill."""
        kills = self.scene.kills
        return kills[self.kills] if self.kills < len(kills) else None

    def _start(self) -> None:
        scene = self.scene
        arguments = [self.key, "--servers", scene.servers, "--checkpoint", str(self._checkpoint)]
        arguments += ["--rows-per-batch", str(scene.rows_per_batch), *self._arguments()]
        self._child = Child("poundlock.demo.job", arguments, self.log)
        self.starts += 1
        self.state, self.step = "starting", ""
        self._record(What.STARTED)

    def _read_checkpoint(self) -> None:
        """Read from Spark's checkpoint which batches are planned and which are done."""
        for batch in range(self._committed + 1, self._planned + 2):
            if batch > self._planned and (self._checkpoint / "offsets" / str(batch)).exists():
                self._planned = batch
                self.rows_in = self._end_of(batch)
                self._record(What.PLANNED, batch=batch)
            if batch <= self._planned and (self._checkpoint / "commits" / str(batch)).exists():
                self._committed = batch
                self._record(What.COMMITTED, batch=batch)

    def _end_of(self, batch: int) -> int:
        """Return how many input rows there are up to the end of a batch, as Spark planned it."""
        plan = (self._checkpoint / "offsets" / str(batch)).read_text().splitlines()
        return sum(offset for ends in json.loads(plan[-1]).values() for offset in ends.values())

    def _kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child = None
        self.kills += 1
        self.state = "killed"
        self._read_checkpoint()  # whether Spark had committed the batch after all
        self._record(What.KILLED, **self._hit())

    def _hit(self) -> dict[str, Any]:
        """Return where the kill hit."""
        return {"batch": self.batch}

    def _finish(self) -> None:
        assert self._child is not None
        status = self._child.kill()  # it has ended, but what it started may still run
        self._child = None
        if status != 0:
            raise PoundlockError(
                f"the job of {self.title} ended with status {status}, but it was not killed: "
                f"{_last_error(self.log)}. More is in {self.log.absolute()}"
            )
        self.done = True
        self.state, self.step = "done", ""
        self._record(What.ENDED)

    def _record(self, what: What, **facts: Any) -> None:
        event = Event(self.scene.now(), what, **facts)
        self.history.events.append(event)
        if what is What.RUNNING:
            self.state = "running"
        self.scene.on_event(self, event)


class PoundlockSide(Side):
    """Its job stops by itself at the step of the next kill, so each kill hits exactly there."""

    key, title, topic = "poundlock", "Poundlock", READINGS

    def __init__(self, scene: Scene):
        super().__init__(scene)
        self._decided: dict[int, int] = {}  # batch to rows
        self._held = False

    def _arguments(self) -> list[str]:
        self._held = False
        kill = self._next
        return ["--hold", f"{kill.batch}:{kill.step.value}"] if kill else []

    def _receive(self, message: dict[str, Any]) -> None:
        super()._receive(message)
        if message["what"] != What.STEP.value:
            return
        facts = {name: message[name] for name in ("batch", "rows", "count") if name in message}
        step, batch = Step(message["step"]), message.get("batch", -1)
        self.step = step.value
        if step is Step.DECIDED:
            self._decided[batch] = message["rows"]
        if step is Step.COMMITTED:
            self.rows_out += self._decided.pop(batch, 0)
        self._record(What.STEP, step=step, **facts)
        kill = self._next
        self._held = kill is not None and (batch, step) == (kill.batch, kill.step)

    def _is_due(self, kill: Kill) -> bool:
        return self._held

    def _hit(self) -> dict[str, Any]:
        kill = self.scene.kills[self.kills - 1]
        return {"batch": kill.batch, "step": kill.step}


class SparkSide(Side):
    """Killed when a part of the batch is in its topic, and commits/N is not written yet."""

    key, title, topic = "spark_sink", "Spark's Kafka sink", SPARK_READINGS

    def __init__(self, scene: Scene):
        super().__init__(scene)
        self._watch = Watch(scene.servers, self.topic)
        self._before = 0  # rows in the topic when the current attempt began
        self._attempted = -1

    def close(self) -> None:
        super().close()
        self._watch.close()

    def _receive(self, message: dict[str, Any]) -> None:
        if message["what"] == What.OPENED.value:
            # The killed driver has ended and this one has not begun, so the killed one left these rows.
            left = self._watch.rows() - self._before
            self._before += left
            self._record(What.OPENED, rows=left)
        else:
            super()._receive(message)

    def _read_checkpoint(self) -> None:
        super()._read_checkpoint()
        self.rows_out = self._watch.rows() if self.state == "running" else self.rows_out
        if self._planned > self._attempted:
            self._attempted, self._before = self._planned, self.rows_out
        writing = self.state == "running" and self.rows_out > self._before
        self.step = "writing" if writing else ""

    def _is_due(self, kill: Kill) -> bool:
        grown = self.rows_out - self._before
        wanted = kill.share * self.scene.rows_per_batch
        return self._committed < self._planned >= kill.batch and grown > wanted

    def _hit(self) -> dict[str, Any]:
        self.rows_out = self._watch.rows()
        return {"batch": self._planned, "rows": self.rows_out - self._before}


def _last_error(log: Path) -> str:
    """Return the last error of a Python traceback in the log, or the last line of the log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|errors\.\w+): ", line)]
    return (errors or lines or ["it printed nothing"])[-1][:500]
