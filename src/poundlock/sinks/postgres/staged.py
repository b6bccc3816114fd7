"""Staged branches: one table each, all tables of a batch moved in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import psycopg
from psycopg import errors

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import (
    GuaranteeBroken,
    InDoubt,
    LogMismatch,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.postgres.catalog import read_table
from poundlock.sinks.postgres.errors import translate_error
from poundlock.sinks.postgres.link import Connections, Link
from poundlock.sinks.postgres.move import (
    Columns,
    Moved,
    clear_away,
    has_alike,
    has_duplicates,
    hurdles,
    lock_all,
    move,
    retyped,
    staged_branches,
    too_long,
)
from poundlock.sinks.postgres.target import Target, staging_name
from poundlock.sinks.sql.naming import read_id
from poundlock.sinks.sql.receipts import STAGED, identities_of
from poundlock.sinks.sql.staging import alike_keys, duplicate_keys, split_batch
from poundlock.sinks.sql.witness import AlreadyWitnessed, WitnessMismatch

logger = logging.getLogger("poundlock")

_AGAIN = (  # another session was briefly in the way: the same move can be tried again
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.SerializationFailure,
    errors.QueryCanceled,
    errors.OutOfMemory,  # of the lock table, until other sessions release their locks
    errors.ReadOnlySqlTransaction,  # a standby, until it is promoted
)


class StagedBranches:
    """The staged branches of a sink, on the driver."""

    def __init__(self, connections: Connections, target: Target):
        self._connections, self._target = connections, target

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        """Check that each branch exists, no key is written twice, and the target accepts all rows.

        If the target has constraints that staging tables cannot have, the move is rehearsed and
        rolled back.
        """
        with self._connections.lend() as link, link.transaction(force_rollback=True):
            link.override_timeouts(self._target.wait)
            return _check(link, self._target, receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Move all branches of a batch in one transaction that also writes their witness rows.

        The staging tables are dropped after it: a session that reads one must not hold up the move.
        Until then the witness keeps them from being moved again.
        """
        target, witness = self._target, self._target.witness
        ids = [receipt.id for receipt in receipts]
        with self._connections.lend() as link:
            try:
                with link.transaction():
                    link.override_timeouts(target.wait)
                    witness.require(link, identities_of(receipts))
                    known = witness.states(link, ids)
                    ended = _end_waiting(link, target, receipts, known)
                    _run_deferred(link)
            except WitnessMismatch:
                return witness.unproven(link, ids)  # a batch is moved as a whole
            except AlreadyWitnessed:
                return self._without_moving(link, ids)
            except _AGAIN as error:
                _log_wait("moved", target, ids[0], error)
                return self._without_moving(link, ids)
            except psycopg.Error as error:
                problem = translate_error(error, target.sink)
                if isinstance(problem, Unavailable):
                    raise
                raise InDoubt(
                    f"the batch of branch {ids[0]} is decided, but its rows cannot be moved into "
                    f"{target.table}: {problem.args[0]}. Nothing is lost and nothing was moved: "
                    "change the target so that it accepts them, then start the pipeline again",
                    sink=target.sink,
                ) from None
            clear_away(link, target, list(ended))
            return [(known | ended)[branch] for branch in ids]

    def _without_moving(self, link: Link, ids: Sequence[str]) -> list[BranchState]:
        """Return the known states while another session blocks the move."""
        known = self._target.witness.states(link, ids)
        return [known.get(branch, BranchState.PREPARED) for branch in ids]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        """Insert a tombstone for each, then drop the staging tables."""
        states: list[BranchState] = []
        over = (BranchState.COMMITTED, BranchState.ABORTED)
        with self._connections.lend() as link:
            for stray in strays:
                try:
                    state = self._target.witness.settle(link, stray.id)
                except _AGAIN as error:
                    _log_wait("aborted", self._target, stray.id, error)
                    state = BranchState.PREPARED
                states.append(state if state in over else BranchState.UNREACHABLE)
            ended = zip(strays, states, strict=True)
            clear_away(link, self._target, [stray.id for stray, it in ended if it in over])
        return states

    def find(self, namespace: Namespace) -> list[Stray]:
        """List the staged branches of exactly this namespace and sink that have not ended.

        The table of an ended branch may still exist, because a session was reading it. Drop it.
        """
        target = self._target
        with self._connections.lend() as link:
            mine = [
                branch
                for branch in sorted(staged_branches(link, target))
                if read_id(branch).belongs_to(namespace, target.sink)
            ]
            over = target.witness.states(link, mine)
            if over:
                clear_away(link, target, list(over))
        return [
            Stray(target.sink, branch, read_id(branch).name.generation, STAGED)
            for branch in mine
            if branch not in over
        ]

    def newest_generation(self, namespace: Namespace) -> int:
        with self._connections.lend() as link:
            names = [read_id(branch).name for branch in staged_branches(link, self._target)]
        return max((it.generation for it in names if it.namespace == namespace), default=0)


