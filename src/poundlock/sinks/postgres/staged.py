"""The driver's half of staged branches: one table each, all of a batch moved in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import Connection, errors

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import BadRow, GuaranteeBroken, InDoubt, LogMismatch, Rejected, Unavailable
from poundlock.sinks.postgres import witness
from poundlock.sinks.postgres.catalog import read_table
from poundlock.sinks.postgres.move import (
    Columns,
    Moved,
    clear_away,
    has_duplicates,
    hurdles,
    move,
    retyped,
    staged_branches,
    too_long,
)
from poundlock.sinks.postgres.session import told, unhurried
from poundlock.sinks.postgres.target import Target, read_id, staging_name

logger = logging.getLogger("poundlock")

_AGAIN = (  # somebody was in the way for a moment: the same move may be tried again
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.SerializationFailure,
    errors.QueryCanceled,
    errors.OutOfMemory,  # of the server's locks, which others give back
    errors.ReadOnlySqlTransaction,  # a standby, until it is promoted
)


def check(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[str | None]:
    """See that every branch is there, that no key is written twice, and that the target would take all.

    The move is rehearsed, and rolled back, where the target has constraints that staging cannot carry.
    """
    with connection.transaction(force_rollback=True):
        unhurried(connection, target.wait)
        return _check(connection, target, receipts)


def _check(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[str | None]:
    staged = staged_branches(connection, target)
    answers: list[str | None] = [
        None if receipt.id in staged else "its staging table is gone" for receipt in receipts
    ]
    if any(answers):
        return answers
    target = target.as_recorded(receipts)
    branches = [receipt.id for receipt in receipts]
    table = read_table(connection, target.schema, target.table)
    unfit = target.key and not any(index.serves(target.key) for index in table.indexes)
    if unfit or any(receipt.handle.get("shape") != table.shape for receipt in receipts):
        raise Rejected(
            f"table {table.schema}.{table.name} was altered while the batch was written: it is "
            "written once more",
            sink=target.sink,
        )
    names = [name for name, _ in _columns(target, staged, branches)]
    if target.key and has_duplicates(connection, target, branches):
        raise duplicate_keys(target)
    if hurdles(target, table, names) or too_long(connection, target, table, branches, names):
        amiss = _amiss(receipts, move(connection, target, table, branches, names))
        if amiss is not None:
            raise Rejected(
                f"{amiss}: a trigger or a rule leaves rows out, so that nobody could tell what was "
                "written",
                sink=target.sink,
            )
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    return answers


def duplicate_keys(target: Target) -> BadRow:
    """The refusal of a batch in which nobody can say which row of a key is the last."""
    keys = ", ".join(target.key)
    if target.order_by is None:
        return BadRow(
            f"two rows of a batch have one key ({keys}). Name the column that chooses between them "
            "with order_by= (the highest wins), or aggregate before writing",
            sink=target.sink,
        )
    return BadRow(
        f"two rows of a batch have one key ({keys}) and one {target.order_by}, so that none is the "
        "last. Order by a column that tells them apart, or aggregate before writing",
        sink=target.sink,
    )


def commit(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[BranchState]:
    """Move all branches of a batch in one transaction, with their witnesses.

    The staging tables are dropped after it: whoever reads one must not hold up the move. Until then
    the witness keeps them from being moved again.
    """
    branches = [receipt.id for receipt in receipts]
    try:
        with connection.transaction():
            unhurried(connection, target.wait)
            held = witness.hold(connection, target)
            if not all(witness.is_witness(target, held, receipt) for receipt in receipts):
                return witness.proven(connection, target, held, branches)  # a batch goes whole
            said = witness.claim(connection, target, branches, "committed")
            states = _move_claimed(connection, target, receipts, said)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except _AGAIN as error:
        _say_why("moved", target, branches[0], error)
        return _without_moving(connection, target, branches)
    except psycopg.Error as error:
        problem = told(error, target.sink)
        if isinstance(problem, Unavailable):
            raise
        raise InDoubt(
            f"the batch of branch {branches[0]} is decided, but its rows cannot be moved into "
            f"{target.table}: {problem.args[0]}. Nothing is lost and nothing was moved: make room in "
            "the target for what is staged, then start the pipeline again",
            sink=target.sink,
        ) from None
    clear_away(connection, target, list(states))
    return [said[branch] or states[branch] for branch in branches]


def _move_claimed(
    connection: Connection[Any],
    target: Target,
    receipts: Sequence[Receipt],
    said: Mapping[str, BranchState | None],
) -> dict[str, BranchState]:
    """Move what no witness has settled before; what has no staging table is lost, and proven so.

    Where a branch is lost and none of its batch was moved before, the others are given up with it. A
    replay that came after them could bring back a row that they deleted or replaced; so it takes the
    place of all, and goes at one instant.
    """
    claimed = [branch for branch, known in said.items() if known is None]
    if not claimed:
        return {}
    staged = staged_branches(connection, target)
    there = [branch for branch in claimed if branch in staged]
    broken = len(there) < len(claimed) or BranchState.ABORTED in said.values()
    if broken and BranchState.COMMITTED not in said.values():
        there = []
    lost = [branch for branch in claimed if branch not in there]
    if lost:
        witness.set_aborted(connection, target, lost)
    if there:
        mine = [receipt for receipt in receipts if receipt.id in there]
        _move(connection, target.as_recorded(mine), mine, _columns(target, staged, there))
    return dict.fromkeys(there, BranchState.COMMITTED) | dict.fromkeys(lost, BranchState.ABORTED)


def _move(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt], columns: Columns
) -> None:
    table = read_table(connection, target.schema, target.table)
    branches = [receipt.id for receipt in receipts]
    moved = move(connection, target, table, branches, [name for name, _ in columns])
    # Now nobody can alter the target any more.
    altered = retyped(target, read_table(connection, target.schema, target.table), columns)
    if altered:
        raise InDoubt(
            f"the batch of branch {branches[0]} is decided, but table {table.schema}.{table.name} was "
            f"altered: {'; '.join(altered)}. Nothing was moved. Alter it back; or drop the batch's "
            f"staging tables in {target.witness_schema}, and it is computed again",
            sink=target.sink,
        )
    amiss = _amiss(receipts, moved)
    if amiss is not None:
        tables = ", ".join(staging_name(branch) for branch in branches[:3])
        raise GuaranteeBroken(
            f"the batch is decided, but {amiss}: somebody changed a staging table, or made a trigger "
            "or a rule that leaves rows out. Nothing was moved. Take that away; or drop the staging "
            f"tables in {target.witness_schema} ({tables}), and the batch is computed again",
            sink=target.sink,
        )


def _amiss(receipts: Sequence[Receipt], moved: Moved) -> str | None:
    """Say of which branch not all rows were moved, or more than all; None: it is as it should be."""
    for receipt in receipts:
        expected, rows = receipt.fingerprint.rows, moved.rows[receipt.id]
        if rows != expected:
            return f"branch {receipt.id} has {expected} rows, and {rows} were moved"
    if moved.left_out:
        return (
            f"the target does not take {moved.left_out} rows of branch {receipts[0].id} and others"
        )
    return None


def _say_why(done: str, target: Target, branch: str, error: psycopg.Error) -> None:
    locked = isinstance(error, errors.LockNotAvailable)
    why = "somebody holds a lock that is needed" if locked else told(error).args[0]
    logger.warning("sink %s: branch %s is not %s yet: %s", target.sink, branch, done, why)


def _without_moving(
    connection: Connection[Any], target: Target, branches: Sequence[str]
) -> list[BranchState]:
    """Say what is known while somebody else holds what the move needs."""
    said = witness.states(connection, target, branches)
    return [said.get(branch, BranchState.PREPARED) for branch in branches]


def _columns(target: Target, staged: Mapping[str, Columns], branches: Sequence[str]) -> Columns:
    found = {staged[branch] for branch in branches}
    if len(found) != 1:
        raise LogMismatch(
            f"the branches of one batch have different columns: {sorted(found)}", sink=target.sink
        )
    return found.pop()


def find(connection: Connection[Any], target: Target, namespace: Namespace) -> list[Stray]:
    """List the staged branches of exactly this namespace and sink that are not over.

    Of those that are, the tables may still be there, because somebody was reading them: drop them.
    """
    mine = {
        branch: parsed[0].generation
        for branch in sorted(staged_branches(connection, target))
        if (parsed := read_id(branch)) is not None
        and (parsed[0].namespace, parsed[0].sink) == (namespace, target.sink)
    }
    over = witness.states(connection, target, list(mine)) if mine else {}
    if over:
        clear_away(connection, target, list(over))
    return [
        Stray(target.sink, branch, generation, "staged")
        for branch, generation in mine.items()
        if branch not in over
    ]


def abort(
    connection: Connection[Any], target: Target, strays: Sequence[Stray]
) -> list[BranchState]:
    """Leave a tombstone for each, then drop the staging tables."""
    states: list[BranchState] = []
    ensured = False
    for stray in strays:
        try:
            if not ensured:
                witness.ensure(connection, target)
                ensured = True
            with connection.transaction():
                unhurried(connection, target.wait)
                said = witness.claim(connection, target, [stray.id], "aborted")[stray.id]
        except _AGAIN as error:
            _say_why("aborted", target, stray.id, error)
            states.append(BranchState.UNREACHABLE)
            continue
        if said is BranchState.NO_WITNESS:
            raise Unavailable(f"branch {stray.id}: its witness went while it was read")
        states.append(said or BranchState.ABORTED)
    clear_away(
        connection,
        target,
        [
            stray.id
            for stray, state in zip(strays, states, strict=True)
            if state is not BranchState.UNREACHABLE
        ],
    )
    return states


def newest_generation(connection: Connection[Any], target: Target, namespace: Namespace) -> int:
    """Of the branches that are over, and of those that are staged."""
    over = witness.newest_generation(connection, target, namespace)
    opened = (read_id(branch) for branch in staged_branches(connection, target))
    return max([over, *(it[0].generation for it in opened if it and it[0].namespace == namespace)])
