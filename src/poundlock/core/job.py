"""What the coordinator needs from the part that runs the tasks of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from poundlock.core.model import Fingerprint, Receipt, Transaction
from poundlock.errors import PoundlockError, Unavailable


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes of all tasks of one attempt."""

    receipts: tuple[Receipt, ...]
    totals: Mapping[str, Fingerprint]  # per sink, those without a receipt included
    settled: bool = True  # each task ran once; otherwise another attempt of one may still run
    # The settings that cut the rows into tasks. With the same ones, a replay has the same tasks.
    cut: Mapping[str, str] = field(default_factory=dict[str, str])


def is_refusal(error: BaseException, *, at_most_once: bool) -> bool:
    """Return whether an error in a task is a no vote, which another attempt would only repeat.

    A system that does not answer has refused nothing: another executor may reach it, so the task fails
    and is run again. But not if it may have written rows that may be written at most once.
    """
    if isinstance(error, Unavailable):
        return at_most_once
    return isinstance(error, PoundlockError)


class Job(Protocol):
    """The work of one batch."""

    @property
    def stateful(self) -> bool:
        """Whether a finished batch must run again without writing, to restore its state."""
        ...

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        """Run the batch once: open, write and prepare a branch of each of `sinks` in each task.

        Totals are computed for all sinks. `held_ids` must not be used again. Raises `Rejected`.
        """
        ...

    def drain(self) -> Mapping[str, Fingerprint]:
        """Run the batch without writing and return the totals of all sinks."""
        ...
