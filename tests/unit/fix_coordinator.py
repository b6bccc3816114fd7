"""A coordinator over sinks in memory, for its unit tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from poundlock.core.checkpoint import Plan
from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import Branch, Fingerprint, Receipt, Stray, Transaction
from poundlock.core.protocol import BranchState, Step
from poundlock.core.surroundings import Settings
from poundlock.errors import PoundlockError
from poundlock.sinks.memory import Memory, MemorySystem


def plan(batch: int) -> Plan:
    """Return a plan of Spark's for a batch."""
    return Plan(f"v1\n{{}}\n{batch}".encode())


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.set_back_s = 0.0  # by a person, or by the time server
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now - self.set_back_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        assert len(self.slept) < 1000, "it waits forever"


class Sink(Memory):
    """The reference sink, with answers that a test can set."""

    def __init__(self, name: str, clock: Clock, *, time_out_s: float | None = None):
        super().__init__(name, MemorySystem(), time_out_s=time_out_s, clock=clock)
        self.asked: list[str] = []  # ids, in the order of the commits
        self.swept: list[str] = []
        self.answer: Callable[[Receipt], BranchState | PoundlockError | None] = lambda receipt: None
        self.refuse: str | None = None
        self.find_error: PoundlockError | None = None

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return [self.refuse] * len(receipts) if self.refuse else super().check(receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        states: list[BranchState] = []
        for receipt in receipts:
            self.asked.append(receipt.id)
            answer = self.answer(receipt)
            if isinstance(answer, PoundlockError):
                raise answer
            states.append(answer or super()._commit_one(receipt))
        return states

    def find(self, namespace: object) -> list[Stray]:
        if self.find_error is not None:
            raise self.find_error
        return super().find(namespace)  # type: ignore[arg-type]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        self.swept += [stray.id for stray in strays]
        return super().abort(strays)


class Job:
    """Writes the same rows to every sink, one task a row."""

    def __init__(self, sinks: Mapping[str, Memory], rows: Sequence[int], *, stateful: bool = False):
        self._sinks, self.rows, self._stateful = sinks, rows, stateful
        self.written: list[Transaction] = []
        self.drained = 0
        self.settled = True
        self.fail: Callable[[int], PoundlockError | None] = lambda attempt: None

    @property
    def stateful(self) -> bool:
        return self._stateful

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        self.written.append(transaction)
        receipts: list[Receipt] = []
        for name in sorted(sinks):
            for task, row in enumerate(self.rows):
                number = 100 * len(self.written) + task
                writer = self._sinks[name].begin(Branch(transaction, name, task, number))
                writer.write([row])
                prepared = writer.prepare()
                if prepared is not None:
                    receipts.append(
                        Receipt(
                            name,
                            prepared.id,
                            task,
                            Fingerprint(1, row),
                            prepared.handle,
                            prepared.began_at,
                            prepared.expires_at,
                        )
                    )
        error = self.fail(len(self.written))
        if error is not None:
            raise error
        return Votes(tuple(receipts), self._totals(), self.settled)

    def drain(self) -> Mapping[str, Fingerprint]:
        self.drained += 1
        return self._totals()

    def _totals(self) -> dict[str, Fingerprint]:
        return {name: Fingerprint(len(self.rows), sum(self.rows)) for name in self._sinks}


class Bench:
    """A coordinator over sinks `a` and `b` that has taken over."""

    def __init__(self, names: Sequence[str] = ("a", "b"), **settings: float):
        self.clock = Clock()
        self.sinks = {name: Sink(name, self.clock) for name in names}
        self.records: dict[int, bytes] = {}
        self.stopping = False
        self.steps: list[Step] = []
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.coordinator = self.driver()
        self.take_over()

    def driver(self) -> Coordinator:
        return Coordinator(
            MemoryLog(self.records, clock=self.clock),
            self.sinks,
            settings=self.settings,
            observe=lambda step, facts: self.steps.append(step),
            stopping=lambda: self.stopping,
            clock=self.clock,
            monotonic=self.clock.monotonic,
            sleep=lambda seconds: self.clock.sleep(seconds),  # a test may replace it
        )

    def take_over(self) -> None:
        self.coordinator.take_over("lock", query=lambda: "query-1", owner="here:1")

    def restart(self) -> None:
        self.coordinator = self.driver()
        self.take_over()

    def run(self, batch: int = 0, rows: Sequence[int] = (1, 2), **kind: bool) -> Job:
        job = Job(self.sinks, rows, **kind)
        self.coordinator.run(batch, plan(batch), job)
        return job

    def kinds(self) -> Sequence[type[object]]:
        log = MemoryLog(self.records)
        return [type(entry.record) for entry in log.entries()][1:]
