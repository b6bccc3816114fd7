"""The machine: drivers, switched at every effect, and what befalls them by schedule.

Each driver is a thread, but only one ever runs: control goes back and forth by locks, so that a
schedule determines everything. Where a driver is about to have an effect it comes through `_gate`,
and there the schedule may kill it, put it to sleep, or spoil the effect.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from poundlock.core.coordinator import Coordinator, Settings
from poundlock.core.log import Entry, FileLog, TransactionLog
from poundlock.core.model import Ruled, Ruling
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.errors import (
    Fenced,
    InDoubt,
    LogCorrupt,
    Parted,
    PoundlockError,
    PromiseBroken,
    Rejected,
    Unavailable,
)

from .database import Blind, BlindServer, Database, DatabaseServer
from .disk import ROOT, DriverDisk, RemoteLog, SimDisk
from .kafka import KafkaServer, KafkaSink
from .oracle import Oracle
from .schedule import REQUEST, Fault, Schedule
from .spark import Checkpoint, Range, Runs, SimJob, SparkConflict
from .systems import OURS, Crash, Wire

T = TypeVar("T")

LOG = f"{ROOT}/checkpoint/log"
SERVERS = {"kafka": KafkaServer, "database": DatabaseServer, "blind": BlindServer}
MOST_EFFECTS = 6000
MOST_DRIVERS = 24


class Interrupt(BaseException):
    """The call was broken off, but its process lives on."""


class Violation(AssertionError):
    """Something happened that must never happen."""


class Driver:
    """One process that runs the pipeline. A thread that has its turn only when told."""

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.dead = self.ended = self.hurt = self.stopping = False
        self.error: BaseException | None = None
        self.batch = -1
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
            self._main()  # nobody will ever take its turn: no thread is needed
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
            settings=Settings(keep_batches=config.keep, commits_at_once=2, sweep_every_s=0.0),
            observe=self._observe,
            stopping=lambda: self.stopping,
            clock=world.clock,
            sleep=self._sleep,
        )
        checkpoint = world.checkpoint
        self._patiently(lambda: coordinator.take_over(OURS, query=self._metadata, owner=self.name))
        query = self._spark("metadata", checkpoint.start)
        self._patiently(lambda: coordinator.bind(query))
        first = checkpoint.next_batch()
        rows = checkpoint.offsets.get(first - 1, (0, 0))
        for batch in itertools.takewhile(world.has_batch, itertools.count(first)):
            self.batch = batch
            if batch == first and batch in checkpoint.offsets:
                rows = checkpoint.offsets[batch]  # a replay
            else:
                rows = planned = world.planned(batch, rows[1], self)
                self._spark("offsets", lambda b=batch, p=planned: checkpoint.plan(b, p))
            self._batch(coordinator, batch, rows, sinks)

    def _batch(
        self, coordinator: Coordinator, batch: int, rows: Range, sinks: Mapping[str, Participant]
    ) -> None:
        """Run one batch as Spark does: by the plan in memory, whatever the checkpoint holds."""
        world, checkpoint = self.world, self.world.checkpoint
        job = SimJob(world.config, rows, sinks, self.runs, batch)

        def call() -> None:
            stored = checkpoint.offsets.get(batch - 1)
            before = None if stored is None else f"{stored[0]}-{stored[1]}"
            coordinator.run(batch, f"{rows[0]}-{rows[1]}", job, before=before)

        self._patiently(call)
        kept = (job.kept or {}) if world.config.stateful else None
        world.oracle.spark_committed(batch, kept)
        self._spark("commits", lambda: checkpoint.commit(batch))

    def _metadata(self) -> str | None:
        return self._spark("metadata", lambda: self.world.checkpoint.query)

    def _patiently(self, step: Callable[[], object]) -> None:
        """Do it; if stubborn, do it again after a failure that allows it."""
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

    def effect(self, label: str, effect: Callable[[], T]) -> T:
        """Let something happen on the disk, or not."""
        fault = self._gate(label)
        if self.outage and label != "sync":
            self.outage -= 1
            fault = fault or "lose_request"
        if fault == "delay" and label != "put":
            fault = "lose_request"
        if fault is not None and label == "sync":
            self.world.disk_failed = True
        return self._spoil(fault, label, effect, OSError(5, "Input/output error"))

    def _spark(self, label: str, effect: Callable[[], T]) -> T:
        """Let Spark read or write a file of its checkpoint; what goes wrong there is its own."""
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
        self.hurt = True
        self.world.oracle.count(fault)
        if fault in ("lose_answer", "interrupt_after", "duplicate"):
            result = effect()
            if fault == "duplicate":
                self.world.limbo.append((label, effect))
                return result
        if fault == "delay":
            self.world.limbo.append((label, effect))
        if fault == "interrupt_after":
            raise Interrupt
        raise error

    def _gate(self, label: str) -> str | None:
        """The point before an effect: whatever is due happens here. Returns how to spoil it."""
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
            case "copy":
                world.start_on_copy()
            case kind if kind in REQUEST or kind == "interrupt_after":
                return kind
            case _:
                world.befall(fault)
        return None


class World:
    """Everything there is, for one schedule."""

    def __init__(self, schedule: Schedule, *, trace: bool = False):
        self.config = schedule.config
        self.faults = deque(schedule.faults)
        self.switches = any(fault.kind == "switch" for fault in schedule.faults)
        self.waited = 0  # effects since the last fault
        self.effects = 0
        self.trace: list[str] | None = [] if trace else None
        self.back = threading.Lock()
        self.back.acquire()
        self.oracle = Oracle()
        self.disk = SimDisk()
        self.disk_failed = False
        self.records: dict[int, bytes] = {}  # of the remote log
        self.checkpoint = Checkpoint(swallows=self.config.log == "swallowing")
        self.sizes = list(self.config.batches)
        self.servers = {
            f"{kind}{index}": SERVERS[kind](f"{kind}{index}", self.oracle)
            for index, kind in enumerate(self.config.sinks)
        }
        self.oracle.systems = dict(self.servers)
        self.limbo: list[tuple[str, Callable[[], object]]] = []  # requests under way
        self.requests: list[tuple[str, Callable[[], object]]] = []  # all that were ever sent
        self.runs: dict[int, int] = {}
        self.drivers: list[Driver] = []
        self.switched = 0
        self.replans = 0
        self.stopped = False
        self._now = 1_000_000.0
        self._rulings = 0

    def clock(self) -> float:
        self._now += 0.001
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for server in self.servers.values():
            server.tick()

    # What drivers are made of.

    def open_log(
        self, effect: Callable[[str, Callable[[], object]], object], writer: str, *, copy: str = ""
    ) -> TransactionLog:
        def published(number: int, data: bytes) -> None:
            if copy:
                self.oracle.fail("a driver wrote to the copy of a log")
            self.oracle.published(number, data, writer)

        if self.config.log == "file":
            disk = DriverDisk(self.disk, effect, published)
            return FileLog(LOG + copy, disk=disk, clock=self.clock)
        return RemoteLog(
            dict(self.records) if copy else self.records,
            f"remote:{copy}",
            effect,
            published,
            swallows=self.config.log == "swallowing",
            clock=self.clock,
        )

    def sinks(self, wire: Wire, clock: Callable[[], float]) -> dict[str, Participant]:
        made: dict[str, Participant] = {}
        for name, server in self.servers.items():
            if isinstance(server, KafkaServer):
                made[name] = KafkaSink(server, wire, clock)
            elif isinstance(server, DatabaseServer):
                made[name] = Database(server, wire)
            else:
                made[name] = Blind(server, wire, clock)
        return made

    def has_batch(self, batch: int) -> bool:
        return batch < len(self.sizes)

    def planned(self, batch: int, start: int, driver: Driver) -> Range:
        """Plan a batch as Spark does: from where the one before ended. Planned again, it differs."""
        differs = self.replans + (self.drivers.index(driver) if self.checkpoint.swallows else 0)
        return start, start + self.sizes[batch] + differs % 2

    # Playing a schedule.

    def run(self) -> Oracle:
        """Play the schedule to its end. Raises `Violation`."""
        try:
            self._play()
            if self.oracle.violation is None:
                self._heal()
        except Crash:
            pass
        finally:
            self._bury()
        if self.oracle.violation is not None:
            raise Violation(self.oracle.violation)
        return self.oracle

    def _play(self) -> None:
        driver = self._new_driver()
        while True:
            driver.resume()
            if self.oracle.violation is not None:
                return
            if not driver.ended:
                driver = self._switch(driver)
                continue
            self._judge(driver)
            if self.stopped or self._complete():
                return
            paused = self._paused()
            driver = paused[0] if paused and not self.config.late else self._new_driver()

    def _new_driver(self) -> Driver:
        if len(self.drivers) >= MOST_DRIVERS:
            self.oracle.fail("it is started again and again and does not come through")
        self.drivers.append(Driver(self, f"driver-{len(self.drivers)}"))
        return self.drivers[-1]

    def _paused(self) -> list[Driver]:
        return [driver for driver in self.drivers if driver.started and not driver.ended]

    def _switch(self, now: Driver) -> Driver:
        """Choose who goes on after a switch: a driver that was paused before, or a new one."""
        others = [driver for driver in self._paused() if driver is not now]
        if others and self.switched % 2:
            self.oracle.count("paused driver went on")
            return others[self.switched // 2 % len(others)]
        return self._new_driver()

    def _complete(self) -> bool:
        return len(self.checkpoint.commits) == len(self.sizes)

    def _heal(self) -> None:
        """Let everything late arrive and everyone paused wake; then start once more and look."""
        self.faults.clear()
        for driver in self._paused():
            self.oracle.count("driver woke when all was over")
            driver.resume()
            self._judge(driver)
        while self.limbo:
            self._deliver(0)
        self.pass_time(1.0)
        if not self.stopped:
            if self.replans or self.checkpoint.swallows:
                self.sizes.append(1)  # log and checkpoint may have parted: go on, to find out
            self._finish()
        self._replay_log()
        position = max((end for _, end in self.checkpoint.offsets.values()), default=0)
        self.oracle.final(None if self.stopped else position)

    def _finish(self) -> None:
        """Start once more, and again as long as a person has to help."""
        while True:
            driver = self._new_driver()
            driver.resume()
            self._judge(driver)
            if self.stopped or (driver.error is None and self._complete()):
                return

    def _replay_log(self) -> None:
        """The log must be readable, and say what the oracle saw."""
        state = self.open_log(_directly, "reader").load()
        seen = {b: s for b, s in self.oracle.stories.items() if b >= self.oracle.batch_floor}
        self.oracle.require(set(seen) == set(state.batches), "log and oracle know other batches")

    def _bury(self) -> None:
        for driver in self._paused():
            driver.dead = True
            driver.resume()

    # What befalls the world.

    def crash_machine(self, arg: int) -> None:
        """The machine of the drivers stops, and its disk keeps only what was synced."""
        self.oracle.count("machine crashed")
        if self.config.log != "file":
            return
        for driver in self.drivers:
            driver.dead = True
        before = len(self.disk.live)
        self.disk.crash(arg)
        if len(self.disk.live) != before:
            self.oracle.count("disk forgot something")
        files = {path: file for path, file in self.disk.live.items() if file is not None}
        records = {int(path[-25:-5]): f.data for path, f in files.items() if path.endswith(".json")}
        try:
            self.oracle.remembered(records)
        except LogCorrupt as torn:
            self.oracle.fail(f"the disk kept half of a published record: {torn}")

    def befall(self, fault: Fault) -> None:
        """A system does something by itself, or an old request arrives."""
        servers = list(self.servers.values())
        server = servers[fault.arg % len(servers)]
        match fault.kind:
            case "expire":
                keys = [(s, key) for s in servers for key in s.open_branches()]
                which = (
                    keys if fault.arg == 0 else keys[fault.arg % len(keys) :][:1] if keys else []
                )
                for owner, key in which:
                    owner.expire(key)
            case "deliver" if self.limbo:
                self._deliver(fault.arg % len(self.limbo))
            case "repeat" if self.requests:
                self.limbo.append(self.requests[-1 - fault.arg % len(self.requests)])
                self.oracle.count("request repeated")
                self._deliver(len(self.limbo) - 1)
            case "straggler":
                server.straggle()
            case "slow_markers" if isinstance(server, KafkaServer):
                server.slow = True
            case "forget_ids" if isinstance(server, KafkaServer):
                server.forget_ids()
            case "retention" if isinstance(server, KafkaServer):
                server.start = server.end
                self.oracle.count("witness removed")
            case _:
                pass

    def _deliver(self, index: int) -> None:
        label, request = self.limbo.pop(index)
        self.oracle.count("late request arrived")
        # A late InitProducerId is a straggler's: ids are used again, so it may hit any branch.
        self.oracle.late = label == "init"
        try:
            request()
        except (PoundlockError, SparkConflict, OSError):
            pass
        finally:
            self.oracle.late = False

    def tamper(self, fault: Fault) -> None:
        self.replans += 1
        self.oracle.count(f"checkpoint tampered with: {fault.kind}")
        if fault.kind == "restore":
            self.checkpoint.restore(1 + fault.arg % 3)
        else:
            self.checkpoint.query = None
            self.checkpoint.offsets.clear()
            self.checkpoint.commits.clear()

    def start_on_copy(self) -> None:
        """Somebody copies the whole checkpoint and starts a second pipeline on it."""
        if not self.oracle.owner:
            return
        for path, file in list(self.disk.live.items()):
            if path.startswith(LOG):
                self.disk.live[path.replace(LOG, f"{LOG}-copy", 1)] = file
        log = self.open_log(_directly, "copy", copy="-copy")
        try:
            Coordinator(log, self.sinks(_directly, self.clock)).take_over(
                OURS, query=lambda: self.checkpoint.query, owner="copy"
            )
        except Parted:
            self.oracle.count("copy refused")
        else:
            self.oracle.fail("a driver started on the copy of a log")
        for path in [p for p in self.disk.live if p.startswith(f"{LOG}-copy")]:
            del self.disk.live[path]

    # Judging how a driver ended, and doing what its message asks a person to do.

    def _judge(self, driver: Driver) -> None:
        if self.oracle.violation is not None:
            raise Crash
        if self.disk_failed:
            self.disk_failed = False
            self.crash_machine(0)
        error = driver.error
        if error is None or isinstance(error, Crash | Interrupt):
            return
        self.oracle.count(f"stopped by {type(error).__name__}")
        if not self._explained(driver, error):
            self.oracle.fail(f"{driver.name} stopped without a reason: {error!r}")
        match error:
            case Parted():
                self._restore_checkpoint()
            case PromiseBroken():
                self._rule(driver.batch, error)
            case InDoubt() if not driver.stopping:
                self._rule(driver.batch, error)
            case _:
                pass

    def _explained(self, driver: Driver, error: BaseException) -> bool:
        """Whether something happened that this error is the right answer to."""
        match error:
            case SparkConflict():
                return len(self.drivers) > 1 or driver.hurt
            case Fenced():
                return self.oracle.last_writer != driver.name
            case Parted():
                # Somebody tampered with the checkpoint, or two drivers wrote to it.
                return self.replans > 0 or self.checkpoint.swallows
            case LogCorrupt():
                return "failed to make the log durable" in str(error)
            case InDoubt():
                # A person may have ruled on it before this driver got to say so.
                ruled = any(story.excused for story in self.oracle.stories.values())
                return driver.stopping or ruled or self._unprovable()
            case PromiseBroken():
                return self.config.salted or self.config.shifting
            case Rejected() | Unavailable():
                return driver.hurt or driver.stopping
            case _:
                return False

    def _unprovable(self) -> bool:
        """Whether a decided branch is over and its system cannot say how it ended."""
        return any(
            self.servers[key[0]].state_of(key) != "open"
            and not self.servers[key[0]].proves(receipt)
            for story in self.oracle.stories.values()
            if not story.finished
            for key, receipt in story.receipts.items()
        )

    def _restore_checkpoint(self) -> None:
        """Put the checkpoint back that belongs to the log."""
        stories = self.oracle.stories
        self.checkpoint.query = self.oracle.query
        self.checkpoint.offsets = {batch: story.rows for batch, story in stories.items()}
        self.checkpoint.commits = {batch for batch, story in stories.items() if story.finished}

    def _rule(self, batch: int, error: PoundlockError) -> None:
        """Rule by what really happened, as a person would who looks."""
        unfinished = [b for b, story in self.oracle.stories.items() if not story.finished]
        batch = unfinished[0] if unfinished else batch
        self._rulings += 1
        if self.config.ruling is None or self._rulings > 3:
            self.stopped = True
            return
        ruling = Ruling(self.config.ruling)
        if isinstance(error, InDoubt) or self.oracle.stories[batch].excused:
            ruling = Ruling.ACCEPT_LOSS
        log = self.open_log(_directly, "operator")
        log.load()
        log.append(Ruled(batch, ruling, by="operator"))


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Decode equal bytes once: reading records back is most of what a schedule costs."""
    original = Entry.__dict__["decode"]

    @functools.lru_cache(1024)
    def decode(number: int, data: bytes) -> Entry:
        return original.__func__(Entry, number, data, "the model")

    Entry.decode = staticmethod(lambda number, data, where: decode(number, data))  # type: ignore
    try:
        yield
    finally:
        Entry.decode = original


def _directly(label: str, effect: Callable[[], T]) -> T:
    return effect()
