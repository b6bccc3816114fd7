"""Every exception of Poundlock, named by what the caller must do.

    PoundlockError            carries the transaction and the sink; survives pickling
    ├── UsageError            fix the call or the configuration; nothing was touched
    │   └── NotAuthorised     grant the permission that the message names
    ├── Unavailable           a system did not answer: the same step may be repeated
    ├── Rejected              a no vote: this attempt at the batch is aborted, nothing is lost
    │   ├── BadRow            the data does not fit the sink
    │   ├── OutOfTime         a branch would expire before it could be committed
    │   ├── SequenceBroken    Kafka saw a gap or a repeat in a producer's sequence numbers
    │   ├── ProducerFenced    another producer took over the branch's transactional id
    │   └── OperatorFailed    a user's function raised an error: correct it
    │       └── StateExpired  state was read after its time to live, which the operator forbids
    ├── Fenced                a newer driver owns the pipeline: stop
    ├── InDoubt               decided, but a branch cannot be finished now: restart to go on
    │   └── PermanentlyRefused    a system rejects some rows: change it, or decide to drop them
    ├── GuaranteeBroken       a system went against the decision, and repair is not allowed
    ├── LogMismatch           log, checkpoint and systems do not match
    └── LogCorrupt            a published record cannot be read: stop

A message says what happened, to which transaction, and what to do next. No message contains a secret.
Of a row it contains at most the key, which an operator needs to find it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any


class PoundlockError(Exception):
    """Base of all errors. `transaction` and `sink` say where it happened, if that is known."""

    def __init__(self, message: str, *, transaction: str | None = None, sink: str | None = None):
        super().__init__(message)
        self.transaction = transaction
        self.sink = sink
        self.faults: tuple[PoundlockError, ...] = ()  # those that it lists; not pickled

    def __str__(self) -> str:
        parts = [self.transaction or "", f"sink {self.sink}" if self.sink else ""]
        where = ", ".join(part for part in parts if part)
        message = str(self.args[0])
        return f"[{where}] {message}" if where else message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross from Python workers to the driver: keep the keyword arguments.
        return _rebuild, (type(self), self.args[0], self.transaction, self.sink)


def _rebuild(
    kind: type[PoundlockError], message: str, transaction: str | None, sink: str | None
) -> PoundlockError:
    return kind(message, transaction=transaction, sink=sink)


@contextmanager
def error_context(*, sink: str | None = None, transaction: object = None) -> Generator[None]:
    """Add the sink and the transaction to errors that do not have them."""
    try:
        yield
    except PoundlockError as error:
        error.sink = error.sink or sink
        if error.transaction is None and transaction is not None:
            error.transaction = str(transaction)
        raise


class UsageError(PoundlockError):
    """The call or the configuration is wrong. Nothing was touched."""


class NotAuthorised(UsageError):
    """A system refused a permission, which the message names."""


class Unavailable(PoundlockError):
    """A system did not answer. The same step may be repeated."""


class Rejected(PoundlockError):
    """A no vote: this attempt at the batch is aborted and nothing is lost."""


class BadRow(Rejected):
    """The data does not fit the sink; running again will not help.

    `rows` gives the bad rows of the batch just written, with the reason for each, if the sink knows
    them. The task may send them elsewhere. `rows` is not pickled.
    """

    def __init__(self, message: str, *, rows: Mapping[int, str] | None = None, **where: str | None):
        super().__init__(message, **where)
        self.rows: Mapping[int, str] = rows or {}


class OutOfTime(Rejected):
    """A branch would expire before it could be committed."""


class SequenceBroken(Rejected):
    """Kafka saw a gap or a repeat in a producer's sequence numbers."""


class ProducerFenced(Rejected):
    """Another producer took over the transactional id of a branch."""


class OperatorFailed(Rejected):
    """A function of a stream operator raised an error. A retry would fail too: correct the function."""


class StateExpired(OperatorFailed):
    """An operator that forbids it read state after its time to live."""


class Fenced(PoundlockError):
    """A newer driver owns the pipeline. This one must stop."""


class InDoubt(PoundlockError):
    """The batch is decided, but a branch cannot be finished now. A restart continues from here."""


class PermanentlyRefused(InDoubt):
    """A system rejects some rows of decided branches. It has all the others.

    `branches` are the ids of those branches. The coordinator continues without the refused rows if an
    operator decides so. `branches` is not pickled.
    """

    def __init__(self, message: str, *, branches: Collection[str] = (), **where: str | None):
        super().__init__(message, **where)
        self.branches = branches


class GuaranteeBroken(PoundlockError):
    """A system went against the decision and repair is not allowed. An operator must decide."""


class LogMismatch(PoundlockError):
    """Log, checkpoint and systems do not match: one was copied, restored or deleted."""


class LogCorrupt(PoundlockError):
    """A published record of the transaction log cannot be read or trusted."""
