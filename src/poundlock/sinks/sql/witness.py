"""The witness: a table with a row for every branch that has ended, and one row about itself.

The transaction that commits a branch also inserts its row, which says "committed". To prove that a
branch was not committed, the driver inserts its tombstone, a row that says "aborted", under the same
key. If that succeeds, the branch was not committed and never will be. If the key exists, the row there
says how the branch ended. If the insert has to wait, the branch is still open.

This proof needs the table in which the branch's row would be, and nobody may have emptied it. So the
table's first row holds a random identity, which is lost when the table is emptied. Receipts hold it.
A table with another identity, or none, proves nothing: no tombstone is inserted, and every branch is
NO_WITNESS unless its row says "committed".
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poundlock.core.inspector import Ended
from poundlock.core.model import Namespace, Receipt
from poundlock.core.protocol import BranchState, LogState
from poundlock.errors import NotAuthorised, Rejected, Unavailable
from poundlock.sinks.sql.dialect import Failure, Link
from poundlock.sinks.sql.naming import read_id
from poundlock.sinks.sql.receipts import identities_of

logger = logging.getLogger("poundlock")

_SELF = "witness"  # the key of the row about the table; no branch has such an id
_STATES = {"committed": BranchState.COMMITTED, "aborted": BranchState.ABORTED}
_AT_ONCE = 250  # rows or keys in one statement: SQL Server takes 2,100 values, Oracle 1,000 keys
_COLUMNS = "branch, pipeline, identity, generation, sink, batch, state"
_WHOSE = "pipeline = {0} AND identity = {0}"


class AlreadyWitnessed(Exception):
    """A branch already has a row."""


class WitnessMismatch(Exception):
    """This is not the witness table of the branches, or it was emptied since."""


@dataclass(frozen=True)
class Witness:
    """The witness table of a sink. Holds no connection."""

    sink: str
    place: str  # the table, or the schema or database that it is in: for receipts
    table: str  # its quoted name
    create: tuple[str, ...]  # the statements that create it
    option: str  # the sink's options that say where it is

    # The table.

    def identity(self, link: Link) -> str | None:
        """Return the identity of this table; None if it is missing or was emptied."""
        found = self._query(link, self._identity(link), [_SELF])
        return str(found[0][0]) if found else None

    def ensure(self, link: Link) -> str:
        """Create the table and its first row if they are missing. Return its identity.

        Outside of any transaction.
        """
        known = self.identity(link)
        if known is None:
            # Not by IF NOT EXISTS alone: it needs the permission to create even if the table exists.
            if not self._exists(link):
                self._create(link)
            with contextlib.suppress(AlreadyWitnessed), link.transaction():
                self._insert(link, [(_SELF, "-", secrets.token_hex(16), 0, "-", 0, "committed")])
            known = self.identity(link)
        if known is None:
            raise Unavailable(
                f"the witness table {self.table} has just been dropped or emptied", sink=self.sink
            )
        return known

    def _create(self, link: Link) -> None:
        try:
            with link.transaction():
                for statement in self.create:
                    link.run(statement)
        except link.dialect.errors as error:
            if self._exists(link):
                return  # another task was faster
            if link.dialect.classify(error) in (Failure.LOST, Failure.LOCKED):
                raise
            detail = link.dialect.translate(error, None, None).args[0]
            raise NotAuthorised(
                f"the witness table {self.table} cannot be created: {detail}. Grant the permission to "
                "create it, and SELECT, INSERT and DELETE on it; or have an administrator create it: "
                f"{self.create[-1].strip()}",
                sink=self.sink,
            ) from None

    def _exists(self, link: Link) -> bool:
        return self._query(link, f"SELECT 1 FROM {self.table} WHERE 1 = 0") is not None

    def _identity(self, link: Link) -> str:
        dialect = link.dialect
        return f"SELECT {dialect.identity} FROM {self.table} WHERE branch = {dialect.mark}"

    def _query(self, link: Link, statement: str, values: Sequence[Any] = ()) -> list[Any] | None:
        """Query or change the table outside of a transaction; None if there is no such table."""
        try:
            return link.run_alone(statement, values)
        except link.dialect.errors as error:
            failure = link.dialect.classify(error)
            problem = link.dialect.translate(error, self.sink, None)
        detail = problem.args[0]
        if failure is Failure.NO_TABLE:
            return None
        if failure is Failure.NO_PERMISSION:
            raise NotAuthorised(
                f"the witness table {self.table} cannot be read ({detail}): grant SELECT, INSERT and "
                "DELETE on it",
                sink=self.sink,
            )
        if failure in (Failure.LOCKED, Failure.LOST):
            raise Unavailable(
                f"the witness table {self.table} cannot be read now: {detail}", sink=self.sink
            )
        raise problem

    # Proof.

    def recognises(self, link: Link, known: Iterable[str | None]) -> bool:
        """Whether the table has all these identities; None stands for a receipt without one."""
        found = self.identity(link)
        return found is not None and set(known) <= {found, None}

    def insert_own(self, link: Link, branch: str) -> None:
        """Insert the row of the task's own branch. Raises `Rejected` if the driver has aborted it."""
        try:
            self.insert(link, [branch])
        except AlreadyWitnessed:
            raise Rejected(
                f"branch {branch} was aborted by the driver while this task was still writing it",
                sink=self.sink,
            ) from None

    def require(self, link: Link, known: Iterable[str | None]) -> None:
        """Raise `WitnessMismatch` unless the table has all these identities. In a transaction.

        Then the table cannot be emptied until the transaction ends, if this follows an insert or if
        the dialect can hold a row.
        """
        try:
            found = link.run(self._identity(link) + link.dialect.hold, [_SELF])
        except link.dialect.errors as error:
            if link.dialect.classify(error) is not Failure.NO_TABLE:
                raise
            raise WitnessMismatch from None
        if not found or not set(known) <= {str(found[0][0]), None}:
            raise WitnessMismatch

    def unproven(self, link: Link, ids: Sequence[str]) -> list[BranchState]:
        """Return what another table proves: only that a branch whose row says "committed" is so."""
        others = f" and {len(ids) - 1} others" if len(ids) > 1 else ""
        logger.warning(
            "sink %s: the witness table %s is missing, was emptied or was replaced, so it proves "
            "nothing about branch %s%s. Restore the table; if %s was changed, set it back",
            *(self.sink, self.table, ids[0], others, self.option),
        )
        found, committed = self.states(link, ids), BranchState.COMMITTED
        return [committed if found.get(it) is committed else BranchState.NO_WITNESS for it in ids]

    def states(self, link: Link, ids: Sequence[str]) -> dict[str, BranchState]:
        """Return what the rows of these branches say, for those that have one."""
        found: dict[str, BranchState] = {}
        for some in _portions(list(ids)):
            marks = ", ".join([link.dialect.mark] * len(some))
            query = f"SELECT branch, state FROM {self.table} WHERE branch IN ({marks})"
            found |= {
                branch: _STATES[state] for branch, state in self._query(link, query, some) or []
            }
        return found

    def insert(
        self, link: Link, ids: Iterable[str], state: BranchState = BranchState.COMMITTED
    ) -> None:
        """Insert the rows of branches, in the open transaction. Waits while another ends one.

        Raises `AlreadyWitnessed`. Then roll the transaction back.
        """
        rows: list[tuple[Any, ...]] = []
        word = "committed" if state is BranchState.COMMITTED else "aborted"
        for spelled in sorted(ids):  # in one order, so that two drivers cannot deadlock
            name = read_id(spelled).name
            space = name.namespace
            rows.append(
                (
                    *(spelled, space.pipeline, space.identity),
                    *(name.generation, name.sink, name.batch, word),
                )
            )
        self._insert(link, rows)

    def _insert(self, link: Link, rows: Sequence[tuple[Any, ...]]) -> None:
        row = f"({', '.join([link.dialect.mark] * 7)})"
        try:
            for some in _portions(rows):
                link.run(
                    f"INSERT INTO {self.table} ({_COLUMNS}) VALUES {', '.join([row] * len(some))}",
                    [value for values in some for value in values],
                )
        except link.dialect.errors as error:
            if link.dialect.classify(error) is not Failure.DUPLICATE:
                raise
            raise AlreadyWitnessed from None

    def settle(self, link: Link, branch: str, known: str | None = None) -> BranchState:
        """Insert a branch's tombstone, to prove how the branch ended. Outside of a transaction.

        `known` is the identity in the branch's receipt. None: no decision names the branch, so any
        table will do, even a new one.
        """
        if known is None:
            self.ensure(link)
        try:
            with link.brief_transaction():
                self.insert(link, [branch], BranchState.ABORTED)
                # After the insert: from here on, a session that empties the table must wait.
                self.require(link, [known])
            return BranchState.ABORTED
        except WitnessMismatch:
            return self.unproven(link, [branch])[0]
        except AlreadyWitnessed:
            pass
        except link.dialect.errors as error:
            failure = link.dialect.classify(error)
            if failure is Failure.LOCKED:
                return BranchState.PREPARED  # another transaction is writing this row
            if failure is Failure.NO_TABLE:
                return self.unproven(link, [branch])[0]
            raise
        # A row that was rolled back or pruned just now is read again later.
        state = self.states(link, [branch]).get(branch, BranchState.PREPARED)
        if state is BranchState.ABORTED and not self.recognises(link, [known]):
            return self.unproven(link, [branch])[0]
        return state

    def committed_others(self, link: Link, ids: Sequence[str]) -> bool:
        """Whether other branches of the same batch and sink were committed before these."""
        mark, name = link.dialect.mark, read_id(ids[0]).name
        space = name.namespace
        values = [space.pipeline, space.identity, name.sink, name.batch]
        found = self._query(
            link,
            f"SELECT branch FROM {self.table} WHERE {_WHOSE.format(mark)} AND sink = {mark} "
            f"AND batch = {mark} AND state = 'committed'",
            values,
        )
        return any(branch not in ids for (branch,) in found or [])

    # What is remembered.

    def newest_generation(self, link: Link, namespace: Namespace) -> int:
        """Return the highest generation of the namespace in the table, over all sinks; 0 if none."""
        found = self._query(
            link,
            f"SELECT MAX(generation) FROM {self.table} WHERE {_WHOSE.format(link.dialect.mark)}",
            [namespace.pipeline, namespace.identity],
        )
        return int(found[0][0] or 0) if found else 0

    def committed_beyond(self, link: Link, state: LogState) -> str | None:
        """Return a batch or branch of this sink that the table calls committed and the log lacks."""
        assert state.generation is not None
        mark, space = link.dialect.mark, state.generation.namespace
        mine = f"{_WHOSE.format(mark)} AND sink = {mark} AND state = 'committed'"
        whose = [space.pipeline, space.identity, self.sink]
        batches = self._query(link, f"SELECT DISTINCT batch FROM {self.table} WHERE {mine}", whose)
        for (batch,) in batches or []:
            if not state.explains(self.sink, int(batch)):
                return f"rows of batch {batch}"
        # Of a batch that is not finished, each branch is compared. There is seldom more than one.
        query = f"SELECT branch FROM {self.table} WHERE {mine} AND batch = {mark}"
        for history in state.unfinished:
            batch = history.decided.batch
            rows = self._query(link, query, [*whose, batch]) or []
            beyond = state.first_unexplained(self.sink, ((batch, str(id_)) for (id_,) in rows))
            if beyond is not None:
                return beyond
        return None

    def newest_batch(self, link: Link, namespace: Namespace) -> int | None:
        """Return this sink's newest batch with a branch that the table calls committed."""
        mark = link.dialect.mark
        found = self._query(
            link,
            f"SELECT MAX(batch) FROM {self.table} WHERE {_WHOSE.format(mark)} AND sink = {mark} "
            "AND state = 'committed'",
            [namespace.pipeline, namespace.identity, self.sink],
        )
        return None if not found or found[0][0] is None else int(found[0][0])

    def logs_of(self, link: Link, pipeline: str) -> frozenset[str]:
        """Return the identities of the pipeline's logs of which this sink has committed branches."""
        mark = link.dialect.mark
        found = self._query(
            link,
            f"SELECT DISTINCT identity FROM {self.table} WHERE pipeline = {mark} AND sink = {mark} "
            "AND state = 'committed'",
            [pipeline, self.sink],
        )
        return frozenset(str(identity) for (identity,) in found or [])

    def prune(self, link: Link, namespace: Namespace, floor: int, keep: Sequence[str] = ()) -> None:
        """Forget this sink's branches of batches below `floor`, except those in `keep`.

        One row of the sink's newest generation stays, and one that says "committed".
        """
        mark = link.dialect.mark
        mine = f"{_WHOSE.format(mark)} AND sink = {mark}"
        whose = [namespace.pipeline, namespace.identity, self.sink]
        newest = self._query(link, f"SELECT MAX(generation) FROM {self.table} WHERE {mine}", whose)
        if not newest or newest[0][0] is None:
            return
        with link.transaction():
            [(kept,)] = link.run(
                f"SELECT MAX(branch) FROM {self.table} WHERE {mine} AND generation = {mark}",
                [*whose, int(newest[0][0])],
            )
            [(committed,)] = link.run(
                f"SELECT MAX(branch) FROM {self.table} WHERE {mine} AND state = 'committed'", whose
            )
            kept_all = [kept, *([committed] if committed is not None else []), *keep]
            link.run(
                f"DELETE FROM {self.table} WHERE {mine} AND batch < {mark} "
                f"AND branch NOT IN ({', '.join([mark] * len(kept_all))})",
                [*whose, floor, *kept_all],
            )


def ended_by(witness: Witness, link: Link, receipts: Sequence[Receipt]) -> dict[str, Ended]:
    """Return how branches ended by their rows. Of another table, only "committed" counts."""
    same = witness.recognises(link, identities_of(receipts))
    states = witness.states(link, [receipt.id for receipt in receipts])
    return {
        branch: Ended(state.value, state is BranchState.COMMITTED)
        for branch, state in states.items()
        if same or state is BranchState.COMMITTED
    }


def _portions(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]