def _check(link: Link, target: Target, receipts: Sequence[Receipt]) -> list[str | None]:
    staged = staged_branches(link, target)
    answers: list[str | None] = [
        None if receipt.id in staged else "its staging table is missing" for receipt in receipts
    ]
    if any(answers):
        return answers
    target = target.as_recorded(receipts)
    branches = [receipt.id for receipt in receipts]
    _check_locks(link, target, branches)
    table = read_table(link, target.schema, target.table)
    unfit = target.key and not any(index.serves(target.key) for index in table.indexes)
    if unfit or any(receipt.handle.get("shape") != table.shape for receipt in receipts):
        raise Rejected(
            f"table {table.schema}.{table.name} was altered while the batch was written: the "
            "batch is written again",
            sink=target.sink,
        )
    names = [name for name, _ in _columns(target, staged, branches)]
    if target.key and has_duplicates(link, target, table, branches):
        raise duplicate_keys(target.sink, target.key, target.order_by)
    if has_alike(link, target, table, branches):
        raise alike_keys(target.sink, target.key)
    if hurdles(target, table, names) or too_long(link, target, table, branches, names):
        wrong = _difference(receipts, move(link, target, table, branches, names))
        if wrong is not None:
            raise Rejected(
                f"{wrong} in the rehearsal before the decision: a trigger or a rule leaves rows out. "
                "Nothing was written to the target",
                sink=target.sink,
            )
        _run_deferred(link)
    return answers


def _run_deferred(link: Link) -> None:
    """Run the constraint triggers that wait for the transaction's end."""
    with link.users_path():
        link.run("SET CONSTRAINTS ALL IMMEDIATE")


def _check_locks(link: Link, target: Target, branches: Sequence[str]) -> None:
    """Take a lock on every staging table, as the move does. The move must not find out that it cannot.

    It reads all tables in one transaction. The server holds each lock until the end, in a table of
    fixed size that all sessions share.
    """
    ((room,),) = link.run(
        "SELECT current_setting('max_locks_per_transaction')::int * ("
        "current_setting('max_connections')::int + "
        "current_setting('max_prepared_transactions')::int)"
    )
    problem = None
    if len(branches) > room:
        problem = f"for which it is made to hold {room}"
    else:
        try:
            lock_all(link, target, branches)
        except errors.OutOfMemory:
            problem = f"which it cannot hold now (it is made for {room}, for all sessions together)"
    if problem is not None:
        raise UsageError(
            f"the batch has {len(branches)} staging tables, and moving them takes as many of the "
            f"server's locks at once, {problem}. Nothing was decided: raise "
            "max_locks_per_transaction and restart the server, or write with fewer tasks (coalesce)",
            sink=target.sink,
        )


def _end_waiting(
    link: Link, target: Target, receipts: Sequence[Receipt], known: Mapping[str, BranchState]
) -> dict[str, BranchState]:
    """Move the branches that have not ended, or give them up; see `split_batch`."""
    waiting = [receipt for receipt in receipts if receipt.id not in known]
    if not waiting:
        return {}
    staged = staged_branches(link, target)
    ready, given_up = split_batch(
        waiting,
        [receipt for receipt in waiting if receipt.id not in staged],
        aborted=BranchState.ABORTED in known.values(),
        begun=BranchState.COMMITTED in known.values(),
    )
    moved, lost = [it.id for it in ready], [it.id for it in given_up]
    # Before the move: another driver that moves the same batch must wait here.
    target.witness.insert(link, moved)
    target.witness.insert(link, lost, BranchState.ABORTED)
    if ready:
        _move(link, target.as_recorded(ready), ready, _columns(target, staged, moved))
    return dict.fromkeys(moved, BranchState.COMMITTED) | dict.fromkeys(lost, BranchState.ABORTED)


def _move(link: Link, target: Target, receipts: Sequence[Receipt], columns: Columns) -> None:
    table = read_table(link, target.schema, target.table)
    branches = [receipt.id for receipt in receipts]
    moved = move(link, target, table, branches, [name for name, _ in columns])
    # From now on the target cannot be altered.
    altered = retyped(target, read_table(link, target.schema, target.table), columns)
    if altered:
        raise InDoubt(
            f"the batch of branch {branches[0]} is decided, but table {table.schema}.{table.name} was "
            f"altered: {'; '.join(altered)}. Nothing was moved. Either undo the change "
            f"to the table, or drop the batch's staging tables in {target.witness_schema}; the "
            "batch is then computed again",
            sink=target.sink,
        )
    wrong = _difference(receipts, moved)
    if wrong is not None:
        tables = ", ".join(staging_name(branch) for branch in branches[:3])
        raise GuaranteeBroken(
            f"the batch is decided, but {wrong}: a staging table was changed, or a new trigger or "
            "rule leaves rows out. Nothing was moved. Undo that change; or drop the staging "
            f"tables in {target.witness_schema} ({tables}), and the batch is computed again",
            sink=target.sink,
        )


def _difference(receipts: Sequence[Receipt], moved: Moved) -> str | None:
    """Say which branch has more or fewer rows than were moved; None if none has."""
    for receipt in receipts:
        expected, rows = receipt.fingerprint.rows, moved.rows[receipt.id]
        if rows != expected:
            return f"branch {receipt.id} has {expected} rows, and {rows} were moved"
    if moved.left_out:
        return (
            f"the target did not accept {moved.left_out} rows of branch {receipts[0].id} and others"
        )
    return None


def _log_wait(action: str, target: Target, branch: str, error: psycopg.Error) -> None:
    locked = isinstance(error, errors.LockNotAvailable)
    why = "another session holds a needed lock" if locked else translate_error(error).args[0]
    logger.warning("sink %s: branch %s is not %s yet: %s", target.sink, branch, action, why)


def _columns(target: Target, staged: Mapping[str, Columns], branches: Sequence[str]) -> Columns:
    found = {staged[branch] for branch in branches}
    if len(found) != 1:
        raise LogMismatch(
            f"the branches of one batch have different columns: {sorted(found)}", sink=target.sink
        )
    return found.pop()
