"""How branches are called where a name has two parts of 64 bytes each, and their witness in plain SQL.

    global part   IDENTITY.GENERATION.BATCH.ATTEMPT.TASK_ATTEMPT.TASK
    branch part   a hash of pipeline, identity and sink: together they are longer than there is room

Both are compared whole.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from poundlock.core.model import Branch, Namespace
from poundlock.core.naming import BranchName, name_of, parse_name
from poundlock.core.protocol import BranchState
from poundlock.errors import PoundlockError, Unavailable, UsageError
from poundlock.sinks.twophase.link import Link, is_lock, kind

logger = logging.getLogger("poundlock")

FORMAT = 0x706C
_GTRID = re.compile(r"([0-9a-f]+)\.(\d+)\.(\d+)\.(\d+)\.(\d+)\.(\d+)", re.ASCII)
_ITSELF = "witness"  # no branch is called so
_STATES = {"committed": BranchState.COMMITTED, "aborted": BranchState.ABORTED}


@dataclass(frozen=True, slots=True)
class Named:
    """A branch by both its names."""

    name: BranchName
    task: int

    @property
    def id(self) -> str:
        return f"{self.name}/{self.task}"

    @property
    def xid(self) -> tuple[int, str, str]:
        name = self.name
        gtrid = (
            f"{name.namespace.identity}.{name.generation}.{name.batch}.{name.attempt}."
            f"{name.task_attempt}.{self.task}"
        )
        if len(gtrid) > 64:
            raise UsageError(f"{gtrid} is longer than the 64 bytes that a branch's name may have")
        return FORMAT, gtrid, _owner(name.namespace, name.sink)


def named(branch: Branch) -> Named:
    return Named(name_of(branch), branch.task)


def read(id_: str) -> Named:
    spelled, _, task = id_.partition("/")
    name = parse_name(spelled)
    if name is None or not task.isdecimal():
        raise UsageError(f"{id_!r} is not the name of a branch")
    return Named(name, int(task))


def _owner(namespace: Namespace, sink: str) -> str:
    text = f"{namespace.pipeline}\n{namespace.identity}\n{sink}"
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def open_branches(link: Link, namespace: Namespace, sink: str) -> Iterator[Named]:
    """List the prepared branches of exactly this namespace and sink."""
    owner = _owner(namespace, sink)
    for number, gtrid, bqual in link.recover():
        match = _GTRID.fullmatch(gtrid)
        if number != FORMAT or bqual != owner or match is None or match[1] != namespace.identity:
            continue
        generation, batch, attempt, task_attempt, task = map(int, match.groups()[1:])
        yield Named(BranchName(namespace, generation, sink, batch, attempt, task_attempt), task)


class Witness:
    """The table with a row for every branch that is over, and one for itself.

    A tombstone that enters proves that a branch was not committed, but only in the very table that the
    branch would have written to. So the table has an identity, by chance, and receipts carry it.
    """

    def __init__(self, table: str):
        self.table = table

    def exists(self, link: Link) -> bool:
        """Whether there is a table. One that cannot be read just now is not a missing one."""
        try:
            link.columns_of(self.table)
        except link.driver.DatabaseError as error:
            if link.misses_table(error):
                return False
            if isinstance(link.told(error), UsageError):
                raise UsageError(
                    f"the witness table {self.table} cannot be read ({kind(error)}): grant SELECT, "
                    "INSERT and DELETE on it",
                    sink=link.sink,
                ) from None
            raise Unavailable(
                f"the witness table {self.table} cannot be read now ({kind(error)}): the connection "
                "is lost, or somebody has locked the table",
                sink=link.sink,
            ) from None
        return True

    def ensure(self, link: Link) -> str:
        """Create the table if it is missing. Return its identity."""
        if not self.exists(link):
            self._create(link)
        known = self.identity(link)
        if known is None:
            try:
                self._enter(link, _ITSELF, ("-", secrets.token_hex(16), 0, "-", 0, "witness"))
                link.connection.commit()
            except link.driver.IntegrityError:  # somebody was faster
                link.connection.rollback()
            known = self.identity(link)
        if known is None:
            raise Unavailable(f"the witness table {self.table} went meanwhile", sink=link.sink)
        return known

    def identity(self, link: Link) -> str | None:
        """Read the identity of a table that exists, and end the transaction."""
        known = self._identity(link)
        link.connection.rollback()
        return known

    def _identity(self, link: Link) -> str | None:
        found = link.execute(
            f"SELECT identity FROM {link.table(self.table)} WHERE branch = ?", (_ITSELF,)
        )
        return found[0][0] if found else None

    def is_of(self, link: Link, branch: Named, known: str | None) -> bool:
        """Whether this table can say how a branch ended whose receipt has this identity."""
        there = self.exists(link)
        if there and known in (None, self.identity(link)):
            return True
        logger.warning(
            "sink %s: the table %s is %s, so that it proves nothing of branch %s. Where witness_table= "
            "or the database was changed, give it as it was",
            *(link.sink, self.table),
            "not the one that was there when the branch was written" if there else "missing",
            branch.id,
        )
        return False

    def _create(self, link: Link) -> None:
        # Types that all have: Oracle knows no BIGINT.
        statement = (
            f"CREATE TABLE {link.table(self.table)} (branch VARCHAR(250) NOT NULL PRIMARY KEY, "
            "pipeline VARCHAR(63) NOT NULL, identity VARCHAR(64) NOT NULL, "
            "generation NUMERIC(19) NOT NULL, sink VARCHAR(63) NOT NULL, "
            "batch NUMERIC(19) NOT NULL, state VARCHAR(9) NOT NULL)"
        )
        try:
            link.execute(statement)
            link.connection.commit()
        except link.driver.DatabaseError as error:
            link.connection.rollback()
            if self.exists(link):
                return  # somebody was faster
            problem = link.told(error)
            if isinstance(problem, Unavailable):
                raise problem from None
            raise UsageError(
                f"the witness table {self.table} cannot be created ({kind(error)}). If a right is "
                f"missing, grant it, or have the table made once by hand: {statement}",
                sink=link.sink,
            ) from None

    def insert(self, link: Link, branch: Named, state: str) -> None:
        name = branch.name
        space = name.namespace
        rest = (space.pipeline, space.identity, name.generation, name.sink, name.batch, state)
        self._enter(link, branch.id, rest)

    def _enter(self, link: Link, branch: str, rest: tuple[object, ...]) -> None:
        link.execute(
            f"INSERT INTO {link.table(self.table)} "
            "(branch, pipeline, identity, generation, sink, batch, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (branch, *rest),
        )

    def state(self, link: Link, branch: Named) -> BranchState:
        found = link.execute(
            f"SELECT state FROM {link.table(self.table)} WHERE branch = ?", (branch.id,)
        )
        link.connection.rollback()
        return _STATES[found[0][0]] if found else BranchState.NO_WITNESS

    def settle(self, link: Link, branch: Named, known: str | None = None) -> BranchState:
        """Prove how a branch ended that is no longer open: by its tombstone.

        `known` is the table's identity as the receipt has it.
        """
        try:
            self.insert(link, branch, "aborted")
            # Asked once more where nobody can put another table in its place.
            if known is not None and self._identity(link) != known:
                link.connection.rollback()
                return BranchState.NO_WITNESS
            link.connection.commit()
        except link.driver.IntegrityError:
            link.connection.rollback()
            return self.state(link, branch)
        except link.driver.DatabaseError as error:
            problem: PoundlockError = link.told(error, branch.id)
            waited = isinstance(error, link.driver.OperationalError) or is_lock(error)
            if isinstance(problem, Unavailable) or not waited:
                raise problem from None
            link.connection.rollback()  # somebody is writing the same witness: not over yet
            return BranchState.PREPARED
        return BranchState.ABORTED

    def newest_generation(self, link: Link, namespace: Namespace) -> int:
        if not self.exists(link):
            return 0
        found = link.execute(
            f"SELECT MAX(generation) FROM {link.table(self.table)} "
            "WHERE pipeline = ? AND identity = ?",
            (namespace.pipeline, namespace.identity),
        )
        link.connection.rollback()
        return int(found[0][0] or 0)

    def prune(self, link: Link, namespace: Namespace, sink: str, floor: int) -> None:
        """Forget the batches below `floor`, but for one row of the sink's newest generation."""
        if not self.exists(link):
            return
        table = link.table(self.table)
        mine = "pipeline = ? AND identity = ? AND sink = ?"
        whose = (namespace.pipeline, namespace.identity, sink)
        found = link.execute(f"SELECT MAX(generation) FROM {table} WHERE {mine}", whose)
        newest = link.execute(
            f"SELECT MAX(branch) FROM {table} WHERE {mine} AND generation = ?",
            (*whose, int(found[0][0] or 0)),
        )
        if newest[0][0] is not None:
            link.execute(
                f"DELETE FROM {table} WHERE {mine} AND batch < ? AND branch <> ?",
                (*whose, floor, newest[0][0]),
            )
        link.connection.commit()
