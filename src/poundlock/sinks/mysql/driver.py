"""The driver's half of the MySQL sink: asks, commits, aborts and finds branches of both modes.

A receipt says by which mode its branch was made, so a sink whose mode has changed still finishes what
was decided before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pymysql

from poundlock.core.model import Branch, Namespace, Receipt, Stray
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, NotAuthorised, Unavailable
from poundlock.sinks.mysql.branches import Xid, let_go, prepared, xid
from poundlock.sinks.mysql.link import XA_ROLLED_BACK, XA_UNKNOWN, Link, code_of, run, said
from poundlock.sinks.mysql.move import stages
from poundlock.sinks.mysql.receipts import (
    branch_of,
    by_place,
    known_of,
    mode_of,
    place_of,
    proves,
    unproven,
    witnessed,
)
from poundlock.sinks.mysql.staged import MOVE_S, StagedBranches
from poundlock.sinks.mysql.writer import RowWriter

logger = logging.getLogger("poundlock")

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4  # branches that the driver ends at a time, each on a connection of its own
_DETACH_TRIES, _DETACH_WAIT_S = 20, 0.05


class MySQLBranches(StagedBranches):
    """All but the frame's and the server's looking over; see `poundlock.sinks.mysql`."""

    def begin(self, branch: Branch) -> Writer:
        return RowWriter(self, branch)

    # What the coordinator asks.

    def commit_together(self, receipts: Sequence[Receipt]) -> bool:
        return any(mode_of(receipt) == "staged" for receipt in receipts)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        by_xa = [receipt for receipt in receipts if mode_of(receipt) == "xa"]
        aside = [receipt for receipt in receipts if mode_of(receipt) == "staged"]
        found: dict[str, str | None] = {}
        with self._borrowed(MOVE_S) as link:
            if by_xa:
                opened = self._opened(link, by_xa)
                for receipt in by_xa:
                    gone = branch_of(receipt) not in opened
                    found[receipt.id] = "the server has it no longer prepared" if gone else None
            if aside:
                found |= self._check_staged(link, aside)
            for mine in by_place(receipts):
                if place_of(mine[0]).identity(link) != known_of(mine[0]):
                    reason = "its witness table was emptied or made anew since it was written"
                    found |= {receipt.id: reason for receipt in mine}
        return [found[receipt.id] for receipt in receipts]

    def _opened(self, link: Link, receipts: Sequence[Receipt]) -> dict[BranchName, Xid]:
        opened: dict[BranchName, Xid] = {}
        for namespace in {branch_of(receipt).namespace for receipt in receipts}:
            opened |= prepared(link, namespace, self.name)
        return opened

    # Committing.

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        by_xa = [receipt for receipt in receipts if mode_of(receipt) == "xa"]
        aside = [receipt for receipt in receipts if mode_of(receipt) == "staged"]
        states: dict[str, BranchState] = {}
        if aside:
            states |= self._commit_staged(aside)
        if by_xa:
            self._let_go(by_xa)
        done = self._many(self._commit_xa, by_xa)
        states |= {receipt.id: state for receipt, state in zip(by_xa, done, strict=True)}
        return [states[receipt.id] for receipt in receipts]

    def _let_go(self, receipts: Sequence[Receipt]) -> None:
        """Wait until the connections that prepared the branches are gone; see `let_go`."""
        ids = [int(str(r.handle["connection"])) for r in receipts if "connection" in r.handle]
        with contextlib.suppress(Unavailable), self._borrowed() as link:
            let_go(link, ids)

    def _commit_xa(self, receipt: Receipt) -> BranchState:
        name = branch_of(receipt)
        branch = xid(name, int(str(receipt.handle["task"])))
        return self._end_xa(
            "COMMIT", name, branch, lambda link: self._proven(link, receipt),
            lambda link: self._seen(link, receipt),
        )  # fmt: skip

    def _seen(self, link: Link, receipt: Receipt) -> BranchState:
        """See the witness of a branch that the server says it has committed; see `let_go`."""
        said = witnessed(link, [receipt]).get(branch_of(receipt))
        if said is not None:
            return said
        if not proves(link, receipt):
            return BranchState.NO_WITNESS
        raise InDoubt(
            f"the server says that branch {receipt.id} is committed, but its witness is not there: it "
            "has lost sight of the branch, which InnoDB still holds prepared. Nothing is lost: "
            "restart the server, which then lists the branch again, and start the pipeline again",
            sink=self.name,
        )

    def _proven(self, link: Link, receipt: Receipt) -> BranchState:
        """Ask the witness, if it is the one that the branch has testified in."""
        if not proves(link, receipt):
            return unproven(link, [receipt])[branch_of(receipt)]
        return place_of(receipt).settle(link, branch_of(receipt), known_of(receipt))

    def _end_xa(
        self,
        verb: str,
        name: BranchName,
        branch: Xid,
        settle: Callable[[Link], BranchState],
        see: Callable[[Link], BranchState],
    ) -> BranchState:
        """Commit or roll back an XA branch, and say how it ended. Nothing but the witness proves it.

        While the connection that prepared it lives, MariaDB denies a branch to all others, though it
        lists it: it goes on to exist, and in a moment the connection will be seen to be closed.
        """
        try:
            with self._borrowed() as link:
                for _ in range(_DETACH_TRIES):
                    try:
                        run(link, f"XA {verb} {branch}")
                    except pymysql.err.Error as error:
                        if code_of(error) not in (XA_UNKNOWN, XA_ROLLED_BACK):
                            raise
                    else:
                        return see(link)
                    if name not in prepared(link, name.namespace, name.sink):
                        return settle(link)
                    time.sleep(_DETACH_WAIT_S)
                return BranchState.PREPARED
        except Unavailable:
            return BranchState.UNREACHABLE

    # Finding and aborting.

    def find(self, namespace: Namespace) -> list[Stray]:
        with self._borrowed() as link:
            strays = [
                Stray(self.name, str(name), name.generation, "prepared",
                      {"mode": "xa", "task": branch.task})
                for name, branch in self._prepared(link, namespace).items()
            ]  # fmt: skip
            aside = stages(link, self.witness.database, namespace, self.name)
            over = self.witness.states(link, aside)
            strays += [
                Stray(
                    self.name, str(name), name.generation, "staged", {"mode": "staged", "task": 0}
                )
                for name in aside
                if name not in over
            ]
        return strays

    def _prepared(self, link: Link, namespace: Namespace) -> dict[BranchName, Xid]:
        try:
            with said(self.name):
                return prepared(link, namespace, self.name)
        except NotAuthorised:
            if self.chosen == "xa":
                raise
            return {}  # a staged sink needs no right to look at XA branches

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return self._many(self._abort_one, strays)

    def _abort_one(self, stray: Stray) -> BranchState:
        name = parse_name(stray.id)
        assert name is not None
        if mode_of(stray) == "xa":
            branch = xid(name, int(str(stray.handle["task"])))
            return self._end_xa(
                "ROLLBACK", name, branch, lambda link: self._settled(link, name),
                lambda link: self._seen_gone(link, name),
            )  # fmt: skip
        try:
            with self._borrowed() as link:
                state = self._settled(link, name)
                if state in (BranchState.ABORTED, BranchState.COMMITTED):
                    self._drop_stage(link, self.witness.database, name)
                return state
        except Unavailable:
            return BranchState.UNREACHABLE

    def _seen_gone(self, link: Link, name: BranchName) -> BranchState:
        """See that a branch is gone that the server says it has rolled back; see `let_go`."""
        state = self._settled(link, name)
        if state is BranchState.PREPARED:
            logger.warning(
                "sink %s: the server says that branch %s is rolled back, but InnoDB still holds it and "
                "its locks. Restart the server, which then lists the branch again",
                *(self.name, name),
            )
        return state

    def _settled(self, link: Link, name: BranchName) -> BranchState:
        self.witness.ensure(link)
        return self.witness.settle(link, name)

    def newest_generation(self, namespace: Namespace) -> int:
        with self._borrowed() as link:
            found = [self.witness.newest_generation(link, namespace, self.name)]
        return max(found + [stray.generation for stray in self.find(namespace)])

    def prune(self, namespace: Namespace, floor: int) -> None:
        with self._borrowed() as link:
            aside = stages(link, self.witness.database, namespace, self.name)
            if aside:  # left by a crash between a move and the end of its staging tables
                for name in self.witness.states(link, aside):
                    self._drop_stage(link, self.witness.database, name)
            self.witness.prune(link, namespace, self.name, floor)

    def _many(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply a function to all, several at a time, in order of beginning."""
        if len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
            return list(pool.map(function, items))
