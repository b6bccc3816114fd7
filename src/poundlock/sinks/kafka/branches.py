"""Branches that are Kafka transactions: the driver checks, commits, finds and aborts them.

The sink's branches hold rows. The source's branches hold consumer-group offsets. Otherwise they are the
same. What an answer of Kafka proves is decided here; how Kafka is asked is in `transactions`.
"""

from __future__ import annotations

import itertools
import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from poundlock.core.model import Branch, Lane, Namespace, Receipt, Stray
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState, LogState
from poundlock.errors import GuaranteeBroken, Unavailable, UsageError
from poundlock.sinks.kafka import cluster, transactions
from poundlock.sinks.kafka.client import ClientOwner, KafkaClient
from poundlock.sinks.kafka.transactions import Answer, Progress, TxnDescription
from poundlock.sinks.kafka.types import LastRecord, TransactionIdentity
from poundlock.sinks.kafka.witness import Evidence, Outcome

_log = logging.getLogger(__name__)

NEVER_MS = 2147483647  # Kafka 4.1 and later never expire a transaction with this time-out
_DEFAULT_LIMIT_MS = 900_000  # Kafka's, used where we may not read the brokers' limit
PREFIX = "poundlock"
_ID = re.compile(rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.(\d+)\.([\w-]+)\.(\d+)\.\d+\.\d+", re.ASCII)
_COMMITS = ("PrepareCommit", "CompleteCommit")

_STATE_BY_OUTCOME = {
    Outcome.COMMITTED: BranchState.COMMITTED,
    Outcome.ABORTED: BranchState.ABORTED,
    # The end is being carried out: ask again.
    Outcome.OPEN: BranchState.PREPARED,
    Outcome.UNKNOWN: BranchState.NO_WITNESS,
}

_STATE_BY_PROGRESS = {
    Progress.SETTLED: BranchState.COMMITTED,
    Progress.PENDING: BranchState.PREPARED,
    # The topic of a decided batch was deleted, or deleted and created again: an operator must decide.
    Progress.LOST: BranchState.NO_WITNESS,
}


def transactional_id(branch: Branch) -> str:
    """Return the id of a branch. No two attempts at a task of a batch share one.

        poundlock.PIPELINE.IDENTITY.GENERATION.SINK.LANE.PARTITION.NUMBER

    The first attempt at a task takes the first number that no decided batch holds, the second attempt
    the next one, and so on. So the batches of a lane use the same ids again. To open an id aborts what
    is open under it, which is left from an earlier batch. An attempt that outlives its batch opens no
    id of a later batch, because the coordinator changes lanes after a run that may have left one.
    """
    transaction, namespace = branch.transaction, branch.transaction.namespace
    owner = f"{PREFIX}.{namespace.pipeline}.{namespace.identity}"
    lane = transaction.lane or Lane(transaction.generation)
    stem = f"{owner}.{lane.generation}.{branch.sink}.{lane.number}.{branch.task}"
    ids = (f"{stem}.{number}" for number in itertools.count())
    free = (id_ for id_ in ids if id_ not in branch.held_ids)
    return next(itertools.islice(free, branch.retry, None))


class IdParts(NamedTuple):
    """What a transactional id of Poundlock contains."""

    namespace: Namespace
    lane: Lane
    sink: str


def parse_transactional_id(id: str) -> IdParts | None:
    """Return the parts of a transactional id. None if it is not Poundlock's."""
    match = _ID.fullmatch(id)
    if match is None:
        return None
    pipeline, identity, generation, sink, number = match.groups()
    return IdParts(Namespace(pipeline, identity), Lane(int(generation), int(number)), sink)


class KafkaBranches(ClientOwner, Participant):
    """The driver's half of a participant whose branches are Kafka transactions."""

    system = "Kafka"
    reuses_ids = True
    commits_at_once = 5000  # a driver that dies between two calls leaves a batch partly committed
    after_restore = (
        "noticed as long as Kafka remembers a transactional id "
        "(transactional.id.expiration.ms: a week after its last use, by default)"
    )

    def __init__(self, name: str, settings: Mapping[str, str]):
        self.name = name
        self.settings = dict(settings)
        self.asked_timeout_ms: int | None = None  # None: as long as the brokers allow
        self._limit_ms = _DEFAULT_LIMIT_MS

    @property
    def timeout_ms(self) -> int:
        """Return how long a transaction may stay open."""
        return self.asked_timeout_ms or self._limit_ms

    def expiry(self, began_at: float) -> float | None:
        """Return when a transaction times out, None if it never does."""
        return None if self.timeout_ms == NEVER_MS else began_at + self.timeout_ms / 1000

    def check_time_out(self) -> list[str]:
        """Learn how long the brokers allow a transaction to stay open. Return warnings."""
        name = "transaction.max.timeout.ms"
        config = self.client.run(cluster.broker_config, [name])
        if config.values is None:
            return [f"{name} could not be read ({config.why}): using {self.timeout_ms} ms"]
        self._limit_ms = config.smallest(name, _DEFAULT_LIMIT_MS)
        if self.timeout_ms > self._limit_ms:
            raise UsageError(
                f"transaction_timeout asks for {self.timeout_ms} ms, but the brokers allow "
                f"{self._limit_ms} ms ({name}). Ask for less, or raise the brokers' limit",
                sink=self.name,
            )
        return []

    @abstractmethod
    def last_records(self, receipt: Receipt) -> list[LastRecord]:
        """Return the branch's last record in each partition."""

    @abstractmethod
    def witness(self, receipt: Receipt) -> Evidence:
        """Prove how a branch ended that its coordinator has forgotten."""

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        ids = [receipt.id for receipt in receipts]
        described = self.client.run(transactions.describe, ids)
        return [self._refusal(receipt, described[receipt.id]) for receipt in receipts]

    def _refusal(self, receipt: Receipt, now: TxnDescription | None) -> str | None:
        identity = _identity(receipt)
        if now is None:
            return "Kafka does not know its transactional id"
        if (now.producer_id, now.epoch) != (identity.producer_id, identity.epoch):
            return "another producer has taken over its transactional id"
        if now.state != "Ongoing":
            return f"its transaction is not open but {now.state}"
        written = {record.topic_partition for record in self.last_records(receipt)}
        missing = written - now.partitions
        return f"its transaction does not contain {sorted(missing)}" if missing else None

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        answers = end_transactions(self.client, list(map(_identity, receipts)), commit=True)
        pairs = list(zip(receipts, answers, strict=True))
        seen = self._read_settlements(
            [receipt for receipt, answer in pairs if answer is Answer.DONE]
        )
        return [
            seen[receipt.id] if answer is Answer.DONE else self._conclude(receipt, answer)
            for receipt, answer in pairs
        ]

    def _read_settlements(self, receipts: Sequence[Receipt]) -> dict[str, BranchState]:
        """Check that commits have reached every partition: the coordinator's answer is not enough."""
        if not receipts:
            return {}
        commits = [(_identity(receipt), self.last_records(receipt)) for receipt in receipts]
        settlements = self.client.run_briefly(transactions.settlements, commits)
        states: dict[str, BranchState] = {}
        for receipt, settlement in zip(receipts, settlements, strict=True):
            if settlement.progress is Progress.TORN:
                raise GuaranteeBroken(
                    f"Kafka calls the transaction of {receipt.id} complete, but a partition never "
                    f"got its marker ({settlement.why}), so its rows there stay invisible. This is "
                    "KAFKA-20734 of Kafka 4.3.0 and 4.3.1. Do not abort the transaction: upgrade "
                    "to a release with the fix, and ask Kafka's maintainers how to repair the "
                    "partition",
                    sink=self.name,
                )
            hidden = settlement.hidden  # only where it is settled
            states[receipt.id] = (
                BranchState.HIDDEN if hidden else _STATE_BY_PROGRESS[settlement.progress]
            )
        return states

    def _conclude(self, receipt: Receipt, answer: Answer) -> BranchState:
        """Return the state of a branch whose commit was not answered with DONE."""
        if answer is Answer.BUSY:
            return BranchState.PREPARED
        if answer is Answer.UNREACHABLE:
            return BranchState.UNREACHABLE
        if answer is Answer.CONTRADICTED and self._was_aborted(receipt):
            return BranchState.ABORTED
        return _STATE_BY_OUTCOME[self.witness(receipt).outcome]

    def _was_aborted(self, receipt: Receipt) -> bool:
        now = self.client.run(transactions.describe, [receipt.id])[receipt.id]
        return shows_abort(now, _identity(receipt))

    def open_place(self) -> str:
        return self.client.run(cluster.identity)

    def newest_generation(self, namespace: Namespace) -> int:
        prefix = f"{PREFIX}.{namespace.pipeline}.{namespace.identity}."
        known = self.client.run(transactions.list_by_prefix, prefix, states=())
        parsed = (parse_transactional_id(txn.transactional_id) for txn in known)
        lanes = [it.lane for it in parsed if it and it.namespace == namespace]
        return max((lane.generation for lane in lanes), default=0)

    def committed_beyond(self, state: LogState) -> str | None:
        """Compare each id's last transaction with its last use in the log.

        Kafka remembers one transaction of an id. So of the ids that were used again, it shows only
        those whose last transaction was committed.
        """
        assert state.generation is not None
        ids = self._list_own(state.generation.namespace, states=_COMMITS)
        unknown = self._first_unknown(ids, state)
        if unknown is not None:
            return f"a transaction of {unknown}"
        uses = {id_: dict(use.identity) for id_ in ids if (use := state.last_use(self.name, id_))}
        described = self.client.run(transactions.describe, uses)
        for id_, use in uses.items():
            now = described[id_]
            # A commit raises the epoch by one. With a new producer id nothing can be compared.
            if (
                now is not None
                and now.state in _COMMITS
                and now.producer_id == use["producer_id"]
                and now.epoch > int(use["epoch"] or 0) + 1
            ):
                return f"a transaction of {id_} with epoch {now.epoch - 1}"
        return None

    def logs_of(self, pipeline: str) -> frozenset[str]:
        """Look at every transactional id of this pipeline and sink that Kafka remembers.

        Kafka remembers only the last transaction of an id. If that was not committed, an earlier one
        may have been, unless the epoch shows that there was none.
        """
        prefix = f"{PREFIX}.{pipeline}."
        found, unclear = set[str](), dict[str, str]()
        for txn in self.client.run(transactions.list_by_prefix, prefix, states=()):
            parsed = parse_transactional_id(txn.transactional_id)
            if parsed and (parsed.namespace.pipeline, parsed.sink) == (pipeline, self.name):
                if txn.state in _COMMITS:
                    found.add(parsed.namespace.identity)
                else:
                    unclear[txn.transactional_id] = parsed.namespace.identity
        unclear = {id_: identity for id_, identity in unclear.items() if identity not in found}
        for id_, now in self.client.run(transactions.describe, unclear).items():
            if now is not None and not _is_unused(now):
                found.add(unclear[id_])
        return frozenset(found)

    def _first_unknown(self, ids: Mapping[str, Lane], state: LogState) -> str | None:
        """Return the first committed id that the log must know, and does not.

        Compaction drops the last uses of ids, but those of older batches before those of newer ones,
        and later batches never use an earlier pair of lanes.
        """
        named = map(parse_transactional_id, state.ids_of(self.name))
        newest = max((it.lane for it in named if it), default=None)
        for id_, lane in ids.items():
            known = state.last_use(self.name, id_) is not None or state.was_let_go(
                Stray(self.name, id_, lane.generation, "CompleteCommit")
            )
            complete = state.batch_floor == 0 or (newest is not None and lane.pair > newest.pair)
            if complete and not known:
                return id_
        return None

    def find(self, namespace: Namespace) -> list[Stray]:
        mine = self._list_own(namespace)
        described = self.client.run(transactions.describe, mine)
        return [
            stray_of(self.name, id_, lane.generation, now)
            for id_, lane in mine.items()
            if (now := described[id_]) is not None and now.state == "Ongoing"
        ]

    def _list_own(
        self, namespace: Namespace, states: Sequence[str] = transactions.OPEN_STATES
    ) -> dict[str, Lane]:
        """Return this sink's ids whose transactions are in these states, with their lanes."""
        prefix = f"{PREFIX}.{namespace.pipeline}.{namespace.identity}."
        mine: dict[str, Lane] = {}
        for txn in self.client.run(transactions.list_by_prefix, prefix, states=states):
            parsed = parse_transactional_id(txn.transactional_id)
            # Names are compared whole, because one name may be the beginning of another.
            if parsed and (parsed.namespace, parsed.sink) == (namespace, self.name):
                mine[txn.transactional_id] = parsed.lane
        return mine

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        answers = end_transactions(self.client, list(map(_identity, strays)), commit=False)
        states = {
            Answer.DONE: BranchState.ABORTED,
            # Its transaction was aborted when its producer was fenced, or before the id was forgotten.
            Answer.FORGOTTEN: BranchState.ABORTED,
            Answer.BUSY: BranchState.UNREACHABLE,
            Answer.UNREACHABLE: BranchState.UNREACHABLE,
            Answer.CONTRADICTED: BranchState.COMMITTED,
        }
        return [states[answer] for answer in answers]


def end_transactions(
    client: KafkaClient, identities: Sequence[TransactionIdentity], *, commit: bool
) -> list[Answer]:
    """Commit or abort transactions. UNREACHABLE for all if nobody can be asked."""
    try:
        return client.run(transactions.end, identities, commit=commit)
    except Unavailable as error:
        _log.warning("%s", error)
        return [Answer.UNREACHABLE] * len(identities)


def shows_abort(now: TxnDescription | None, identity: TransactionIdentity) -> bool:
    """Whether the coordinator remembers this transaction, and no later one, as aborted."""
    return (
        now is not None
        and now.producer_id == identity.producer_id
        and now.state in ("PrepareAbort", "CompleteAbort")
        # An abort by an older client keeps the epoch. Version 5 and a time-out raise it by one.
        and now.epoch in (identity.epoch, identity.epoch + 1)
    )


def shows_commit(now: TxnDescription, receipt: Receipt) -> bool | None:
    """Whether the coordinator remembers a branch as committed, None if it does not tell.

    A commit raises the epoch by one.
    """
    identity = _identity(receipt)
    if shows_abort(now, identity):
        return False
    mine = now.producer_id == identity.producer_id and now.epoch - identity.epoch in (0, 1)
    return True if mine and now.state in _COMMITS else None


def _is_unused(now: TxnDescription) -> bool:
    """Whether an id has never committed: this is its first transaction, and not a commit.

    A new producer begins with epoch 0, and the end of a transaction raises it by one.
    """
    if now.state in _COMMITS:
        return False
    return now.epoch <= (1 if now.state in ("PrepareAbort", "CompleteAbort") else 0)


def stray_of(sink: str, id: str, generation: int, now: TxnDescription) -> Stray:
    ends = None
    if now.started_at is not None and now.timeout_ms != NEVER_MS:
        ends = now.started_at + now.timeout_ms / 1000
    handle = {"producer_id": now.producer_id, "epoch": now.epoch}
    return Stray(sink, id, generation, now.state, handle, now.started_at, ends)


def _identity(branch: Receipt | Stray) -> TransactionIdentity:
    handle: Mapping[str, Any] = branch.handle
    return TransactionIdentity(branch.id, handle["producer_id"], handle["epoch"])
