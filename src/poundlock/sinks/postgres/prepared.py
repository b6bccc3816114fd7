"""The driver's half of branches that the server holds: PREPARE TRANSACTION and what ends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from psycopg import Connection, errors, sql

from poundlock.core.model import Branch, Namespace, Receipt, Stray
from poundlock.core.naming import name_of
from poundlock.core.protocol import BranchState
from poundlock.errors import LogMismatch, NotAuthorised, Rejected, Unavailable
from poundlock.sinks.postgres import witness
from poundlock.sinks.postgres.session import translated
from poundlock.sinks.postgres.target import Target, read_id

logger = logging.getLogger("poundlock")

OPEN = (
    "SELECT gid, extract(epoch FROM prepared)::float8, owner::text, "
    "owner = current_user OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) "
    "FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'poundlock.%'"
)


def check(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[str | None]:
    """Ask once which branches are open, and whether we may commit them."""
    found = {gid: (owner, ours) for gid, _, owner, ours in connection.execute(OPEN).fetchall()}
    answers: list[str | None] = []
    for receipt in receipts:
        if receipt.id not in found:
            answers.append("it is no longer prepared")
        elif not found[receipt.id][1]:
            answers.append(
                f"it was prepared by role {found[receipt.id][0]}, which alone may commit it"
            )
        else:
            answers.append(None)
    return answers


def commit(
    connection: Connection[Any], target: Target, receipts: Sequence[Receipt]
) -> list[BranchState]:
    """Commit each branch. Where the connection breaks, it and those after it are UNREACHABLE."""
    states: list[BranchState] = []
    for receipt in receipts:
        try:
            with translated(target.sink, receipt.id):
                states.append(_finish(connection, target, receipt.id, receipt))
        except Rejected as error:  # a time-out of the role, or a server that is read-only for now
            logger.warning("sink %s: not committed yet: %s", target.sink, error)
            states.append(BranchState.PREPARED)
        except Unavailable:
            break
    return states + [BranchState.UNREACHABLE] * (len(receipts) - len(states))


def abort(
    connection: Connection[Any], target: Target, strays: Sequence[Stray]
) -> list[BranchState]:
    """Roll each branch back, and leave its tombstone."""
    states: list[BranchState] = []
    for stray in strays:
        try:
            with translated(target.sink, stray.id):
                state = _finish(connection, target, stray.id)
        except Rejected as error:
            logger.warning("sink %s: not rolled back yet: %s", target.sink, error)
            state = BranchState.UNREACHABLE
        except Unavailable:
            break
        states.append(BranchState.UNREACHABLE if state is BranchState.PREPARED else state)
    return states + [BranchState.UNREACHABLE] * (len(strays) - len(states))


def _finish(
    connection: Connection[Any], target: Target, branch: str, receipt: Receipt | None = None
) -> BranchState:
    """Commit what a receipt names; roll back what none does."""
    verb = "COMMIT PREPARED" if receipt is not None else "ROLLBACK PREPARED"
    try:
        # The name cannot be a parameter of this statement; it is quoted by the driver.
        done = connection.execute(sql.SQL(verb + " {}").format(sql.Literal(branch)))
    except errors.UndefinedObject:
        return witness.settle(connection, target, branch, receipt)
    except errors.ObjectNotInPrerequisiteState:
        return BranchState.PREPARED  # somebody else is finishing it at this moment
    except errors.InsufficientPrivilege:
        raise NotAuthorised(
            f"branch {branch} was prepared by another role, and only that role or a superuser may "
            "finish it: connect as the role that wrote it",
            sink=target.sink,
        ) from None
    except errors.FeatureNotSupported:
        raise LogMismatch(
            f"branch {branch} was prepared in another database of this server: connect to that one",
            sink=target.sink,
        ) from None
    if done.statusmessage != verb:
        raise Unavailable(
            f"branch {branch}: {verb} was answered by {done.statusmessage}", sink=target.sink
        )
    if receipt is not None:
        return BranchState.COMMITTED
    return witness.settle(connection, target, branch)


def find(connection: Connection[Any], target: Target, namespace: Namespace) -> list[Stray]:
    """List the open branches of exactly this namespace and sink."""
    found: list[Stray] = []
    for gid, began, owner, _ in connection.execute(OPEN).fetchall():
        parsed = read_id(gid)
        if parsed is not None and _mine(parsed[0], namespace, target):
            found.append(
                Stray(target.sink, gid, parsed[0].generation, "prepared", {"owner": owner}, began)
            )
    return found


def _mine(name: Any, namespace: Namespace, target: Target) -> bool:
    return (name.namespace, name.sink) == (namespace, target.sink)


def roll_back_earlier(connection: Connection[Any], target: Target, branch: Branch) -> None:
    """Roll back what earlier attempts of this very task have prepared: its locks would block us.

    Spark does not repeat a task of which it has an answer, so nothing that is decided is among them;
    but it may run one twice at a time (`spark.speculation`), and then this must not be called.
    """
    mine = name_of(branch)
    for gid, _, _, _ in connection.execute(OPEN).fetchall():
        parsed = read_id(gid)
        if parsed is None:
            continue
        name, task = parsed
        same = (
            name.namespace == mine.namespace
            and (name.generation, name.sink, name.batch, name.attempt)
            == (mine.generation, mine.sink, mine.batch, mine.attempt)
            and task == branch.task
        )
        if same and name.task_attempt < mine.task_attempt:
            _finish(connection, target, gid)


def newest_generation(connection: Connection[Any], target: Target, namespace: Namespace) -> int:
    """Of the branches that are over, and of those that are open."""
    over = witness.newest_generation(connection, target, namespace)
    opened = (read_id(row[0]) for row in connection.execute(OPEN).fetchall())
    return max([over, *(it[0].generation for it in opened if it and it[0].namespace == namespace)])
