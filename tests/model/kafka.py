"""A model of Kafka: transactional ids, producer ids and epochs, EndTxn in versions 4 and 5.

`KafkaServer` answers as brokers 4.2.1 and 4.3.1 answered in each case. One topic with one partition per
sink is enough, because only offsets, markers and the last stable offset matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poundlock.core.model import Branch, Lane, Namespace, Receipt, Stray, Transaction
from poundlock.core.participant import Commitment, Participant, PreparedBranch, Writer
from poundlock.core.protocol import BranchState, LogState
from poundlock.errors import ProducerFenced

from .systems import ALIEN, ELSEWHERE, FOREIGN, PROTOCOL, Key, Row, Watcher, Wire

NONE = "NONE"
INVALID_TXN_STATE = "INVALID_TXN_STATE"
PRODUCER_FENCED = "PRODUCER_FENCED"
INVALID_PRODUCER_ID_MAPPING = "INVALID_PRODUCER_ID_MAPPING"
CONCURRENT_TRANSACTIONS = "CONCURRENT_TRANSACTIONS"


@dataclass(eq=False)
class Txn:
    """One transaction and its records, which take consecutive offsets."""

    key: Key
    rows: list[Row]
    first: int
    last: int
    outcome: str = "open"
    marked: bool = False  # the end marker is in the partition


@dataclass
class Meta:
    """What the coordinator keeps of a transactional id: only its latest transaction."""

    pid: int
    epoch: int
    state: str = "Empty"
    txn: Txn | None = None


class KafkaServer:
    """Coordinator and partition of one topic."""

    witnesses = True

    def __init__(self, sink: str, watcher: Watcher):
        self.remembers = True  # until ids expire
        self.sink, self.watcher = sink, watcher
        self.ids: dict[str, Meta] = {}
        self.txns: dict[Key, Txn] = {}
        self.end = 0  # the next offset
        self.start = 0  # the first offset that retention has kept
        self.lost_tail = 0  # what a commit wrote before this offset is never proven to be readable
        self.slow = False  # the next end writes its markers later
        self._next_pid = 0
        # Another pipeline's open transaction, in another topic.
        self._foreign = transactional_id(FOREIGN, 1, sink, "0.0.0")
        elsewhere = Txn((sink, self._foreign, None), [], 0, 0)
        self.ids[self._foreign] = Meta(0, 0, "Ongoing", elsewhere)

    def init_producer_id(self, id_: str, by: str = PROTOCOL) -> tuple[int, int]:
        meta = self.ids.get(id_)
        if meta is None:
            self._next_pid += 1
            meta = self.ids[id_] = Meta(self._next_pid, -1)
        elif meta.state == "Ongoing":
            self._end(meta, "aborted", by)
            meta.epoch += 1
        self._write_markers(meta)
        meta.epoch, meta.state, meta.txn = meta.epoch + 1, "Empty", None
        return meta.pid, meta.epoch

    def produce(self, id_: str, pid: int, epoch: int, rows: list[Row]) -> tuple[int, int]:
        """Append records; return first and last offset."""
        meta = self.ids.get(id_)
        if meta is None or (meta.pid, meta.epoch) != (pid, epoch):
            raise ProducerFenced(f"{id_} is used by another producer", sink=self.sink)
        if meta.txn is None or meta.state != "Ongoing":
            key = (self.sink, id_, (pid, epoch))
            meta.txn = self.txns[key] = Txn(key, [], self.end, self.end)
            meta.state = "Ongoing"
        meta.txn.rows.extend(rows)
        self.end += len(rows)
        meta.txn.last = self.end - 1
        return meta.txn.first, meta.txn.last

    def end_txn(
        self, id_: str, pid: int, epoch: int, *, commit: bool, version: int, by: str = PROTOCOL
    ) -> str:
        meta = self.ids.get(id_)
        if meta is None or meta.pid != pid:
            return INVALID_PRODUCER_ID_MAPPING
        bumped = meta.epoch == epoch + 1
        same = meta.epoch == epoch
        ending, ended = meta.state.startswith("Prepare"), meta.state.startswith("Complete")
        if version >= 5:
            valid = bumped if ending else bumped or same if ended else same
        else:
            valid = same
        if not valid:
            return PRODUCER_FENCED
        if meta.state == "Ongoing":
            self._end(meta, "committed" if commit else "aborted", by)
            if version >= 5:
                meta.epoch += 1
            if not self.slow:
                self._write_markers(meta)
            self.slow = False
            return NONE
        if not meta.state.endswith("Commit" if commit else "Abort"):
            return INVALID_TXN_STATE
        if ending:
            return CONCURRENT_TRANSACTIONS
        return NONE if bumped or version < 5 else INVALID_TXN_STATE

    def _end(self, meta: Meta, outcome: str, by: str) -> None:
        assert meta.txn is not None and meta.txn.outcome == "open"
        meta.txn.outcome = outcome
        meta.state = "PrepareCommit" if outcome == "committed" else "PrepareAbort"
        if outcome == "committed":
            self.watcher.committed(meta.txn.key)
        else:
            self.watcher.aborted(meta.txn.key, by)

    def _write_markers(self, meta: Meta) -> None:
        if meta.state.startswith("Prepare"):
            assert meta.txn is not None
            meta.state = meta.state.replace("Prepare", "Complete")
            meta.txn.marked = True
            self.end += 1

    def describe(self, id_: str) -> tuple[str, int, int] | None:
        meta = self.ids.get(id_)
        return meta and (meta.state, meta.pid, meta.epoch)

    def list_open(self) -> list[tuple[str, int, int]]:
        return [(id_, pid, epoch) for id_, state, pid, epoch in self.list() if state == "Ongoing"]

    def list(self) -> list[tuple[str, str, int, int]]:
        return [(id_, meta.state, meta.pid, meta.epoch) for id_, meta in self.ids.items()]

    @property
    def stable(self) -> int:
        """The last stable offset: where the oldest transaction without a marker begins."""
        return min((txn.first for txn in self.txns.values() if not txn.marked), default=self.end)

    def read(self, offset: int, pid: int) -> str | None:
        """Return how the transaction of a record ended, or None if the record no longer exists."""
        if offset < self.start:
            return None
        for txn in self.txns.values():
            if txn.first <= offset <= txn.last and txn.key[2][0] == pid:
                if self.stable <= offset:
                    return "not stable"
                return txn.outcome
        return None

    def forget_ids(self) -> None:
        """Expire ids that are not in use, as Kafka does after seven days."""
        for id_ in [i for i, meta in self.ids.items() if meta.state.startswith("Complete")]:
            del self.ids[id_]
            self.remembers = False

    # As the oracle sees it.

    def state_of(self, key: Key) -> str:
        txn = self.txns[key]
        return "committing" if txn.outcome == "committed" and not txn.marked else txn.outcome

    def visible(self) -> list[Row]:
        stable = self.stable
        return [
            row
            for txn in self.txns.values()
            if txn.outcome == "committed" and txn.marked and txn.last < stable
            for row in txn.rows
        ]

    def open_branches(self) -> list[Key]:
        return [key for key, txn in self.txns.items() if txn.outcome == "open"]

    def bystander_lives(self) -> bool:
        return self.describe(self._foreign) == ("Ongoing", 0, 0)

    def expire(self, key: Key) -> None:
        meta = self.ids[key[1]]
        self._end(meta, "aborted", ELSEWHERE)
        meta.epoch += 1
        self._write_markers(meta)

    def proves(self, receipt: Receipt) -> bool:
        pid, epoch, last = (int(str(receipt.handle[name])) for name in ("pid", "epoch", "last"))
        by_answer = self.describe(receipt.id)
        return last >= self.start or by_answer in [
            (state, pid, epoch + 1) for state in ("CompleteCommit", "CompleteAbort")
        ]

    def stick(self) -> None:
        """Lose the tail of a partition: what was written there never reaches its readers."""
        self.lost_tail = self.end

    def straggle(self) -> None:
        ids = [id_ for id_ in self.ids if id_ != self._foreign]
        if ids:
            pid, epoch = self.init_producer_id(ids[-1], ELSEWHERE)
            self.produce(ids[-1], pid, epoch, [ALIEN])

    def tick(self) -> None:
        for meta in self.ids.values():
            self._write_markers(meta)


def transactional_id(namespace: Namespace, generation: int, sink: str, rest: str) -> str:
    return f"{namespace.pipeline}.{namespace.identity}.{generation}.{sink}.{rest}"


def _pair(id_: str) -> tuple[int, int]:
    """Return the pair of lanes that an id belongs to."""
    _, _, generation, _, number, *_ = id_.split(".")
    return Lane(int(generation), int(number)).pair


class KafkaSink(Participant):
    """Like the real sink: one producer and one transaction per task, ended by EndTxn 5."""

    commitment = Commitment.TRANSACTIONAL
    reuses_ids = True
    time_out_s = 900.0

    def __init__(self, server: KafkaServer, wire: Wire, clock: Any):
        self.name, self.server, self.wire, self.clock = server.sink, server, wire, clock

    def project(self, columns: Mapping[str, str]) -> dict[str, str]:
        return dict(columns)

    def id_of(self, branch: Branch) -> str:
        transaction = branch.transaction
        lane = transaction.lane or Lane(transaction.generation)
        stem = f"{lane.number}.{branch.task}"
        ids = (self.id_with(transaction, f"{stem}.{number}") for number in itertools.count())
        free = (id_ for id_ in ids if id_ not in branch.held_ids)
        return next(itertools.islice(free, branch.retry, None))

    def id_with(self, transaction: Transaction, rest: str) -> str:
        lane = transaction.lane or Lane(transaction.generation)
        return transactional_id(transaction.namespace, lane.generation, self.name, rest)

    def begin(self, branch: Branch) -> KafkaWriter:
        id_ = self.id_of(branch)
        pid, epoch = self.wire("init", lambda: self.server.init_producer_id(id_))
        return KafkaWriter(self, id_, pid, epoch)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return self.wire("check", lambda: [self._check_one(receipt) for receipt in receipts])

    def _check_one(self, receipt: Receipt) -> str | None:
        ours = ("Ongoing", receipt.handle["pid"], receipt.handle["epoch"])
        now = self.server.describe(receipt.id)
        return None if now == ours else f"it is {now}"

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [self._commit_one(receipt) for receipt in receipts]

    def _commit_one(self, receipt: Receipt) -> BranchState:
        match self._end(receipt.id, receipt.handle, commit=True):
            case "NONE":
                return self._seen(receipt)
            case "INVALID_TXN_STATE":
                return self._contradicted(receipt)
            case "CONCURRENT_TRANSACTIONS":
                return BranchState.PREPARED
            case _:
                return self._witness(receipt)

    def _end(self, id_: str, handle: Mapping[str, Any], *, commit: bool) -> str:
        pid, epoch = handle["pid"], handle["epoch"]
        answer = self.wire(
            "commit" if commit else "abort",
            lambda: self.server.end_txn(id_, pid, epoch, commit=commit, version=5),
        )
        self.server.watcher.count(f"EndTxn {'commit' if commit else 'abort'} {answer}")
        return answer

    def _seen(self, receipt: Receipt) -> BranchState:
        """Return COMMITTED when every reader sees it: markers written, stable offset past it."""
        handle: Mapping[str, Any] = receipt.handle
        now = self.wire("witness", lambda: self.server.describe(receipt.id))
        if now == ("PrepareCommit", handle["pid"], handle["epoch"] + 1):
            return BranchState.PREPARED
        if self.wire("witness", lambda: self.server.stable) <= handle["last"]:
            return BranchState.PREPARED
        if handle["last"] < self.server.lost_tail:
            return BranchState.PREPARED
        return BranchState.COMMITTED

    def _contradicted(self, receipt: Receipt) -> BranchState:
        now = self.wire("witness", lambda: self.server.describe(receipt.id))
        handle: Mapping[str, Any] = receipt.handle
        pid, epoch = handle["pid"], handle["epoch"]
        if now and now[0].endswith("Abort") and now[1] == pid and now[2] in (epoch, epoch + 1):
            return BranchState.ABORTED
        return self._witness(receipt)

    def _witness(self, receipt: Receipt) -> BranchState:
        handle: Mapping[str, Any] = receipt.handle
        pid, last = handle["pid"], handle["last"]
        seen = self.wire("witness", lambda: self.server.read(last, pid))
        self.server.watcher.count(f"witness {seen}")
        return {
            "committed": BranchState.COMMITTED,
            "aborted": BranchState.ABORTED,
            "not stable": BranchState.PREPARED,
        }.get(str(seen), BranchState.NO_WITNESS)

    def open_place(self) -> str:
        return self.wire("place", lambda: self.server.sink)

    def find(self, namespace: Namespace) -> list[Stray]:
        strays: list[Stray] = []
        for id_, pid, epoch in self.wire("find", self.server.list_open):
            pipeline, identity, generation, sink, *_ = id_.split(".")
            mine = (namespace.pipeline, namespace.identity, self.name)
            if (pipeline, identity, sink) == mine:
                handle = {"pid": pid, "epoch": epoch}
                strays.append(Stray(self.name, id_, int(generation), "Ongoing", handle))
        return strays

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        namespace = state.generation.namespace
        newest = max(map(_pair, state.ids_of(self.name)), default=None)
        for id_, (how, pid, epoch) in self._list(namespace.pipeline).items():
            if not how.endswith("Commit") or id_.split(".")[1] != namespace.identity:
                continue
            use = state.last_use(self.name, id_)
            stray = Stray(self.name, id_, _pair(id_)[0], how)
            if use is not None:
                known = dict(use.identity)
                later = pid == known["pid"] and epoch > int(str(known["epoch"])) + 1
            else:
                complete = state.batch_floor == 0 or (newest is not None and _pair(id_) > newest)
                later = complete and not state.was_let_go(stray)
            if later:
                return id_
        return None

    def logs_of(self, pipeline: str) -> frozenset[str]:
        found = self._list(pipeline)
        # With a first epoch, nothing was committed before.
        first = {id_ for id_, (how, _, epoch) in found.items() if epoch <= how.endswith("Abort")}
        first = {id_ for id_ in first if not found[id_][0].endswith("Commit")}
        return frozenset(id_.split(".")[1] for id_ in found.keys() - first)

    def _list(self, pipeline: str) -> dict[str, tuple[str, int, int]]:
        """Return state, producer id and epoch of this sink's ids, whatever the log."""
        listed = self.wire("remembered", self.server.list)
        mine = {id_: tuple(rest) for id_, *rest in listed}
        whose = (pipeline, self.name)
        return {id_: it for id_, it in mine.items() if tuple(id_.split(".")[0:4:3]) == whose}

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return [self._abort_one(stray) for stray in strays]

    def _abort_one(self, stray: Stray) -> BranchState:
        match self._end(stray.id, stray.handle, commit=False):
            case "NONE":
                return BranchState.ABORTED
            case "INVALID_TXN_STATE":
                return BranchState.COMMITTED
            case "CONCURRENT_TRANSACTIONS":
                return BranchState.PREPARED
            case _:
                return BranchState.NO_WITNESS  # it has ended, and its id is in use again


class KafkaWriter(Writer):
    def __init__(self, sink: KafkaSink, id_: str, pid: int, epoch: int):
        self.sink, self.id, self.pid, self.epoch = sink, id_, pid, epoch
        self.began_at = sink.clock()
        self.last = -1

    def write(self, rows: Any) -> None:
        server = self.sink.server
        _, self.last = self.sink.wire(
            "produce", lambda: server.produce(self.id, self.pid, self.epoch, rows)
        )

    def prepare(self) -> PreparedBranch:
        handle = {"pid": self.pid, "epoch": self.epoch, "last": self.last}
        ends = self.began_at + self.sink.time_out_s
        return PreparedBranch(self.id, handle, began_at=self.began_at, expires_at=ends)

    def abort(self) -> None:
        pass
