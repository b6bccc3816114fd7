"""Branches in MySQL and MariaDB: their names, which are open, and the witness of those that are over.

    XID of a branch      'pl.IDENTITY.PIPELINE.GENERATION.BATCH.ATTEMPT.TASK_ATTEMPT.TASK', 'SINK', 1

An XID has two parts of at most 64 bytes and the number of its format, so PIPELINE is a short hash of
the name, and the identity, which is whole, tells logs apart. Numbers are hexadecimal.

The witness is a row that the branch itself inserts: it is there if the branch was committed, and only
then. Whoever must prove that a branch was rolled back inserts a tombstone under the same key. If that
succeeds, the branch was not and will never be committed; if it finds the key taken, the row there says
which it was; if it has to wait, the branch is still open. That holds for the very table that the
branch testifies in, and only while nobody has emptied it. So the table's first row tells of itself, by
chance, and goes with the others; receipts carry what it says.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pymysql

from poundlock.core.model import Namespace
from poundlock.core.naming import BranchName
from poundlock.core.protocol import BranchState
from poundlock.errors import Unavailable, UsageError
from poundlock.sinks.mysql.link import (
    DUPLICATE,
    GONE,
    LOCK_TIMEOUT,
    NO_RIGHT,
    Link,
    changed,
    code_of,
    run,
)
from poundlock.sinks.mysql.names import quoted

WITNESS = "poundlock_witness"
_ITSELF = "witness"  # the row about the table; no branch is called so
_COMMITTED, _ABORTED = "committed", "aborted"
_STATES = {_COMMITTED: BranchState.COMMITTED, _ABORTED: BranchState.ABORTED}
_LET_GO_TRIES = 50
_LET_GO_S = 0.02  # from a connection's end, as it is shown, until its branch is let go
_GTRID = re.compile(rb"pl\.([0-9a-f]+)\.([0-9a-f]{8})" + rb"\.([0-9a-f]+)" * 5)
# One for all, and that of those who name none: with a binary log MySQL (9.7 still) puts XIDs of several
# formats into a map by an order that is none, and after a crash rolls back what it does not find there.
_FORMAT = 1


@dataclass(frozen=True)
class Xid:
    """The name of a branch as XA statements spell it. Only letters, digits, '.', '_' and '-'."""

    gtrid: str
    bqual: str
    task: int

    def __str__(self) -> str:
        return f"'{self.gtrid}','{self.bqual}',{_FORMAT}"


def xid(name: BranchName, task: int) -> Xid:
    """Spell a branch's name for XA, its numbers in hexadecimal: there is little room."""
    space = name.namespace
    numbers = (name.generation, name.batch, name.attempt, name.task_attempt, task)
    spelled = ".".join(f"{number:x}" for number in numbers)
    gtrid = f"pl.{space.identity}.{_short(space.pipeline)}.{spelled}"
    if len(gtrid) > 64:
        raise UsageError(f"{gtrid} is longer than the 64 bytes that an XID allows", sink=name.sink)
    return Xid(gtrid, name.sink, task)


def let_go(link: Link, connections: Sequence[int]) -> None:
    """Wait until the connections that prepared some branches are gone, as far as that can be seen.

    While one is being closed, MariaDB (10.11 still) gives its branch free a moment before InnoDB does.
    In that moment XA COMMIT answers OK and commits nothing: the server forgets the branch, and InnoDB
    keeps it prepared until the next start. So an OK is no proof, only a witness is.
    """
    if not link.is_mariadb:
        return
    ids = ", ".join(map(str, connections)) or "NULL"
    for _ in range(_LET_GO_TRIES):
        if not _attached(link, ids):
            break
        time.sleep(_LET_GO_S)
    time.sleep(_LET_GO_S)


def _attached(link: Link, ids: str) -> bool:
    """Look whether a connection lives, or InnoDB still holds a branch to be of one that has gone."""
    if run(link, f"SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN ({ids})"):
        return True
    held = f"SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id IN ({ids})"
    try:
        return bool(run(link, held))
    except pymysql.err.Error as error:
        if code_of(error) != NO_RIGHT:  # without PROCESS there is only the wait that follows
            raise
        return False


