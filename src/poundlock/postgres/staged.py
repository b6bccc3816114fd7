"""The driver's half of staged branches: one table each, all of a batch moved in one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psycopg import Connection, errors

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import BadRow, InDoubt, Parted, PromiseBroken, Rejected, Unavailable
from poundlock.postgres import witness
from poundlock.postgres.catalog import read_table
from poundlock.postgres.move import (
    drop,
    has_duplicates,
    hurdles,
    move,
    staged_branches,
)
from poundlock.postgres.session import told
from poundlock.postgres.target import Target, read_id, staging_name

_AGAIN = (  # somebody was in the way for a moment: the same move may be tried again
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.SerializationFailure,
    errors.QueryCanceled,  # by a time-out of the role
    errors.ReadOnlySqlTransaction,  # a standby, until it is promoted
)


def check(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[str | None]:
    """See that every branch is there, that no key is written twice, and that the target would take all.

    The move is rehearsed, and rolled back, where the target has constraints that staging cannot carry.
    """
    staged = staged_branches(connection, target)
    answers: list[str | None] = [
        None if receipt.id in staged else "its staging table is gone" for receipt in receipts
    ]
    if any(answers):
        return answers
    branches = [receipt.id for receipt in receipts]
    columns = _columns(target, staged, branches)
    if target.key and has_duplicates(connection, target, branches):
        raise duplicate_keys(target)
    table = read_table(connection, target.schema, target.table)
    in_the_way = hurdles(target, table, columns)
    if in_the_way:
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [target.wait])
            moved = move(connection, target, table, branches, columns)
            for branch, given, taken in _differing(receipts, moved):
                raise Rejected(
                    f"branch {branch} has {given} rows, and the target would take {taken}: a trigger "
                    "or a rule leaves rows out, so that nobody could tell what was written",
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
    """Move all branches of a batch in one transaction, with their witnesses."""
    branches = [receipt.id for receipt in receipts]
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [target.wait])
            held = witness.hold(connection, target)
            if not all(witness.is_witness(target, held, receipt) for receipt in receipts):
                return witness.proven(connection, target, held, branches)  # a batch goes whole
            said = witness.claim(connection, target, branches, "committed")
            states = _move_claimed(connection, target, receipts, said)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except _AGAIN:
        return _without_moving(connection, target, branches)
    except (errors.IntegrityError, errors.DataError, errors.ProgrammingError) as error:
        problem = told(error, target.sink)
        raise InDoubt(
            f"the batch of branch {branches[0]} is decided, but its rows cannot be moved into "
            f"{target.table}: {problem.args[0]}. Nothing is lost and nothing was moved: make room in "
            "the target for what is staged, then start the pipeline again",
            sink=target.sink,
        ) from None
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
        drop(connection, target, there)
        there = []
    lost = [branch for branch in claimed if branch not in there]
    if lost:
        witness.set_aborted(connection, target, lost)
    if there:
        table = read_table(connection, target.schema, target.table)
        moved = move(connection, target, table, there, _columns(target, staged, there))
        for branch, decided, rows in _differing(receipts, moved):
            raise PromiseBroken(
                f"branch {branch} was decided with {decided} rows, but its staging table "
                f"{target.witness_schema}.{staging_name(branch)} holds, or the target took, {rows}: "
                "somebody changed it, or made a trigger or rule that leaves rows out. Nothing was "
                "moved. Take that away; or drop the staging table, and the batch is computed again",
                sink=target.sink,
            )
        drop(connection, target, there)
    return dict.fromkeys(there, BranchState.COMMITTED) | dict.fromkeys(lost, BranchState.ABORTED)


def _differing(
    receipts: Sequence[Receipt], moved: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield each branch of which not all rows were moved, or more than all."""
    for receipt in receipts:
        expected, rows = receipt.fingerprint.rows, moved.get(receipt.id)
        if rows is not None and rows != expected:
            yield receipt.id, expected, rows


def _without_moving(
    connection: Connection[Any], target: Target, branches: Sequence[str]
) -> list[BranchState]:
    """Say what is known while somebody else holds what the move needs."""
    said = witness.states(connection, target, branches)
    return [said.get(branch, BranchState.PREPARED) for branch in branches]


def _columns(
    target: Target, staged: Mapping[str, tuple[str, ...]], branches: Sequence[str]
) -> tuple[str, ...]:
    found = {staged[branch] for branch in branches}
    if len(found) != 1:
        raise Parted(
            f"the branches of one batch have different columns: {sorted(found)}", sink=target.sink
        )
    return found.pop()


def find(connection: Connection[Any], target: Target, namespace: Namespace) -> list[Stray]:
    """List the staged branches of exactly this namespace and sink."""
    return [
        Stray(target.sink, branch, parsed[0].generation, "staged")
        for branch in sorted(staged_branches(connection, target))
        if (parsed := read_id(branch)) is not None
        and (parsed[0].namespace, parsed[0].sink) == (namespace, target.sink)
    ]


def abort(
    connection: Connection[Any], target: Target, strays: Sequence[Stray]
) -> list[BranchState]:
    """Drop each staging table, and leave a tombstone, in one step."""
    witness.ensure(connection, target)
    states: list[BranchState] = []
    for stray in strays:
        try:
            with connection.transaction():
                connection.execute("SELECT set_config('lock_timeout', %s, true)", [target.wait])
                said = witness.claim(connection, target, [stray.id], "aborted")[stray.id]
                if said is not BranchState.COMMITTED:
                    drop(connection, target, [stray.id])
        except _AGAIN:
            states.append(BranchState.UNREACHABLE)
            continue
        if said is BranchState.NO_WITNESS:
            raise Unavailable(f"branch {stray.id}: its witness went while it was read")
        states.append(said or BranchState.ABORTED)
    return states


def newest_generation(connection: Connection[Any], target: Target, namespace: Namespace) -> int:
    """Of the branches that are over, and of those that are staged."""
    over = witness.newest_generation(connection, target, namespace)
    opened = (read_id(branch) for branch in staged_branches(connection, target))
    return max([over, *(it[0].generation for it in opened if it and it[0].namespace == namespace)])
