"""Staged branches: rows in tables aside, which the driver moves by one transaction."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pymysql

from poundlock.core.model import Receipt
from poundlock.core.naming import BranchName
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, LogMismatch, PoundlockError, Unavailable
from poundlock.sinks.mysql.connected import Connected
from poundlock.sinks.mysql.link import (
    DEADLOCK,
    DUPLICATE,
    LOCK_TIMEOUT,
    NO_SUCH_TABLE,
    Link,
    code_of,
    run,
    said,
    told,
)
from poundlock.sinks.mysql.move import ORDER, Move, stage_name
from poundlock.sinks.mysql.names import quoted
from poundlock.sinks.mysql.receipts import (
    MEANING,
    branch_of,
    by_place,
    known_of,
    place_of,
    proves,
    stage_of,
    unproven,
    went_before,
    witnessed,
)
from poundlock.sinks.mysql.target import (
    Target,
    TargetColumn,
    changes,
    describe,
    lacking,
    layout,
    read,
)

MOVE_S = 3600.0
_UNSAID = TargetColumn(ORDER, "", "")  # that there is an order is all that a move must know

logger = logging.getLogger("poundlock")


class StagedBranches(Connected):
    """The driver's half for branches that are staged."""

    def _check_staged(self, link: Link, receipts: Sequence[Receipt]) -> dict[str, str | None]:
        over = witnessed(link, receipts)
        found: dict[str, str | None] = {}
        for receipt in receipts:
            held = None if branch_of(receipt) in over else self._count(link, receipt)
            if held is None:
                found[receipt.id] = "its staging table is gone"
            elif held != receipt.handle["rows"]:
                found[receipt.id] = f"{held} rows are staged, {receipt.handle['rows']} were written"
            else:
                found[receipt.id] = None
        if any(found.values()):
            return found
        refusal = self._rehearse(link, receipts)
        return dict.fromkeys(found, refusal) if refusal else found

    def _count(self, link: Link, receipt: Receipt) -> int | None:
        """Count what is staged; None if the table is gone."""
        try:
            return int(run(link, f"SELECT COUNT(*) FROM {stage_of(receipt)}")[0][0])
        except pymysql.err.ProgrammingError as error:
            if code_of(error) != NO_SUCH_TABLE:
                raise
            return None

    def _rehearse(self, link: Link, receipts: Sequence[Receipt]) -> str | None:
        """Say what would stop the move. What only the target can tell is tried, and undone."""
        places = [stage_of(receipt) for receipt in receipts]
        move = self._move_of(link, receipts)
        if move.duplicates(link, places):
            return self.contradiction
        if changed := self._changes(link, move, receipts):
            return f"the columns of table {move.target.table} were changed: {changed}"
        if not move.may_be_refused:
            return None
        run(link, "START TRANSACTION")
        try:
            with said(self.name):
                move.run(link, places)
        except Unavailable:
            raise
        except PoundlockError as error:
            return f"the target would not take its rows: {error.args[0]}"
        finally:
            with contextlib.suppress(pymysql.err.Error):
                run(link, "ROLLBACK")
        return None

    def _changes(self, link: Link, move: Move, receipts: Sequence[Receipt]) -> str | None:
        """Say which columns of the target have become others; None if none."""
        now = describe(link, move.target.database, move.target.table)
        if missing := lacking(now, move.written):
            return missing
        layout_now = layout(now, move.written)
        for receipt in receipts:
            if receipt.handle["layout"] != layout_now:
                place, name = place_of(receipt).database, stage_name(branch_of(receipt))
                if found := changes(describe(link, place, name), now, move.written):
                    return found
        return None

    def _commit_staged(self, receipts: Sequence[Receipt]) -> dict[str, BranchState]:
        """Move all branches in one transaction that also writes their witnesses."""
        with self._borrowed(MOVE_S) as link:
            # Each in the database that its receipt names: new ones may go elsewhere by now.
            if not all(proves(link, mine[0]) for mine in by_place(receipts)):
                unknown = unproven(link, receipts)
                return {str(name): state for name, state in unknown.items()}
            states = witnessed(link, receipts)
            waiting = [receipt for receipt in receipts if branch_of(receipt) not in states]
            # A stage that others have changed is as lost as one that is gone.
            lost = [r for r in waiting if self._count(link, r) != r.handle["rows"]]
            some_lost = lost or BranchState.ABORTED in states.values()
            if some_lost and not self._begun(link, receipts, states):
                states = dict.fromkeys(map(branch_of, receipts), self._abort_all(link, waiting))
            else:
                for receipt in lost:
                    states[branch_of(receipt)] = place_of(receipt).settle(
                        link, branch_of(receipt), known_of(receipt)
                    )
                ready = [receipt for receipt in waiting if branch_of(receipt) not in states]
                if ready:
                    moved = self._move_all(link, ready)
                    states |= dict.fromkeys(map(branch_of, ready), moved)
            for receipt in receipts:
                if states[branch_of(receipt)] in (BranchState.COMMITTED, BranchState.ABORTED):
                    self._drop_stage(link, place_of(receipt).database, branch_of(receipt))
        return {str(name): state for name, state in states.items()}

    def _begun(
        self, link: Link, receipts: Sequence[Receipt], states: Mapping[BranchName, BranchState]
    ) -> bool:
        """Whether anything of the batch was committed already."""
        return BranchState.COMMITTED in states.values() or went_before(link, receipts)

    def _abort_all(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        """Give up what is left of a batch that has lost a part, in one transaction.

        The whole replay takes their place, at one instant: which row of a key is the last can be told
        only among all of them. Until that is settled none of them counts as aborted: the others
        would be moved by themselves.
        """
        run(link, "START TRANSACTION")
        try:
            if not _testify(link, receipts, committed=False):
                run(link, "ROLLBACK")
                return BranchState.NO_WITNESS
            run(link, "COMMIT")
        except pymysql.err.Error as error:
            if code_of(error) not in (LOCK_TIMEOUT, DEADLOCK, DUPLICATE):
                raise
            run(link, "ROLLBACK")
            return BranchState.PREPARED  # another driver is about it
        return BranchState.ABORTED

    def _move_all(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        move = self._move_of(link, receipts)
        run(link, "START TRANSACTION")
        try:
            if not _testify(link, receipts):  # first: who else moves the same must wait here
                run(link, "ROLLBACK")
                return BranchState.NO_WITNESS
            self._check_first(link, move, receipts)
            moved = move.run(link, [stage_of(receipt) for receipt in receipts])
            wanted = sum(int(str(receipt.handle["rows"])) for receipt in receipts)
            if not move.key and moved != wanted:
                raise InDoubt(
                    f"{moved} rows were to be moved instead of {wanted}: the staging tables of "
                    f"{receipts[0].id} and its like were changed by others. Nothing was moved",
                    sink=self.name,
                )
            # Only now: nobody can change the table any more until this ends.
            if changed := self._changes(link, move, receipts):
                raise InDoubt(
                    f"the batch of {receipts[0].id} is decided, but the columns of table "
                    f"{move.target.table} were changed since: {changed}. "
                    "Nothing was moved and nothing is lost: undo the change and start the pipeline "
                    "again",
                    sink=self.name,
                )
            run(link, "COMMIT")
        except pymysql.err.Error as error:
            with contextlib.suppress(pymysql.err.Error):
                run(link, "ROLLBACK")
            if code_of(error) in (LOCK_TIMEOUT, DEADLOCK) or self._overtaken(link, receipts):
                return BranchState.PREPARED
            self._stop(error, receipts[0], move)
        except BaseException:
            with contextlib.suppress(Exception):
                run(link, "ROLLBACK")
            raise
        return BranchState.COMMITTED

    def _check_first(self, link: Link, move: Move, receipts: Sequence[Receipt]) -> None:
        """See that no other branch of the batch went before, where tasks may share a key."""
        if move.order is None or self.key_partitioned or not went_before(link, receipts):
            return
        raise InDoubt(
            f"branch {receipts[0].id} is to be moved, but other branches of its batch were moved "
            "before it. Which of their rows are the last cannot be told. Nothing was moved: compare "
            "the table with the input, and rule by hand with 'poundlock txn'",
            sink=self.name,
        )

    def _overtaken(self, link: Link, receipts: Sequence[Receipt]) -> bool:
        """Whether another driver has ended one of them meanwhile: then the witness is asked anew."""
        with contextlib.suppress(pymysql.err.Error):
            return bool(witnessed(link, receipts))
        return False

    def _stop(self, error: pymysql.err.Error, receipt: Receipt, move: Move) -> NoReturn:
        """A decided batch that its target refuses is for a person to look at."""
        try:
            told(error, self.name)
        except Unavailable:
            raise
        except PoundlockError as reason:
            cure = "make the table take them"
            if move.may_be_refused:
                cure = "it took them when they were checked, so undo what was changed since"
            raise InDoubt(
                f"the batch of {receipt.id} is decided, but the target refuses its rows: "
                f"{reason.args[0]}. Nothing was moved and nothing is lost: {cure}, and start the "
                "pipeline again",
                sink=self.name,
            ) from None

    def _move_of(self, link: Link, receipts: Sequence[Receipt]) -> Move:
        """Return the move as the receipts have it: the sink's options may be others by now."""
        handles: list[Mapping[str, Any]] = [receipt.handle for receipt in receipts]
        if len({json.dumps([it[word] for word in MEANING]) for it in handles}) > 1:
            raise LogMismatch(
                f"the branches of {receipts[0].id} and its like were staged by sinks with different "
                "options",
                sink=self.name,
            )
        one = handles[0]
        return Move(
            self._target_at(link, *one["into"]),
            tuple(one["columns"]),
            tuple(one["key"]),
            _UNSAID if one["ordered"] else None,
            one["deletes"],
        )

    def _target_at(self, link: Link, database: str, table: str) -> Target:
        if (database, table) == (self.database, self.table):
            return self.target
        found = read(link, database, table)
        if found is None:
            raise LogMismatch(
                f"rows are staged for table {database}.{table}, which is gone. Bring it back, or start "
                "once more with the old options",
                sink=self.name,
            )
        return found

    def _drop_stage(self, link: Link, database: str, name: BranchName) -> None:
        """Drop a staging table whose rows are settled: what comes of it changes nothing for them."""
        try:
            run(link, f"DROP TABLE IF EXISTS {quoted(database, stage_name(name))}")
        except pymysql.err.Error as error:
            if not code_of(error) or code_of(error) >= 2000:  # the connection, and not the server
                raise
            logger.warning(
                "sink %s: the staging table of %s stays for now: %s", self.name, name, error
            )


def _testify(link: Link, receipts: Sequence[Receipt], *, committed: bool = True) -> bool:
    """Insert witnesses, in the open transaction; say whether their tables still prove anything.

    Asked after that: whoever empties a table now has to wait.
    """
    for mine in by_place(receipts):
        place_of(mine[0]).testify(link, list(map(branch_of, mine)), committed=committed)
    return all(proves(link, mine[0]) for mine in by_place(receipts))
