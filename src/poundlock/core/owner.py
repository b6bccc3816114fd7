"""Who owns a pipeline: the name of a driver's process, and whether that process has ended.

A number of a process says little: other hosts and containers use it too, and later processes get it
again. So the name says also when the process started, and in which boot and namespace of its host.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket

LOOK_EVERY_S = 1.0  # an idle driver looks this often whether it was replaced
# A new driver waits this long for the one before to notice. Longer than a look and a stop take.
NOTICED_AFTER_S = 5.0

_PROC = "/proc"
_NAME = re.compile(r"(.+:(\d+))\.(\d+)@([0-9a-f]{12})")


def this_process() -> str:
    """Return HOST:PID, and where the system tells more, HOST:PID.START@PLACE."""
    name, place, start = f"{socket.gethostname()}:{os.getpid()}", _place(), _start(os.getpid())
    return name if place is None or start is None else f"{name}.{start}@{place}"


def has_ended(owner: str) -> bool:
    """Return whether an owner is known to run no more. False if that is unknown.

    This process has ended its own earlier query, or would have refused to start another.
    """
    if owner == this_process():
        return True
    named = _NAME.fullmatch(owner)
    if named is None or named[1] != f"{socket.gethostname()}:{named[2]}" or named[4] != _place():
        return False  # a person who adopted the log, or a process that cannot be seen from here
    try:
        os.kill(int(named[2]), 0)  # sends nothing
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's
    return _start(int(named[2])) not in (None, named[3])


def _place() -> str | None:
    """Return where process numbers are the same as here: the boot and the namespaces, hashed."""
    try:
        if os.readlink(f"{_PROC}/self") != str(os.getpid()):
            return None  # the /proc of another namespace
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            known = [file.read()]
        # The start of a process is counted from the boot as its namespace of time sees it.
        spaces = {"pid", "time"} & set(os.listdir(f"{_PROC}/self/ns"))
        known += [os.readlink(f"{_PROC}/self/ns/{it}") for it in sorted(spaces)]
    except OSError:
        return None
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def _start(process: int) -> str | None:
    """Return when a process started, in ticks of its boot. None if that cannot be read."""
    try:
        with open(f"{_PROC}/{process}/stat", "rb") as file:
            # The second field, the name of the program, may contain spaces and parentheses.
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None
