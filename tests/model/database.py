"""A database with prepared transactions, with a witness table and without one.

`COMMIT PREPARED` of a name that is not prepared answers 42704, whether it was committed or rolled back:
PostgreSQL and MariaDB alike. `Database` asks its witness table then. `Blind` is the reference sink of
the library as it behaves without a witness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from poundlock.core.model import Branch, Namespace, Receipt, Stray
from poundlock.core.participant import Commitment, Participant, PreparedBranch, Writer
from poundlock.core.protocol import BranchState, LogState
from poundlock.sinks.memory import Held, Memory, MemorySystem, MemoryWriter

from .systems import ALIEN, ELSEWHERE, FOREIGN, PROTOCOL, Key, Row, Watcher, Wire

UNDEFINED_OBJECT = "42704"
LOCK_NOT_AVAILABLE = "55P03"


class DatabaseServer:
    """Prepared branches, the table, and the witness table, whose key is unique."""

    witnesses = True
    remembers = True

    def __init__(self, sink: str, watcher: Watcher):
        self.sink, self.watcher = sink, watcher
        self.prepared: dict[str, list[Row]] = {_gid(FOREIGN, 1, sink, "0"): []}
        self.table: list[Row] = []
        # Committed, or the tombstone.
        self.witness: dict[str, str] = {_gid(FOREIGN, 1, sink, "0-1-0"): "committed"}
        self.pruned: dict[str, str] = {}
        self.stuck: set[str] = set()  # can be rolled back, but not committed
        self.last: str | None = None

    def prepare(self, gid: str, rows: list[Row]) -> None:
        self.prepared[gid] = rows
        self.last = gid
        self.watcher.prepared((self.sink, gid, None))

    def commit_prepared(self, gid: str) -> str | None:
        if gid not in self.prepared:
            return UNDEFINED_OBJECT
        if gid in self.stuck:
            return LOCK_NOT_AVAILABLE
        self.table.extend(self.prepared.pop(gid))
        self.witness[gid] = "committed"
        self.watcher.committed((self.sink, gid, None))
        return None

    def rollback_prepared(self, gid: str, by: str = PROTOCOL) -> str | None:
        if gid not in self.prepared:
            return UNDEFINED_OBJECT
        del self.prepared[gid]
        self.watcher.aborted((self.sink, gid, None), by)
        return None

    def insert_tombstone(self, gid: str) -> str:
        """Return the mark that the key now has: the first one inserted."""
        return self.witness.setdefault(gid, "aborted")

    def prune(self, namespace: Namespace, floor: int) -> None:
        """Forget the batches below a floor, except the newest that was committed."""
        committed = [gid for gid, mark in self.witness.items() if mark == "committed"]
        newest = max((g for g in committed if _whose(g) == namespace), key=_batch, default=None)
        for gid in [g for g in self.witness if _whose(g) == namespace and _batch(g) < floor]:
            if gid != newest:
                self.pruned[gid] = self.witness.pop(gid)

    # As the oracle sees it.

    def state_of(self, key: Key) -> str:
        if key[1] in self.prepared:
            return "open"
        marks = {**self.pruned, **self.witness}
        return "committed" if marks.get(key[1]) == "committed" else "aborted"

    def visible(self) -> list[Row]:
        return self.table

    def open_branches(self) -> list[Key]:
        return [(self.sink, gid, None) for gid in list(self.prepared)[self.bystander_lives() :]]

    def bystander_lives(self) -> bool:
        return _gid(FOREIGN, 1, self.sink, "0") in self.prepared

    def expire(self, key: Key) -> None:
        self.rollback_prepared(key[1], ELSEWHERE)

    def proves(self, receipt: Receipt) -> bool:
        return True

    def stick(self) -> None:
        self.stuck.update(self.prepared)

    def straggle(self) -> None:
        if self.last is not None:
            self.prepared[f"{self.last}-late"] = [ALIEN]

    def tick(self) -> None:
        pass


def _gid(namespace: Namespace, generation: int, sink: str, rest: str) -> str:
    return f"{namespace.pipeline}.{namespace.identity}.{generation}.{sink}.{rest}"


def _whose(gid: str) -> Namespace:
    pipeline, identity, *_ = gid.split(".")
    return Namespace(pipeline, identity)


def _batch(gid: str) -> int:
    return int(gid.split(".")[4].split("-")[0])


class Database(Participant):
    commitment = Commitment.TRANSACTIONAL

    def __init__(self, server: DatabaseServer, wire: Wire):
        self.name, self.server, self.wire = server.sink, server, wire

    def project(self, columns: Mapping[str, str]) -> dict[str, str]:
        return dict(columns)

    def begin(self, branch: Branch) -> DatabaseWriter:
        transaction = branch.transaction
        rest = f"{transaction.batch}-{transaction.attempt}-{branch.task_attempt}"
        gid = _gid(transaction.namespace, transaction.generation, self.name, rest)
        return DatabaseWriter(self, gid)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        prepared = self.wire("check", lambda: set(self.server.prepared))
        return [None if r.id in prepared else "it is not prepared" for r in receipts]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [self._commit_one(receipt.id) for receipt in receipts]

    def _commit_one(self, gid: str) -> BranchState:
        answer = self.wire("commit", lambda: self.server.commit_prepared(gid))
        if answer is None:
            return BranchState.COMMITTED
        if answer == LOCK_NOT_AVAILABLE:
            return BranchState.PREPARED
        mark = self.wire("witness", lambda: self.server.insert_tombstone(gid))
        self.server.watcher.count(f"42704, witness {mark}")
        return BranchState.COMMITTED if mark == "committed" else BranchState.ABORTED

    def open_place(self) -> str:
        return self.wire("place", lambda: self.server.sink)

    def find(self, namespace: Namespace) -> list[Stray]:
        strays: list[Stray] = []
        mine = (namespace.pipeline, namespace.identity, self.name)
        for gid in self.wire("find", lambda: list(self.server.prepared)):
            pipeline, identity, generation, sink, _ = gid.split(".")
            if (pipeline, identity, sink) == mine:
                strays.append(Stray(sink, gid, int(generation), "prepared"))
        return strays

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return [self._abort_one(stray.id) for stray in strays]

    def _abort_one(self, gid: str) -> BranchState:
        if self.wire("abort", lambda: self.server.rollback_prepared(gid)) is None:
            return BranchState.ABORTED
        mark = self.wire("witness", lambda: self.server.insert_tombstone(gid))
        return BranchState.COMMITTED if mark == "committed" else BranchState.ABORTED

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        witness = self.wire("remembered", lambda: dict(self.server.witness))
        for gid, mark in witness.items():
            ours = _whose(gid) == state.generation.namespace and gid.split(".")[3] == self.name
            ours = ours and mark == "committed"
            if ours and not state.explains(self.name, _batch(gid), gid):
                return gid
        return None

    def logs_of(self, pipeline: str) -> frozenset[str]:
        witness = self.wire("remembered", lambda: dict(self.server.witness))
        spaces = (_whose(gid) for gid, mark in witness.items() if mark == "committed")
        return frozenset(it.identity for it in spaces if it.pipeline == pipeline)

    def prune(self, namespace: Namespace, floor: int) -> None:
        self.wire("prune", lambda: self.server.prune(namespace, floor))


class DatabaseWriter(Writer):
    def __init__(self, sink: Database, gid: str):
        self.sink, self.gid, self.rows = sink, gid, list[Row]()

    def write(self, rows: Any) -> None:
        self.rows.extend(rows)

    def prepare(self) -> PreparedBranch:
        self.sink.wire("prepare", lambda: self.sink.server.prepare(self.gid, self.rows))
        return PreparedBranch(self.gid, {}, began_at=0.0, expires_at=None)

    def abort(self) -> None:
        pass


class BlindServer:
    """The library's reference system, as it is without a witness."""

    witnesses = False
    remembers = False

    def __init__(self, sink: str, watcher: Watcher):
        self.sink, self.watcher = sink, watcher
        self.memory = MemorySystem(forgets=True)
        self._foreign = f"{FOREIGN.identity}/{sink}/1.0.1.0"
        self.memory.branches[self._foreign] = Held(FOREIGN, 1, 0, [])

    def watched(self, id_: str, effect: Callable[[], BranchState], by: str) -> BranchState:
        """Apply `effect`, and notify the watcher if it ended the branch."""
        held = self.memory.branches.get(id_)
        before = held and held.state
        answer = effect()
        if held is not None and before is BranchState.PREPARED:
            if held.state is BranchState.COMMITTED:
                self.watcher.committed((self.sink, id_, None))
            elif held.state is BranchState.ABORTED:
                self.watcher.aborted((self.sink, id_, None), by)
        return answer

    def state_of(self, key: Key) -> str:
        state = self.memory.branches[key[1]].state
        return "open" if state is BranchState.PREPARED else state.value

    def visible(self) -> list[Row]:
        return self.memory.visible

    def open_branches(self) -> list[Key]:
        return [
            (self.sink, id_, None)
            for id_, held in self.memory.branches.items()
            if held.state is BranchState.PREPARED and id_ != self._foreign
        ]

    def bystander_lives(self) -> bool:
        return self.memory.branches[self._foreign].state is BranchState.PREPARED

    def expire(self, key: Key) -> None:
        self.memory.branches[key[1]].state = BranchState.ABORTED
        self.watcher.aborted(key, ELSEWHERE)

    def proves(self, receipt: Receipt) -> bool:
        return False

    def stick(self) -> None:
        pass

    def straggle(self) -> None:
        last = list(self.memory.branches)[-1]
        if last != self._foreign:
            held = self.memory.branches[last]
            late = Held(held.namespace, held.generation, held.batch, [ALIEN])
            self.memory.branches[f"{last}-late"] = late

    def tick(self) -> None:
        pass


