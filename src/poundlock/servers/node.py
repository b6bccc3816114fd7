"""A handle on a running server, with the means to disturb it."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from poundlock.servers import base, guard, rooms


class Node(base.Instance):
    """A server in its home. Its nodes are numbered from 1; most servers have one."""

    @property
    def address(self) -> str:
        """The address with the password, if there is one. The server's password is random."""
        return self.url

    @property
    def directory(self) -> Path:
        return self.home

    def running(self) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the numbers of the nodes that run."""
        return [int(name) for name in super().running()]


S = TypeVar("S", bound=base.Server)
N = TypeVar("N", bound=Node)


def lasting(kind: Callable[[S, Path], N], server: S, directory: Path | str | None) -> N:
    """Start the server that outlives the program, if it is not running; see `base.home_of`."""
    node = kind(server, base.home_of(server.name, directory))
    node.up()
    return node


@contextlib.contextmanager
def private(
    kind: Callable[[S, Path, str], N], server: S, directory: Path | str | None, *, kill: bool = True
) -> Iterator[N]:
    """Run a server that ends with the block, and also if this program is killed.

    Without a directory, the data is deleted at the end, and the nodes are killed unless `kill` is
    false.
    """
    temporary = directory is None
    home = Path(directory or tempfile.mkdtemp(prefix=f"poundlock-{server.name}-")).absolute()
    owner = uuid.uuid4().hex
    with guard.watched(home, owner, wipe=temporary):
        base.down(home)  # an earlier program may have left a server there
        node = kind(server, home, owner)
        try:
            node.up()
            yield node
        finally:
            if temporary and kill:
                for number in node.running():
                    node.kill(number)  # faster than a shutdown, and the data is deleted anyway
            base.down(home)
            if temporary:
                rooms.delete_home(home)
