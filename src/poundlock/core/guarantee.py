"""What a pipeline can promise, computed from its source and its sinks.

Rules of this file: the table is data; every cell has a reason that a person can check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from poundlock.core.participant import Commitment, Participant, Semantic
from poundlock.errors import UsageError


class Guarantee(Enum):
    """How often a row of the input changes the output, from weakest to strongest."""

    NONE = "none"  # rows may be lost as well as repeated
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


ANY = "any"  # a sink without a commitment of its own, or one that writes straight through

_LOST = "what the source has handed out is gone after a crash"
_KEPT = f"{_LOST}; rows that were kept beside the log by then may be sent twice"
_REPEATED = "rows written before a crash are written again when the batch is replayed"
_UNWATCHED = "an error of the system loses rows, and its retries or a replay may repeat them"

# Kind of sink to what it gives with a replayable source, and why. Without one, nothing helps.
_REPLAYABLE: Mapping[str, tuple[Guarantee, str]] = {
    ANY: (Guarantee.AT_LEAST_ONCE, _REPEATED),
    Commitment.IDEMPOTENT.value: (
        Guarantee.EXACTLY_ONCE,
        "a repeat changes nothing; while recovering, readers may see old values again",
    ),
    Commitment.LOGGED.value: (
        Guarantee.AT_LEAST_ONCE,
        "rows are kept beside the log and sent after the decision, but a crash may send them again",
    ),
    Commitment.TRANSACTIONAL.value: (
        Guarantee.EXACTLY_ONCE,
        "the system holds prepared branches, and every one is committed once the batch is decided",
    ),
    Commitment.STAGED.value: (
        Guarantee.EXACTLY_ONCE,
        "rows are written aside and moved by one atomic step: the batch appears at one instant",
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One answer of the table."""

    guarantee: Guarantee
    reason: str


def cell(kind: str, *, replayable: bool) -> Cell:
    """Return what a kind of sink gives with a source that can, or cannot, be replayed."""
    if not replayable:
        logged = kind == Commitment.LOGGED.value
        return Cell(Guarantee.AT_MOST_ONCE, _KEPT if logged else _LOST)
    return Cell(*_REPLAYABLE[kind])


def table() -> dict[str, dict[str, str]]:
    """Return the whole table, kinds of sink by kinds of source."""
    return {
        kind: {
            "not_replayable": cell(kind, replayable=False).guarantee.value,
            "replayable": cell(kind, replayable=True).guarantee.value,
        }
        for kind in _REPLAYABLE
    }


def at_most_once(sinks: Sequence[Participant], *, replayable: bool) -> bool:
    """Say whether a batch must not be run again: rows go straight through, and at most once.

    What an attempt has written before it failed would be written again by the next.
    """
    return not replayable and any(s.semantic is not Semantic.EXACTLY_ONCE for s in sinks)


@dataclass(frozen=True, slots=True)
class Route:
    """What one sink of a pipeline is given and what its readers must do."""

    sink: str
    asked: Semantic
    kind: str
    cell: Cell
    reader: str


@dataclass(frozen=True, slots=True)
class Statement:
    """The guarantee of a whole pipeline: that of its weakest sink."""

    source: str
    replayable: bool
    routes: tuple[Route, ...]

    @property
    def guarantee(self) -> Guarantee:
        order = list(Guarantee)
        return min((route.cell.guarantee for route in self.routes), key=order.index)

    def __str__(self) -> str:
        can = "can be replayed" if self.replayable else "cannot be replayed"
        lines = [f"source {self.source}: {can}"]
        for route in self.routes:
            words = route.cell.guarantee.value.replace("_", " ")
            lines.append(
                f"sink {route.sink} ({route.kind}): {words}: {route.cell.reason}. "
                f"A reader must set: {route.reader}"
            )
        return "\n".join(lines)


def state(source: str, *, replayable: bool, sinks: Sequence[Participant]) -> Statement:
    """Compute the guarantee of a pipeline from its parts."""
    routes: list[Route] = []
    for sink in sinks:
        exact = sink.semantic is Semantic.EXACTLY_ONCE
        kind = sink.commitment.value if exact else ANY
        answer = cell(kind, replayable=replayable)
        if sink.semantic is Semantic.NONE:
            answer = Cell(Guarantee.NONE, _UNWATCHED)
        routes.append(Route(sink.name, _asked(sink), kind, answer, sink.reader_settings()))
    return Statement(source, replayable, tuple(routes))


def _asked(sink: Participant) -> Semantic:
    """Return what is asked of a sink: by name, or else as much as its kind can give."""
    logged = sink.commitment is Commitment.LOGGED
    least = Semantic.AT_LEAST_ONCE if logged and sink.semantic is Semantic.EXACTLY_ONCE else None
    return sink.asked or least or sink.semantic


def require(statement: Statement) -> None:
    """Refuse a sink that was asked for EXACTLY_ONCE where its parts cannot give it."""
    for route in statement.routes:
        if route.asked is not Semantic.EXACTLY_ONCE:
            continue
        if not statement.replayable:
            raise UsageError(
                f"EXACTLY_ONCE is not to be had from source {statement.source}, which cannot be "
                f"replayed: {route.cell.reason}. Use a source that can, or ask the sink for "
                "semantic='at_least_once'",
                sink=route.sink,
            )
        if route.cell.guarantee is not Guarantee.EXACTLY_ONCE:
            given = route.cell.guarantee.value.replace("_", " ")
            raise UsageError(
                f"EXACTLY_ONCE is not to be had from this sink, which gives {given}: "
                f"{route.cell.reason}. Leave semantic= out, or use a sink that holds its branches",
                sink=route.sink,
            )
