"""The nouns of the protocol: frozen values, and their form in the log.

Rules of this file: values only, no behaviour beyond arithmetic and spelling; every value that goes
into the log turns into plain JSON and back without loss; nothing here ever holds a secret or a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from poundlock.errors import UsageError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

_DIGEST_SPAN = 1 << 64
_VERSION_STEP = 1_000_000  # so that versions fit into 63 bits until the year 2262
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def checked_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of an identifier in every system we write to."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} {name!r} cannot be used: take 1 to 63 letters, digits, '_' and '-', "
            "beginning with a letter or a digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Namespace:
    """Pipeline name and the log's own identity: all that is ours in another system carries it."""

    pipeline: str
    identity: str  # milliseconds since 1970 when the log began, and chance; in hexadecimal

    @classmethod
    def new(cls, pipeline: str, now: float, chance: int) -> Namespace:
        return cls(pipeline, f"{int(now * 1000):012x}{chance % (1 << 32):08x}")

    def version(self, batch: int) -> int:
        """Return a number that grows with every batch, and with every log begun after this one.

        It is far from the next and has the log's own chance in it: nobody comes to it by counting up,
        so whoever finds it in a system has found what this batch wrote.
        """
        began, chance = int(self.identity[:12], 16), int(self.identity[12:], 16)
        return (began + batch) * _VERSION_STEP + chance % _VERSION_STEP


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Row count and additive, order-free hash of what a branch wrote."""

    rows: int = 0
    digest: int = 0  # modulo 2**64, so that sums may be taken in any order and grouping

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.rows + other.rows, (self.digest + other.digest) % _DIGEST_SPAN)

    def __str__(self) -> str:
        return f"{self.rows} rows, hash {self.digest:016x}"


def total(fingerprints: Iterable[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of all that these branches wrote together."""
    return sum(fingerprints, Fingerprint())


@dataclass(frozen=True, slots=True)
class Transaction:
    """All output of one batch, in one attempt."""

    namespace: Namespace
    generation: int
    batch: int
    attempt: int

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
    held_ids: frozenset[str] = frozenset()  # ids that decided but unfinished branches still hold
    tolerant: bool = False  # bad rows are to be left out, not to end the batch


