"""What a pipeline guarantees, computed from its source and its sinks.

Rules of this file: the table is data, and every cell has a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from poundlock.core.participant import Commitment, Participant, Semantic
from poundlock.errors import UsageError


class Guarantee(Enum):
    """How often a row of the input affects the output, from weakest to strongest."""

    NONE = "none"  # rows may be lost or repeated
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


ANY = "any"  # any sink that writes without a decision

# The kinds of sinks by `Commitment`, as printed.
_KIND_NAMES: Mapping[str, str] = {
    Commitment.TRANSACTIONAL.value: "two-phase commit",
    Commitment.LOGGED.value: "write-ahead log",
}

_LOST = "rows that the source has delivered are gone after a crash"
_STORED = f"{_LOST}; rows stored beside the log before the crash may be sent twice"
_REPEATED = "rows written before a crash are written again when the batch is replayed"
_UNCHECKED = "an error of the system loses rows, and retries or a replay may repeat them"

# What each kind of sink guarantees with a replayable source, and why.
_REPLAYABLE: Mapping[str, tuple[Guarantee, str]] = {
    ANY: (Guarantee.AT_LEAST_ONCE, _REPEATED),
    Commitment.IDEMPOTENT.value: (
        Guarantee.EXACTLY_ONCE,
        "a repeat changes nothing; during recovery, readers may see old values again",
    ),
    Commitment.LOGGED.value: (
        Guarantee.AT_LEAST_ONCE,
        "rows are stored beside the log and sent after the decision, but a crash may send them again",
    ),
    Commitment.TRANSACTIONAL.value: (
        Guarantee.EXACTLY_ONCE,
        "the system holds prepared branches, and all of them are committed after the decision",
    ),
    Commitment.STAGED.value: (
        Guarantee.EXACTLY_ONCE,
        "rows are staged and then published atomically: readers see the whole batch or nothing",
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    guarantee: Guarantee
    reason: str


def cell(kind: str, *, replayable: bool) -> Cell:
    """Return what a kind of sink guarantees with a source that can, or cannot, be replayed."""
    if not replayable:
        logged = kind == Commitment.LOGGED.value
        return Cell(Guarantee.AT_MOST_ONCE, _STORED if logged else _LOST)
    return Cell(*_REPLAYABLE[kind])


def kind_name(kind: str) -> str:
    """Return a kind of sink as the table in README.md names it."""
    return _KIND_NAMES.get(kind, kind)


def table() -> dict[str, dict[str, str]]:
    """Return the whole table: guarantees by kind of sink and kind of source."""
    return {
        kind: {
            "not_replayable": cell(kind, replayable=False).guarantee.value,
            "replayable": cell(kind, replayable=True).guarantee.value,
        }
        for kind in _REPLAYABLE
    }


def at_most_once(sinks: Sequence[Participant], *, replayable: bool) -> bool:
    """Return whether a failed batch must not be run again, because that would write rows twice."""
    return not replayable and any(s.semantic is not Semantic.EXACTLY_ONCE for s in sinks)


@dataclass(frozen=True, slots=True)
class Route:
    """The guarantee for one sink of a pipeline, and what its readers must set."""

    sink: str
    asked: Semantic
    kind: str
    cell: Cell
    reader: str
    after_restore: str = ""  # `Participant.after_restore` of a sink that commits by decisions


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
                f"sink {route.sink} ({kind_name(route.kind)}): {words}: {route.cell.reason}. "
                f"A reader must set: {route.reader}{_after_restore(route)}"
            )
        return "\n".join(lines)


def _after_restore(route: Route) -> str:
    if not route.after_restore:
        return ""
    return (
        ". If log and checkpoint are deleted, or restored together to an older state, that is "
        f"{route.after_restore}"
    )


def state(source: str, *, replayable: bool, sinks: Sequence[Participant]) -> Statement:
    """Compute the guarantee of a pipeline from its parts."""
    routes: list[Route] = []
    for sink in sinks:
        exact = sink.semantic is Semantic.EXACTLY_ONCE
        kind = sink.commitment.value if exact else ANY
        answer = cell(kind, replayable=replayable)
        if sink.semantic is Semantic.NONE:
            answer = Cell(Guarantee.NONE, _UNCHECKED)
        # Unless the user named a semantic, a sink is asked for no more than its kind can give.
        logged = exact and sink.commitment is Commitment.LOGGED
        asked = sink.asked or (Semantic.AT_LEAST_ONCE if logged else sink.semantic)
        deletion = sink.after_restore if exact else ""
        routes.append(Route(sink.name, asked, kind, answer, sink.reader_settings(), deletion))
    return Statement(source, replayable, tuple(routes))


def require(statement: Statement) -> None:
    """Raise `UsageError` if a sink was asked for EXACTLY_ONCE and cannot guarantee it."""
    for route in statement.routes:
        if route.asked is not Semantic.EXACTLY_ONCE:
            continue
        if not statement.replayable:
            raise UsageError(
                f"EXACTLY_ONCE is impossible with source {statement.source}, which cannot be replayed: "
                f"{route.cell.reason}. Use a replayable source. To start with this one, set "
                "semantic='at_least_once' on the sink: rows are then written at most once, whatever "
                "semantic= says",
                sink=route.sink,
            )
        if route.cell.guarantee is not Guarantee.EXACTLY_ONCE:
            given = route.cell.guarantee.value.replace("_", " ")
            raise UsageError(
                f"EXACTLY_ONCE is impossible with this sink, which gives {given}: "
                f"{route.cell.reason}. Remove semantic=, or use a sink with two-phase commit",
                sink=route.sink,
            )
