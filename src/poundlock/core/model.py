"""The nouns of the protocol: frozen values. Their form in the log is in `encoding`.

Rules of this file: values only, with no behaviour beyond arithmetic and conversion to text. Every value
in the log converts to plain JSON and back without loss. No value holds a secret or a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from poundlock.errors import UsageError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Scalar: TypeAlias = "str | int | float | bool | None"

_DIGEST_SPAN = 1 << 64
_VERSION_STEP = 1_000_000  # so that versions fit into 63 bits until the year 2262
_IDENTITY = re.compile(r"[0-9a-f]{20}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def checked_name(kind: str, name: str) -> str:
    """Return `name` if every system accepts it as part of an identifier."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} {name!r} cannot be used: choose 1 to 63 letters, digits, '_' and '-', starting "
            "with a letter or a digit"
        )
    return name


def is_identity(text: object) -> bool:
    """Return whether this can be the identity of a log."""
    return isinstance(text, str) and _IDENTITY.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Namespace:
    """Pipeline name and log identity. Everything that a pipeline creates in a system carries both."""

    pipeline: str
    identity: str  # in hexadecimal: milliseconds since 1970 when the log began, and random bits

    @classmethod
    def new(cls, pipeline: str, now: float, chance: int) -> Namespace:
        return cls(pipeline, f"{int(now * 1000):012x}{chance % (1 << 32):08x}")

    @property
    def began_at(self) -> float:
        """When the log began, in seconds since 1970."""
        return int(self.identity[:12], 16) / 1000

    def version(self, batch: int) -> int:
        """Return a version number that grows with every batch, and with every later log.

        Versions are far apart and contain the log's random bits. A system that counts up does not
        reach one by accident, so this version proves that this batch wrote.
        """
        began, chance = int(self.identity[:12], 16), int(self.identity[12:], 16)
        return (began + batch) * _VERSION_STEP + chance % _VERSION_STEP


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Row count and hash of what a branch wrote. The hash is a sum, so order does not matter."""

    rows: int = 0
    digest: int = 0  # modulo 2**64

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.rows + other.rows, (self.digest + other.digest) % _DIGEST_SPAN)

    def __str__(self) -> str:
        return f"{self.rows} rows, hash {self.digest:016x}"

    def to_json(self) -> dict[str, Json]:
        return {"rows": self.rows, "digest": f"{self.digest:016x}"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(data["rows"], int(data["digest"], 16))


def total(fingerprints: Iterable[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of everything that these branches wrote."""
    return sum(fingerprints, Fingerprint())


class Lane(NamedTuple):
    """Names transactional ids that batch after batch uses. A driver uses the two of a pair in turn."""

    generation: int  # whose driver opened it
    number: int = 0  # 0 and 1 are that driver's first pair, 2 and 3 its second

    @property
    def pair(self) -> tuple[int, int]:
        """Name the pair. Later pairs are greater."""
        return self.generation, self.number // 2