@dataclass(frozen=True, slots=True)
class Receipt:
    """A branch's yes vote: the least that another process needs to commit it."""

    sink: str
    id: str  # the branch's name in its system; unique among the receipts of a batch and sink
    task: int
    fingerprint: Fingerprint
    handle: Mapping[str, Json] = field(default_factory=dict[str, Json])  # for the sink alone
    began_at: float = 0.0  # seconds since 1970
    expires_at: float | None = None  # when the system will abort it by itself; None: never
    system: str = ""  # the kind of system that holds it: `Participant.system`

    def to_json(self) -> dict[str, Json]:
        return {
            "sink": self.sink,
            "id": self.id,
            "task": self.task,
            "rows": self.fingerprint.rows,
            "digest": f"{self.fingerprint.digest:016x}",
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
            fingerprint=Fingerprint(data["rows"], int(data["digest"], 16)),
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


class OperatorDecision(Enum):
    """What a person ordered for a batch that cannot be repaired by itself."""

    ACCEPT_LOSS = "accept_loss"  # go on without the rows that are lost, or refused for good
    ACCEPT_REPLAY = "accept_replay"  # take the replay's rows, though they are not the same


# The records of the log. A batch's story is Decided, then Repaired as often as needed, then Finished.


@dataclass(frozen=True, slots=True)
class Generation:
    """A driver took over. Every record after it is that driver's, up to the next Generation."""

    number: int
    namespace: Namespace
    uri: str  # where the log stands: a copy of it is found out
    query: str | None  # Spark's query id, once known: a new checkpoint is found out
    owner: str  # host and process, for people


@dataclass(frozen=True, slots=True)
class Bound:
    """The log belongs to this Spark query: its id is known only once the query has started."""

    query: str


@dataclass(frozen=True, slots=True)
class Decided:
    """COMMIT, final: from here the batch is a fact. ABORT is never logged, it is presumed."""

    batch: int
    attempt: int
    generation: int
    offsets: str  # hash of Spark's offsets/N, so that no batch is skipped by its number alone
    receipts: tuple[Receipt, ...]
    totals: Mapping[str, Fingerprint]  # per sink, those without a receipt included


@dataclass(frozen=True, slots=True)
class Repaired:
    """Branches that a system lost after the decision, and the new ones in their place."""

    batch: int
    generation: int
    lost: tuple[tuple[str, str], ...]  # (sink, id)
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class OperatorDecided:
    """A person's order for a batch that cannot be repaired."""

    batch: int
    operator_decision: OperatorDecision
    by: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every branch of the batch was seen committed."""

    batch: int


@dataclass(frozen=True, slots=True)
class Compacted:
    """Records below `floor` and batches below `batch_floor` no longer count."""

    floor: int
    batch_floor: int
    generation: Generation


Record: TypeAlias = Generation | Bound | Decided | Repaired | OperatorDecided | Finished | Compacted


def record_to_json(record: Record) -> dict[str, Json]:
    """Spell a record as JSON; `record_from_json` is its inverse."""
    kind = type(record).__name__
    match record:
        case Generation(number, namespace, uri, query, owner):
            body: dict[str, Json] = {
                "number": number,
                "pipeline": namespace.pipeline,
                "identity": namespace.identity,
                "uri": uri,
                "query": query,
                "owner": owner,
            }
        case Bound(query):
            body = {"query": query}
        case Decided(batch, attempt, generation, offsets, receipts, totals):
            body = {
                "batch": batch,
                "attempt": attempt,
                "generation": generation,
                "offsets": offsets,
                "receipts": [receipt.to_json() for receipt in receipts],
                "totals": {
                    sink: {"rows": value.rows, "digest": f"{value.digest:016x}"}
                    for sink, value in totals.items()
                },
            }
        case Repaired(batch, generation, lost, receipts):
            body = {
                "batch": batch,
                "generation": generation,
                "lost": [list(key) for key in lost],
                "receipts": [receipt.to_json() for receipt in receipts],
            }
        case OperatorDecided(batch, operator_decision, by):
            body = {"batch": batch, "operator_decision": operator_decision.value, "by": by}
        case Finished(batch):
            body = {"batch": batch}
        case Compacted(floor, batch_floor, generation):
            body = {
                "floor": floor,
                "batch_floor": batch_floor,
                "generation": record_to_json(generation),
            }
    return {"kind": kind, **body}


def record_from_json(data: Mapping[str, Any]) -> Record:
    """Build a record from its JSON. A KeyError, TypeError or ValueError means a damaged record."""
    match data["kind"]:
        case "Generation":
            namespace = Namespace(data["pipeline"], data["identity"])
            return Generation(data["number"], namespace, data["uri"], data["query"], data["owner"])
        case "Bound":
            return Bound(data["query"])
        case "Decided":
            return Decided(
                batch=data["batch"],
                attempt=data["attempt"],
                generation=data["generation"],
                offsets=data["offsets"],
                receipts=tuple(Receipt.from_json(item) for item in data["receipts"]),
                totals={
                    sink: Fingerprint(value["rows"], int(value["digest"], 16))
                    for sink, value in data["totals"].items()
                },
            )
        case "Repaired":
            return Repaired(
                batch=data["batch"],
                generation=data["generation"],
                lost=tuple((sink, id_) for sink, id_ in data["lost"]),
                receipts=tuple(Receipt.from_json(item) for item in data["receipts"]),
            )
        case "OperatorDecided":
            return OperatorDecided(
                data["batch"], OperatorDecision(data["operator_decision"]), data["by"]
            )
        case "Finished":
            return Finished(data["batch"])
        case "Compacted":
            generation = record_from_json(data["generation"])
            if not isinstance(generation, Generation):
                raise TypeError("a compaction record must carry its generation")
            return Compacted(data["floor"], data["batch_floor"], generation)
        case kind:
            raise ValueError(f"unknown kind of record {kind!r}")
