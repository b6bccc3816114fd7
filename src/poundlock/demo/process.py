"""A child process and all that it starts, in a session of its own, so that all of it can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Child:
    """A Python module that runs as a child and says JSON, a line each, on its standard output."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path):
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,  # ends when we do, however we do
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._said = self._process.stdout.fileno()
        os.set_blocking(self._said, False)
        self._unfinished = b""

    def messages(self) -> list[dict[str, Any]]:
        """Return what the child has said since the last call, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._said, 1 << 16):
                self._unfinished += part
        *lines, self._unfinished = self._unfinished.split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def ended(self) -> bool:
        """Whether the child itself has ended; what it started may live on.

        It is only looked at, not collected: until `kill` does that, nobody else can get its number.
        """
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def kill(self) -> int:
        """SIGKILL for everybody in the session: driver, JVM and workers. Return the child's status."""
        while members := _session(self._process.pid):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        with self._process:  # closes the pipes and collects the status
            pass
        return self._process.returncode


def _session(leader: int) -> list[int]:
    """Return the living members of the session that `leader` began."""
    return [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdecimal() and _session_of(entry.path) == leader
    ]


def _session_of(directory: str) -> int | None:
    try:
        stat = Path(directory, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in brackets and may hold blanks and brackets itself.
    state, _, _, session, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(session)
