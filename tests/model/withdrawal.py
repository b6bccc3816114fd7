"""An operator who runs `poundlock txn replan`, and may be interrupted between its two effects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from poundlock.errors import Fenced, LogMismatch, PoundlockError, UsageError
from poundlock.txn.replan import replan

from .systems import Crash

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")

_REFUSED = "has withdrawn Spark's plan"
_GONE = ("is not in its checkpoint", "with other source offsets than the checkpoint has")
BOTH, RECORD, MOVE = range(3)  # the steps of the command: other drivers may run between the two


class Command(threading.Thread):
    """The command in a thread of its own. It stops before it changes the checkpoint, if told to."""

    def __init__(self, world: World, *, stops: bool):
        super().__init__(daemon=True)
        self._world, self._stops = world, stops
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.dead = False

    def go_on(self) -> None:
        """Run until the command stops or ends."""
        if self.ident is None:
            self.start()
        else:
            self._turn.release()
        self._back.acquire()

    def run(self) -> None:
        try:
            self._replan()
        except (UsageError, LogMismatch, Fenced):
            self._world.oracle.count("withdrawal refused")
        except Crash:
            pass
        self._back.release()

    def _replan(self) -> None:
        world = self._world
        log, checkpoint = (
            world.open_log(self._effect, "operator"),
            world.checkpoint_files(self._effect),
        )
        plans = checkpoint.plans()
        if log.load().generation is not None and plans:
            replan(log, checkpoint, max(plans), lambda question: None)
            world.oracle.count("plan set aside")

    def _effect(self, label: str, request: Callable[[], T]) -> T:
        if self._stops and label in ("checkpoint-write", "checkpoint-rename"):
            self._stops = False
            self._back.release()
            self._turn.acquire()
        if self.dead:
            raise Crash
        return request()


class Withdrawal:
    """The operator, and a command of theirs that has stopped halfway."""

    def __init__(self) -> None:
        self._halfway: Command | None = None

    def perform(self, world: World, step: int) -> None:
        if step == MOVE:
            command, self._halfway = self._halfway, None
            if command is not None and command.is_alive():
                command.go_on()
            return
        command = Command(world, stops=step == RECORD)
        command.go_on()
        if command.is_alive():
            self.die()
            self._halfway = command

    def die(self) -> None:
        """End a command that has stopped halfway, as if its machine had crashed."""
        if self._halfway is not None and self._halfway.is_alive():
            self._halfway.dead = True
            self._halfway.go_on()
        self._halfway = None

    def repeat(self, world: World, error: PoundlockError) -> None:
        """Complete what the error says."""
        if _REFUSED in str(error):
            self.perform(world, BOTH)


def withdrawn(error: PoundlockError) -> bool:
    """Return whether a driver stopped because its plan was withdrawn, is gone or was made anew."""
    return any(words in str(error) for words in (_REFUSED, *_GONE))
