"""Which transactional ids the next batch uses.

Kafka remembers only the last transaction of an id. So a driver uses two lanes in turn: while a batch is
written in one, the ids of the other still show that the batch before was committed. If log and
checkpoint are restored to an older state then, Kafka shows that they are older.
"""

from __future__ import annotations

from poundlock.core.model import Lane


class Lanes:
    """The lanes of one driver."""

    def __init__(self) -> None:
        self._pair = self._turn = 0
        self.left_task = False  # a task of an earlier run may still run

    def current(self, generation: int) -> Lane:
        return Lane(generation, 2 * self._pair + self._turn)

    def take_turns(self) -> None:
        """Leave the current lane to what has just been decided."""
        self._turn = 1 - self._turn

    def leave_pair(self) -> None:
        """Go on in a new pair. No id of an earlier one is opened again."""
        self._pair += 1
