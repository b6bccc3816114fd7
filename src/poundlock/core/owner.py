"""Who owns a pipeline: the name of a driver's process, and whether that process has ended."""

from __future__ import annotations

import os
import socket

LOOK_EVERY_S = 1.0  # an idle driver looks this often whether it was replaced
# A new driver waits this long for the one before to notice. Longer than a look and a stop take.
NOTICED_AFTER_S = 5.0


def this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def has_ended(owner: str) -> bool:
    """Return whether an owner is known to run no more. False if that is unknown.

    This process has ended its own earlier query, or would have refused to start another.
    """
    host, _, process = owner.rpartition(":")
    if not process.isdigit() or owner == this_process():
        return True  # not a process: a person who adopted the log
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(process), 0)  # sends nothing
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # another user's
    return False
