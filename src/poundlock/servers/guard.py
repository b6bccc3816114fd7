"""Ends a private server when the program that it belongs to is gone, however it went.

Servers run in sessions of their own, so nothing ends them with a test run that was killed. A watcher
does: a shell that waits at a pipe which the system closes when our program ends, even by SIGKILL.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poundlock.servers import base

_WATCH = 'cat; exec "$0" -m poundlock.servers.guard "$@"'


@contextmanager
def watched(home: Path, owner: str, *, wipe: bool) -> Iterator[None]:
    """Inside this block, what `owner` has started in `home` does not outlive us.

    With `wipe`, nor does the home: it must be one that nobody else will ever use.
    """
    arguments = [str(home), owner, "wipe" if wipe else "keep"]
    with subprocess.Popen(
        ["sh", "-c", _WATCH, sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # or Ctrl-C at the terminal would end the watcher first
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()


if __name__ == "__main__":
    base.down(Path(sys.argv[1]), owner=sys.argv[2])
    if sys.argv[3] == "wipe":
        shutil.rmtree(sys.argv[1], ignore_errors=True)
