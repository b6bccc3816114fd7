"""Checks that log, checkpoint and systems match: none was copied, restored or deleted."""

from __future__ import annotations

from collections.abc import Mapping

from poundlock.core.log import TransactionLog
from poundlock.core.participant import Participant
from poundlock.errors import LogMismatch


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
    """Return whether the log still has the newest generation. Raises `LogMismatch`.

    False means that another driver has taken over since the log was read. If a system knows a newer
    generation than the log, the log was restored to an older state.
    """
    known = log.state.generation
    assert known is not None
    seen = {name: sink.newest_generation(known.namespace) for name, sink in sinks.items()}
    sink = max(seen, key=lambda name: seen[name], default=None)
    if sink is None or seen[sink] <= known.number:
        return True
    now = log.load().generation
    if now is not None and now.number >= seen[sink]:
        return False
    raise LogMismatch(
        f"the system has seen generation {seen[sink]} of this pipeline, but the log at "
        f"{log.uri} knows only {known.number}: it was restored to an older state, and later "
        "batches would be written again. Restore the newest log and checkpoint, or start with a new "
        "pipeline name and checkpoint location",
        sink=sink,
    )


def query_mismatch(recorded: str, found: str) -> LogMismatch:
    return LogMismatch(
        f"the log belongs to Spark's query {recorded}, but the checkpoint to query {found}: the "
        "checkpoint was deleted or exchanged. Restore it, or start with a new pipeline name and "
        "checkpoint location"
    )
