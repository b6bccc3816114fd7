"""The sweep of one sink: aborts the branches that no decision names."""

from __future__ import annotations

from poundlock.core.participant import Participant
from poundlock.core.protocol import Action, LogState, after_abort, strays_to_abort
from poundlock.errors import LogMismatch, Unavailable, error_context


def sweep_once(state: LogState, sink: Participant) -> tuple[int, str | None]:
    """Abort the strays of a sink. Return their number, and why some are left, if any are.

    `state` must be that of a log just read to its end. No task of this pipeline may be running.
    """
    assert state.generation is not None
    try:
        with error_context(sink=sink.name):
            strays = strays_to_abort(state, sink.find(state.generation.namespace))
            states = sink.abort(strays) if strays else []
    except Unavailable as error:
        return 0, str(error)
    actions = [
        after_abort(state, stray, found) for stray, found in zip(strays, states, strict=True)
    ]
    impossible = [
        stray.id for stray, action in zip(strays, actions, strict=True) if action is Action.STOP
    ]
    if impossible:
        raise LogMismatch(
            f"{', '.join(impossible)} was committed, but no decision names it: another program "
            "committed it. Compare the output with the input before you continue",
            sink=sink.name,
        )
    over = (Action.NOTHING, Action.DONE)
    left = [s.id for s, action in zip(strays, actions, strict=True) if action not in over]
    return len(strays), f"{left[0]} cannot be aborted now" if left else None
