"""What the compliance suite must know about a sink to test it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant


class Subject(ABC):
    """A sink together with its real server, and a view of that server without the sink's code.

    A subject also has a method for each of `fault.FAULTS`. Faults that cannot happen to the sink are in
    `not_applicable` instead, each with a sentence that says why.
    """

    not_applicable: Mapping[str, str] = {}
    forgets_aborted = False  # the witness does not distinguish "aborted" from "never"; explain why
    prunes = True  # witnesses use space, and `prune` frees it
    remembers = True  # `newest_batch` knows what the system committed last
    can_lose = True  # an operator or a time-out can undo a prepared branch
    has_place = False  # an open branch is in the way of others; see `Participant.open_place`
    finds_without_server = False  # `find` needs no server, because open branches are kept elsewhere

    @abstractmethod
    def sink(self, name: str = "out") -> Participant:
        """Return a sink with its own empty target, after `attach` and `preflight`."""

    @abstractmethod
    def again(self, sink: Participant) -> Participant:
        """Return another sink with the same target, as a new driver would create it."""

    @abstractmethod
    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        """Return one good row for each number, with the columns that the sink's writer expects."""

    @abstractmethod
    def visible(self, sink: Participant) -> Counter[int]:
        """Count the numbers that a plain reader of the system sees in the target."""

    @abstractmethod
    def open(self, sink: Participant) -> set[str]:
        """Return what the server itself shows as prepared or staged for the sink's target.

        Any names will do, but the set must be empty when nothing is open.
        """

    @abstractmethod
    def killed(self) -> AbstractContextManager[None]:
        """Kill the server with SIGKILL. It is down inside the block, and afterwards it answers."""

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        """Undo a prepared branch as an operator could (ROLLBACK PREPARED, DEL)."""
        raise NotImplementedError

    def outcome(self, fault: str, word: str) -> None:  # noqa: B027 (optional)
        """Receive the result of a fault, an error's name or "goes on", to compare with your docs."""

    @property
    def has_server(self) -> bool:
        """Whether the sink's system is a process that can be killed."""
        return True
