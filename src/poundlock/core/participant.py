"""The contract a sink signs.

A sink is one object with two halves. The executor's half opens a branch in each task, writes rows
into it and prepares it; the driver's half commits, aborts and finds branches, in another process and
perhaps years later. The two meet only in the receipt.

What every sink owes:

1. Nothing that a branch writes can be seen before the branch is committed.
2. After `prepare` returned, the branch outlives its writer, and any process can commit it.
3. `commit` and `abort` may be repeated without harm.
4. `commit` tells the truth: COMMITTED and ABORTED are proven, everything else is NO_WITNESS or
   UNREACHABLE. No error is ever mapped to success.
5. `find` shows every open branch of the namespace given, compared whole, and none of any other.
6. What it cannot take it names: `write` takes a batch of rows whole, or raises `BadRow` and, where
   the branch is tolerant, has taken none of it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.core.model import Branch, Json, Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.core.site import Site
from poundlock.errors import PoundlockError, UsageError

logger = logging.getLogger("poundlock")


class Commitment(Enum):
    """How a sink keeps a branch between prepare and commit.

    The branches of a STAGED batch are committed in one call, so that it appears at one instant.
    """

    TRANSACTIONAL = "transactional"  # the server holds the prepared branch
    STAGED = "staged"  # written aside, moved after the decision by one atomic step
    IDEMPOTENT = "idempotent"  # sent after the decision; a repeat changes nothing
    LOGGED = "logged"  # kept beside the log, sent after the decision, at least once


class Semantic(Enum):
    """What a sink is asked for. Flink's three, but ours defaults to the first."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> Semantic:
        known = ", ".join(repr(it.value) for it in cls)
        raise UsageError(f"semantic={value!r}: there are {known}")


class Writer(ABC):
    """The executor's half of one open branch. Used by one task, from one thread."""

    @abstractmethod
    def write(self, rows: Any) -> None:
        """Take a `pyarrow.RecordBatch` with the columns that `Participant.project` asked for.

        Raises `BadRow` for data that the sink cannot take, naming the rows where it can, and
        `Rejected` for any other no. In a tolerant branch a `BadRow` leaves nothing of these rows
        behind, and the good ones are given once more. In any other branch, which an error ends, it may
        come later, from the next `write` or from `prepare`.
        """

    @abstractmethod
    def prepare(self) -> PreparedBranch | None:
        """Make all rows durable and the branch independent of this process.

        Every acknowledgement has been checked when this returns. None: written straight through
        (a semantic below EXACTLY_ONCE), there is nothing to commit.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up the branch, as far as that is possible from here. Never raises."""


