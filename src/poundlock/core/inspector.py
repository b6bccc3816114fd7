"""What an operator can see of a system: every open branch in it, of any pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from poundlock.core.model import Json, Namespace, Receipt, Stray
from poundlock.core.naming import owner_of
from poundlock.core.participant import Participant


@dataclass(frozen=True, slots=True)
class OpenBranch:
    """An open branch and whose it is."""

    namespace: Namespace
    stray: Stray


class Inspector(ABC):
    """A system, reached by its address alone: no pipeline is running."""

    system: str  # for people: "Kafka", "PostgreSQL", ...

    @abstractmethod
    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        """List every open branch of ours, or those of one namespace. Raises `Unavailable`.

        Without a namespace the pipeline's name is given as far as the system knows it.
        """

    def holds(self, receipt: Receipt) -> bool:
        """Whether a branch of this kind of system was written to this very one. Raises `Unavailable`.

        Where a receipt does not tell: it was.
        """
        return True

    @abstractmethod
    def participant(self, branch: Receipt | Stray) -> Participant:
        """Return a sink that can commit this receipt, or abort this stray."""

    def describe(self, id: str) -> dict[str, Json] | None:
        """Tell all that the system knows of a branch; None if it knows nothing."""
        for found in self.open(owner_of(id)):
            if found.stray.id == id:
                return {"state": found.stray.state, "sink": found.stray.sink}
        return None

    def close(self) -> None:  # noqa: B027 (most ask and hang up)
        """Let go of connections."""
