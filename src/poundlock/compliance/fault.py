"""The faults that a sink must survive or report, and how a subject causes each of them.

For each of `FAULTS`, a subject either has a method of that name, or explains in `not_applicable` why
the fault cannot happen to the sink. Such a method is a context manager. Inside the block the fault is
present, until `FaultCase.over` is called, and the method yields the case. For example

    @contextmanager
    def null(self, sink):
        yield FaultCase("number is null", tasks=[[batch_with_a_null]])
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from poundlock.core.participant import Participant
from poundlock.errors import PoundlockError, Rejected

FAULTS = {
    "wrong_columns": "wrong schema",
    "wrong_type": "wrong type",
    "wrong_password": "wrong password",
    "null": "null in a required column",
    "too_long": "too long",
    "duplicate_key": "duplicate key",
    "key_in_two_tasks": "the same key in two tasks",
    "killed_task": "a task killed after PREPARE and retried",  # the same for all sinks: no method
    "no_room": "no room for another branch",
    "full_disk": "full disk",
    "lost_connection": "connection lost while writing",
}


@dataclass(frozen=True)
class FaultCase:
    """How to cause a fault, and which error it must raise.

    By default one task writes good rows to the sink of the test.
    """

    says: str  # a pattern that the error must contain
    kind: type[PoundlockError] = Rejected
    make: Callable[[], Participant] | None = None  # creating the sink must fail
    sink: Participant | None = None  # replaces the test's sink
    tasks: Sequence[Sequence[pa.RecordBatch]] = ()  # what each task writes, one after the other
    during: Callable[[], object] | None = None  # called when a task has written its first batch
    over: Callable[[], object] = lambda: None  # ends the fault; the block cleans up
    survived: bool = False  # there is no error: the sink handles the fault itself
    hides: str = "\0"  # a secret or a value of a row, which the error must not contain


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """Mount a small file system. Without root, it is mounted in its own namespace."""
    with tempfile.TemporaryDirectory(prefix="small-disk-") as directory:
        options = ["-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "poundlock-test"]
        if os.geteuid() == 0:
            os.chmod(directory, 0o755)
            subprocess.run(["mount", *options, directory], check=True)
            try:
                yield Path(directory)
            finally:
                subprocess.run(["umount", "--lazy", directory], check=True)
            return
        inside = f"mount {' '.join(options)} {directory} && echo mounted && exec cat"
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdin is not None
            assert holder.stdout.readline() == b"mounted\n", "neither root nor user namespaces"
            yield Path(f"/proc/{holder.pid}/root{directory}")
            holder.stdin.close()


def fill(disk: Path) -> None:
    """Fill a file system completely; `empty` undoes it."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def empty(disk: Path) -> None:
    (disk / "filler").unlink()
