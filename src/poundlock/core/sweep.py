"""The sweep of one sink: branches that no decision names are aborted."""

from __future__ import annotations

from poundlock.core.participant import Participant
from poundlock.core.protocol import RECOVERY, Action, LogState, Stage, strays_to_abort
from poundlock.errors import LogMismatch, Unavailable, error_context


def sweep_once(state: LogState, sink: Participant) -> tuple[int, str | None]:
    """Abort the strays of a sink. Return how many there were, and why some are left, if any are.

    `state` must be that of a log that has just been read to its end. No task of ours may be running.
    """
    assert state.generation is not None
    try:
        with error_context(sink=sink.name):
            strays = strays_to_abort(state, sink.find(state.generation.namespace))
            states = sink.abort(strays) if strays else []
    except Unavailable as error:
        return 0, str(error)
    actions = [RECOVERY[Stage.NONE][found] for found in states]
    impossible = [
        stray.id for stray, action in zip(strays, actions, strict=True) if action is Action.STOP
    ]
    if impossible:
        raise LogMismatch(
            f"{', '.join(impossible)} was committed, but no decision names it: another program "
            "finished it. Compare the output with the input before you go on",
            sink=sink.name,
        )
    left = [s.id for s, action in zip(strays, actions, strict=True) if action is not Action.NOTHING]
    return len(strays), f"{left[0]} cannot be aborted now" if left else None
