"""Staged branches: rows in tables beside the target, which the driver moves in one transaction."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import pymysql

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, PoundlockError, Unavailable
from poundlock.sinks.mysql.errors import MYSQL, NO_SUCH_TABLE, code_of, translate_error
from poundlock.sinks.mysql.link import Connections, Link
from poundlock.sinks.mysql.move import ORDER, Move, list_stages
from poundlock.sinks.mysql.target import Target, TargetColumn, changes, describe, lacking, layout
from poundlock.sinks.mysql.witness import STAGE_PREFIX, Witnesses, stage_in, stage_of, witness_for
from poundlock.sinks.sql.dialect import Failure
from poundlock.sinks.sql.naming import read_id
from poundlock.sinks.sql.receipts import STAGED, witness_of
from poundlock.sinks.sql.staging import (
    StagedRows,
    alike_keys,
    duplicate_keys,
    split_batch,
    staging_name,
)
from poundlock.sinks.sql.witness import AlreadyWitnessed, Witness, WitnessMismatch

MOVE_S = 3600.0
_ENDED = (BranchState.COMMITTED, BranchState.ABORTED)

logger = logging.getLogger("poundlock")


class StagedBranches:
    """The staged branches of a sink, on the driver."""

    def __init__(
        self,
        connections: Connections,
        witness: Witness,
        read_target: Callable[[Link, str, str], Target],
        *,
        key_partitioned: bool,
    ) -> None:
        self._connections, self._witness, self._sink = connections, witness, witness.sink
        self._read_target, self._key_partitioned = read_target, key_partitioned

    # Before the decision.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self._connections.lend(MOVE_S) as link:
            over = Witnesses(receipts).states(link)
            answers = [
                "its staging table is missing" if receipt.id in over else self._lost(link, receipt)
                for receipt in receipts
            ]
            if not any(answers):
                answers = [self._rehearse(link, receipts)] * len(receipts)
        return answers

    def _lost(self, link: Link, receipt: Receipt) -> str | None:
        """Return what is wrong with a staging table: it is missing, or was changed."""
        try:
            staged = int(link.run(f"SELECT COUNT(*) FROM {stage_of(receipt)}")[0][0])
        except pymysql.err.ProgrammingError as error:
            if code_of(error) != NO_SUCH_TABLE:
                raise
            return "its staging table is missing"
        rows = receipt.fingerprint.rows
        return None if staged == rows else f"{staged} rows are staged, but {rows} were written"

    def _rehearse(self, link: Link, receipts: Sequence[Receipt]) -> str | None:
        """Return what would stop the move. If only the target can tell, it is tried and undone."""
        stages = [stage_of(receipt) for receipt in receipts]
        move, rows = self._move_of(link, receipts)
        if move.duplicates(link, stages):
            return duplicate_keys(self._sink, rows.key, rows.order_by).args[0]
        if move.alike(link, stages):
            return alike_keys(self._sink, rows.key).args[0]
        if changed := self._changes(link, move, receipts):
            return f"the columns of table {move.target.table} were changed: {changed}"
        if not move.may_be_refused:
            return None
        link.run("START TRANSACTION")
        try:
            with MYSQL.translated_errors(self._sink):
                move.run(link, stages)
        except Unavailable:
            raise
        except PoundlockError as error:
            return f"the target would refuse its rows: {error.args[0]}"
        finally:
            with contextlib.suppress(pymysql.err.Error):
                link.run("ROLLBACK")
        return None

    def _changes(self, link: Link, move: Move, receipts: Sequence[Receipt]) -> str | None:
        """Return which columns of the target were altered; None if none was."""
        now = describe(link, move.target.database, move.target.table)
        if missing := lacking(now, move.written):
            return missing
        layout_now = layout(now, move.written)
        for receipt in receipts:
            if receipt.handle["shape"] != layout_now:
                name = staging_name(STAGE_PREFIX, receipt.id)
                staged = describe(link, witness_for(receipt).place, name)
                if found := changes(staged, now, move.written):
                    return found
        return None

    # After the decision.

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Move all branches in one transaction that also writes their witness rows."""
        witnesses = Witnesses(receipts)
        with self._connections.lend(MOVE_S) as link:
            if not witnesses.recognises(link):
                states = witnesses.unproven(link)
            else:
                states = self._end_batch(link, receipts, witnesses.states(link))
                for receipt in receipts:
                    if states[receipt.id] in _ENDED:
                        self._drop_stage(link, witness_for(receipt).place, receipt.id)
        return [states[receipt.id] for receipt in receipts]

    def _end_batch(
        self, link: Link, receipts: Sequence[Receipt], states: dict[str, BranchState]
    ) -> dict[str, BranchState]:
        """Move the branches that have not ended, or give them up; see `split_batch`."""
        waiting = [receipt for receipt in receipts if receipt.id not in states]
        lost = [receipt for receipt in waiting if self._lost(link, receipt)]
        aborted = BranchState.ABORTED in states.values()
        begun = BranchState.COMMITTED in states.values() or (
            bool(lost or aborted) and Witnesses(receipts).committed_others(link)
        )
        ready, given_up = split_batch(waiting, lost, aborted=aborted, begun=begun)
        if given_up and not begun:
            # None may count as aborted until all are given up, or the others would be moved alone.
            return dict.fromkeys([it.id for it in receipts], self._give_up(link, given_up))
        for receipt in given_up:
            identity = witness_of(receipt)[1]
            states[receipt.id] = witness_for(receipt).settle(link, receipt.id, identity)
        if ready:
            states |= dict.fromkeys([it.id for it in ready], self._move_all(link, ready))
        return states

    def _give_up(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        """Insert the tombstones of branches in one transaction."""
        try:
            with link.transaction():
                Witnesses(receipts).insert(link, BranchState.ABORTED)
        except WitnessMismatch:
            Witnesses(receipts).unproven(link)
            return BranchState.NO_WITNESS
        except AlreadyWitnessed:
            return BranchState.PREPARED  # another driver is ending them
        except pymysql.err.Error as error:
            if MYSQL.classify(error) is not Failure.LOCKED:
                raise
            return BranchState.PREPARED
        return BranchState.ABORTED

    def _move_all(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        move, _ = self._move_of(link, receipts)
        try:
            with link.transaction():
                # First: another driver that moves the same batch must wait here.
                Witnesses(receipts).insert(link)
                self._move(link, move, receipts)
        except WitnessMismatch:
            Witnesses(receipts).unproven(link)
            return BranchState.NO_WITNESS
        except AlreadyWitnessed:
            return BranchState.PREPARED  # the witness is read again later
        except pymysql.err.Error as error:
            locked = MYSQL.classify(error) is Failure.LOCKED
            if locked or self._ended_meanwhile(link, receipts):
                return BranchState.PREPARED
            raise self._refusal(error, receipts[0], move) from None
        return BranchState.COMMITTED

    def _move(self, link: Link, move: Move, receipts: Sequence[Receipt]) -> None:
        first = receipts[0].id
        ordered = move.order is not None and not self._key_partitioned
        if ordered and Witnesses(receipts).committed_others(link):
            raise InDoubt(
                f"branch {first} cannot be moved: other branches of its batch were moved before it, so "
                "it is unknown which rows are the latest. Nothing was moved: compare the table "
                "with the input, and decide with 'poundlock txn'",
                sink=self._sink,
            )
        moved = move.run(link, [stage_of(receipt) for receipt in receipts])
        wanted = sum(receipt.fingerprint.rows for receipt in receipts)
        if not move.key and moved != wanted:
            raise InDoubt(
                f"the staging tables of {first} and other branches of its batch hold {moved} rows, "
                f"not {wanted}: another program changed them. Nothing was moved",
                sink=self._sink,
            )
        # Only now: from here on nobody can alter the table.
        if changed := self._changes(link, move, receipts):
            raise InDoubt(
                f"the batch of {first} is decided, but the columns of table {move.target.table} were "
                f"changed since: {changed}. Nothing was moved and nothing is lost: undo the change and "
                "start the pipeline again",
                sink=self._sink,
            )

    def _ended_meanwhile(self, link: Link, receipts: Sequence[Receipt]) -> bool:
        with contextlib.suppress(pymysql.err.Error, PoundlockError):
            return bool(Witnesses(receipts).states(link))
        return False

    def _refusal(self, error: pymysql.err.Error, receipt: Receipt, move: Move) -> PoundlockError:
        """Return the error for a decided batch that its target refuses: an operator must look at it."""
        reason = translate_error(error, self._sink)
        if isinstance(reason, Unavailable):
            return reason
        cure = "change the table so that it accepts them"
        if move.may_be_refused:
            cure = "it accepted them in the check, so undo what was changed since"
        return InDoubt(
            f"the batch of {receipt.id} is decided, but the target refuses its rows: {reason.args[0]}. "
            f"Nothing was moved and nothing is lost: {cure}, and start the pipeline again",
            sink=self._sink,
        )

    def _move_of(self, link: Link, receipts: Sequence[Receipt]) -> tuple[Move, StagedRows]:
        """Return the move that the receipts describe: the sink's options may have changed."""
        rows = StagedRows.of(receipts)
        # The type of the column that orders is not needed here.
        order = None if rows.order_by is None else TargetColumn(ORDER, "", "")
        target = self._read_target(link, rows.schema, rows.table)
        return Move(target, rows.columns, rows.key, order, rows.delete is not None), rows

    # Open branches.

    def find(self, namespace: Namespace) -> list[Stray]:
        """List the staged branches of exactly this namespace and sink that have not ended."""
        with self._connections.lend() as link:
            ids = self._list(link, namespace)
            over = self._witness.states(link, ids)
        return [
            Stray(self._sink, it, read_id(it).name.generation, STAGED)
            for it in ids
            if it not in over
        ]

    def newest_generation(self, namespace: Namespace) -> int:
        return max((stray.generation for stray in self.find(namespace)), default=0)

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return [self._abort_one(stray) for stray in strays]

    def _abort_one(self, stray: Stray) -> BranchState:
        try:
            with self._connections.lend() as link:
                state = self._witness.settle(link, stray.id)
                if state in _ENDED:
                    self._drop_stage(link, self._witness.place, stray.id)
                return state
        except Unavailable:
            return BranchState.UNREACHABLE

    def drop_ended(self, link: Link, namespace: Namespace) -> list[str]:
        """Drop tables that a crash after a move left. Return the branches that still have one."""
        ids = self._list(link, namespace)
        for branch in self._witness.states(link, ids):
            self._drop_stage(link, self._witness.place, branch)
        return self._list(link, namespace) if ids else []

    def _list(self, link: Link, namespace: Namespace) -> list[str]:
        return list_stages(link, self._witness.place, namespace, self._sink)

    def _drop_stage(self, link: Link, database: str, branch: str) -> None:
        """Drop a staging table whose branch has ended. An error of the server is only logged."""
        try:
            link.run(f"DROP TABLE IF EXISTS {stage_in(database, branch)}")
        except pymysql.err.Error as error:
            if not code_of(error) or code_of(error) >= 2000:  # not an error of the server
                raise
            logger.warning(
                "sink %s: the staging table of %s cannot be dropped yet: %s",
                *(self._sink, branch, error),
            )
