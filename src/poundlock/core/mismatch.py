"""Checks that log, checkpoint and systems match: none was copied, restored or deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set

from poundlock.core.log import TransactionLog
from poundlock.core.model import Json, Namespace, Receipt
from poundlock.core.participant import Participant
from poundlock.core.protocol import LogState
from poundlock.errors import LogMismatch, error_context


def check_log_matches(log: TransactionLog, pipeline: str, query: str | None) -> None:
    """Check that a log just loaded belongs to this pipeline, location and checkpoint.

    `query` is Spark's query id in the checkpoint, None if there is no checkpoint.
    """
    state = log.state
    before = state.generation
    if before is None:
        return
    if before.namespace.pipeline != pipeline:
        raise LogMismatch(
            f"the log at {log.uri} belongs to pipeline {before.namespace.pipeline!r}, not "
            f"to {pipeline!r}. Give each pipeline its own checkpoint location"
        )
    if before.uri != log.uri:
        raise LogMismatch(
            f"the log was written at {before.uri} but is now at {log.uri}: it was "
            "moved or copied, and two drivers with one identity would undo each other's work. "
            "If it was moved, run 'poundlock txn adopt' on it. If it is a copy, start with a new "
            "checkpoint location"
        )
    if state.query is not None and query is None and state.batches:
        raise LogMismatch(
            f"the log has {len(state.batches)} batches of Spark's query {state.query}, but there "
            "is no checkpoint beside it: the checkpoint was deleted. Restore it, or start "
            "with a new pipeline name and checkpoint location"
        )
    if state.query is not None and query is not None and state.query != query:
        raise query_mismatch(state.query, query)


def is_newest(log: TransactionLog, sinks: Mapping[str, Participant]) -> bool:
    """Return whether no other driver has taken over since the log was read. Raises `LogMismatch`.

    If a system knows more than the log, the log is read again. If its owner has written meanwhile, that
    explains it: the owner's log was found to be the newest when it took over. Otherwise the log was
    restored to an older state.
    """
    for name, sink in sinks.items():
        evidence = _older_than(sink, log.state)
        if evidence is None:
            _check_system_is_newest(log, sink)
            continue
        before = log.state
        if log.load() != before:
            if log.state.generation != before.generation:
                return False
            continue
        seen, known = evidence
        raise LogMismatch(
            f"the system has {seen}, but the log at {log.uri} {known}: it was restored to an older "
            "state, and later batches would be written again. Restore the newest log and checkpoint, "
            "or start with a new pipeline name and checkpoint location",
            sink=name,
        )
    return True


def is_first(
    log: TransactionLog, sinks: Mapping[str, Participant], pipeline: str, abandoned: Set[str]
) -> bool:
    """Return whether a log that was read as empty is still empty. Raises `LogMismatch`.

    False means that another driver has begun it since. If it is empty even then, no system may have
    rows of this pipeline from another log, except from those in `abandoned`.
    """
    found = dict[str, frozenset[str]]()
    for name, sink in sinks.items():
        with error_context(sink=name):
            found[name] = sink.logs_of(pipeline)
    others = sorted({identity for identities in found.values() for identity in identities})
    if abandoned >= set(others):
        return True
    if log.load().generation is not None:
        return False
    newest = max(it for it in others if it not in abandoned)
    where = ", ".join(name for name, identities in found.items() if newest in identities)
    began = time.gmtime(Namespace(pipeline, newest).began_at)
    raise LogMismatch(
        f"the log at {log.uri} is new, but pipeline {pipeline!r} has already committed rows to {where} "
        f"with another log, {newest}, which began on {time.strftime('%Y-%m-%d %H:%M:%S UTC', began)}: "
        "it was deleted or is elsewhere, and its rows would be written again. Restore it and its "
        "checkpoint, or choose another pipeline name. To start anew in spite of these rows, set "
        f"abandon_log={others!r}"
    )


def _older_than(sink: Participant, state: LogState) -> tuple[str, str] | None:
    """Return what a system knows of this pipeline, and what the log knows of that, if it is less."""
    assert state.generation is not None
    with error_context(sink=sink.name):
        generation = sink.newest_generation(state.generation.namespace)
        if generation > state.generation.number:
            known = f"knows only {state.generation.number}"
            return f"seen generation {generation} of this pipeline", known
        beyond = sink.committed_beyond(state)
    return None if beyond is None else (f"committed {beyond}", "does not know it")


def _check_system_is_newest(log: TransactionLog, sink: Participant) -> None:
    """Check that a system still has the newest batch that the log has finished in it."""
    assert log.state.generation is not None
    finished = log.state.newest_finished(sink.name)
    with error_context(sink=sink.name):
        newest = None if finished is None else sink.newest_batch(log.state.generation.namespace)
        if newest is None or finished is None or newest >= finished:
            return
        raise LogMismatch(
            f"the log has finished batch {finished}, but the newest batch that the system has is "
            f"{newest}: the system was restored to an older state, and has lost the rows since then. "
            "Restore its newest state; or restore the log and the checkpoint to the same age as the "
            "system, and the rows are written again; or accept the loss with 'poundlock txn commit "
            f"--log {log.uri} --batch {finished} --sink {sink.name} --accept-loss'"
        )


def moved_target(receipt: Receipt, word: str, there: Json, here: Json) -> LogMismatch:
    """Return the error for a decided branch whose sink now leads elsewhere."""
    return LogMismatch(
        f"branch {receipt.id} is decided for {word} {there}, but the sink now leads to {here}, and its "
        "batch would be divided between both. Nothing of the branch was sent now. Set the option back "
        "for one start, which finishes the batch; then change it",
        sink=receipt.sink,
    )


def query_mismatch(recorded: str, found: str) -> LogMismatch:
    return LogMismatch(
        f"the log belongs to Spark's query {recorded}, but the checkpoint to query {found}: the "
        "checkpoint was deleted or exchanged. Restore it, or start with a new pipeline name and "
        "checkpoint location"
    )
