"""The driver's half: branches that the database holds, and their names there.

    global part   IDENTITY.GENERATION.BATCH.ATTEMPT.TASK_ATTEMPT.TASK
    branch part   a hash of pipeline, identity and sink, which together would be too long

A name has two parts of at most 64 bytes. Both are compared in full.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.naming import BranchName
from poundlock.core.protocol import BranchState
from poundlock.errors import Rejected, Unavailable, UsageError
from poundlock.sinks.sql.naming import BranchId, read_id
from poundlock.sinks.sql.receipts import PREPARED, identities_of, witness_of
from poundlock.sinks.sql.witness import Witness
from poundlock.sinks.twophase.link import Link

logger = logging.getLogger("poundlock")

FORMAT = 0x706C
_GTRID = re.compile(r"([0-9a-f]+)\.(\d+)\.(\d+)\.(\d+)\.(\d+)\.(\d+)", re.ASCII)


def xid_of(branch: BranchId) -> tuple[int, str, str]:
    name = branch.name
    gtrid = (
        f"{name.namespace.identity}.{name.generation}.{name.batch}.{name.attempt}."
        f"{name.task_attempt}.{branch.task}"
    )
    if len(gtrid) > 64:
        raise UsageError(f"{gtrid} is longer than the 64 bytes that a branch's name may have")
    return FORMAT, gtrid, _owner(name.namespace, name.sink)


def _owner(namespace: Namespace, sink: str) -> str:
    text = f"{namespace.pipeline}\n{namespace.identity}\n{sink}"
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def open_branches(link: Link, namespace: Namespace, sink: str) -> Iterator[BranchId]:
    """List the prepared branches of exactly this namespace and sink."""
    owner = _owner(namespace, sink)
    for number, gtrid, bqual in link.recover():
        match = _GTRID.fullmatch(gtrid)
        if number != FORMAT or bqual != owner or match is None or match[1] != namespace.identity:
            continue
        generation, batch, attempt, task_attempt, task = map(int, match.groups()[1:])
        name = BranchName(namespace, generation, sink, batch, attempt, task_attempt)
        yield BranchId(name, task)


class PreparedBranches:
    """The branches of a sink. Each call has a new connection."""

    def __init__(self, connect: Callable[[], Link], witness: Witness, sink: str):
        self._connect, self._witness, self._sink = connect, witness, sink

    @contextlib.contextmanager
    def lend(self) -> Generator[Link]:
        link = self._connect()
        try:
            with link.translated_errors():
                yield link
        except Rejected as error:  # only a task has a vote; on the driver the step may be repeated
            raise Unavailable(str(error.args[0]), sink=self._sink) from None
        finally:
            link.close()

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self.lend() as link:
            if not self._witness.recognises(link, identities_of(receipts)):
                return ["its witness table has since been dropped or emptied"] * len(receipts)
            opened = self._opened(link, [read_id(receipt.id) for receipt in receipts])
        return [
            None if receipt.id in opened else "it is no longer prepared" for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return self._each(receipts, self._commit_one)

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states = self._each(strays, lambda link, stray: self.roll_back(link, read_id(stray.id)))
        return [
            BranchState.UNREACHABLE if state is BranchState.PREPARED else state for state in states
        ]

    def find(self, namespace: Namespace) -> list[Stray]:
        with self.lend() as link:
            return [
                Stray(self._sink, str(it), it.name.generation, PREPARED)
                for it in open_branches(link, namespace, self._sink)
            ]

    def newest_generation(self, namespace: Namespace) -> int:
        with self.lend() as link:
            opened = open_branches(link, namespace, self._sink)
            return max((it.name.generation for it in opened), default=0)

    def _each(
        self, branches: Sequence[Any], finish: Callable[[Link, Any], BranchState]
    ) -> list[BranchState]:
        states: list[BranchState] = []
        try:
            with self.lend() as link:
                for branch in branches:
                    states.append(finish(link, branch))  # noqa: PERF401 (kept on error)
        except Unavailable as error:
            logger.warning("sink %s: %s", self._sink, error)
        return states + [BranchState.UNREACHABLE] * (len(branches) - len(states))

    def _commit_one(self, link: Link, receipt: Receipt) -> BranchState:
        # Do nothing if the witness could not prove afterwards how the branch ended.
        known = witness_of(receipt)[1]
        if not self._witness.recognises(link, [known]):
            return self._witness.unproven(link, [receipt.id])[0]
        return self._finish(link, read_id(receipt.id), "tpc_commit", known)

    def roll_back(self, link: Link, branch: BranchId) -> BranchState:
        """Roll back a branch that no decision names, and insert its tombstone."""
        self._witness.ensure(link)
        return self._finish(link, branch, "tpc_rollback", None)

    def _finish(self, link: Link, branch: BranchId, verb: str, known: str | None) -> BranchState:
        """Commit or roll back a branch. Return how it ended, according to the witness.

        Drivers report an unknown branch in many ways, so their answers alone prove nothing.
        """
        try:
            getattr(link.connection, verb)(link.xid(*xid_of(branch)))
        except link.driver.Error as error:
            link.renew()
            if str(branch) in self._opened(link, [branch]):
                detail = link.translate_error(error).args[0]
                logger.warning("sink %s: branch %s is still open: %s", self._sink, branch, detail)
                return BranchState.PREPARED
        committed = BranchState.COMMITTED
        if self._witness.states(link, [str(branch)]).get(str(branch)) is committed:
            return committed
        return self._witness.settle(link, str(branch), known)

    def _opened(self, link: Link, branches: Sequence[BranchId]) -> set[str]:
        spaces = {branch.name.namespace for branch in branches}
        return {str(it) for space in spaces for it in open_branches(link, space, self._sink)}