class Blind(Memory):
    """The reference sink, each of its requests sent over the wire."""

    def __init__(self, server: BlindServer, wire: Wire, clock: Callable[[], float]):
        super().__init__(server.sink, server.memory, clock=clock)
        self.blind, self.wire = server, wire

    def begin(self, branch: Branch) -> BlindWriter:
        return BlindWriter(self, branch)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return self.wire("check", lambda: super(Blind, self).check(receipts))

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [self._commit_watched(receipt) for receipt in receipts]

    def _commit_watched(self, receipt: Receipt) -> BranchState:
        effect = partial(super()._commit_one, receipt)
        return self.wire("commit", lambda: self.blind.watched(receipt.id, effect, PROTOCOL))

    def find(self, namespace: Namespace) -> list[Stray]:
        return self.wire("find", lambda: super(Blind, self).find(namespace))

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return [self._abort_watched(stray) for stray in strays]

    def _abort_watched(self, stray: Stray) -> BranchState:
        abort = super().abort
        return self.wire(
            "abort", lambda: self.blind.watched(stray.id, lambda: abort([stray])[0], PROTOCOL)
        )


class BlindWriter(MemoryWriter):
    def __init__(self, sink: Blind, branch: Branch):
        super().__init__(sink, branch)
        self._wire = sink.wire

    def prepare(self) -> PreparedBranch | None:
        return self._wire("prepare", super().prepare)
