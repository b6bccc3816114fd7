"""A server that runs, and the means to make it suffer: what those of one kind of node share."""

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
    """A server in its home. Its nodes are numbered from 1; most have one."""

    def __init__(self, server: base.Server, home: Path, owner: str = ""):
        self._instance = base.Instance(server, home, owner)

    @property
    def url(self) -> str:
        """Where it is, without the password."""
        return self._instance.url

    @property
    def address(self) -> str:
        """The url with the password, if there is one: it is the server's own and random."""
        return self.url

    @property
    def directory(self) -> Path:
        return self._instance.home

    def running(self) -> bool:
        return bool(self._instance.running())

    def up(self) -> None:
        """Start what is not running, and wait until it answers."""
        self._instance.up()

    def start(self, node: int = 1, *, wait: bool = True) -> None:
        """Start it again, upon the same data and port."""
        self._instance.start(self._name(node), timeout=base.START_TIMEOUT if wait else None)

    def stop(self, node: int = 1) -> None:
        """End it in good order."""
        self._instance.stop(self._name(node))

    def kill(self, node: int = 1) -> None:
        """SIGKILL: gone at once, with all that it had only in memory."""
        self._instance.kill(self._name(node))

    def pause(self, node: int = 1) -> None:
        """SIGSTOP: alive, connected, and silent."""
        self._instance.pause(self._name(node))

    def resume(self, node: int = 1) -> None:
        """SIGCONT."""
        self._instance.resume(self._name(node))

    def wait_ready(self, timeout: float = base.START_TIMEOUT) -> None:
        self._instance.wait_ready(timeout=timeout)

    def log(self, node: int = 1) -> Path:
        return self._instance.log(self._name(node))

    def _name(self, node: int) -> str:
        return self._instance.server.nodes[node - 1]


N = TypeVar("N", bound=Node)


@contextlib.contextmanager
def private(kind: Callable[[Path, str], N], name: str, directory: Path | str | None) -> Iterator[N]:
    """Run a server of our own, ended on exit, and also if this program is killed.

    Its data goes with it unless a directory was given. `kind(home, owner)` makes the node.
    """
    lasting = directory is not None
    home = Path(directory or tempfile.mkdtemp(prefix=f"poundlock-{name}-")).absolute()
    owner = uuid.uuid4().hex
    with guard.watched(home, owner, wipe=not lasting):
        base.down(home)  # what an earlier program may have left there
        node = kind(home, owner)
        try:
            node.up()
            yield node
        finally:
            if not lasting and node.running():
                node.kill()  # its data goes anyway: no need to write it out first
            base.down(home)
            if not lasting:
                shutil.rmtree(home, ignore_errors=True)


def down(name: str, directory: Path | str | None = None, *, wipe: bool = False) -> None:
    """End what `up` started; with `wipe`, delete the data too."""
    base.down(base.home_of(name, directory), wipe=wipe)


def status(name: str, directory: Path | str | None = None) -> base.Status:
    """Address, pid and log of what `up` started."""
    return base.status(base.home_of(name, directory))
