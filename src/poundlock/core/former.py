"""Former sinks: the log knows them, and the pipeline no longer has them, or has them elsewhere.

What such a sink left open holds locks, or hides rows from Kafka's readers, until it is aborted. So a
sink that reaches the same place sweeps it, even a sink below exactly-once. If there is none, the start
is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from poundlock.core.log import TransactionLog
from poundlock.core.model import Opened, Place
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import LogState
from poundlock.errors import LogMismatch, NotAuthorised, error_context


def places_of(sinks: Iterable[Participant]) -> list[Place]:
    """Return where sinks leave their open branches. Raises `Unavailable`."""
    places = list[Place]()
    for sink in sinks:
        try:
            with error_context(sink=sink.name):
                where = sink.open_place()
        except NotAuthorised:
            if sink.semantic is Semantic.EXACTLY_ONCE:
                raise
            continue  # it opens no branches, so it needs no right to end any
        if where:
            places.append(Place(sink.name, sink.system, where))
            if sink.semantic is not Semantic.EXACTLY_ONCE:
                sink.close()  # the driver asks it nothing more
    return places


def opening(state: LogState, sinks: Iterable[Participant]) -> Opened | None:
    """Return the record to append before sinks open branches; None if the log says it already."""
    places = {*state.places, *places_of(sinks)}
    if places == set(state.places):
        return None
    return Opened(tuple(sorted(places, key=lambda it: (it.sink, it.system, it.id))))


def stand_ins(
    log: TransactionLog, sinks: Mapping[str, Participant], found: Sequence[Place]
) -> list[Participant]:
    """Return for each former sink one that sweeps in its name. `found` are the places of the sinks.

    Raises `LogMismatch` if none reaches it. A former sink with branches that must be committed is left
    to the commit, which asks for that sink itself.
    """
    state, chosen = log.state, list[Participant]()
    for place in state.places:
        reaching = [it.sink for it in found if (it.system, it.id) == (place.system, place.id)]
        present = sinks.get(place.sink) if place.sink in reaching else None
        if present is not None and present.semantic is Semantic.EXACTLY_ONCE:
            continue
        if _must_commit(state, place.sink):
            continue
        if not reaching:
            raise _unreached(log, place)
        chosen.append((present or sinks[reaching[0]]).standing_in(place.sink))
    return chosen


def _must_commit(state: LogState, sink: str) -> bool:
    return any(
        receipt.sink == sink and not history.accepts_loss(sink)
        for history in state.unfinished
        for receipt in history.receipts
    )


def _unreached(log: TransactionLog, place: Place) -> LogMismatch:
    return LogMismatch(
        f"sink {place.sink!r} may have left branches open in {place.system} (at {place.id}), and no "
        "sink of the pipeline reaches that place. They hold locks there, or hide rows from readers. "
        "Put the sink back as it was for one start, and let the query end by itself or by stop(). Or "
        "abort its branches with 'poundlock txn list' and 'poundlock txn abort'. Then, or if the "
        f"system is gone for good, run 'poundlock txn forget --log {log.uri} --sink {place.sink}'",
        sink=place.sink,
    )
