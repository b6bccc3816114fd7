"""Branches that are Kafka transactions: how the driver checks, commits, finds and aborts them.

The Kafka sink's branches hold rows, those of the source hold consumer-group offsets; in all else they
are the same. Every answer of Kafka's is taken for what it proves and no more: see `Answer`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from poundlock.core.model import Branch, Namespace, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.errors import GuaranteeBroken, NoFreeId, UsageError
from poundlock.secret import resolve_all
from poundlock.sinks.kafka.client import (
    Answer,
    Evidence,
    Identity,
    KafkaClient,
    Outcome,
    Progress,
    TxnDescription,
    Written,
)

NEVER_MS = 2147483647  # Kafka 4.1 and later never expire a transaction with this time-out
PREFIX = "poundlock"

_WITNESSED = {
    Outcome.COMMITTED: BranchState.COMMITTED,
    Outcome.ABORTED: BranchState.ABORTED,
    # The end is on its way: ask again.
    Outcome.OPEN: BranchState.PREPARED,
    Outcome.UNKNOWN: BranchState.NO_WITNESS,
}

_SEEN = {
    Progress.SETTLED: BranchState.COMMITTED,
    Progress.PENDING: BranchState.PREPARED,
    # The topic was deleted, or made anew, under a decided batch: a person must say what follows.
    Progress.LOST: BranchState.NO_WITNESS,
}


def transactional_id(branch: Branch, bound: int) -> str:
    """Choose an id for a branch: one of a bounded set, and none that is still held.

    The generation is part of it, so no driver ever opens an id that an earlier one may have in doubt.
    """
    transaction = branch.transaction
    stem = _stem(transaction.namespace, transaction.generation, branch.sink)
    free = [
        id_ for id_ in (f"{stem}.{slot}" for slot in range(bound)) if id_ not in branch.held_ids
    ]
    if free:  # spread over all that are free, so that tasks do not meet behind a held block
        return free[branch.task_attempt % len(free)]
    raise NoFreeId(
        f"all {bound} transactional ids of the sink are held by batches that are decided but not "
        "finished. Let those finish (see 'poundlock txn list'), raise transactional_ids=, run fewer "
        "tasks a batch, or make the batches' commits faster",
        transaction=str(transaction),
        sink=branch.sink,
    )


def _stem(namespace: Namespace, generation: int, sink: str) -> str:
    return f"{PREFIX}.{namespace.pipeline}.{namespace.identity}.{generation}.{sink}"


def parse_id(id: str) -> tuple[Namespace, int, str] | None:
    """Read namespace, generation and sink off a transactional id; None if it is not one of ours."""
    match = re.fullmatch(
        rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.(\d+)\.([\w-]+)\.(\d+)", id, flags=re.ASCII
    )
    return (Namespace(match[1], match[2]), int(match[3]), match[4]) if match else None


class KafkaBranches(Participant):
    """The driver's half of a participant whose branches are Kafka transactions."""

    system = "Kafka"

    def __init__(self, name: str, settings: Mapping[str, str]):
        self.name = name
        self.settings = dict(settings)
        self._client: KafkaClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}  # connections stay on the driver

    @abstractmethod
    def written(self, receipt: Receipt) -> list[Written]:
        """Return what the branch wrote, partition by partition."""

    @abstractmethod
    def witness(self, receipt: Receipt) -> Evidence:
        """Prove what became of a branch that its coordinator has forgotten."""

    @property
    def client(self) -> KafkaClient:
        if self._client is None:
            self._client = KafkaClient(self.settings)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        described = self.client.describe([receipt.id for receipt in receipts])
        return [self._refusal(receipt, described[receipt.id]) for receipt in receipts]

    def _refusal(self, receipt: Receipt, now: TxnDescription | None) -> str | None:
        identity = _identity(receipt)
        if now is None:
            return "Kafka does not know its transactional id"
        if (now.producer_id, now.epoch) != (identity.producer_id, identity.epoch):
            return "another producer has taken over its transactional id"
        if now.state != "Ongoing":
            return f"its transaction is not open but {now.state}"
        here = {(part.topic, part.partition) for part in self.written(receipt)}
        missing = here - now.partitions
        return f"its transaction does not contain {sorted(missing)}" if missing else None

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        answers = self.client.end_many([_identity(receipt) for receipt in receipts], commit=True)
        pairs = list(zip(receipts, answers, strict=True))
        seen = self._seen([receipt for receipt, answer in pairs if answer is Answer.DONE])
        return [
            seen[receipt.id] if answer is Answer.DONE else self._conclude(receipt, answer)
            for receipt, answer in pairs
        ]

    def _seen(self, receipts: Sequence[Receipt]) -> dict[str, BranchState]:
        """Look whether decided commits have reached every partition: an answer alone is not enough."""
        if not receipts:
            return {}
        handles = [(_identity(receipt), self.written(receipt)) for receipt in receipts]
        states: dict[str, BranchState] = {}
        for receipt, settlement in zip(receipts, self.client.settled_many(handles), strict=True):
            if settlement.progress is Progress.TORN:
                raise GuaranteeBroken(
                    f"Kafka calls the transaction of {receipt.id} complete, but a partition never "
                    f"got its marker ({settlement.why}): this is KAFKA-20734 of Kafka 4.3.0 and "
                    "4.3.1. Its rows there stay invisible. Do not abort it; move to a release that "
                    "has the fix and ask its maintainers for the repair",
                    sink=self.name,
                )
            hidden = settlement.hidden  # only where it is settled
            states[receipt.id] = BranchState.HIDDEN if hidden else _SEEN[settlement.progress]
        return states

    def _conclude(self, receipt: Receipt, answer: Answer) -> BranchState:
        """Say where a branch stands whose commit was not answered with DONE."""
        if answer is Answer.BUSY:
            return BranchState.PREPARED
        if answer is Answer.UNREACHABLE:
            return BranchState.UNREACHABLE
        if answer is Answer.CONTRADICTED and self._was_aborted(receipt):
            return BranchState.ABORTED
        return _WITNESSED[self.witness(receipt).outcome]

    def _was_aborted(self, receipt: Receipt) -> bool:
        """Confirm that the coordinator remembers this very transaction as aborted."""
        identity, now = _identity(receipt), self.client.describe([receipt.id])[receipt.id]
        return (
            now is not None
            and now.producer_id == identity.producer_id
            and now.state in ("PrepareAbort", "CompleteAbort")
            # A client's own abort leaves the epoch, version 5 and a time-out raise it.
            and now.epoch in (identity.epoch, identity.epoch + 1)
        )

    def newest_generation(self, namespace: Namespace) -> int:
        prefix = f"{PREFIX}.{namespace.pipeline}.{namespace.identity}."
        parsed = (parse_id(found.transactional_id) for found in self.client.list_all(prefix))
        return max((it[1] for it in parsed if it and it[0] == namespace), default=0)

    def find(self, namespace: Namespace) -> list[Stray]:
        prefix = f"{PREFIX}.{namespace.pipeline}.{namespace.identity}."
        mine: dict[str, int] = {}
        for found in self.client.list_open(prefix):
            parsed = parse_id(found.transactional_id)
            # Compared whole, for a prefix would also be that of another name.
            if parsed and (parsed[0], parsed[2]) == (namespace, self.name):
                mine[found.transactional_id] = parsed[1]
        described = self.client.describe(mine)
        return [
            stray_of(self.name, id_, generation, now)
            for id_, generation in mine.items()
            if (now := described[id_]) is not None and now.state == "Ongoing"
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        identities = [Identity(stray.id, *_producer(stray.handle)) for stray in strays]
        meanings = {
            Answer.DONE: BranchState.ABORTED,
            # Whoever fenced it, or forgot it, has aborted what was open.
            Answer.FORGOTTEN: BranchState.ABORTED,
            Answer.BUSY: BranchState.UNREACHABLE,
            Answer.UNREACHABLE: BranchState.UNREACHABLE,
            Answer.CONTRADICTED: BranchState.COMMITTED,
        }
        return [meanings[answer] for answer in self.client.end_many(identities, commit=False)]


def stray_of(sink: str, id: str, generation: int, now: TxnDescription) -> Stray:
    ends = None
    if now.started_at is not None and now.timeout_ms != NEVER_MS:
        ends = now.started_at + now.timeout_ms / 1000
    handle = {"producer_id": now.producer_id, "epoch": now.epoch}
    return Stray(sink, id, generation, now.state, handle, now.started_at, ends)


def _identity(receipt: Receipt) -> Identity:
    return Identity(receipt.id, *_producer(receipt.handle))


def _producer(handle: Mapping[str, Any]) -> tuple[int, int]:
    return handle["producer_id"], handle["epoch"]


def client_settings(bootstrap_servers: str, settings: Mapping[str, str] | None) -> dict[str, str]:
    """Put the two ways to name the brokers together, and refuse a contradiction."""
    given = resolve_all(settings or {})
    named = given.get("bootstrap.servers", bootstrap_servers)
    if named != bootstrap_servers:
        raise UsageError(
            "bootstrap_servers= and settings['bootstrap.servers'] differ: give it once"
        )
    return given | {"bootstrap.servers": bootstrap_servers}