class PreparedBranch:
    """What a writer hands back: the receipt less what the caller knows better."""

    __slots__ = ("began_at", "expires_at", "handle", "id")

    def __init__(
        self,
        id: str,
        handle: Mapping[str, Json],
        *,
        began_at: float,
        expires_at: float | None,
    ):
        self.id = id
        self.handle = handle
        self.began_at = began_at
        self.expires_at = expires_at


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a sink may read: how to name it in Spark SQL, and its type."""

    sql: str
    # As Spark's `simpleString`, for example `array<struct<key:string,value:binary>>`, but with names of
    # fields in backquotes where SQL needs them: it can be declared.
    type: str


# What a dead letter says. `row` is JSON: what `Participant.original_row` makes of the refused row.
DEAD_LETTER: Mapping[str, Column] = {
    "pipeline": Column("pipeline", "string"),
    "batch": Column("batch", "bigint"),
    "sink": Column("sink", "string"),
    "error": Column("error", "string"),
    "row": Column("row", "string"),
}


def frame_mismatch(
    sink: str, problems: Sequence[str], columns: Mapping[str, Column], *, target: str = ""
) -> UsageError:
    """Return the error for a DataFrame whose columns a sink cannot take."""
    has = ", ".join(f"{name} {column.type}" for name, column in columns.items())
    fits = f"does not fit {target}" if target else "does not fit"
    return UsageError(
        f"the DataFrame {fits}: {'; '.join(problems)}. The DataFrame has {has}", sink=sink
    )


@contextmanager
def tolerate_loss(
    sink: str, semantic: Semantic, kind: type[PoundlockError] = PoundlockError
) -> Generator[None]:
    """Log an error of this kind and go on if `semantic` is NONE. Raise it otherwise."""
    try:
        yield
    except kind as error:
        if semantic is not Semantic.NONE:
            raise
        logger.warning("sink %s: rows were lost, which semantic NONE allows: %s", sink, error)


class Participant(ABC):
    """A sink. Must survive pickling: a copy travels to every task."""

    name: str  # unique within its pipeline
    system: str = ""  # the kind of system, for people: "Kafka", "PostgreSQL", ...
    commitment: Commitment
    semantic: Semantic = Semantic.EXACTLY_ONCE
    asked: Semantic | None = None  # what the user asked for by name, where the kind may give less
    only_appends: bool = False  # has no use for results that take the place of earlier ones

    # Before anything starts, on the driver.

    @abstractmethod
    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        """Say which columns the writer wants: name to Spark SQL expression over `columns`.

        Raises `UsageError` that names every column that is missing or of a wrong type.
        """

    def check_dead_letters(self) -> None:
        """See that this sink could take another's bad rows. Raises `UsageError`."""
        self.project(DEAD_LETTER)

    def preflight(self) -> list[str]:
        """Look at the system. Return warnings; raise `UsageError` for what cannot work.

        Touches nothing.
        """
        return []

    def check_conflict(self, other: Participant) -> None:  # noqa: B027 (most sinks bear any other)
        """See that another sink of the same pipeline is not in this one's way. Raises `UsageError`."""

    def attach(self, site: Site) -> None:  # noqa: B027 (most systems hold their branches themselves)
        """Learn where rows may be kept and who sends them. Called before `preflight`."""

    def reader_settings(self) -> str:
        """Say what a reader of this sink must set to see each row exactly once."""
        return "nothing"

    # In a task.

    def original_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a refused row for a dead letter, as far as can be as the frame had it.

        `row` has the columns that `project` asked for, which may be others than the frame's.
        """
        return row

    def dead_letters(self, dead_letters: Any) -> Any:
        """Turn dead letters into rows for the writer, where this sink takes another's bad rows.

        `letters` is a `pyarrow.RecordBatch` with the columns of `DEAD_LETTER`.
        """
        return dead_letters

    @abstractmethod
    def begin(self, branch: Branch) -> Writer:
        """Open a branch. Called only when there is a row to write.

        Where an earlier attempt of the same task could make this one wait (`branch.retry` > 0), what
        it left is aborted first.
        """

    # On the driver.

    def annotate(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Add to the receipts what only the driver can learn, before they are decided on."""
        return list(receipts)

    @abstractmethod
    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        """Say of each receipt why its branch could not be committed now; None if it could.

        One batched question. Raises `Unavailable`.
        """

    def commit_together(self, receipts: Sequence[Receipt]) -> bool:
        """Whether these branches of a batch must be committed in one call.

        They may have been written when the sink's options, and so its commitment, were others.
        """
        return self.commitment is Commitment.STAGED

    @abstractmethod
    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Try to commit each branch, in this order, many at a time. Return the state of each.

        COMMITTED only if readers see its rows; HIDDEN if they will as soon as another transaction,
        which is open before it, has ended; PREPARED if it is still to be committed. Raises
        `PermanentlyRefused`, with the ids of branches whose rows the system refuses in part.
        """

    @abstractmethod
    def find(self, namespace: Namespace) -> list[Stray]:
        """List the open branches of exactly this namespace, of all generations.

        Raises `Unavailable`.
        """

    @abstractmethod
    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        """Abort open branches as found. ABORTED, UNREACHABLE, or COMMITTED if too late."""

    def newest_generation(self, namespace: Namespace) -> int:
        """Return the highest generation of the namespace that the system remembers, 0 if none.

        Branches that are over count too: a log that knows less was restored to an older state.
        """
        return 0

    def prune(self, namespace: Namespace, floor: int) -> None:  # noqa: B027
        """Forget the witnesses of batches below `floor`: the log has, and Spark will not ask.

        One of the newest generation stays: see `newest_generation`.
        """

    def close(self) -> None:  # noqa: B027 (a sink without connections needs none)
        """Let go of the driver's connections. They may be opened again."""
