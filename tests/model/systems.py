"""What the simulated systems have in common: how a request travels, and what the oracle may ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from poundlock.core.model import Namespace, Receipt

T = TypeVar("T")

# One branch, which differs from later uses of its id: (sink, id, instance).
Key = tuple[str, str, Any]
Row = tuple[int, int]  # the row's number in the input, and what the query made of it

OURS, FOREIGN = "lock", Namespace("lock-2", "feed")  # `lock` begins the other's name
ALIEN: Row = (1_000_000, 0)  # what a straggler writes: must never be seen
PROTOCOL, ELSEWHERE = "the protocol", "its surroundings"


class Crash(BaseException):
    """The process has died: nothing after this line runs, and no `except` catches it."""


NEW = "new-"  # begins the name of a sink that was renamed


def first_name(sink: str) -> str:
    """Return the name that a sink had at the beginning: that of its system."""
    return sink.removeprefix(NEW)


def key_of(receipt: Receipt) -> Key:
    pid = receipt.handle.get("pid")
    return (
        first_name(receipt.sink),
        receipt.id,
        None if pid is None else (pid, receipt.handle["epoch"]),
    )


class Wire(Protocol):
    """One driver's way to the systems. The request or its answer may be lost: `Unavailable`."""

    def __call__(self, label: str, request: Callable[[], T]) -> T: ...


class Watcher(Protocol):
    """Is notified of every outcome when it happens."""

    def prepared(self, key: Key) -> None: ...

    def committed(self, key: Key) -> None: ...

    def aborted(self, key: Key, by: str) -> None: ...

    def count(self, what: str) -> None: ...


class System(Protocol):
    """A simulated system, as the world and the oracle see it."""

    witnesses: bool
    remembers: bool  # finished branches show that a log is older than the system

    def state_of(self, key: Key) -> str:
        """Return the true state: open, committing, committed or aborted."""
        ...

    def visible(self) -> list[Row]: ...

    def open_branches(self) -> list[Key]:
        """Return the open branches, except the other pipeline's."""
        ...

    def bystander_lives(self) -> bool:
        """Whether the other pipeline's open branch is unchanged."""
        ...

    def expire(self, key: Key) -> None:
        """Abort an open branch, as a time-out does, or an operator."""
        ...

    def proves(self, receipt: Receipt) -> bool:
        """Whether the system can tell how this branch ended."""
        ...

    def stick(self) -> None:
        """Make the open branches such that their commit is never proven."""
        ...

    def straggle(self) -> None:
        """Let a task that was abandoned long ago write and prepare."""
        ...

    def tick(self) -> None:
        """Let time pass."""
        ...
