"""The operator's view of a system: all its open branches, of any pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from poundlock.core.model import Json, Namespace, Receipt, Stray
from poundlock.core.naming import owner_of
from poundlock.core.participant import Participant


@dataclass(frozen=True, slots=True)
class OpenBranch:
    """An open branch and its owner."""

    namespace: Namespace
    stray: Stray


@dataclass(frozen=True, slots=True)
class Ended:
    """How a branch ended, in its system's own word."""

    state: str
    committed: bool | None  # None if the system does not tell


class Inspector(ABC):
    """A system that is reached by its address, without a running pipeline."""

    system: str  # for display: "Kafka", "PostgreSQL", ...

    @abstractmethod
    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        """List Poundlock's open branches, of one namespace or of all. Raises `Unavailable`.

        Without a namespace, the pipeline's name may be incomplete if the system truncates it.
        """

    def holds(self, receipt: Receipt) -> bool:
        """Return whether a branch was written to this system. Raises `Unavailable`.

        The receipt names this kind of system. True if it does not tell more.
        """
        return True

    def ended(self, receipts: Sequence[Receipt]) -> dict[str, Ended]:
        """Return by id how branches ended that were written to this system and are not open.

        Without those of which the system knows nothing. Changes nothing. Raises `Unavailable`.
        """
        return {}

    @abstractmethod
    def participant(self, branch: Receipt | Stray) -> Participant:
        """Return a sink that can commit this receipt, or abort this stray."""

    def describe(self, id: str) -> dict[str, Json] | None:
        """Return what the system knows about a branch, None if it knows nothing."""
        for found in self.open(owner_of(id)):
            if found.stray.id == id:
                return {"state": found.stray.state, "sink": found.stray.sink}
        return None

    def close(self) -> None:  # noqa: B027 (most keep no connection)
        """Close connections."""