def prepared(link: Link, namespace: Namespace, sink: str) -> dict[BranchName, Xid]:
    """List the prepared branches of exactly this namespace and sink, with their XIDs."""
    return {
        name: branch
        for name, branch in every(link, namespace)
        if (name.namespace, name.sink) == (namespace, sink)
    }


def every(link: Link, known: Namespace | None = None) -> list[tuple[BranchName, Xid]]:
    """List all prepared branches of ours, with their XIDs.

    An XID has room for the hash of a pipeline's name alone: it is spelled out where it is the `known`
    one, and stays a hash elsewhere.
    """
    found: list[tuple[BranchName, Xid]] = []
    # As bytes: the XIDs of others may be no text at all.
    link.use_unicode, before = False, link.use_unicode
    try:
        listed = run(link, "XA RECOVER")
    finally:
        link.use_unicode = before
    for form, first, second, data in listed:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        gtrid, bqual = raw[: int(first)], raw[int(first) : int(first) + int(second)]
        match = _GTRID.fullmatch(gtrid)
        if match is None or form != _FORMAT or not re.fullmatch(rb"[\w-]+", bqual):
            continue
        identity, pipeline, *numbers = (part.decode() for part in match.groups())
        if known is not None and pipeline == _short(known.pipeline):
            pipeline = known.pipeline
        generation, batch, attempt, task_attempt, task = (int(it, 16) for it in numbers)
        name = BranchName(
            Namespace(pipeline, identity), generation, bqual.decode(), batch, attempt, task_attempt
        )
        found.append((name, Xid(gtrid.decode(), bqual.decode(), task)))
    return found


