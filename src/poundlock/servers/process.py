"""Processes that outlive the program that started them, and cannot be confused with others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that we started. Its pid alone does not identify it, because pids are reused."""

    pid: int
    started: int  # clock ticks between boot and start
    boot: str  # ticks and pids start again at each boot

    @property
    def alive(self) -> bool:
        if child := _children.get(self.pid):
            child.poll()  # collects its status if it has ended, so that no zombie stays
        return self.boot == _boot() and self.started == _start_time(self.pid)

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            # It may end between check and signal, but its pid is not reused that soon.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self) -> None:
        """Send SIGSTOP, and return when every thread has stopped.

        The signal only asks for it. On a busy machine a thread can still answer a request afterwards.
        """
        self.send(signal.SIGSTOP)
        while self.alive and not _threads_stopped(self.pid):
            time.sleep(0.001)

    def wait(self, seconds: float) -> bool:
        """Wait for the end, and return whether it came within this time."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def stop_all(
    processes: Sequence[Process], seconds: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Signal all of them to end, and kill those that are alive after `seconds`."""
    deadline = time.monotonic() + seconds
    if seconds > 0:
        for process in processes:
            process.send(number)
            process.send(signal.SIGCONT)  # a paused process would not handle the signal
    for process in processes:
        if not process.wait(deadline - time.monotonic()):
            process.send(signal.SIGKILL)
    for process in processes:
        process.wait(10)


# Processes that this program started. It must collect their exit status.
_children: dict[int, subprocess.Popen[bytes]] = {}


def spawn(command: Sequence[str], cwd: Path, log: Path) -> Process:
    # Other users may pass through the directory of a server that root starts.
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    return Process(child.pid, _start_time(child.pid) or 0, _boot())


def read_stat(pid: int) -> list[str] | None:
    """Return the fields after the name in a process's or thread's stat; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses. It may contain blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def _threads_stopped(pid: int) -> bool:
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return all(fields is None or fields[0] in "Tt" for fields in map(read_stat, threads))


def _start_time(pid: int) -> int | None:
    fields = read_stat(pid)
    return int(fields[19]) if fields else None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
