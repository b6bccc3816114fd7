"""Transactions in doubt, as the log and the systems see them, and the ways to resolve them.

Rules of this file: it never does what the log forbids. Every act is in the audit before it begins. A
branch is named by its exact id, never by a pattern.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from poundlock.core.inspector import Ended, Inspector, OpenBranch
from poundlock.core.log import FileLog, TransactionLog
from poundlock.core.model import (
    Generation,
    Opened,
    OperatorDecided,
    OperatorDecision,
    Place,
    Receipt,
    Stray,
)
from poundlock.core.naming import owner_of
from poundlock.core.participant import Participant
from poundlock.core.protocol import BatchHistory, BranchState, LogState
from poundlock.errors import PoundlockError, Unavailable, UsageError
from poundlock.terminal import shown_output
from poundlock.txn.audit import Chain, Trail, signature
from poundlock.txn.replan import open_checkpoint, replan

T = TypeVar("T")

_PATIENCE_S = 30.0  # for a commit to reach every partition
_ASKED = ("Kafka", "PostgreSQL", "MySQL")  # the systems that have an inspector
_NOT_ASKED, _AWAY = "not asked", "cannot be asked"
_NOT_OPEN = Ended("not open", None)

# How the branches that are not open ended, by sink and id.
Endings = dict[tuple[str, str], Ended]


@dataclass(frozen=True, slots=True)
class Line:
    """One branch, as the log and its system know it."""

    id: str
    pipeline: str
    sink: str
    system: str  # Kafka, PostgreSQL, ...; empty if neither a system nor the receipt names it
    generation: int | None
    batch: int | None
    decision: str  # commit, finished, none (so it will be aborted), or unknown without a log
    state: str  # in the system's own words, or why it is not known
    age_s: float | None
    time_left_s: float | None
    owner: str | None
    rows: int | None
    next: str  # what happens to it, or what the operator can do

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Open:
    """A branch that a system holds open."""

    system: Inspector
    found: OpenBranch

    @property
    def stray(self) -> Stray:
        return self.found.stray


def open_log(location: str) -> TransactionLog:
    """Open an existing log. Only a log on a Hadoop file system needs Spark."""
    from urllib.parse import unquote, urlparse

    parsed = urlparse(location)
    if parsed.scheme in ("", "file"):
        path = unquote(parsed.path) if parsed.scheme else location
        nested = os.path.join(path, "poundlock")  # the location may be that of the checkpoint
        if os.path.isdir(nested):
            path = nested
        if not os.path.isdir(path):
            raise UsageError(
                f"there is no log at {path}: give the log's or the checkpoint's location"
            )
        return FileLog(path, create=False)
    from poundlock.spark import storage
    from poundlock.spark.session import session

    with shown_output():
        spark = session("local[1]", conf={"spark.ui.enabled": "false"})
    return storage.open_log(spark, location)


class Resolver:
    """Looks into a log, into systems, or into both, and resolves transactions in doubt."""

    def __init__(self, log: TransactionLog | None, systems: Sequence[Inspector] = ()):
        if log is None and not systems:
            raise UsageError(
                "give --log, the address of a system, or both: there is nowhere to look"
            )
        self.log = log
        self.systems = systems
        self.away: dict[Inspector, str] = {}  # systems that could not be reached, and why
        self.state = log.load() if log else LogState()
        if log is not None and self.state.generation is None:
            raise UsageError(f"the log at {log.uri} is empty: no pipeline has used it yet")

    def __enter__(self) -> Resolver:
        return self

    def __exit__(self, *_: object) -> None:
        for system in self.systems:
            system.close()

    # Showing.

    def lines(self) -> list[Line]:
        """List the branches in doubt: decided but not finished, or open in a system."""
        found = {(open_.found.stray.sink, open_.found.stray.id): open_ for open_ in self._open()}
        decided = [(it, receipt) for it in self.state.unfinished for receipt in it.receipts]
        endings = self._endings([it for _, it in decided if (it.sink, it.id) not in found])
        lines = [
            self._decided_line(
                history, receipt, found.pop((receipt.sink, receipt.id), None), endings
            )
            for history, receipt in decided
        ]
        lines += [self._stray_line(open_) for open_ in found.values()]
        return sorted(lines, key=lambda line: (line.batch is None, line.batch or 0, line.id))

    def show(self, id: str) -> dict[str, Any]:
        """Return everything that is known about one branch, finished or not.

        `branch` is its line as in `lines`.
        """
        lines = [line for line in self.lines() if line.id == id]
        records: list[dict[str, Any]] = []
        finished: Line | None = None
        for entry in self.log.naming(id) if self.log else []:
            for receipt in getattr(entry.record, "receipts", ()):
                if receipt.id == id:
                    kind = type(entry.record).__name__
                    batch = getattr(entry.record, "batch", None)
                    history = self.state.batches.get(batch) if batch is not None else None
                    stage = history.stage.value if history else "compacted"
                    records.append(
                        {
                            "record": entry.number,
                            "kind": kind,
                            "at": entry.at,
                            "batch": batch,
                            "stage": stage,
                            "receipt": receipt.to_json(),
                        }
                    )
                    if not lines:
                        finished = self._finished_line(batch, history, receipt)
        answers = list(self._ask(lambda system: system.describe(id)))
        known = (
            {"system": system.system} | facts for system, facts in answers if facts is not None
        )
        now = next(known, None)
        line = lines[0] if lines else finished
        if line is None and now is None:
            self._need_all(f"{id} is not known")
            raise UsageError(f"neither the log nor the systems know {id!r}: give the exact id")
        audits = [act for act in (self.audit().acts() if self.log else []) if act["id"] == id]
        branch = None if line is None else line.to_json()
        return {"id": id, "branch": branch, "system": now, "log": records, "audit": audits}

    # Acting.

    def commit(self, id: str) -> BranchState:
        """Commit a branch that the log has decided to commit."""
        batch, _ = self._decided(id)
        with self._trail().act("commit", id, batch=batch) as act:
            self._reload()
            _, receipt = self._decided(id)
            participant = self._participant(receipt)
            act.touched = True
            deadline = time.monotonic() + _PATIENCE_S
            state = participant.commit([receipt])[0]
            while state in (BranchState.PREPARED, BranchState.UNREACHABLE):
                if time.monotonic() > deadline:
                    break  # the system finishes the commit without us
                time.sleep(0.1)
                state = participant.commit([receipt])[0]
            if state is BranchState.HIDDEN:
                state = BranchState.COMMITTED  # only the end of another transaction is to come
            act.outcome = state.value
        return state

    def abort(self, id: str) -> BranchState:
        """Abort an open branch that no decision names.

        The driver may decide at any moment. So what counts is the log of now, not of an earlier look,
        and a driver that could still decide about this branch is fenced before the branch is touched.
        """
        with self._trail().act("abort", id) as act:
            self._reload()
            found = self.abortable(id)
            if self.stops_driver(found):
                # Fails if the log has moved since. It says nothing new.
                self._need_log().append(Opened(self.state.places))
            act.touched = True
            state = found.system.participant(found.stray).abort([found.stray])[0]
            act.outcome = state.value
        return state

    def abortable(self, id: str) -> Open:
        """Return the open branch to abort. Raises `UsageError` where the log forbids it."""
        log, generation = self._need_log(), self.state.generation
        assert generation is not None
        if any(id == held for _, held in self.state.held()):
            raise UsageError(
                f"the log has decided to commit {id}: it may not be aborted. {_SEE_LIST}"
            )
        for open_ in self._open():
            if open_.stray.id == id:
                return open_
        self._need_all(f"{id} is not open")
        if owner_of(id) == generation.namespace:
            raise UsageError(f"{id} is not open: there is nothing to abort")
        raise UsageError(
            f"{id!r} is not a branch of the log at {log.uri}, which belongs to pipeline "
            f"{generation.namespace.pipeline!r} with identity {generation.namespace.identity}"
        )

    def stops_driver(self, found: Open) -> bool:
        """Return whether an abort of this branch stops a running driver.

        A driver decides only about branches of its own generation, and only the newest one decides.
        """
        generation = self.state.generation
        assert generation is not None
        return found.stray.generation >= generation.number

    def in_doubt(self, batch: int, named: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the sinks of a batch that an operator decides about.

        Raises `UsageError` if some that are named are not in the batch, or if none is named and more
        than one could be meant.
        """
        history = self.state.batches.get(batch)
        if history is None:
            raise UsageError(
                f"the log has no decision for batch {batch}: there is nothing to decide"
            )
        written = {receipt.sink for receipt in history.receipts}
        known = written | set(history.decided.totals)
        if unknown := sorted(set(named) - known):
            raise UsageError(
                f"batch {batch} has no sink {', '.join(unknown)}: its sinks are "
                f"{', '.join(sorted(known))}"
            )
        meant = tuple(sorted(named or written or known))
        if not named and len(meant) > 1:
            raise UsageError(
                f"batch {batch} has branches of {', '.join(meant)}: name those that you decide about "
                "with --sink NAME, as the error of the pipeline does"
            )
        return meant

    def decide(
        self, batch: int, operator_decision: OperatorDecision, sinks: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Record an operator's decision about sinks of a batch. Fences a running driver."""
        meant = self.in_doubt(batch, sinks)
        act = self._trail().act(
            "decide",
            f"batch {batch}",
            batch=batch,
            sinks=list(meant),
            decision=operator_decision.value,
        )
        with act:
            self._need_log().append(OperatorDecided(batch, operator_decision, meant, signature()))
        return meant

    def adopt(self) -> None:
        """Accept that the log was moved to where it is now. Fences a running driver."""
        log, before = self._need_log(), self.state.generation
        assert before is not None
        if before.uri == log.uri:
            raise UsageError(f"the log was not moved: its recorded location is {log.uri} too")
        query, owner = self.state.query, f"adopted by {signature()}"
        with self._trail().act("adopt", log.uri, was=before.uri):
            log.append(Generation(before.number + 1, before.namespace, log.uri, query, owner))

    def replan(self, batch: int, checkpoint: str | None, ask: Callable[[str], None]) -> str:
        """Withdraw Spark's plan of an undecided batch. Return where it is kept. See `replan`."""
        log = self._need_log()
        return replan(log, open_checkpoint(log, checkpoint), batch, ask)

    def audit(self) -> Chain:
        """Return what operators did, and whether that can be trusted."""
        return self._trail().read()

    def forgettable(self, sink: str) -> list[Place]:
        """Return the places of a sink that may be forgotten. Raises `UsageError` if none may be."""
        self._need_log()
        places = [place for place in self.state.places if place.sink == sink]
        if not places:
            known = ", ".join(sorted({place.sink for place in self.state.places})) or "none"
            raise UsageError(
                f"the log knows no sink {sink!r} that may have left branches open: it knows {known}"
            )
        for history in self.state.unfinished:
            batch = history.decided.batch
            if not history.accepts_loss(sink) and any(r.sink == sink for r in history.receipts):
                raise UsageError(
                    f"batch {batch} is decided, and branches of sink {sink!r} must still be committed. "
                    f"Start the pipeline with that sink, or run 'poundlock txn commit --batch {batch} "
                    f"--sink {sink} --accept-loss' first"
                )
        for open_ in self._open():
            if open_.stray.sink == sink:
                held = (sink, open_.stray.id) in self.state.held()
                cure = (
                    "its batch is decided, so start the pipeline once with that sink, or run "
                    "'poundlock txn commit' with that id"
                    if held
                    else "run 'poundlock txn abort' with that id"
                )
                raise UsageError(
                    f"{open_.stray.id} is still open in {open_.system.system}: {cure} first"
                )
        return places

    def forget(self, sink: str) -> None:
        """Accept that a sink, which the pipeline no longer has, left nothing open. Fences a driver."""
        gone = self.forgettable(sink)
        left = tuple(place for place in self.state.places if place not in gone)
        was = ", ".join(f"{place.system} {place.id}" for place in gone)
        with self._trail().act("forget", f"sink {sink}", was=was):
            self._need_log().append(Opened(left))

    def _decided(self, id: str) -> tuple[int, Receipt]:
        self._need_log()
        for history in self.state.unfinished:
            for receipt in history.receipts:
                if receipt.id == id:
                    return history.decided.batch, receipt
        batch = self.state.batch_naming(id)
        if batch is not None:
            raise UsageError(f"batch {batch}, which contains {id}, is already finished")
        raise UsageError(
            f"the log has not decided to commit {id!r}: committing it could repeat rows. {_SEE_LIST}"
        )

    def _reload(self) -> None:
        """Read the log again: the driver, or another operator, may have written since."""
        self.state = self._need_log().load()
        self.away.clear()

    def _trail(self) -> Trail:
        return Trail(self._need_log())

    def _need_log(self) -> TransactionLog:
        if self.log is None:
            raise UsageError("give --log: only the log says what was decided")
        return self.log

    # The systems.

    def _participant(self, receipt: Receipt) -> Participant:
        start = "start the pipeline, which first finishes decided batches"
        if not _by_hand(receipt):
            raise UsageError(
                f"{receipt.id} is committed by its pipeline alone, together with its batch: {start}",
                sink=receipt.sink,
            )
        for system in self._alike(receipt):
            if system.holds(receipt):
                return system.participant(receipt)
        raise UsageError(
            f"{receipt.id} cannot be committed from here: give the address of the "
            f"{receipt.system} that it was written to, or {start}",
            sink=receipt.sink,
        )

    def _alike(self, receipt: Receipt) -> list[Inspector]:
        """Return the systems of the receipt's kind."""
        return [system for system in self.systems if system.system == receipt.system]

    def _ask(
        self, question: Callable[[Inspector], T], systems: Sequence[Inspector] | None = None
    ) -> Iterator[tuple[Inspector, T]]:
        """Ask every system, or some of them. If one cannot be reached, continue with the others."""
        for system in self.systems if systems is None else systems:
            if system in self.away:
                continue
            try:
                answer = question(system)
            except PoundlockError as error:
                self.away[system] = str(error.args[0])
            else:
                yield system, answer

    def _need_all(self, finding: str) -> None:
        """Raise `Unavailable` if a system could not be reached, so the finding is not certain."""
        for system, why in self.away.items():
            raise Unavailable(
                f"{finding} in the other systems, but {system.system} cannot be asked: {why}"
            )

    def _open(self) -> list[Open]:
        """List the open branches of the log's pipeline, or of all pipelines if there is no log."""
        mine = self.state.generation.namespace if self.state.generation else None
        answers = self._ask(lambda system: system.open(mine))
        return [Open(system, found) for system, all_found in answers for found in all_found]

    def _decided_line(
        self, history: BatchHistory, receipt: Receipt, open_: Open | None, endings: Endings
    ) -> Line:
        generation = self.state.generation
        assert generation is not None
        ended = None if open_ else endings.get((receipt.sink, receipt.id))
        state = open_.stray.state if open_ else self._state(receipt, ended)
        return Line(
            id=receipt.id,
            pipeline=generation.namespace.pipeline,
            sink=receipt.sink,
            system=open_.system.system if open_ else receipt.system,
            generation=open_.stray.generation if open_ else history.decided.generation,
            batch=history.decided.batch,
            decision="commit",
            state=state,
            age_s=time.time() - receipt.began_at,
            time_left_s=None if receipt.expires_at is None else receipt.expires_at - time.time(),
            owner=generation.owner,
            rows=receipt.fingerprint.rows,
            next=_advice(receipt, state, ended),
        )

    def _finished_line(
        self, batch: int | None, history: BatchHistory | None, receipt: Receipt
    ) -> Line:
        """Return the line of a branch whose batch is over. Only `show` has it."""
        generation = self.state.generation
        assert generation is not None
        ended = self._endings([receipt]).get((receipt.sink, receipt.id))
        return Line(
            id=receipt.id,
            pipeline=generation.namespace.pipeline,
            sink=receipt.sink,
            system=receipt.system,
            generation=history.decided.generation if history else None,
            batch=batch,
            decision="finished",
            state=self._state(receipt, ended),
            age_s=time.time() - receipt.began_at,
            time_left_s=None,
            owner=None,
            rows=receipt.fingerprint.rows,
            next="nothing, because its batch is finished",
        )

    def _endings(self, receipts: Sequence[Receipt]) -> Endings:
        """Ask the systems of their kinds how branches ended that no system shows as open."""

        def answer(system: Inspector) -> Endings:
            mine = [it for it in receipts if it.system == system.system and system.holds(it)]
            known = system.ended(mine) if mine else {}
            return {(it.sink, it.id): known.get(it.id, _NOT_OPEN) for it in mine}

        found: Endings = {}
        for _, endings in self._ask(answer):
            found |= endings
        return found

    def _state(self, receipt: Receipt, ended: Ended | None) -> str:
        """Return the state of a branch that no system shows as open."""
        if ended is not None:
            return ended.state
        if any(system in self.away for system in self._alike(receipt)):
            return _AWAY
        return _NOT_ASKED if receipt.system in _ASKED else "waits for the pipeline"

    def _stray_line(self, open_: Open) -> Line:
        generation, stray = self.state.generation, open_.stray
        known = generation is not None
        current = known and stray.generation == generation.number
        advice = (
            "belongs to the running batch, or is swept"
            if current
            else "is swept when the pipeline starts; 'poundlock txn abort' does it now"
        )
        return Line(
            id=stray.id,
            pipeline=open_.found.namespace.pipeline,
            sink=stray.sink,
            system=open_.system.system,
            generation=stray.generation,
            batch=None,
            decision="none" if known else "unknown",
            state=stray.state,
            age_s=None if stray.began_at is None else time.time() - stray.began_at,
            time_left_s=None if stray.expires_at is None else stray.expires_at - time.time(),
            owner=generation.owner if current and generation else None,
            rows=None,
            next=advice if known else "give --log to know what was decided",
        )


# Where two commands refuse: neither may send the user to the other.
_SEE_LIST = (
    "The pipeline settles it when it starts; 'poundlock txn list' shows what can be done before"
)


def _advice(receipt: Receipt, state: str, ended: Ended | None) -> str:
    """Return what happens to a branch that is decided, or what the operator can do."""
    if ended is not None and ended.committed is not None:
        return (
            "is committed; its batch is finished when the pipeline starts"
            if ended.committed
            else "was aborted after the decision; the pipeline repairs it when it starts, or says why "
            "it cannot"
        )
    advice = "is committed when the pipeline starts"
    if not _by_hand(receipt):
        return f"{advice}, and only then"
    if state == _NOT_ASKED:
        return f"{advice}; to see it, or to do it now, give the address of its {receipt.system}"
    return advice if state == _AWAY else f"{advice}; 'poundlock txn commit' does it now"


def _by_hand(receipt: Receipt) -> bool:
    """Whether an operator can commit a branch with the address of its system alone.

    Only the pipeline can move a staged branch, together with the others of its batch.
    """
    return receipt.system in _ASKED and receipt.handle.get("mode") != "staged"
