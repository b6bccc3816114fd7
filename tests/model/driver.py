"""One driver of the pipeline, which passes a gate before each of its effects.

Each driver is a thread, but only one ever runs: control goes back and forth by locks, so that a
schedule determines everything. At the gate the schedule may kill the driver, put it to sleep, or spoil
the effect.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from poundlock.core.checkpoint import FileCheckpoint
from poundlock.core.coordinator import Coordinator
from poundlock.core.owner import LOOK_EVERY_S
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import Step
from poundlock.core.surroundings import Settings
from poundlock.errors import Fenced, Unavailable

from .schedule import REQUEST, Fault
from .spark import Range, Runs, SimJob, SparkConflict, list_of, text_of
from .systems import OURS, Crash

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")

MOST_EFFECTS = 6000
PATIENCE = 6  # pauses after which an operator stops a driver that waits for what never comes


class Interrupt(BaseException):
    """The call was interrupted, but its process still runs."""


class Driver:
    """One process that runs the pipeline: a thread that runs only when it is given its turn."""

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.dead = self.ended = self.hurt = self.stopping = False
        self.error: BaseException | None = None
        self.batch = -1
        self.generation = 0  # set when it has taken over
        self.idle = False
        self.waited = 0
        self.outage = 0
        self.runs = Runs(world.runs)
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread = threading.Thread(target=self._main, daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def resume(self) -> None:
        """Give this driver its turn, and wait until it ends or is switched away from."""
        if not self.world.switches:
            self._main()  # it never gets another turn, so it needs no thread
        elif self.started:
            self._turn.release()
        else:
            self._thread.start()
        self.world.back.acquire()

    def pause(self) -> None:
        self.world.back.release()
        self._turn.acquire()
        if self.dead:
            raise Crash

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 (the world judges it)
            self.error = error
        self.ended = True
        self.world.back.release()

    def _run(self) -> None:
        world, config = self.world, self.world.config
        sinks = world.sinks(self._wire, world.clock)
        coordinator = Coordinator(
            world.open_log(self.effect, self.name),
            sinks,
            settings=Settings(
                keep_batches=config.keep,
                most_records=config.records,
                commits_at_once=2,
                sweep_every_s=0.0,
            ),
            observe=self._observe,
            stopping=lambda: self.stopping,
            clock=world.clock,
            monotonic=world.clock,
            sleep=self._sleep,
        )
        checkpoint = world.checkpoint
        files = world.checkpoint_files(self.effect)
        self._patiently(
            lambda: coordinator.take_over(
                OURS, query=files.query, owner=self.name, has_ended=self._has_ended
            )
        )
        self.generation = coordinator.generation.number
        self._patiently(lambda: files.mend(coordinator.log))
        self._spark("metadata", checkpoint.start)
        first = checkpoint.next_batch()
        rows = checkpoint.offsets.get(first - 1, (0, 0))
        for batch in itertools.takewhile(world.has_batch, itertools.count(first)):
            self.batch = batch
            if batch == first and batch in checkpoint.offsets:
                rows = checkpoint.offsets[batch]  # a replay
            else:
                self._await_rows()
                rows = planned = world.planned(batch, rows[1], self)
                self._spark("offsets", lambda b=batch, p=planned: checkpoint.plan(b, p))
            self._batch(coordinator, files, batch, rows, sinks)
            if config.cron:
                break
        with contextlib.suppress(Unavailable, Fenced):
            coordinator.end()

    def _batch(
        self,
        coordinator: Coordinator,
        files: FileCheckpoint,
        batch: int,
        rows: Range,
        sinks: Mapping[str, Participant],
    ) -> None:
        """Run one batch as Spark does: by the plan in memory, whatever the checkpoint holds."""
        world, checkpoint = self.world, self.world.checkpoint
        # A decided batch is planned again with what cut its rows.
        cut = coordinator.cut_to_repeat() or world.cut(self)
        exact = {n: it for n, it in sinks.items() if it.semantic is Semantic.EXACTLY_ONCE}
        job = SimJob(world, rows, exact, self.runs, batch, cut)

        def call() -> None:
            plan = files.plan(batch)
            coordinator.bind(files.running_query())
            running = text_of(rows, number=list_of(plan.text)).decode()
            plan.check_runs(batch, running.split("\n")[2:])
            coordinator.run(batch, plan, job)

        self._patiently(call)
        kept = (job.kept or {}) if world.config.stateful else None
        world.oracle.spark_committed(batch, kept)
        self._spark("commits", lambda: checkpoint.commit(batch))

    def _await_rows(self) -> None:
        """Be idle until there are rows. Whoever replaces this driver must wait until it has noticed.

        Unless it was asleep before, and has only just become idle.
        """
        late = self._is_replaced()
        self.idle = True
        self._gate("idle")
        self.idle = False
        goes_on = self._is_replaced() and not late
        self.world.oracle.require(not goes_on, "an idle driver goes on beside its successor")

    def _is_replaced(self) -> bool:
        """Return whether the next driver has taken over, and has not only begun to."""
        return any(driver.generation == self.generation + 1 for driver in self.world.drivers)

    def _has_ended(self, owner: str) -> bool:
        named = [driver for driver in self.world.drivers if driver.name == owner]
        return all(driver is self or driver.ended or driver.dead for driver in named)

    def _let_others_look(self) -> None:
        """Idle drivers look into the log at intervals, and stop when they were replaced."""
        for driver in self.world.drivers:
            if driver.idle and 0 < driver.generation < self.world.oracle.owner:
                driver.dead = True
                self.world.oracle.count("idle driver stopped")

    def _patiently(self, step: Callable[[], object]) -> None:
        """Run the call; a stubborn driver repeats it after a failure that allows a retry."""
        for _ in range(3):
            try:
                step()
                return
            except (Unavailable, Interrupt) as error:
                if isinstance(error, Unavailable) and "its fate is unknown" in str(error):
                    self.world.oracle.count("append of unknown outcome")
                if not self.world.config.stubborn:
                    raise
                self.world.oracle.count("step repeated in the same process")
        step()

    # The effects of a driver.

    def _observe(self, step: Step, facts: object) -> None:
        if step in (Step.DRAINED, Step.REPAIRED, Step.ABORTED):
            self.world.oracle.count(f"step {step.value}")
        self._gate("step")

    def _sleep(self, seconds: float) -> None:
        self._gate("sleep")
        self.world.pass_time(seconds)
        if seconds >= LOOK_EVERY_S:
            self._let_others_look()
        if self.world.gone or self.world.stuck:
            self.waited += 1
            self.stopping = self.waited > PATIENCE

    def effect(self, label: str, effect: Callable[[], T]) -> T:
        """Apply an effect on the disk, unless the schedule prevents it."""
        fault = self._gate(label)
        sync = label.endswith("sync")
        if self.outage and not sync:
            self.outage -= 1
            fault = fault or "lose_request"
        if fault == "delay" and label != "put":
            fault = "lose_request"
        if fault in ("lose_request", "lose_answer") and sync:
            self.world.disk_failed = True
        return self._spoil(fault, label, effect, OSError(5, "Input/output error"))

    def _spark(self, label: str, effect: Callable[[], T]) -> T:
        """Let Spark read or write a file of its checkpoint. A failure there is Spark's own error."""
        return self._spoil(self._gate(label), label, effect, SparkConflict())

    def _wire(self, label: str, request: Callable[[], T]) -> T:
        """Send a request to a system, and perhaps get its answer."""
        fault = self._gate(label)
        if self.outage:
            self.outage -= 1
            fault = fault or "lose_request"
        if fault == "duplicate" and label in ("produce", "prepare"):
            fault = None  # sequence numbers and session state keep these from happening twice
        if label in ("commit", "abort"):
            self.world.requests.append((label, request))
        return self._spoil(fault, label, request, Unavailable("no answer"))

    def _spoil(self, fault: str | None, label: str, effect: Callable[[], T], error: Exception) -> T:
        if fault is None:
            return effect()
        self.hurt = self.hurt or label != "del"  # a record that stays only takes space
        self.world.oracle.count(fault)
        if fault in ("lose_answer", "interrupt_after", "duplicate"):
            result = effect()
            if fault == "duplicate":
                again = f"{label} again" if label == "init" else label
                self.world.limbo.append((again, effect))
                return result
        if fault == "delay":
            self.world.limbo.append((label, effect))
        if fault == "interrupt_after":
            raise Interrupt
        raise error

    def _gate(self, label: str) -> str | None:
        """Apply the faults that are due before an effect. Return how to spoil the effect."""
        world = self.world
        if self.dead:
            raise Crash
        world.effects += 1
        if world.effects > MOST_EFFECTS:
            world.oracle.fail("it goes on for ever")
        if world.trace is not None:
            world.trace.append(label)
        while world.faults and not world.disk_failed:
            fault = world.faults[0]
            if fault.at is not None and fault.at != label:
                return None
            if world.waited < fault.after:
                world.waited += 1
                return None
            world.faults.popleft()
            world.waited = 0
            spoiled = self._fire(fault)
            if spoiled is not None:
                return spoiled
        return None

    def _fire(self, fault: Fault) -> str | None:
        world = self.world
        match fault.kind:
            case "crash":
                self.dead = True
                raise Crash
            case "machine":
                world.crash_machine(fault.arg)
                self.dead = True
                raise Crash
            case "switch":
                world.switched = fault.arg
                self.pause()
            case "interrupt":
                raise Interrupt
            case "stop":
                self.stopping = True
            case "outage":
                self.outage = 2 + fault.arg
                self.hurt = True
            case "restore" | "delete":
                world.tamper(fault)
                self.dead = True
                raise Crash
            case "forget":
                world.forget(fault.arg)
                self.dead = True
                raise Crash
            case "withdraw":
                world.withdrawal.perform(world, fault.arg % 3)
            case "exchange":
                if world.exchange(fault.arg):
                    self.dead = True
                    raise Crash
            case "rename" | "remove" | "downgrade":
                world.change_sink(fault)
                self.dead = True
                raise Crash
            case "copy":
                world.start_on_copy()
            case "rewind":
                if world.backups.rewind(fault.arg):
                    raise Crash
            case "vanish":
                if world.backups.vanish():
                    raise Crash
            case kind if kind in REQUEST or kind == "interrupt_after":
                return kind
            case _:
                world.apply_fault(fault)
        return None
