"""A child process in a session of its own, so that everything it starts can be killed with it."""

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

from poundlock.servers.process import read_stat


class Child:
    """A Python module that runs as a child and prints one JSON object per line."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path):
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,  # ends when this program ends
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._unfinished = b""

    def messages(self) -> list[dict[str, Any]]:
        """Return what the child has printed since the last call, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._output, 1 << 16):
                self._unfinished += part
        *lines, self._unfinished = self._unfinished.split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def ended(self) -> bool:
        """Whether the child itself has ended. What it started may still run.

        Its status is not collected before `kill`, so that the system does not reuse its pid.
        """
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def kill(self) -> int:
        """Kill every process of the session: driver, JVM and workers. Return the child's status."""
        while members := _session(self._process.pid):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        with self._process:  # closes the pipes and collects the status
            pass
        return self._process.returncode


def _session(leader: int) -> list[int]:
    """Return the running processes of the session that `leader` started."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    stats = {pid: read_stat(pid) for pid in pids}
    return [pid for pid, stat in stats.items() if stat and int(stat[3]) == leader]
