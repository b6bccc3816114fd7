"""What the compliance suite must know of a sink to try it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant


class Subject(ABC):
    """A sink together with its real server, and eyes that are not the sink's own.

    It also has a method for each of `trouble.TROUBLES`, but for those that cannot befall it: these are
    in `not_applicable`, with a sentence that says why.
    """

    not_applicable: Mapping[str, str] = {}
    forgets_aborted = False  # a witness cannot tell "aborted" from "never"; say why in the subject
    prunes = True  # witnesses take space, and `prune` frees it
    can_lose = True  # an operator, or time, can undo a prepared branch behind our back
    finds_without_server = False  # open branches are kept elsewhere: `find` needs no server

    @abstractmethod
    def sink(self, name: str = "out") -> Participant:
        """Return a sink upon an empty target of its own, attached and looked over (`preflight`)."""

    @abstractmethod
    def again(self, sink: Participant) -> Participant:
        """Return another sink upon the same target, as a driver that was just started would."""

    @abstractmethod
    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        """Return one good row for each number, in the columns that the sink's writer takes."""

    @abstractmethod
    def visible(self, sink: Participant) -> Counter[int]:
        """Count the numbers that a plain reader of the system sees in the target."""

    @abstractmethod
    def open(self, sink: Participant) -> set[str]:
        """Return what the server itself shows as prepared or staged for the sink's target.

        Anything that names the branches will do; it must be empty when nothing is open.
        """

    @abstractmethod
    def killed(self) -> AbstractContextManager[None]:
        """SIGKILL the server; inside the block it is down, after it, it is up and answers."""

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        """Undo a prepared branch behind our back, as an operator would (ROLLBACK PREPARED, DEL)."""
        raise NotImplementedError

    def outcome(self, trouble: str, word: str) -> None:  # noqa: B027 (not everybody writes a table)
        """Be told what came of a trouble, the error's name or "goes on": compare it with your docs."""

    @property
    def has_server(self) -> bool:
        """Whether there is a process to kill."""
        return True
