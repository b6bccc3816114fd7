"""A handle on a running server, with the means to disturb it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from poundlock.servers import base, guard


class Node:
    """A server in its home. Its nodes are numbered from 1; most servers have one."""

    def __init__(self, server: base.Server, home: Path, owner: str = ""):
        self._instance = base.Instance(server, home, owner)

    @property
    def url(self) -> str:
        """The address without the password."""
        return self._instance.url

    @property
    def address(self) -> str:
        """The address with the password, if there is one. The server's password is random."""
        return self.url

    @property
    def directory(self) -> Path:
        return self._instance.home

    def running(self) -> list[int]:
        """Return the numbers of the nodes that run."""
        return [int(name) for name in self._instance.running()]

    def up(self) -> None:
        """Start every node that is not running, and wait until all answer."""
        self._instance.up()

    def start(self, node: int = 1, *, wait: bool = True) -> None:
        """Start a node again, with the same data and port.

        Do not wait if too few other nodes run to form a cluster.
        """
        self._instance.start(str(node), timeout=base.START_TIMEOUT if wait else None)

    def stop(self, node: int = 1) -> None:
        """Shut a node down."""
        self._instance.stop(str(node))

    def kill(self, node: int = 1) -> None:
        """Send SIGKILL: the node ends at once and loses what it had only in memory."""
        self._instance.kill(str(node))

    def pause(self, node: int = 1) -> None:
        """Send SIGSTOP: the node keeps its connections and does not answer."""
        self._instance.pause(str(node))

    def resume(self, node: int = 1) -> None:
        """Send SIGCONT."""
        self._instance.resume(str(node))

    def wait_ready(self, timeout: float = base.START_TIMEOUT) -> None:
        """Wait until all nodes that were started answer."""
        self._instance.wait_ready(timeout=timeout)

    def log(self, node: int = 1) -> Path:
        return self._instance.log(str(node))


N = TypeVar("N", bound=Node)


@contextlib.contextmanager
def private(
    kind: Callable[[Path, str], N], name: str, directory: Path | str | None, *, kill: bool = True
) -> Iterator[N]:
    """Run a server that ends with the block, and also if this program is killed.

    `kind(home, owner)` makes the node. Without a directory, the data is deleted at the end, and the
    nodes are killed unless `kill` is false.
    """
    temporary = directory is None
    home = Path(directory or tempfile.mkdtemp(prefix=f"poundlock-{name}-")).absolute()
    owner = uuid.uuid4().hex
    with guard.watched(home, owner, wipe=temporary):
        base.down(home)  # an earlier program may have left a server there
        node = kind(home, owner)
        try:
            node.up()
            yield node
        finally:
            if temporary and kill:
                for number in node.running():
                    node.kill(number)  # faster than a shutdown, and the data is deleted anyway
            base.down(home)
            if temporary:
                shutil.rmtree(home, ignore_errors=True)
