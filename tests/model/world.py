"""The simulated world: drivers, systems, disk, checkpoint, and the faults of a schedule.

The world also judges. A driver may only stop for a reason that the schedule gave it. The remedy
in its message is then applied.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeVar

from poundlock.core.checkpoint import FileCheckpoint
from poundlock.core.coordinator import Coordinator
from poundlock.core.log import FileLog, TransactionLog, record_numbers
from poundlock.core.model import Opened, OperatorDecided, OperatorDecision
from poundlock.core.participant import Participant, Semantic
from poundlock.errors import (
    Fenced,
    GuaranteeBroken,
    InDoubt,
    LogCorrupt,
    LogMismatch,
    OutOfTime,
    PoundlockError,
    Rejected,
    Unavailable,
)

from .backups import Backups
from .database import Blind, BlindServer, Database, DatabaseServer
from .disk import ROOT, DriverDisk, RemoteLog, SimDisk, checkpoint_on
from .driver import Driver, Interrupt
from .kafka import KafkaServer, KafkaSink
from .oracle import Oracle
from .schedule import Fault, Schedule
from .spark import EXECUTORS, Checkpoint, Range, SparkConflict
from .systems import NEW, OURS, Crash, Wire
from .withdrawal import BOTH, Withdrawal, withdrawn

T = TypeVar("T")

CHECKPOINT = f"{ROOT}/checkpoint"
LOG = f"{CHECKPOINT}/log"
SERVERS = {"kafka": KafkaServer, "database": DatabaseServer, "blind": BlindServer}
MOST_DRIVERS = 24

_OPENED = re.compile(r"was opened by generation (\d+), but the log knows only (\d+)")
_FORMER = re.compile("may have left branches open|has no such sink")


class Violation(AssertionError):
    """Something happened that must never happen."""


class World:
    """The simulated world of one schedule."""

    def __init__(self, schedule: Schedule, *, trace: bool = False):
        self.config = schedule.config
        self.faults = deque(schedule.faults)
        self.switches = any(fault.kind == "switch" for fault in schedule.faults)
        self.waited = 0  # effects since the last fault
        self.effects = 0
        self.trace: list[str] | None = [] if trace else None
        self.back = threading.Lock()
        self.back.acquire()
        self.oracle = Oracle(lambda: self._now)
        self.disk = SimDisk()
        self.disk_failed = False
        self.records: dict[int, bytes] = {}  # of the remote log
        # A remote checkpoint is durable at once: no crash of the machine touches its disk.
        self.checkpoint_disk = self.disk if self.config.log == "file" else SimDisk()
        self.checkpoint = Checkpoint(
            self.checkpoint_disk, CHECKPOINT, swallows=self.config.log == "swallowing"
        )
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
        self.withdrawal = Withdrawal()
        self.stopped = False
        rewinds = any(fault.kind == "rewind" for fault in schedule.faults)
        self.backups = Backups(self, LOG, wanted=rewinds)
        self._now = 1_000_000.0
        self._rulings = 0
        # Sinks that the pipeline does not have: not yet, or no more.
        self.absent = {sink for i, sink in enumerate(self.servers) if i in self.config.absent}
        self.gone: set[str] = set()  # sinks whose system never answers again
        self.removed: set[str] = set()  # of those, the ones that the pipeline no longer has
        self.changed: dict[str, str] = {}  # how sinks were changed: `schedule.CHANGED`
        self.slow = False  # each row takes long, so few of them fit into a transaction
        self.cut_off: set[tuple[int, str]] = (
            set()
        )  # executors and the systems that they cannot reach
        self.stuck: set[str] = set()  # sinks with branches whose commit is never proven

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
            self.backups.keep()

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

    def checkpoint_files(
        self, effect: Callable[[str, Callable[[], object]], object]
    ) -> FileCheckpoint:
        return checkpoint_on(self.checkpoint_disk, CHECKPOINT, effect)

    def sinks(self, wire: Wire, clock: Callable[[], float]) -> dict[str, Participant]:
        made: dict[str, Participant] = {}
        for name, server in self.servers.items():
            way = self._way_to(name, wire)
            if name in self.removed | self.absent or self.changed.get(name) == "remove":
                continue
            if isinstance(server, KafkaServer):
                sink = KafkaSink(server, way, clock)
            elif isinstance(server, DatabaseServer):
                sink = Database(server, way)
            else:
                sink = Blind(server, way, clock)
            sink.name = NEW + name if self.changed.get(name) == "rename" else name
            if self.changed.get(name) == "downgrade":
                sink.semantic = Semantic.AT_LEAST_ONCE
            made[sink.name] = sink
        return made

    def change_sink(self, fault: Fault) -> None:
        """Rename, remove or downgrade a sink. The next driver has the change."""
        name = list(self.servers)[fault.arg % len(self.servers)]
        self.changed[name] = fault.kind
        self.oracle.count(f"sink changed: {fault.kind}")

    def _way_to(self, name: str, wire: Wire) -> Wire:
        def send(label: str, request: Callable[[], T]) -> T:
            return wire(label, request if name not in self.gone else _unreachable)

        return send

    def has_batch(self, batch: int) -> bool:
        return batch < len(self.sizes)

    def cut(self, driver: Driver) -> dict[str, str]:
        """Return what cuts the rows by default: the size of the driver's cluster."""
        return {"cores": str(self.drivers.index(driver))} if self.config.resized else {}

    def planned(self, batch: int, start: int, driver: Driver) -> Range:
        """Plan a batch as Spark does, from the end of the previous one. A second plan differs."""
        differs = self.replans + (self.drivers.index(driver) if self.checkpoint.swallows else 0)
        return start, start + self.sizes[batch] + differs % 2

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
        """Choose the driver that continues after a switch: a paused one, or a new one."""
        others = [driver for driver in self._paused() if driver is not now]
        if others and self.switched % 2:
            self.oracle.count("paused driver went on")
            return others[self.switched // 2 % len(others)]
        return self._new_driver()

    def _complete(self) -> bool:
        return len(self.checkpoint.commits) == len(self.sizes)

    def _heal(self) -> None:
        """Deliver what is late, wake paused drivers, then start once more and check."""
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
                # Log and checkpoint may no longer match. The next start finds out.
                self.sizes.append(1)
            self._finish()
        self._replay_log()
        position = max((end for _, end in self.checkpoint.offsets.values()), default=0)
        self.oracle.final(None if self.stopped else position)
        self.oracle.count("pipeline stopped for good" if self.stopped else "pipeline came through")

    def _finish(self) -> None:
        """Start once more, and again while an operator has to intervene."""
        while True:
            driver = self._new_driver()
            driver.resume()
            self._judge(driver)
            if self.stopped or (driver.error is None and self._complete()):
                return

    def _replay_log(self) -> None:
        """Check that the log is readable and agrees with the oracle."""
        state = self.open_log(_directly, "reader").load()
        seen = {b: s for b, s in self.oracle.stories.items() if b >= self.oracle.batch_floor}
        self.oracle.require(set(seen) == set(state.batches), "log and oracle know other batches")

    def _bury(self) -> None:
        self.withdrawal.die()
        for driver in self._paused():
            driver.dead = True
            driver.resume()

    # Faults.

    def crash_machine(self, arg: int) -> None:
        """Stop the drivers' machine; its disk keeps only what was synced."""
        self.oracle.count("machine crashed")
        if self.config.log != "file":
            return
        for driver in self.drivers:
            driver.dead = True
        self.withdrawal.die()
        before = len(self.disk.live)
        self.disk.crash(arg)
        if len(self.disk.live) != before:
            self.oracle.count("disk forgot something")
        files = {path: file for path, file in self.disk.live.items() if file is not None}
        records = {
            number: file.data
            for path, file in files.items()
            for number in record_numbers([path.rpartition("/")[2]])
        }
        try:
            self.oracle.remembered(records)
        except LogCorrupt as torn:
            self.oracle.fail(f"the disk kept half of a published record: {torn}")

    def apply_fault(self, fault: Fault) -> None:
        """Make a system act by itself, or deliver an old request."""
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
            case "slow":
                self.slow = True
            case "cut_off":
                self.cut_off.add((fault.arg // 2 % EXECUTORS, server.sink))
                self.oracle.count("executor cut off")
            case "gone":
                self.gone.add(server.sink)
                self.oracle.gone.add(server.sink)
                self.oracle.count("system gone for good")
            case "stuck":
                self.stuck.add(server.sink)
                server.stick()
                self.oracle.count("branches stuck for good")
            case "slow_markers" if isinstance(server, KafkaServer):
                server.slow = True
            case "forget_ids" if isinstance(server, KafkaServer):
                server.forget_ids()
            case "retention" if isinstance(server, KafkaServer):
                server.start = server.end
                self.oracle.count("witness removed")
            case _:
                pass

    def forget(self, arg: int) -> None:
        """Lose the newest plan of Spark's checkpoint, or the newest commit, or both.

        A file is left empty, in half or not at all. The end of a batch is lost only if Spark has
        written no plan since: a later batch begins after it was synced.
        """
        for driver in self.drivers:
            driver.dead = True
        lost = self.checkpoint.forget(plan=arg % 4, commit=arg // 4 % 4)
        if lost:
            self.oracle.count("checkpoint forgot something")

    def exchange(self, arg: int) -> bool:
        """Add the sinks that the pipeline does not have. Remove the first one if `arg` is odd.

        A sink is removed only when its batches are finished and it has no open branch.
        """
        first, *_ = self.servers
        finished = all(history.finished for history in self.oracle.stories.values())
        if arg % 2 and (not finished or self.servers[first].open_branches()):
            return False
        removed = {first} if arg % 2 else set[str]()
        if self.absent == removed:
            return False
        self.absent = removed
        self.oracle.count("sinks exchanged")
        return True

    def _deliver(self, index: int) -> None:
        label, request = self.limbo.pop(index)
        self.oracle.count("late request arrived")
        # The task that sent it does not know of it, so nobody avoids the id.
        self.oracle.late = label == "init again"
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
            self.checkpoint.put(None, {}, ())

    def start_on_copy(self) -> None:
        """Copy the whole checkpoint and start a second pipeline on it."""
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
        except LogMismatch:
            self.oracle.count("copy refused")
        else:
            self.oracle.fail("a driver started on the copy of a log")
        for path in [p for p in self.disk.live if p.startswith(f"{LOG}-copy")]:
            del self.disk.live[path]

    # Judging how a driver ended, and applying the remedy in its message.
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
        if (self.gone or self.stuck) and isinstance(error, InDoubt | Unavailable | Rejected):
            self._give_up()
            return
        match error:
            case LogMismatch() if _FORMER.search(str(error)):
                self._settle_former_sinks(decided="no such sink" in str(error))
            case LogMismatch() if self.oracle.counts["Withdrawn"] and withdrawn(error):
                self.withdrawal.repeat(self, error)
            case OutOfTime():
                self._replan(driver.batch)
            case LogMismatch() if self.backups.newest is not None:
                for other in self.drivers:  # one that was reading has seen a part of each log
                    other.dead = True
                self.backups.restore_newest()
            case LogMismatch():
                self._restore_checkpoint()
            case GuaranteeBroken():
                self._rule(driver.batch, error)
            case InDoubt() if not driver.stopping:
                self._rule(driver.batch, error)
            case _:
                pass

    def _explained(self, driver: Driver, error: BaseException) -> bool:
        """Return whether an earlier fault justifies this error."""
        match error:
            case SparkConflict():
                return len(self.drivers) > 1 or driver.hurt
            case Fenced():
                return self.oracle.last_writer != driver.name
            case LogMismatch() if _FORMER.search(str(error)):
                self.oracle.count("former sink refused")
                return bool(self.changed or self.removed or self.absent)
            case LogMismatch() if self.backups.newest and (opened := _OPENED.search(str(error))):
                return int(opened[2]) < int(opened[1]) <= self.backups.newest.account["owner"]
            case LogMismatch() if self.oracle.counts["Withdrawn"] and withdrawn(error):
                return True
            case OutOfTime():
                return self.slow
            case LogMismatch() if self.backups.newest is not None and _accuses(error):
                later = "was opened by generation" in str(error)  # an open branch accuses too
                return later or bool(self.oracle.unknown_commits())
            case LogMismatch():
                # The checkpoint was changed from outside, or two drivers wrote to it.
                return self.replans > 0 or self.checkpoint.swallows
            case LogCorrupt():
                return re.search("failed to make .* durable", str(error)) is not None
            case InDoubt():
                # An operator may have decided before this driver reported it.
                ruled = any(history.excused for history in self.oracle.stories.values())
                return driver.stopping or ruled or self._unprovable()
            case GuaranteeBroken():
                return self.config.salted or self.config.shifting
            case Rejected() | Unavailable():
                return driver.hurt or driver.stopping or bool(self.gone)
            case _:
                return False

    def _unprovable(self) -> bool:
        """Return whether a decided branch has ended and its system cannot say how."""
        return any(
            self.servers[key[0]].state_of(key) != "open"
            and not self.servers[key[0]].proves(receipt)
            for history in self.oracle.stories.values()
            if not history.finished
            for key, receipt in history.receipts.items()
        )

    def _replan(self, batch: int) -> None:
        """Lower the limit of the source, and have Spark plan the batch anew."""
        self.oracle.count("batch out of time")
        self.sizes[batch : batch + 1] = [1] * max(1, self.sizes[batch])
        self.withdrawal.perform(self, BOTH)

    def _restore_checkpoint(self) -> None:
        """Put the checkpoint back that belongs to the log."""
        stories = self.oracle.stories
        self.checkpoint.put(
            self.oracle.query,
            {batch: history.text for batch, history in stories.items()},
            {batch for batch, history in stories.items() if history.finished},
        )

    def _settle_former_sinks(self, *, decided: bool) -> None:
        """Put changed sinks back. Forget the others: nothing of them is open, or they are gone."""
        self.changed.clear()
        if decided:
            self.absent = set()
        log = self.open_log(_directly, "operator")
        places = log.load().places
        left = tuple(place for place in places if place.sink not in self.removed | self.absent)
        if left != places:
            log.append(Opened(left))

    def _rule(self, batch: int, error: PoundlockError) -> None:
        """Decide by what really happened, as an operator would."""
        unfinished = [b for b, history in self.oracle.stories.items() if not history.finished]
        batch = unfinished[0] if unfinished else batch
        self._rulings += 1
        if self.config.operator_decision is None or self._rulings > 3:
            self.stopped = True
            return
        operator_decision = OperatorDecision(self.config.operator_decision)
        if isinstance(error, InDoubt) or self.oracle.stories[batch].excused:
            operator_decision = OperatorDecision.ACCEPT_LOSS
        log = self.open_log(_directly, "operator")
        log.load()
        named = re.findall(r"--sink (\S+)", str(error))  # the message says which
        log.append(
            OperatorDecided(batch, operator_decision, tuple(named or self.servers), by="operator")
        )

    def _give_up(self) -> None:
        """Accept the loss of what a system never answers for, and remove a system that is gone."""
        self.removed |= self.gone
        log = self.open_log(_directly, "operator")
        for history in log.load().unfinished:
            sinks = {receipt.sink for receipt in history.receipts} & (self.gone | self.stuck)
            if sinks - history.operator_decisions.keys():
                batch, accepted = history.decided.batch, OperatorDecision.ACCEPT_LOSS
                log.append(OperatorDecided(batch, accepted, tuple(sorted(sinks)), by="operator"))
                self.oracle.count("loss accepted for good")


def _accuses(error: LogMismatch) -> bool:
    return "older state" in str(error) or "is new, but" in str(error)


def _unreachable() -> NoReturn:
    raise Unavailable("the system is gone for good")


def _directly(label: str, request: Callable[[], T]) -> T:
    return request()
