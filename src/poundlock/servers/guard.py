"""Ends a private server when the program that started it ends, even by SIGKILL.

Servers run in sessions of their own, so they would outlive a test run that is killed. A watcher ends
them: a shell that reads from a pipe, which the system closes when the program ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poundlock.servers import base, rooms

_WATCH = 'cat; exec "$0" -m poundlock.servers.guard "$@"'


@contextmanager
def watched(home: Path, owner: str, *, wipe: bool) -> Iterator[None]:
    """End what `owner` started in `home` if this program ends inside the block.

    `wipe` deletes the home too, so nobody else may use it.
    """
    arguments = [str(home), owner, "wipe" if wipe else "keep"]
    with subprocess.Popen(
        ["sh", "-c", _WATCH, sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # otherwise Ctrl-C would end the watcher first
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()


if __name__ == "__main__":
    base.down(Path(sys.argv[1]), owner=sys.argv[2])
    if sys.argv[3] == "wipe":
        rooms.delete_home(Path(sys.argv[1]))
