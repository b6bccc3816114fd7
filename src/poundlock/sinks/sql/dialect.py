"""What differs between SQL systems, and the connection that the shared code uses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from poundlock.errors import PoundlockError, Unavailable, UsageError


class Failure(Enum):
    """What an error of a driver means for the witness."""

    DUPLICATE = "duplicate key"
    LOCKED = "lock wait timed out, or deadlock"
    NO_TABLE = "no such table"
    NO_PERMISSION = "permission denied"
    LOST = "no answer"
    OTHER = "anything else"


@dataclass(frozen=True)
class Dialect:
    """One system's SQL and errors."""

    mark: str  # the placeholder of a value in a statement
    errors: tuple[type[Exception], ...]  # what the driver raises
    # Returns DUPLICATE, LOCKED or NO_TABLE for such an error, else None.
    failure_of: Callable[[Exception], Failure | None]
    # Returns the error to raise for one of the driver's: `translate(error, sink, branch)`.
    translate: Callable[[Exception, str | None, str | None], PoundlockError]
    identity: str = "identity"  # the expression that tells one witness table from another
    hold: str = ""  # ends a SELECT: its row then cannot be deleted until the transaction ends

    def classify(self, error: Exception) -> Failure:
        found = self.failure_of(error)
        if found is not None:
            return found
        translated = self.translate(error, None, None)
        if isinstance(translated, Unavailable):
            return Failure.LOST
        return Failure.NO_PERMISSION if isinstance(translated, UsageError) else Failure.OTHER

    @contextmanager
    def translated_errors(self, sink: str | None, branch: str | None = None) -> Generator[None]:
        """Raise the driver's errors as Poundlock's. They are not chained, as they may hold data."""
        problem: PoundlockError | None = None
        try:
            yield
        except self.errors as error:
            problem = self.translate(error, sink, branch)
        if problem is not None:
            raise problem


class Link(Protocol):
    """One connection."""

    @property
    def dialect(self) -> Dialect: ...

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run a statement in the open transaction. Return its rows."""
        ...

    def run_alone(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run a statement outside of any transaction. Return its rows."""
        ...

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction, which is rolled back on an error and committed otherwise."""
        ...

    def brief_transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction that waits only a short while for a lock."""
        ...