@dataclass(frozen=True, slots=True)
class Transaction:
    """All output of one attempt at a batch."""

    namespace: Namespace
    generation: int
    batch: int
    attempt: int
    lane: Lane | None = None  # no task of an earlier run uses its ids; None: the generation's first

    def __str__(self) -> str:
        return (
            f"{self.namespace.pipeline} batch {self.batch} attempt {self.attempt} "
            f"generation {self.generation}"
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """One sink's share of a transaction in one task, before it has been written."""

    transaction: Transaction
    sink: str
    task: int  # Spark's partition number: not stable across replays, so never a key
    task_attempt: int  # unique within one driver
    retry: int = 0  # how many attempts of this task came before
    held_ids: frozenset[str] = frozenset()  # ids that decided but unfinished branches still use
    tolerant: bool = False  # leave bad rows out instead of failing the batch


@dataclass(frozen=True, slots=True)
class Receipt:
    """A branch's yes vote: what another process needs to commit it."""

    sink: str
    id: str  # the branch's name in its system; unique among the receipts of a batch and sink
    task: int
    fingerprint: Fingerprint
    handle: Mapping[str, Json] = field(default_factory=dict[str, Json])  # only the sink reads it
    began_at: float = 0.0  # seconds since 1970
    expires_at: float | None = None  # when the system aborts it on its own; None: never
    system: str = ""  # `Participant.system` of its sink

    @property
    def identity(self) -> tuple[tuple[str, Scalar], ...]:
        """The plain values of the handle, by name. They tell one use of an id from a later one."""
        items = sorted(self.handle.items())
        return tuple((k, it) for k, it in items if it is None or isinstance(it, str | int | float))

    def to_json(self) -> dict[str, Json]:
        return {
            "sink": self.sink,
            "id": self.id,
            "task": self.task,
            **self.fingerprint.to_json(),
            "handle": dict(self.handle),
            "began_at": self.began_at,
            "expires_at": self.expires_at,
            "system": self.system,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Receipt:
        return cls(
            sink=data["sink"],
            id=data["id"],
            task=data["task"],
            fingerprint=Fingerprint.from_json(data),
            handle=data["handle"],
            began_at=data["began_at"],
            expires_at=data["expires_at"],
            system=data["system"],
        )


@dataclass(frozen=True, slots=True)
class Stray:
    """A branch in our namespace as its system shows it, whether or not the log knows it."""

    sink: str
    id: str
    generation: int
    state: str  # in the system's own words
    handle: Mapping[str, Json] = field(default_factory=dict[str, Json])
    began_at: float | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sink leaves its open branches."""

    sink: str
    system: str  # `Participant.system`
    id: str  # `Participant.open_place`


class OperatorDecision(Enum):
    """What an operator decided for a sink in a batch that cannot be repaired automatically."""

    ACCEPT_LOSS = "accept_loss"  # continue without the branches that are not proven to be committed
    ACCEPT_REPLAY = "accept_replay"  # accept the replay's rows, although they differ


# The records of the log. A batch is Decided, then Repaired any number of times, then Finished.


@dataclass(frozen=True, slots=True)
class Generation:
    """A driver took over. All records up to the next Generation are that driver's."""

    number: int
    namespace: Namespace
    uri: str  # location of the log, which shows that a log is a copy
    query: str | None  # Spark's query id once known, which shows that a checkpoint is new
    owner: str  # its process (`owner.this_process`), or who adopted the log


@dataclass(frozen=True, slots=True)
class Bound:
    """The log belongs to this Spark query. Its id is known only after the query has started."""

    query: str


@dataclass(frozen=True, slots=True)
class Opened:
    """Branches may be open at these places, and at no others. Logged before the first is opened."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The final decision to commit. ABORT is never logged, it is presumed."""

    batch: int
    attempt: int
    generation: int
    offsets: str  # hash of Spark's offsets/N: a number alone does not identify a batch
    receipts: tuple[Receipt, ...]
    totals: Mapping[str, Fingerprint]  # per sink, those without a receipt included
    cut: Mapping[str, str] = field(default_factory=dict[str, str])  # `Votes.cut`
    plan: str | None = None  # Spark's offsets/N, should it be lost; older records do not have it


@dataclass(frozen=True, slots=True)
class Repaired:
    """Branches that were lost after the decision, and the branches that replace them.

    None replaces a branch whose loss an operator has accepted.
    """

    batch: int
    generation: int
    lost: tuple[tuple[str, str], ...]  # (sink, id)
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class OperatorDecided:
    """An operator's decision for some sinks of a batch that cannot be repaired."""

    batch: int
    operator_decision: OperatorDecision
    sinks: tuple[str, ...]
    by: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An operator withdrew Spark's plan of an undecided batch: it is never decided with this plan."""

    batch: int
    offsets: str  # hash of the plan
    by: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every branch of the batch is known to be committed, except where a loss was accepted."""

    batch: int


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """What a compaction carries of a finished batch whose records it drops.

    The receipts are only those that are the last use of their id. They have the sink, the id and the
    plain values of the handle. Only the newest batch has Spark's plan: no other plan can be lost.
    """

    decided: Decided
    operator_decisions: Mapping[str, OperatorDecision]  # by sink
    let_go: tuple[Receipt, ...]  # an operator accepted the loss


@dataclass(frozen=True, slots=True)
class Compacted:
    """Records below `floor` and batches below `batch_floor` no longer count."""

    floor: int
    batch_floor: int
    generation: Generation
    places: tuple[Place, ...] = ()  # of the newest `Opened`
    carried: tuple[FinishedBatch, ...] | None = None  # all batches, if `floor` drops their records


Record: TypeAlias = (
    Generation
    | Bound
    | Opened
    | Withdrawn
    | Decided
    | Repaired
    | OperatorDecided
    | Finished
    | Compacted
)
