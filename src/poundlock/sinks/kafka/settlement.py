"""Whether a commit that was taken has reached every partition.

DONE means decided: the markers follow. And Kafka 4.3.0 and 4.3.1 call a transaction complete though a
partition without a leader never got its marker (KAFKA-20734), so every partition is looked at. There
a last stable offset past our last record is proof. Where it is not past, somebody else's open
transaction may hold it back, so the partition is asked whether ours is the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from poundlock.errors import NotAuthorised
from poundlock.sinks.kafka.partitions import (
    Leaders,
    Partition,
    ProducerState,
    Written,
    high_watermarks,
    last_stable_offsets,
    producers,
)
from poundlock.sinks.kafka.transactions import Identity, TxnDescription, describe
from poundlock.sinks.kafka.wire import Again, Collected, Wire


class Progress(Enum):
    """How far a transaction is that was told to commit."""

    SETTLED = "settled"  # every partition has its marker
    PENDING = (
        "pending"  # markers are still to be written, or it cannot be seen now whether they are
    )
    TORN = "torn"  # called complete, and yet open or aborted: KAFKA-20734
    LOST = "lost"  # its topic was deleted, or created anew


@dataclass(frozen=True, slots=True)
class Settlement:
    progress: Progress
    why: str
    hidden: bool = False  # from readers, by another transaction that is open before it


async def settlements(
    wire: Wire, handles: Sequence[tuple[Identity, Sequence[Written]]]
) -> list[Settlement]:
    """Say of each transaction whose commit was DONE whether it has reached every partition."""
    described = await describe(wire, [identity.transactional_id for identity, _ in handles])
    unfinished = {identity: _by_coordinator(described, identity) for identity, _ in handles}
    complete = [written for identity, written in handles if unfinished[identity] is None]
    view = await _look(wire, [part for written in complete for part in written])
    return [
        unfinished[identity] or _by_partitions(view, identity, written)
        for identity, written in handles
    ]


def _by_coordinator(
    described: Collected[str, TxnDescription | None], identity: Identity
) -> Settlement | None:
    """Say how far a coordinator is with a commit that it took; None if it is through."""
    id_ = identity.transactional_id
    if id_ in described.missing:
        why = f"its coordinator did not answer: {described.missing[id_]}"
        return Settlement(Progress.PENDING, why)
    now = described.answers[id_]
    if now is None or now.producer_id != identity.producer_id or now.epoch > identity.epoch + 1:
        # The id expired, or went on to its next use or (epochs end at 32767) its next producer id:
        # none of which can be before the commit is complete.
        return None
    if now.state == "CompleteCommit":
        return None
    if now.epoch == identity.epoch + 1 and now.state in ("Empty", "Ongoing"):
        return None  # its next use, by a client that keeps the epoch it was given
    if now.epoch == identity.epoch + 1 and now.state == "PrepareCommit":
        missing = ", ".join(f"{topic}-{number}" for topic, number in sorted(now.partitions))
        return Settlement(Progress.PENDING, f"markers are to be written to {missing or 'nothing'}")
    why = f"its coordinator took the commit, and now shows {now.state} at epoch {now.epoch}"
    return Settlement(Progress.TORN, why)


@dataclass(frozen=True, slots=True)
class _View:
    """What partitions show. The last two only where the first does not answer the question."""

    leaders: Leaders
    stable: Collected[Partition, int | None]  # last stable offsets
    high: Collected[Partition, int | None]  # high watermarks
    states: Collected[Partition, list[ProducerState] | None]


async def _look(wire: Wire, written: Sequence[Written]) -> _View:
    leaders = Leaders(wire)
    stable = await last_stable_offsets(wire, {part.place for part in written}, leaders)
    behind = {
        part.place
        for part in written
        if (stable.answers.get(part.place) or 0) <= part.last_offset
        and part.place not in stable.missing
    }
    high = await high_watermarks(wire, behind, leaders)
    try:
        states = await producers(wire, behind, leaders)
    except NotAuthorised as error:  # READ on the topic may not be needed for anything else
        states = Collected[Partition, list[ProducerState] | None](
            {}, dict.fromkeys(behind, Again(str(error)))
        )
    return _View(leaders, stable, high, states)


def _by_partitions(view: _View, identity: Identity, written: Sequence[Written]) -> Settlement:
    """Join what the partitions say: the worst counts."""
    found = [_by_partition(view, identity, part) for part in written]
    for progress in (Progress.TORN, Progress.LOST, Progress.PENDING):
        said = [settlement.why for settlement in found if settlement.progress is progress]
        if said:
            return Settlement(progress, "; ".join(said))
    hidden = any(settlement.hidden for settlement in found)
    return Settlement(Progress.SETTLED, "every partition has its marker", hidden)


def _by_partition(view: _View, identity: Identity, part: Written) -> Settlement:
    where = part.place
    for missing in (view.stable.missing, view.high.missing, view.states.missing):
        if where in missing:
            return Settlement(Progress.PENDING, f"{part}: {missing[where]}")
    stable = view.stable.answers[where]
    if stable is None or view.leaders.topic_id(part.topic) != part.topic_id:
        return Settlement(Progress.LOST, f"{part}: the topic was deleted, or created anew")
    if stable > part.last_offset:
        return Settlement(Progress.SETTLED, f"{part}: the last stable offset is {stable}")
    high = view.high.answers.get(where)
    if high is None or high <= part.last_offset:
        # A new leader may show less for a moment; if it lasts, the broker lost what it acknowledged.
        return Settlement(Progress.PENDING, f"{part}: the high watermark is {high}")
    for state in view.states.answers.get(where) or ():
        since = state.open_since if state.producer_id == identity.producer_id else None
        if since is not None and since <= part.last_offset:
            why = f"producer {state.producer_id} is open there since {since}"
            return Settlement(Progress.TORN, f"{part}: {why}")
    why = f"{part}: only another transaction holds readers back"
    return Settlement(Progress.SETTLED, why, hidden=True)
