"""The contract of a sink.

A sink is one object with two halves. The executor's half opens a branch in each task, writes rows
into it and prepares it. The driver's half commits, aborts and finds branches, in another process and
possibly much later. The receipt is the only link between the two.

What every sink must do:

1. Nothing that a branch writes is visible before the branch is committed.
2. After `prepare`, the branch outlives its writer, and any process can commit it.
3. `commit` and `abort` may be repeated without harm.
4. `commit` returns COMMITTED and ABORTED only if they are proven. Otherwise it returns NO_WITNESS or
   UNREACHABLE. No error is ever mapped to success.
5. `find` returns every open branch of exactly the given namespace and this sink's name, and no other.
6. If it uses an id again, the handles of receipts and strays have plain values (no lists) under the
   same names that tell the uses apart.
7. `write` writes all rows that it is given, or raises `BadRow`. In a tolerant branch it has then
   written none of them.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.core.model import Branch, Json, Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.reach import Address
from poundlock.core.site import Site
from poundlock.errors import PoundlockError, UsageError

logger = logging.getLogger("poundlock")


class Commitment(Enum):
    """How a sink holds a branch between prepare and commit.

    All STAGED branches of a batch are committed in one call, so the batch becomes visible atomically.
    """

    TRANSACTIONAL = "transactional"  # the server holds the prepared branch
    STAGED = "staged"  # written to a staging area, published atomically after the decision
    IDEMPOTENT = "idempotent"  # sent after the decision; a repeat changes nothing
    LOGGED = "logged"  # stored beside the log, sent after the decision at least once


class Semantic(Enum):
    """The guarantee that a sink is asked for. The default is the first."""

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
        """Write a `pyarrow.RecordBatch` with the columns that `Participant.project` chose.

        Raises `BadRow` for data that the sink cannot write, with the rows if it knows them, and
        `Rejected` for any other no vote. In a tolerant branch, a `BadRow` leaves none of these rows
        behind, and the good ones are passed again. In any other branch, the next `write` or `prepare`
        may raise it instead.
        """

    @abstractmethod
    def prepare(self) -> PreparedBranch | None:
        """Make all rows durable and the branch independent of this process.

        When this returns, every acknowledgement has been checked. Returns None if the rows are already
        visible (a semantic below EXACTLY_ONCE) and there is nothing to commit.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the branch if that is possible in the task. Never raises."""

    def lifetime(self) -> tuple[float, float] | None:
        """Return when the branch was opened and when its system aborts it, None if it never does."""
        return None


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """What a writer returns: the part of the receipt that only the writer knows."""

    id: str
    handle: Mapping[str, Json]
    began_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a sink may read: its name as Spark SQL, and its type."""

    sql: str
    # Spark's `simpleString`, for example `array<struct<key:string,value:binary>>`, with field names in
    # backquotes where SQL needs them. Spark can parse it.
    type: str


@dataclass(frozen=True, slots=True)
class MissingOrder:
    """A sink that keeps one row for each key lacks the option that says which one."""

    key: Sequence[str]  # the columns of the key
    option: str  # that names the order
    refuses: bool  # a batch with two rows of one key; otherwise chance decides

    def __str__(self) -> str:
        key = ", ".join(self.key)
        fate = "the batch is refused" if self.refuses else "chance decides which of them stays"
        return (
            f"it keeps one row for each {key}, but has no order. If two rows of a batch have the same "
            f"{key}, {fate}. Set {self.option}= to a column: the row with its greatest value stays"
        )


# The columns of a dead letter. `row` is JSON: `Participant.original_row` of the refused row.
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
    """If `semantic` is NONE, log an error of this kind and continue. Raise it otherwise."""
    try:
        yield
    except kind as error:
        if semantic is not Semantic.NONE:
            raise
        logger.warning("sink %s: rows were lost, which semantic NONE allows: %s", sink, error)


