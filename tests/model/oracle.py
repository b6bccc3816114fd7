"""Sees every record and every outcome, and checks what must never happen.

It keeps its own account of the log, apart from the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NoReturn

from poundlock.core.log import Entry
from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    FinishedBatch,
    Generation,
    OperatorDecided,
    Receipt,
    Repaired,
)

from .spark import Range, fingerprint, range_of, routed
from .systems import PROTOCOL, Crash, Key, Row, System, first_name, key_of

LEAST_TIME_LEFT_S = 9.0  # a little less than the driver's setting: the record takes time too


@dataclass
class Story:
    """The history of a batch in the log, as the oracle reads it."""

    decided: Decided
    receipts: dict[Key, Receipt]
    finished: bool
    # The sinks for which an operator decided, and accepts the result.
    excused: set[str] = field(default_factory=set[str])

    @property
    def text(self) -> bytes:
        assert self.decided.plan is not None
        return self.decided.plan.encode()

    @property
    def rows(self) -> Range:
        return range_of(self.text)


class Oracle:
    """Fails the run immediately when something happens that must not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.systems: dict[str, System] = {}
        self.counts: Counter[str] = Counter()
        self.violation: str | None = None
        self.last_writer: str | None = None
        self.late = False  # the sender of the request that is being delivered has long continued
        self.restored = False  # the log may lack decisions
        self.stories: dict[int, Story] = {}
        self._forget_log()
        self._ended: dict[Key, str] = {}
        self._aborted_by_us: set[Key] = set()
        self._went_back = False  # to an older log
        self._let_go: set[Key] = set()  # left a batch because an operator accepted their loss
        self.gone: set[str] = set()  # sinks whose system never answers again

    def _forget_log(self) -> None:
        self.owner = 0  # the generation that may write
        self.query: str | None = None  # that the log is bound to
        self.floor = self.batch_floor = self.next = 0
        self._named: dict[Key, int] = {}

    def fail(self, what: str) -> NoReturn:
        self.violation = self.violation or what
        raise Crash(what)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # The log.

    def published(self, number: int, data: bytes, writer: str) -> None:
        """A record was created under its number."""
        if number < self.floor:
            self.count("record below the floor")
            return
        self.last_writer = writer
        record = Entry.decode(number, data, "").record
        self.count(type(record).__name__)
        self.require(number == self.next, f"record {number} leaves a gap after {self.next - 1}")
        match record:
            case Generation():
                self.require(record.number > self.owner, "a generation came twice")
            case Decided():
                self._check_decision(record)
            case Repaired():
                self._check_repair(record)
            case Finished():
                history = self.stories[record.batch]
                self.require(not history.finished, f"batch {record.batch} was finished twice")
                self._require_all(history, "committed", "was finished")
            case Compacted():
                dropped = [b for b, s in self.stories.items() if b < record.batch_floor]
                open_ = [b for b in dropped if not self.stories[b].finished]
                self.require(not open_, f"batches {open_} were compacted away unfinished")
                if record.carried is not None:
                    self.count("batches carried")
                    self._check_carried(record.batch_floor, record.carried)
            case _:
                pass
        self._apply(number, record)

    def _check_decision(self, record: Decided) -> None:
        what = f"batch {record.batch}, decided by generation {record.generation},"
        self.require(record.batch not in self.stories, f"{what} was decided before")
        self.require(record.generation == self.owner, f"{what} is not that of owner {self.owner}")
        for receipt in record.receipts:
            ours = self._is_aborted_by_us(key_of(receipt))
            self.require(not ours, f"{what} names {receipt.id}, which the protocol aborted")
            left = (receipt.expires_at or float("inf")) - self._clock()
            self.require(left > LEAST_TIME_LEFT_S, f"{what} has {left:.0f} s to be committed")

    def _check_repair(self, record: Repaired) -> None:
        history = self.stories[record.batch]
        self.require(record.generation == self.owner, "a repair by another than the owner")
        for name, id_ in record.lost:
            sink = first_name(name)
            states = [self._state(k) for k in history.receipts if k[:2] == (sink, id_)]
            what = f"repair of {id_}, which is {states}"
            self.require(states == ["aborted"] or sink in history.excused, what)
        for receipt in record.receipts:
            ours = self._is_aborted_by_us(key_of(receipt))
            self.require(not ours, f"repair by {receipt.id}, which the protocol aborted")

    def _check_carried(self, batch_floor: int, carried: Sequence[FinishedBatch]) -> None:
        stories = {batch: it for batch, it in self.stories.items() if batch >= batch_floor}
        found = {it.decided.batch: it for it in carried}
        self.require(found.keys() == stories.keys(), f"{[*found]} are carried of {[*stories]}")
        for batch, story in stories.items():
            self.require(story.finished, f"batch {batch} was carried unfinished")
            same = found[batch].decided.offsets == story.decided.offsets
            self.require(same, f"batch {batch} was carried with other offsets")

    def _is_aborted_by_us(self, key: Key) -> bool:
        if self._went_back and key in self._aborted_by_us and self._state(key) == "open":
            # An older log was restored, so the same generation came again, and its names with it.
            self._aborted_by_us.remove(key)
            del self._ended[key]
        return key in self._aborted_by_us

    def _require_all(self, history: Story, state: str, what: str) -> None:
        for key in history.receipts:
            found = self._state(key)
            self.require(
                found == state, f"batch {history.decided.batch} {what}, but {key[1]} is {found}"
            )

    def _apply(self, number: int, record: object) -> None:
        self.next = number + 1
        match record:
            case Generation():
                bound = self.query if self.stories else None
                self.owner, self.query = record.number, record.query or bound
            case Bound():
                self.query = record.query
            case Decided():
                receipts = {key_of(r): r for r in record.receipts}
                self.stories[record.batch] = Story(record, receipts, finished=not receipts)
                self._named.update(dict.fromkeys(receipts, record.batch))
            case Repaired():
                history = self.stories[record.batch]
                lost = {(first_name(sink), id_) for sink, id_ in record.lost}
                for key in [k for k in history.receipts if k[:2] in lost]:
                    del history.receipts[key], self._named[key]
                    if key[0] in history.excused:
                        self._let_go.add(key)
                history.receipts.update({key_of(r): r for r in record.receipts})
                self._named.update(dict.fromkeys(history.receipts, record.batch))
                history.finished = not history.receipts
            case Finished():
                self.stories[record.batch].finished = True
            case OperatorDecided():
                self.stories[record.batch].excused.update(map(first_name, record.sinks))
            case Compacted():
                self.owner = max(self.owner, record.generation.number)
                self.query = record.generation.query
                self.floor, self.batch_floor = record.floor, record.batch_floor
            case _:
                pass

    def remembered(self, records: Mapping[int, bytes]) -> None:
        """The machine crashed, and this is what its disk kept: nothing acted on may be missing."""
        entries = [Entry.decode(n, records[n], "") for n in sorted(records)]
        floors = [e.record for e in entries if isinstance(e.record, Compacted)]
        self._forget_log()
        if floors:
            self.floor, self.batch_floor = floors[-1].floor, floors[-1].batch_floor
        carried = {it.decided.batch for record in floors[-1:] for it in record.carried or ()}
        kept = {b: s for b, s in self.stories.items() if b < self.batch_floor or b in carried}
        self.next, self.stories = self.floor, kept
        for entry in entries:
            if entry.number >= self.floor:
                self.require(
                    entry.number == self.next, "the disk kept a record but not the one before"
                )
                self._apply(entry.number, entry.record)
        naming = [e.record for e in entries if isinstance(e.record, Decided | Repaired)]
        known = {key_of(receipt) for record in naming for receipt in record.receipts}
        known.update(self._let_go, *(history.receipts for history in kept.values()))
        for key, outcome in self._ended.items():
            if outcome == "committed" and not self.restored:
                self.require(key in known, f"the disk forgot the decision that committed {key[1]}")

    def account(self) -> dict[str, Any]:
        """Copy what this oracle knows of the log."""
        names = ("stories", "owner", "query", "floor", "batch_floor", "next", "_named")
        return {name: deepcopy(getattr(self, name)) for name in names}

    def go_back(self, account: Mapping[str, Any]) -> None:
        """The log was restored to the state of this account."""
        self.restored = True
        for name, value in account.items():
            setattr(self, name, deepcopy(value))
        self._went_back = True

    def has_committed(self) -> bool:
        return "committed" in self._ended.values()

    def unknown_commits(self) -> list[Key]:
        """Return the branches that were committed by decisions which are not in the log."""
        known = {key for story in self.stories.values() for key in story.receipts}
        return [
            key
            for key, outcome in self._ended.items()
            if outcome == "committed" and key not in known
        ]

    # The systems.

    def committed(self, key: Key) -> None:
        decided = key in self._named or key in self._let_go
        self.require(decided, f"{key[1]} was committed, and no decision names it")
        self._end(key, "committed")

    def aborted(self, key: Key, by: str) -> None:
        if by == PROTOCOL and not self.late:
            batch = self._named.get(key)
            self.require(batch is None, f"{key[1]} was aborted, though batch {batch} is decided")
            self._aborted_by_us.add(key)
        elif key in self._named:
            self.count("branch lost after the decision")
        self.count(f"branch aborted by {by}")
        self._end(key, "aborted")

    def prepared(self, key: Key) -> None:
        """A branch was prepared. After a restore, generations and so names come again."""
        if self._ended.get(key) == "aborted":
            del self._ended[key]
            self._aborted_by_us.discard(key)

    def _end(self, key: Key, outcome: str) -> None:
        before = self._ended.setdefault(key, outcome)
        self.require(before == outcome, f"the outcome of {key[1]} changed: {before}, {outcome}")

    def _state(self, key: Key) -> str:
        return self.systems[key[0]].state_of(key)

    # The state at the end.

    def spark_committed(self, batch: int, kept: Mapping[str, Fingerprint] | None) -> None:
        """Spark writes `commits/N`; `kept` is what the state it keeps belongs to, if it has one."""
        history = self.stories.get(batch)
        if history is None or not history.finished:
            self.fail(f"the call for batch {batch} returned, and the batch is not finished")
        if kept is None:
            return
        self.require(
            bool(kept) or not self.systems, f"batch {batch} was not run: its state is lost"
        )
        for sink in kept.keys() & history.decided.totals.keys():  # the others were exchanged since
            shown = fingerprint(self._visible(sink, history.rows))
            if sink not in history.excused:
                self.require(shown == kept[sink], f"state and output of batch {batch} differ")

    def _visible(self, sink: str, rows: Range) -> list[Row]:
        return [row for row in self.systems[sink].visible() if rows[0] <= row[0] < rows[1]]

    def final(self, position: int | None) -> None:
        """Check the end. `position` is that of Spark's checkpoint; None if the run stopped before."""
        for history in self.stories.values():
            for sink in self.systems:
                self._check_rows(sink, history)
            self._check_salts(history)
        for sink, system in self.systems.items():
            known = [range(*history.rows) for history in self.stories.values()]
            alien = [r for r in system.visible() if not any(r[0] in rows for rows in known)]
            self.require(not alien, f"{sink} shows {alien}, which no batch has written")
            self.require(system.bystander_lives(), f"another pipeline's branch in {sink} was ended")
        if position is not None:
            self._check_complete(position)

    def _check_complete(self, position: int) -> None:
        decided = [self.stories[batch].rows for batch in sorted(self.stories)]
        ends = [0, *(end for _, end in decided)]
        gapless = [start for start, _ in decided] == ends[:-1]
        self.require(gapless, f"the batches of the log do not follow each other: {decided}")
        self.require(ends[-1] == position, f"Spark is at {position}, the log at {ends[-1]}")
        for history in self.stories.values():
            self.require(history.finished, f"batch {history.decided.batch} was left unfinished")
        for sink, system in self.systems.items():
            left = system.open_branches()
            self.require(sink in self.gone or not left, f"{left} were left open in {sink}")

    def _check_rows(self, sink: str, history: Story) -> None:
        batch, seen = history.decided.batch, [row[0] for row in self._visible(sink, history.rows)]
        wanted = [row[0] for row in routed(sink, [(n, 0) for n in range(*history.rows)])]
        twice = sorted({row for row in seen if seen.count(row) > 1})
        self.require(not twice, f"batch {batch}: rows {twice} are in {sink} more than once")
        self.require({*seen} <= {*wanted}, f"batch {batch}: {sink} shows {seen}, not {wanted}")
        written = {first_name(name) for name in history.decided.totals}
        if history.finished and sink in written and sink not in history.excused:
            lost = sorted({*wanted} - {*seen})
            self.require(not lost, f"batch {batch} is finished, and rows {lost} are not in {sink}")

    def _check_salts(self, history: Story) -> None:
        """All sinks must show the same computation, even of a query that is not deterministic."""
        sinks = self.systems.keys() - history.excused
        salts = {row[1] for sink in sinks for row in self._visible(sink, history.rows)}
        self.require(len(salts) <= 1, f"batch {history.decided.batch} is a mix of two computations")
