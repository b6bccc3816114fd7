"""Every exception of Poundlock, named by what the caller must do.

    PoundlockError            carries the transaction and the sink; survives pickling
    ├── UsageError            fix the call or the configuration; nothing was touched
    │   └── NotAuthorised     grant the permission that the message names
    ├── Unavailable           a system did not answer: the same step may be repeated
    ├── Rejected              a no vote: this attempt at the batch is aborted, nothing is lost
    │   ├── BadRow            the data does not fit the sink
    │   ├── OutOfTime         a branch would expire before it could be committed
    │   ├── NoFreeId          all transactional ids are held by unfinished batches
    │   ├── SequenceBroken    Kafka saw a gap or a repeat in a producer's sequence numbers
    │   ├── ProducerFenced    another producer took over the branch's transactional id
    │   └── OperatorFailed    a function of the user's raised an error: correct it
    │       └── StateExpired  state was read past its time to live, and the operator asked to be told
    ├── Fenced                a newer driver owns the pipeline: stop
    ├── InDoubt               decided, but a branch cannot be finished now: restart to go on
    │   └── PermanentlyRefused    a system will not take some rows as it is: change it, or rule
    ├── GuaranteeBroken         a system went against the decision, and repair is not allowed
    ├── LogMismatch                log, checkpoint and systems do not belong together
    └── LogCorrupt            a published record cannot be read: never guess, stop

A message says what happened, to which transaction, and what to do next. No message carries a secret,
or more of a row than the key that a person needs to find it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any


class PoundlockError(Exception):
    """Base of all errors. `transaction` and `sink` say where it happened, as far as is known."""

    def __init__(self, message: str, *, transaction: str | None = None, sink: str | None = None):
        super().__init__(message)
        self.transaction = transaction
        self.sink = sink

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
    """Have errors say where they happened, as far as they do not know it themselves."""
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

    `rows` says which rows of the batch just written, and why each, if the sink knows: for the task
    alone, which may send them elsewhere. It does not travel.
    """

    def __init__(
        self,
        message: str,
        *,
        transaction: str | None = None,
        sink: str | None = None,
        rows: Mapping[int, str] | None = None,
    ):
        super().__init__(message, transaction=transaction, sink=sink)
        self.rows: Mapping[int, str] = rows or {}


class OutOfTime(Rejected):
    """A branch would expire before it could be committed."""


class NoFreeId(Rejected):
    """Every transactional id of the sink is held by a batch that is not finished."""


class SequenceBroken(Rejected):
    """Kafka saw a gap or a repeat in a producer's sequence numbers."""


class ProducerFenced(Rejected):
    """Another producer took over the transactional id of a branch."""


class OperatorFailed(Rejected):
    """An operator of a flow raised an error, as it will again: its function must be corrected."""


class StateExpired(OperatorFailed):
    """State was read past its time to live by an operator that asked to be told."""


class Fenced(PoundlockError):
    """A newer driver owns the pipeline. This one must stop."""


class InDoubt(PoundlockError):
    """The batch is decided, but a branch cannot be finished now. A restart goes on from here."""


class PermanentlyRefused(InDoubt):
    """A system answered that it will not take some rows of decided branches; it has all the others.

    `branches` are the ids of those branches: for the coordinator alone, which goes on without the
    refused rows where a person ruled so. It does not travel.
    """

    def __init__(
        self,
        message: str,
        *,
        transaction: str | None = None,
        sink: str | None = None,
        branches: Collection[str] = (),
    ):
        super().__init__(message, transaction=transaction, sink=sink)
        self.branches = branches


class GuaranteeBroken(PoundlockError):
    """A system went against the decision and repair is not allowed: a person must rule."""


class LogMismatch(PoundlockError):
    """Log, checkpoint and systems do not belong together: a part was copied, restored or deleted."""


class LogCorrupt(PoundlockError):
    """A published record of the transaction log cannot be read or trusted."""
