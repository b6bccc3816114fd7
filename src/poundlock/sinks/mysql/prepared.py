"""Branches that the server holds (XA), and how the driver ends them.

    XID of a branch      'pl.IDENTITY.PIPELINE.GENERATION.BATCH.ATTEMPT.TASK_ATTEMPT.TASK', 'SINK', 1

An XID has two parts of at most 64 bytes, and a format number. So PIPELINE is a short hash of the name.
IDENTITY is complete, and differs between logs. Numbers are hexadecimal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import pymysql

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.naming import BranchName
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, NotAuthorised, Unavailable, UsageError
from poundlock.sinks.mysql.errors import NO_RIGHT, XA_ROLLED_BACK, XA_UNKNOWN, code_of
from poundlock.sinks.mysql.link import Connections, Link
from poundlock.sinks.mysql.witness import Witnesses, witness_for
from poundlock.sinks.sql.naming import BranchId, read_id
from poundlock.sinks.sql.receipts import PREPARED, witness_of
from poundlock.sinks.sql.witness import Witness

logger = logging.getLogger("poundlock")

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4  # branches that the driver ends at the same time, each on a connection of its own
_DETACH_TRIES, _DETACH_WAIT_S = 20, 0.05
_CLOSING_TRIES = 50
_CLOSING_S = 0.02  # after the server no longer shows a connection, until its branch is free
_GTRID = re.compile(rb"pl\.([0-9a-f]+)\.([0-9a-f]{8})" + rb"\.([0-9a-f]+)" * 5)
# One format for all branches, and the one that most programs use. With a binary log, MySQL (9.7 too)
# can lose track of XIDs that differ in format, and rolls those branches back after a crash.
_FORMAT = 1


@dataclass(frozen=True)
class Xid:
    """The name of a branch in XA statements. Only letters, digits, '.', '_' and '-'."""

    gtrid: str
    bqual: str

    def __str__(self) -> str:
        return f"'{self.gtrid}','{self.bqual}',{_FORMAT}"


def xid_of(branch: BranchId) -> Xid:
    name, space = branch.name, branch.name.namespace
    numbers = (name.generation, name.batch, name.attempt, name.task_attempt, branch.task)
    spelled = ".".join(f"{number:x}" for number in numbers)
    gtrid = f"pl.{space.identity}.{_short(space.pipeline)}.{spelled}"
    if len(gtrid) > 64:
        raise UsageError(f"{gtrid} is longer than the 64 bytes that an XID allows", sink=name.sink)
    return Xid(gtrid, name.sink)


def _short(pipeline: str) -> str:
    return hashlib.sha256(pipeline.encode()).hexdigest()[:8]


def wait_until_closed(link: Link, connections: Sequence[int]) -> None:
    """Wait until the connections that prepared some branches are closed, if that can be seen.

    While one is being closed, MariaDB (10.11 too) frees its branch a moment before InnoDB does. In that
    moment XA COMMIT answers OK but commits nothing: the server forgets the branch, and InnoDB keeps it
    prepared until the next start. So OK proves nothing; only a witness does.
    """
    if not link.is_mariadb:
        return
    ids = ", ".join(map(str, connections)) or "NULL"
    for _ in range(_CLOSING_TRIES):
        if not _attached(link, ids):
            break
        time.sleep(_CLOSING_S)
    time.sleep(_CLOSING_S)


def _attached(link: Link, ids: str) -> bool:
    """Whether a connection is open, or InnoDB still ties a branch to a closed one."""
    if link.run(f"SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN ({ids})"):
        return True
    held = f"SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id IN ({ids})"
    try:
        return bool(link.run(held))
    except pymysql.err.Error as error:
        if code_of(error) != NO_RIGHT:  # without PROCESS, the wait that follows must do
            raise
        return False


def prepared_branches(link: Link, namespace: Namespace | None = None) -> list[BranchId]:
    """List all prepared branches of Poundlock.

    An XID has room only for a hash of the pipeline's name. If it is the hash of `namespace`'s, that
    name replaces it. Otherwise it stays a hash.
    """
    found: list[BranchId] = []
    # As bytes: the XIDs of other programs may not be text.
    link.use_unicode, before = False, link.use_unicode
    try:
        listed = link.run("XA RECOVER")
    finally:
        link.use_unicode = before
    for form, first, second, data in listed:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        gtrid, bqual = raw[: int(first)], raw[int(first) : int(first) + int(second)]
        match = _GTRID.fullmatch(gtrid)
        if match is None or form != _FORMAT or not re.fullmatch(rb"[\w-]+", bqual):
            continue
        identity, pipeline, *numbers = (part.decode() for part in match.groups())
        if namespace is not None and pipeline == _short(namespace.pipeline):
            pipeline = namespace.pipeline
        generation, batch, attempt, task_attempt, task = (int(it, 16) for it in numbers)
        space = Namespace(pipeline, identity)
        name = BranchName(space, generation, bqual.decode(), batch, attempt, task_attempt)
        found.append(BranchId(name, task))
    return found


class PreparedBranches:
    """The prepared branches of a sink, on the driver."""

    def __init__(self, connections: Connections, witness: Witness, *, required: bool) -> None:
        """`required`: the sink prepares branches now, so it must be allowed to list them."""
        self._connections, self._witness, self._required = connections, witness, required

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self._connections.lend() as link:
            spaces = {read_id(receipt.id).name.namespace for receipt in receipts}
            opened = {str(it) for space in spaces for it in prepared_branches(link, space)}
        return [
            None if receipt.id in opened else "it is no longer prepared" for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        self._wait_until_closed(receipts)
        return _each(self._commit_one, receipts)

    def _wait_until_closed(self, receipts: Sequence[Receipt]) -> None:
        ids = [int(str(r.handle["connection"])) for r in receipts if "connection" in r.handle]
        with contextlib.suppress(Unavailable), self._connections.lend() as link:
            wait_until_closed(link, ids)

    def _commit_one(self, receipt: Receipt) -> BranchState:
        return self._end(
            "COMMIT",
            read_id(receipt.id),
            lambda link: self.settle(link, receipt),
            lambda link: self._confirm(link, receipt),
        )

    def settle(self, link: Link, receipt: Receipt) -> BranchState:
        """Prove how a branch that is no longer open has ended."""
        return witness_for(receipt).settle(link, receipt.id, witness_of(receipt)[1])

    def _confirm(self, link: Link, receipt: Receipt) -> BranchState:
        """Read the witness of a branch that the server says it has committed."""
        witnesses = Witnesses([receipt])
        found = witnesses.states(link).get(receipt.id)
        if found is BranchState.COMMITTED:
            return found
        if not witnesses.recognises(link):
            return witnesses.unproven(link)[receipt.id]
        if found is not None:
            return found
        raise InDoubt(
            f"the server says that branch {receipt.id} is committed, but its witness row is missing: "
            "the server no longer lists the branch, but InnoDB still holds it. Nothing is lost: "
            "restart the server, which then lists the branch again, and start the pipeline again",
            sink=self._witness.sink,
        )

    def _end(
        self,
        verb: str,
        branch: BranchId,
        settle: Callable[[Link], BranchState],
        confirm: Callable[[Link], BranchState],
    ) -> BranchState:
        """Commit or roll back a branch, and say how it ended. Only the witness proves it.

        While the connection that prepared a branch is open, MariaDB lists the branch but refuses it to
        all other connections. Then try again: the connection is about to be closed.
        """
        try:
            with self._connections.lend() as link:
                for _ in range(_DETACH_TRIES):
                    try:
                        link.run(f"XA {verb} {xid_of(branch)}")
                    except pymysql.err.Error as error:
                        if code_of(error) not in (XA_UNKNOWN, XA_ROLLED_BACK):
                            raise
                    else:
                        return confirm(link)
                    if branch not in prepared_branches(link, branch.name.namespace):
                        return settle(link)
                    time.sleep(_DETACH_WAIT_S)
                return BranchState.PREPARED
        except Unavailable:
            return BranchState.UNREACHABLE

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return _each(self._abort_one, strays)

    def _abort_one(self, stray: Stray) -> BranchState:
        return self._end(
            "ROLLBACK",
            read_id(stray.id),
            lambda link: self._witness.settle(link, stray.id),
            lambda link: self._confirm_rollback(link, stray.id),
        )

    def _confirm_rollback(self, link: Link, branch: str) -> BranchState:
        """Read the witness of a branch that the server says it has rolled back."""
        state = self._witness.settle(link, branch)
        if state is BranchState.PREPARED:
            logger.warning(
                "sink %s: the server says that branch %s is rolled back, but InnoDB still holds it and "
                "its locks. Restart the server, which then lists the branch again",
                *(self._witness.sink, branch),
            )
        return state

    def find(self, namespace: Namespace) -> list[Stray]:
        """List the prepared branches of exactly this namespace and sink."""
        sink = self._witness.sink
        return [
            Stray(sink, str(it), it.name.generation, PREPARED)
            for it in self._list(namespace)
            if it.belongs_to(namespace, sink)
        ]

    def newest_generation(self, namespace: Namespace) -> int:
        names = [it.name for it in self._list(namespace)]
        return max((it.generation for it in names if it.namespace == namespace), default=0)

    def _list(self, namespace: Namespace) -> list[BranchId]:
        try:
            with self._connections.lend() as link:
                return prepared_branches(link, namespace)
        except NotAuthorised:
            if self._required:
                raise
            return []  # a staged sink needs no permission to list XA branches


def _each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to all items, several at the same time."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(function, items))