class Participant(ABC):
    """A sink. It must survive pickling, because every task gets a copy."""

    name: str  # unique within its pipeline
    system: str = ""  # the kind of system, for display: "Kafka", "PostgreSQL", ...
    commitment: Commitment
    semantic: Semantic = Semantic.EXACTLY_ONCE
    asked: Semantic | None = None  # set if the user named it and the kind may guarantee less
    only_appends: bool = False  # cannot replace earlier results
    reuses_ids: bool = False  # later batches open the ids of earlier branches again
    commits_at_once: int = 256  # how many branches one call of `commit` gets
    # What `logs_of` and `committed_beyond` may miss, for `guarantee()`. Empty: nothing, as long as the
    # system keeps its data.
    after_restore: str = "not noticed: the rows since then are written again"

    # Before anything starts, on the driver.

    @abstractmethod
    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        """Choose the writer's columns: each name with a Spark SQL expression over `columns`.

        Raises a `UsageError` that names every column that is missing or has a wrong type.
        """

    def check_dead_letters(self) -> None:
        """Check that this sink can take dead letters. Raises `UsageError`."""
        self.project(DEAD_LETTER)

    def missing_order(self) -> MissingOrder | None:
        """Return what to set if the sink keeps one row for each key and has no order, else None."""
        return None

    def preflight(self) -> list[str]:
        """Check the system without changing it. Return warnings. Raises `UsageError`."""
        return []

    def addresses(self) -> Sequence[Address]:
        """Return the hosts and ports of the system, if its client would wait for refused ones.

        A start asks them first, and `preflight` only if one of them takes connections.
        """
        return ()

    def check_conflict(self, other: Participant) -> None:  # noqa: B027 (most sinks conflict with no other)
        """Check that another sink of the pipeline does not conflict with this. Raises `UsageError`."""

    def attach(self, site: Site) -> None:  # noqa: B027 (most systems hold their branches)
        """Receive the site for storing and sending rows. Called before `preflight`."""

    def reader_settings(self) -> str:
        """Return what a reader of this sink must set to see each row exactly once."""
        return "nothing"

    # In a task.

    def original_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a refused row for a dead letter, as similar to the DataFrame's row as possible.

        `row` has the columns that `project` chose, which may differ from the DataFrame's.
        """
        return row

    def dead_letters(self, dead_letters: Any) -> Any:
        """Convert dead letters to rows for this sink's writer.

        `dead_letters` is a `pyarrow.RecordBatch` with the columns of `DEAD_LETTER`.
        """
        return dead_letters

    @abstractmethod
    def begin(self, branch: Branch) -> Writer:
        """Open a branch. Called only if there is a row to write.

        If an earlier attempt of the task (`branch.retry` > 0) could make this one wait, its branch is
        aborted first.
        """

    # On the driver.

    def annotate(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Add to the receipts what only the driver knows. Called before the decision."""
        return list(receipts)

    @abstractmethod
    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        """Return for each receipt why its branch cannot be committed now, None if it can.

        Asks the system once for all receipts. Raises `Unavailable`.
        """

    def commit_together(self, receipts: Sequence[Receipt]) -> bool:
        """Return whether these branches of a batch must be committed in one call.

        They may have been written with other options, and so with another commitment.
        """
        return self.commitment is Commitment.STAGED

    @abstractmethod
    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Try to commit each branch, in this order, many at a time. Return the state of each.

        COMMITTED: readers see its rows. HIDDEN: readers see them when an earlier open transaction
        has ended. PREPARED: it is not committed yet. Raises `PermanentlyRefused` with the ids of
        branches of which the system refuses some rows.
        """

    @abstractmethod
    def find(self, namespace: Namespace) -> list[Stray]:
        """List the open branches of this namespace, of all generations. Raises `Unavailable`."""

    @abstractmethod
    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        """Abort open branches. Return ABORTED, UNREACHABLE, or COMMITTED if it was too late."""

    def open_place(self) -> str:
        """Return where this sink leaves its open branches. Two sinks of one system find each other's
        branches exactly if their places are equal.

        Empty if an open branch only takes space: nothing waits for it, and nothing is hidden by it.
        Raises `Unavailable`.
        """
        return ""

    def standing_in(self, name: str) -> Participant:
        """Return this sink under another name: it finds and aborts what a sink of that name left at
        this place.
        """
        other = copy.copy(self)
        other.name = name
        return other

    def newest_generation(self, namespace: Namespace) -> int:
        """Return the highest generation of the namespace that the system knows, 0 if none.

        Finished branches count too. A log with a lower generation was restored to an older state.
        """
        return 0

    def committed_beyond(self, state: LogState) -> str | None:
        """Return a branch or batch that this system has committed and the log does not know.

        None if it knows of none. Decisions precede commits, so such a branch proves that the log was
        restored to an older state. `LogState.explains` tells; tombstones and undecided branches do
        not count. The log is read again before it is accused: another driver may have decided since.
        """
        return None

    def newest_batch(self, namespace: Namespace) -> int | None:
        """Return the newest batch that this system has committed for this sink. None if not known.

        If the log has finished a newer one, the system was restored to an older state. Tombstones and
        open branches do not count.
        """
        return None

    def logs_of(self, pipeline: str) -> frozenset[str]:
        """Return the identities of all logs of this pipeline that have committed to this sink.

        Asked when a log is new: an earlier log with the same pipeline name was then deleted, and its
        batches would be written again. A log that may have committed counts; one that proves not to
        have does not. Names are compared whole.
        """
        return frozenset()

    def prune(self, namespace: Namespace, floor: int) -> None:  # noqa: B027
        """Delete the witnesses of batches below `floor`, which the log no longer has.

        The newest one stays, for `newest_generation`, and the newest that says "committed".
        """

    def close(self) -> None:  # noqa: B027 (a sink without connections needs none)
        """Close the driver's connections. They may be opened again."""
