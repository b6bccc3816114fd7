"""What was observed on one side of the demo, and what follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from poundlock.core.protocol import Step


class What(Enum):
    """The kinds of observation."""

    STARTED = "started"  # its process
    OPENED = "opened"  # its Spark session
    RUNNING = "running"  # its query
    PLANNED = "planned"  # Spark has written offsets/N
    STEP = "step"  # Poundlock reports a step
    COMMITTED = "committed"  # Spark has written commits/N
    KILLED = "killed"
    ENDED = "ended"  # by itself, when all input is read


@dataclass(frozen=True, slots=True)
class Event:
    """One observation."""

    at: float  # seconds since the demo began
    what: What
    batch: int | None = None
    step: Step | None = None
    rows: int | None = None  # decided in the batch; for KILLED and OPENED, left in the topic
    count: int | None = None  # transactions swept


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a side's process."""

    started: float
    opened: float | None
    running: float | None
    ended: float
    killed: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a batch, until Spark's commit or a kill."""

    batch: int
    started: float
    ended: float
    again: bool  # an earlier attempt was killed
    killed: bool


@dataclass(frozen=True, slots=True)
class Death:
    """A kill, and how the next run recovered from it."""

    number: int  # from 1
    event: Event
    aborted: int = 0  # open transactions that the next run found and aborted
    rewritten: bool = False  # the batch was written again
    recommitted: bool = False  # the next run committed what the log had decided
    left: int = 0  # rows of the killed attempt that stayed in the topic


@dataclass
class History:
    """All observations of one side, in order."""

    events: list[Event] = field(default_factory=list)

    def runs(self) -> list[Run]:
        return [_run(events) for events in self._lives()]

    def attempts(self) -> list[Attempt]:
        """Return every attempt at every batch. A repeated attempt starts with its run."""
        found: list[Attempt] = []
        begun: dict[int, tuple[float, bool]] = {}
        unfinished: set[int] = set()
        for event in self.events:
            batch = event.batch
            if event.what is What.PLANNED and batch is not None:
                begun[batch] = (event.at, False)
                unfinished.add(batch)
            elif event.what is What.RUNNING:
                begun |= dict.fromkeys(unfinished, (event.at, True))
            elif event.what is What.COMMITTED and batch in begun:
                found.append(Attempt(batch, begun[batch][0], event.at, begun[batch][1], False))
                unfinished.discard(batch)
                del begun[batch]
            elif event.what is What.KILLED:
                for attempted, (started, again) in begun.items():
                    found.append(Attempt(attempted, started, event.at, again, True))
                begun.clear()
        return found

    def deaths(self) -> list[Death]:
        lives = [*self._lives(), []]
        killed = [
            (life[-1], after)
            for life, after in itertools.pairwise(lives)
            if life[-1].what is What.KILLED
        ]
        return [_death(number, *pair) for number, pair in enumerate(killed, start=1)]

    def marks(self, step: Step) -> list[Event]:
        return [event for event in self.events if event.step is step]

    def _lives(self) -> Iterator[list[Event]]:
        """Split the events into one list per process."""
        life: list[Event] = []
        for event in self.events:
            if event.what is What.STARTED and life:
                yield life
                life = []
            life.append(event)
        if life:
            yield life


def _run(events: list[Event]) -> Run:
    first = {event.what: event.at for event in reversed(events)}
    return Run(
        started=events[0].at,
        opened=first.get(What.OPENED),
        running=first.get(What.RUNNING),
        ended=events[-1].at,
        killed=What.KILLED in first,
    )


def _death(number: int, kill: Event, after: list[Event]) -> Death:
    same = [event for event in after if event.batch == kill.batch]
    steps = {event.step for event in same}
    return Death(
        number=number,
        event=kill,
        # The first sweep of a run aborts what earlier runs left; later ones abort its own branches.
        aborted=next((it.count or 0 for it in after if it.step is Step.SWEPT), 0),
        rewritten=Step.WRITING in steps,
        recommitted=Step.COMMITTING in steps and Step.WRITING not in steps,
        left=next((it.rows or 0 for it in after if it.what is What.OPENED), 0),
    )


def place_of(kill: Event) -> str:
    """Describe where a kill hit."""
    if kill.step is not None:
        return f"at step {kill.step.value}"
    return f"{kill.rows or 0:,} rows written, before Spark's commit"
