"""The reference sink: a complete participant in the memory of one process, for tests and examples.

It behaves like a correct server: prepared branches outlive their writer, commit and abort may be
repeated, and a finished branch leaves a witness. Tasks must run in the driver's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.participant import (
    Column,
    Commitment,
    Participant,
    PreparedBranch,
    Semantic,
    Writer,
)
from poundlock.core.protocol import BranchState, LogState


@dataclass
class Held:
    """A branch inside the memory system."""

    namespace: Namespace
    generation: int
    batch: int
    rows: list[Any]
    state: BranchState = BranchState.PREPARED
    expires_at: float | None = None


@dataclass
class MemorySystem:
    """The server, which several Memory sinks and several drivers share."""

    branches: dict[str, Held] = field(default_factory=dict[str, Held])
    visible: list[Any] = field(default_factory=list[Any])
    forgets: bool = False  # a system without a witness, once a branch is over

    def expire(self, now: float) -> None:
        """Abort branches that have been open for too long, as servers do."""
        for held in self.branches.values():
            due = held.expires_at is not None and now >= held.expires_at
            if held.state is BranchState.PREPARED and due:
                held.state = BranchState.ABORTED


class Memory(Participant):
    """Rows into a list. `system` stands for the server and outlives the sink."""

    system = "Memory"
    commitment = Commitment.TRANSACTIONAL
    after_restore = ""

    def __init__(
        self,
        name: str,
        system: MemorySystem,
        *,
        time_out_s: float | None = None,
        semantic: Semantic = Semantic.EXACTLY_ONCE,
        clock: Callable[[], float] = time.time,
    ):
        self.name = checked_name("sink name", name)
        self.server = system
        self.semantic = semantic
        self.time_out_s = time_out_s
        self.clock = clock

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {name: column.sql for name, column in columns.items()}

    def begin(self, branch: Branch) -> MemoryWriter:
        return MemoryWriter(self, branch)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        self.server.expire(self.clock())
        found = [self.server.branches.get(receipt.id) for receipt in receipts]
        return [
            None if held and held.state is BranchState.PREPARED else "it is no longer open"
            for held in found
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        self.server.expire(self.clock())
        return [self._commit_one(receipt) for receipt in receipts]

    def _commit_one(self, receipt: Receipt) -> BranchState:
        held = self.server.branches.get(receipt.id)
        if held is None or (self.server.forgets and held.state is not BranchState.PREPARED):
            return BranchState.NO_WITNESS
        if held.state is BranchState.PREPARED:
            held.state = BranchState.COMMITTED
            self.server.visible.extend(held.rows)
        return held.state

    def find(self, namespace: Namespace) -> list[Stray]:
        return [
            Stray(self.name, id_, held.generation, "prepared", expires_at=held.expires_at)
            for id_, held in self.server.branches.items()
            if held.namespace == namespace
            and held.state is BranchState.PREPARED
            and id_.split("/")[1] == self.name
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states: list[BranchState] = []
        for stray in strays:
            held = self.server.branches[stray.id]
            if held.state is BranchState.PREPARED:
                held.state = BranchState.ABORTED
            states.append(held.state)
        return states

    def newest_generation(self, namespace: Namespace) -> int:
        mine = (held for held in self.server.branches.values() if held.namespace == namespace)
        return max((held.generation for held in mine), default=0)

    def committed_beyond(self, state: LogState) -> str | None:
        if state.generation is None or self.server.forgets:
            return None
        committed = (
            (held.batch, id_)
            for id_, held in self.server.branches.items()
            if held.namespace == state.generation.namespace
            and held.state is BranchState.COMMITTED
            and id_.split("/")[1] == self.name
        )
        return state.first_unexplained(self.name, committed)

    def newest_batch(self, namespace: Namespace) -> int | None:
        committed = (
            held.batch
            for id_, held in self.server.branches.items()
            if held.namespace == namespace
            and held.state is BranchState.COMMITTED
            and id_.split("/")[1] == self.name
        )
        return None if self.server.forgets else max(committed, default=None)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        if self.server.forgets:
            return frozenset()
        return frozenset(
            held.namespace.identity
            for id_, held in self.server.branches.items()
            if held.namespace.pipeline == pipeline
            and held.state is BranchState.COMMITTED
            and id_.split("/")[1] == self.name
        )


class MemoryWriter(Writer):
    """Gathers rows, then leaves them with the system."""

    def __init__(self, sink: Memory, branch: Branch):
        self._sink, self._branch = sink, branch
        self._rows: list[Any] = []
        self._began_at = sink.clock()

    def write(self, rows: Any) -> None:
        self._rows.extend(rows.to_pylist() if hasattr(rows, "to_pylist") else rows)

    def prepare(self) -> PreparedBranch | None:
        sink, transaction = self._sink, self._branch.transaction
        if sink.semantic is not Semantic.EXACTLY_ONCE:
            sink.server.visible.extend(self._rows)
            return None
        branch_id = (
            f"{transaction.namespace.identity}/{sink.name}/{transaction.generation}."
            f"{transaction.batch}.{transaction.attempt}.{self._branch.task_attempt}"
        )
        ends = None if sink.time_out_s is None else self._began_at + sink.time_out_s
        sink.server.branches[branch_id] = Held(
            transaction.namespace,
            transaction.generation,
            transaction.batch,
            self._rows,
            expires_at=ends,
        )
        return PreparedBranch(branch_id, {}, began_at=self._began_at, expires_at=ends)

    def lifetime(self) -> tuple[float, float] | None:
        time_out = self._sink.time_out_s
        return None if time_out is None else (self._began_at, self._began_at + time_out)

    def abort(self) -> None:
        self._rows.clear()
