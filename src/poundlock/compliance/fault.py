"""What goes wrong in the life of a sink, and what a subject must say to have it tried.

Every subject either causes each of `FAULTS`, by a method of that name, or says in `not_applicable` why
the fault cannot happen to the sink. Such a method is a context manager: inside the block the fault is
there, until `FaultCase.over` is called, and it yields how to meet it. For example

    @contextmanager
    def null(self, sink):
        yield Tried("number is null", rows=[...])
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
    "killed_task": "a task killed after PREPARE and retried",  # the same for all: needs no method
    "no_room": "no room for another branch",
    "full_disk": "full disk",
    "lost_connection": "connection lost while writing",
}


@dataclass(frozen=True)
class FaultCase:
    """How to meet a trouble, and what must be said of it.

    By default one task writes good rows to the sink of the test.
    """

    says: str  # a pattern; found in the error
    kind: type[PoundlockError] = Rejected
    make: Callable[[], Participant] | None = None  # to be refused before anything starts
    sink: Participant | None = None  # another one than the test's
    tasks: Sequence[Sequence[pa.RecordBatch]] = ()  # what each writes, one task after the other
    during: Callable[[], object] | None = None  # done when each task has written its first rows
    over: Callable[[], object] = lambda: None  # ends the trouble; the block clears away
    survived: bool = False  # no error at all: the sink takes the trouble upon itself
    hides: str = "\0"  # a secret, or a value of a row: not to be found in the error


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system of its own that is soon full. Without root it is one in another namespace."""
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
    """Leave no byte of a file system, until `empty`."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def empty(disk: Path) -> None:
    (disk / "filler").unlink()
