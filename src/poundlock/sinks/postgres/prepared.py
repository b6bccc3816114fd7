"""Branches that the server holds (PREPARE TRANSACTION), and how the driver ends them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from psycopg import errors, sql

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import LogMismatch, NotAuthorised, Rejected, Unavailable
from poundlock.sinks.postgres.link import Connections, Link
from poundlock.sinks.postgres.target import Target
from poundlock.sinks.sql.naming import BranchId, parse_id
from poundlock.sinks.sql.receipts import PREPARED, witness_of

logger = logging.getLogger("poundlock")

_OPEN = (
    "SELECT gid, extract(epoch FROM prepared)::float8, owner::text, "
    "owner = current_user OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) "
    "FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'poundlock.%'"
)


def prepared_strays(link: Link) -> Iterator[tuple[BranchId, Stray]]:
    """List every prepared branch of Poundlock in the database."""
    for gid, began, owner, _ in link.run(_OPEN):
        if (found := parse_id(gid)) is not None:
            name = found.name
            yield found, Stray(name.sink, gid, name.generation, PREPARED, {"owner": owner}, began)


class PreparedBranches:
    """The prepared branches of a sink, on the driver."""

    def __init__(self, connections: Connections, target: Target):
        self._connections, self._target = connections, target

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        """Return why a branch could not be committed: it is not open, or this role may not do it."""
        with self._connections.lend() as link:
            found = {gid: (owner, may) for gid, _, owner, may in link.run(_OPEN)}
        answers: list[str | None] = []
        for receipt in receipts:
            owner, may = found.get(receipt.id, (None, False))
            if owner is None:
                answers.append("it is no longer prepared")
            else:
                only = f"it was prepared by role {owner}: only that role may commit it"
                answers.append(None if may else only)
        return answers

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        """Commit each branch. If the connection breaks, this branch and the rest are UNREACHABLE."""
        return self._finish_each([(receipt.id, receipt) for receipt in receipts], "committed")

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        """Roll back each branch and insert its tombstone."""
        states = self._finish_each([(stray.id, None) for stray in strays], "rolled back")
        return [
            BranchState.UNREACHABLE if state is BranchState.PREPARED else state for state in states
        ]

    def _finish_each(
        self, branches: Sequence[tuple[str, Receipt | None]], action: str
    ) -> list[BranchState]:
        states: list[BranchState] = []
        with self._connections.lend() as link:
            for branch, receipt in branches:
                try:
                    with link.dialect.translated_errors(self._target.sink, branch):
                        states.append(finish(link, self._target, branch, receipt))
                except Rejected as error:  # a time-out of the role, or a read-only server
                    logger.warning("sink %s: not %s yet: %s", self._target.sink, action, error)
                    states.append(BranchState.PREPARED)
                except Unavailable:
                    break
        return states + [BranchState.UNREACHABLE] * (len(branches) - len(states))

    def find(self, namespace: Namespace) -> list[Stray]:
        """List the open branches of exactly this namespace and sink."""
        with self._connections.lend() as link:
            return [
                stray
                for found, stray in prepared_strays(link)
                if found.belongs_to(namespace, self._target.sink)
            ]

    def newest_generation(self, namespace: Namespace) -> int:
        with self._connections.lend() as link:
            listed = [found.name for found, _ in prepared_strays(link)]
        return max((it.generation for it in listed if it.namespace == namespace), default=0)


def finish(link: Link, target: Target, branch: str, receipt: Receipt | None = None) -> BranchState:
    """Commit a branch that has a receipt. Roll back one that has none."""
    verb = "COMMIT PREPARED" if receipt is not None else "ROLLBACK PREPARED"
    known = witness_of(receipt)[1] if receipt is not None else None
    try:
        # The id cannot be a parameter of this statement. The driver quotes it.
        done = link.run_bare(sql.SQL(verb + " {}").format(sql.Literal(branch)))
    except errors.UndefinedObject:
        return target.witness.settle(link, branch, known)
    except errors.ObjectNotInPrerequisiteState:
        return BranchState.PREPARED  # another session is ending it at this moment
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
            f"branch {branch}: the server answered {verb} with {done.statusmessage}",
            sink=target.sink,
        )
    if receipt is not None:
        return BranchState.COMMITTED
    return target.witness.settle(link, branch)


def roll_back_earlier(link: Link, target: Target, branch: BranchId) -> None:
    """Roll back what earlier attempts of this task have prepared: their locks would block it.

    Spark does not repeat a task that has succeeded, so none of these branches is decided. With
    `spark.speculation` it may run two attempts of a task at the same time. Then do not call this.
    """
    for found, stray in list(prepared_strays(link)):
        if found.precedes(branch):
            finish(link, target, stray.id)