class Witness:
    """The table of witnesses, in one database. Holds no connection."""

    def __init__(self, database: str):
        self.database = database
        self.table = quoted(database, WITNESS)

    @property
    def statement(self) -> str:
        """The statement that creates the table, for those who may not do it themselves."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.table} ("
            "branch VARCHAR(250) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY, "
            "pipeline VARCHAR(63) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
            "identity VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
            "sink VARCHAR(63) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
            "generation BIGINT NOT NULL, batch BIGINT NOT NULL, state VARCHAR(9) NOT NULL, "
            "written_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, "
            "KEY (identity, pipeline, sink, batch)) ENGINE=InnoDB"
        )

    def identity(self, link: Link) -> str | None:
        """Return what tells this table from any other, ever; None if it is gone, or was emptied."""
        found = self._ask(link, f"SELECT identity FROM {self.table} WHERE branch = %s", (_ITSELF,))
        return str(found[0][0]) if found else None

    def _ask(self, link: Link, query: str, values: Sequence[Any] = ()) -> list[Any] | None:
        """Ask the table, or change it; None if it is gone, or its whole database."""
        try:
            return run(link, query, values)
        except pymysql.err.Error as error:
            if code_of(error) not in GONE:
                raise
            return None

    def ensure(self, link: Link) -> str:
        """Create the table and its first row where they are missing; return its identity.

        Outside of any transaction.
        """
        found = self.identity(link)
        if found is None:
            # Only where it is missing: IF NOT EXISTS needs the right to create, too.
            if self._ask(link, f"SELECT 1 FROM {self.table} LIMIT 0") is None:
                run(link, self.statement)
            with contextlib.suppress(pymysql.err.IntegrityError):  # somebody was faster
                self._enter(link, [(_ITSELF, "", uuid.uuid4().hex, "", 0, 0, _COMMITTED)])
            found = self.identity(link)
        if found is None:
            raise Unavailable(f"the witness table {self.table} was emptied or dropped meanwhile")
        return found

    def testify(self, link: Link, names: Sequence[BranchName], *, committed: bool = True) -> None:
        """Insert witnesses, as part of the transaction that is open."""
        state = _COMMITTED if committed else _ABORTED
        rows = [
            (
                str(n),
                n.namespace.pipeline,
                n.namespace.identity,
                n.sink,
                n.generation,
                n.batch,
                state,
            )
            for n in names
        ]
        self._enter(link, rows)

    def _enter(self, link: Link, rows: Sequence[tuple[str | int, ...]]) -> None:
        places = ", ".join(["(%s, %s, %s, %s, %s, %s, %s)"] * len(rows))
        statement = (
            f"INSERT INTO {self.table} (branch, pipeline, identity, sink, generation, batch, state) "
            f"VALUES {places}"
        )
        changed(link, statement, [value for row in rows for value in row])

    def states(self, link: Link, names: Iterable[BranchName]) -> dict[BranchName, BranchState]:
        """Read the witnesses of those branches that have one."""
        wanted = {str(name): name for name in names}
        if not wanted:
            return {}
        places = ", ".join(["%s"] * len(wanted))
        query = f"SELECT branch, state FROM {self.table} WHERE branch IN ({places})"
        rows = self._ask(link, query, list(wanted)) or []
        return {wanted[branch]: _STATES[state] for branch, state in rows}

    def went_before(self, link: Link, names: Sequence[BranchName]) -> bool:
        """Whether other branches of the same batch were committed before these."""
        one = names[0]
        places = ", ".join(["%s"] * len(names))
        return bool(
            run(
                link,
                f"SELECT 1 FROM {self.table} WHERE identity = %s AND pipeline = %s AND sink = %s "
                f"AND batch = %s AND state = %s AND branch NOT IN ({places}) LIMIT 1",
                [one.namespace.identity, one.namespace.pipeline, one.sink, one.batch, _COMMITTED,
                 *map(str, names)],
            )
        )  # fmt: skip

    def settle(self, link: Link, name: BranchName, known: str | None = None) -> BranchState:
        """Prove how a branch ended that nobody shows as open, by a tombstone.

        `known` is the table's identity as the receipt has it: any other proves nothing. Without a
        receipt no decision names the branch, and any table will do.
        """
        run(link, "SET @before = @@innodb_lock_wait_timeout")
        run(link, "SET SESSION innodb_lock_wait_timeout = 1")
        run(link, "START TRANSACTION")
        try:
            self.testify(link, [name], committed=False)
            # Asked where nobody can empty the table unseen: that would have to wait for us.
            proves = known is None or self.identity(link) == known
            run(link, "COMMIT" if proves else "ROLLBACK")
            return BranchState.ABORTED if proves else BranchState.NO_WITNESS
        except pymysql.err.Error as error:
            code = code_of(error)
            if code not in (LOCK_TIMEOUT, *GONE, DUPLICATE):
                raise
            run(link, "ROLLBACK")
            if code == LOCK_TIMEOUT:
                return BranchState.PREPARED  # its witness is there, but not committed yet
            if code in GONE:
                return BranchState.NO_WITNESS  # every branch made sure of the table: it was dropped
        finally:
            if link.open:
                run(link, "SET SESSION innodb_lock_wait_timeout = @before")
        # The row may be gone again where it was rolled back just now: then ask once more, later.
        return self.states(link, [name]).get(name, BranchState.PREPARED)

    def newest_generation(self, link: Link, namespace: Namespace, sink: str) -> int:
        rows = self._ask(
            link,
            f"SELECT MAX(generation) FROM {self.table} "
            "WHERE identity = %s AND pipeline = %s AND sink = %s",
            (namespace.identity, namespace.pipeline, sink),
        )
        return int(rows[0][0] or 0) if rows else 0

    def prune(self, link: Link, namespace: Namespace, sink: str, floor: int) -> None:
        """Forget what is below `floor`, but for one row of the newest generation."""
        mine = "identity = %s AND pipeline = %s AND sink = %s"
        whose = (namespace.identity, namespace.pipeline, sink)
        newest = self._ask(
            link,
            f"SELECT branch FROM {self.table} WHERE {mine} "
            "ORDER BY generation DESC, batch DESC LIMIT 1",
            whose,
        )
        if newest:
            self._ask(
                link,
                f"DELETE FROM {self.table} WHERE {mine} AND batch < %s AND branch <> %s",
                (*whose, floor, newest[0][0]),
            )


def _short(pipeline: str) -> str:
    return hashlib.sha256(pipeline.encode()).hexdigest()[:8]
