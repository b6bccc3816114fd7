"""The driver's half of the MySQL sink: asks, commits, aborts and finds branches of both modes.

A receipt says by which mode its branch was made, so a sink whose mode has changed still finishes what
was decided before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, cast

import pymysql

from poundlock.core.model import Branch, Namespace, Receipt, Stray
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Participant, Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, NotAuthorised, Parted, PoundlockError, Unavailable, UsageError
from poundlock.mysql import target as tables
from poundlock.mysql.branches import Witness, Xid, let_go, prepared, xid
from poundlock.mysql.link import (
    DEADLOCK,
    DUPLICATE,
    LOCK_TIMEOUT,
    NO_SUCH_TABLE,
    XA_ROLLED_BACK,
    XA_UNKNOWN,
    Link,
    code_of,
    connect,
    connect_arguments,
    drop,
    run,
    said,
    told,
)
from poundlock.mysql.move import DELETE, ORDER, Move, stage_name, stages
from poundlock.mysql.names import quoted
from poundlock.mysql.target import Target, TargetColumn
from poundlock.mysql.writer import RowWriter

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4  # branches that the driver ends at a time, each on a connection of its own
_ANSWER_S, _MOVE_S = 60.0, 3600.0
_DETACH_TRIES, _DETACH_WAIT_S = 20, 0.05
_UNSAID = TargetColumn(ORDER, "", "")  # that there is an order is all that a move must know


class MySQLBranches(Participant):
    """All but the frame's and the server's looking over; see `poundlock.sinks.mysql`."""

    url: str
    table: str
    key: tuple[str, ...]
    delete: str | None
    order_by: str | None
    chosen: str  # "xa" or "staged"
    bulks: bool  # the server takes MariaDB's bulks
    loads: bool  # it takes LOAD DATA LOCAL
    packet: int  # bytes of rows that it takes at once
    key_partitioned: bool
    lock_timeout: float
    connections: int | None
    known: Target | None

    def __init__(self, database: str | None, witness_database: str | None) -> None:
        self._database, self._witness_database = database, witness_database
        self._frame: dict[str, str] = {}  # what is written: column to Spark's type
        self._links: list[Link] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_links": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_links": [], "_lock": threading.Lock()})

    @property
    def database(self) -> str:
        """The target's database: as it was named, or else the address's."""
        if self._database is None:
            self._database = connect_arguments(self.url)["database"]
        if self._database is None:
            raise UsageError(
                f"which database is table {self.table!r} in? Name it in the url, or as "
                "'database.table'",
                sink=self.name,
            )
        return self._database

    @property
    def witness(self) -> Witness:
        return Witness(self._witness_database or self.database)

    # For the writers.

    def begin(self, branch: Branch) -> Writer:
        return RowWriter(self, branch)

    def connect(self, answer_timeout: float = 600.0) -> Link:
        return connect(
            self.url, sink=self.name, lock_timeout=self.lock_timeout, answer_timeout=answer_timeout
        )

    @property
    def into(self) -> str:
        return quoted(self.database, self.table)

    @property
    def target(self) -> Target:
        """The table, as the server describes it; asked for once."""
        if self.known is None:
            with self._borrowed() as link:
                self.known = tables.read(link, self.database, self.table)
        if self.known is None:
            raise UsageError(
                f"there is no table {self.database}.{self.table}, or the account may not see it. "
                "Create it, or grant SELECT, INSERT, UPDATE and DELETE on it",
                sink=self.name,
            )
        return self.known

    def shaped(self, rows: Any) -> Any:
        """Leave out what only orders rows, where the target has no such column."""
        extra = self.order_by
        if extra and extra in rows.schema.names and self.target.column(extra) is None:
            rows = rows.drop_columns([extra])
        return rows

    def move(self, names: Sequence[str], *, order: TargetColumn | None) -> Move:
        """Return how rows with these columns go into the target."""
        target = self.target
        spelled = {key: column.name for key, column in target.columns.items()}
        written = tuple(spelled.get(name.lower(), name) for name in names
                        if name not in (ORDER, DELETE))  # fmt: skip
        key = tuple(spelled.get(name.lower(), name) for name in self.key)
        return Move(target, written, key, order, bool(self.key and self.delete))

    def meeting(self, target: Target) -> list[frozenset[str]]:
        """Return the unique keys that two tasks could share: not those that the table numbers."""
        given = {name.lower() for name in self._frame}
        fresh = {key for key, col in target.columns.items() if col.serial and key not in given}
        return [unique for unique in target.unique if not unique & fresh]

    @property
    def contradiction(self) -> str:
        cure = (
            f"order_by={self.order_by!r} does not tell which came last"
            if self.order_by
            else "name the column that tells which came last with order_by="
        )
        return f"rows of one batch have the same key ({', '.join(self.key)}): {cure}"

    # What the coordinator asks.

    def together(self, receipts: Sequence[Receipt]) -> bool:
        return any(_mode(receipt) == "staged" for receipt in receipts)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        by_xa = [receipt for receipt in receipts if _mode(receipt) == "xa"]
        aside = [receipt for receipt in receipts if _mode(receipt) == "staged"]
        found: dict[str, str | None] = {}
        with self._borrowed(_MOVE_S) as link:
            if by_xa:
                opened = self._opened(link, by_xa)
                for receipt in by_xa:
                    gone = _name(receipt) not in opened
                    found[receipt.id] = "the server has it no longer prepared" if gone else None
            if aside:
                found |= self._check_staged(link, aside)
        return [found[receipt.id] for receipt in receipts]

    def _opened(self, link: Link, receipts: Sequence[Receipt]) -> dict[BranchName, Xid]:
        opened: dict[BranchName, Xid] = {}
        for namespace in {_name(receipt).namespace for receipt in receipts}:
            opened |= prepared(link, namespace, self.name)
        return opened

    def _check_staged(self, link: Link, receipts: Sequence[Receipt]) -> dict[str, str | None]:
        over = _witnessed(link, receipts)
        found: dict[str, str | None] = {}
        for receipt in receipts:
            held = None if _name(receipt) in over else self._count(link, receipt)
            if held is None:
                found[receipt.id] = "its staging table is gone"
            elif held != receipt.handle["rows"]:
                found[receipt.id] = f"{held} rows are staged, {receipt.handle['rows']} were written"
            else:
                found[receipt.id] = None
        if any(found.values()):
            return found
        refusal = self._rehearse(link, receipts)
        return dict.fromkeys(found, refusal) if refusal else found

    def _count(self, link: Link, receipt: Receipt) -> int | None:
        """Count what is staged; None if the table is gone."""
        try:
            return int(run(link, f"SELECT COUNT(*) FROM {_stage_of(receipt)}")[0][0])
        except pymysql.err.ProgrammingError as error:
            if code_of(error) != NO_SUCH_TABLE:
                raise
            return None

    def _rehearse(self, link: Link, receipts: Sequence[Receipt]) -> str | None:
        """Say what would stop the move. What only the target can tell is tried, and undone."""
        places = [_stage_of(receipt) for receipt in receipts]
        move = self._move_of(receipts)
        if move.duplicates(link, places):
            return self.contradiction
        if not self._may_refuse(move):
            return None
        run(link, "START TRANSACTION")
        try:
            with said(self.name):
                move.run(link, places)
        except Unavailable:
            raise
        except PoundlockError as error:
            return f"the target would not take its rows: {error.args[0]}"
        finally:
            with contextlib.suppress(pymysql.err.Error):
                run(link, "ROLLBACK")
        return None

    def _may_refuse(self, move: Move) -> bool:
        key = frozenset(name.lower() for name in move.key)
        others = [unique for unique in move.target.unique if unique != key]
        return bool(others or move.target.strict)

    # Committing.

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        by_xa = [receipt for receipt in receipts if _mode(receipt) == "xa"]
        aside = [receipt for receipt in receipts if _mode(receipt) == "staged"]
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
        name = _name(receipt)
        branch = xid(name, int(str(receipt.handle["task"])))
        return self._end_xa(
            "COMMIT", name, branch, lambda link: self._proven(link, receipt),
            lambda link: self._seen(link, receipt),
        )  # fmt: skip

    def _seen(self, link: Link, receipt: Receipt) -> BranchState:
        """See the witness of a branch that the server says it has committed; see `let_go`."""
        witness = self._witness_of(link, receipt)
        if witness is None or _name(receipt) in witness.states(link, [_name(receipt)]):
            return BranchState.COMMITTED
        raise InDoubt(
            f"the server says that branch {receipt.id} is committed, but its witness is not there: it "
            "has lost sight of the branch, which InnoDB still holds prepared. Nothing is lost: "
            "restart the server, which then lists the branch again, and start the pipeline again",
            sink=self.name,
        )

    def _proven(self, link: Link, receipt: Receipt) -> BranchState:
        """Ask the witness, if it is the one that the branch has testified in."""
        witness = self._witness_of(link, receipt)
        return witness.settle(link, _name(receipt)) if witness else BranchState.NO_WITNESS

    def _witness_of(self, link: Link, receipt: Receipt) -> Witness | None:
        """Return the receipt's witness table; None if it is gone."""
        _, wanted = cast("list[str]", receipt.handle["witness"])
        witness = _place(receipt)
        found = witness.identity(link)
        if found is not None and found != wanted:
            raise Parted(
                f"branch {receipt.id} was written to another server, or the witness table "
                f"{witness.table} was made anew since: connect to the server that has it",
                sink=self.name,
            )
        return witness if found else None

    def _end_xa(
        self,
        verb: str,
        name: BranchName,
        branch: Xid,
        settle: Callable[[Link], BranchState],
        see: Callable[[Link], BranchState] = lambda link: BranchState.ABORTED,
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

    def _commit_staged(self, receipts: Sequence[Receipt]) -> dict[str, BranchState]:
        """Move all branches in one transaction that also writes their witnesses."""
        with self._borrowed(_MOVE_S) as link:
            # Each in the database that its receipt names: new ones may go elsewhere by now.
            if any(self._witness_of(link, mine[0]) is None for mine in _by_place(receipts)):
                return {receipt.id: BranchState.NO_WITNESS for receipt in receipts}
            states = _witnessed(link, receipts)
            waiting = [receipt for receipt in receipts if _name(receipt) not in states]
            # A stage that others have changed is as lost as one that is gone.
            lost = [r for r in waiting if self._count(link, r) != r.handle["rows"]]
            some_lost = lost or BranchState.ABORTED in states.values()
            if some_lost and not self._begun(link, receipts, states):
                states = dict.fromkeys(map(_name, receipts), self._abort_all(link, waiting))
            else:
                for receipt in lost:
                    states[_name(receipt)] = _place(receipt).settle(link, _name(receipt))
                ready = [receipt for receipt in waiting if _name(receipt) not in states]
                if ready:
                    moved = self._move_all(link, ready)
                    states |= dict.fromkeys(map(_name, ready), moved)
            for receipt in receipts:
                if states[_name(receipt)] in (BranchState.COMMITTED, BranchState.ABORTED):
                    self._drop_stage(link, _place(receipt).database, _name(receipt))
        return {str(name): state for name, state in states.items()}

    def _begun(
        self, link: Link, receipts: Sequence[Receipt], states: Mapping[BranchName, BranchState]
    ) -> bool:
        """Whether anything of the batch was committed already."""
        return BranchState.COMMITTED in states.values() or _went_before(link, receipts)

    def _abort_all(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        """Give up what is left of a batch that has lost a part, in one transaction.

        The whole replay takes their place, at one instant: which row of a key is the last can be told
        only among all of them. Until that is settled none of them counts as aborted: the others
        would be moved by themselves.
        """
        run(link, "START TRANSACTION")
        try:
            for mine in _by_place(receipts):
                _place(mine[0]).testify(link, list(map(_name, mine)), committed=False)
            run(link, "COMMIT")
        except pymysql.err.Error as error:
            if code_of(error) not in (LOCK_TIMEOUT, DEADLOCK, DUPLICATE):
                raise
            run(link, "ROLLBACK")
            return BranchState.PREPARED  # another driver is about it
        return BranchState.ABORTED

    def _move_all(self, link: Link, receipts: Sequence[Receipt]) -> BranchState:
        run(link, "START TRANSACTION")
        try:
            for mine in _by_place(receipts):  # first: who else moves the same must wait here
                _place(mine[0]).testify(link, list(map(_name, mine)))
            move = self._move_of(receipts)
            self._check_first(link, move, receipts)
            moved = move.run(link, [_stage_of(receipt) for receipt in receipts])
            wanted = sum(int(str(receipt.handle["rows"])) for receipt in receipts)
            if not self.key and moved != wanted:
                raise InDoubt(
                    f"{moved} rows were to be moved instead of {wanted}: the staging tables of "
                    f"{receipts[0].id} and its like were changed by others. Nothing was moved",
                    sink=self.name,
                )
            run(link, "COMMIT")
        except pymysql.err.Error as error:
            with contextlib.suppress(pymysql.err.Error):
                run(link, "ROLLBACK")
            if code_of(error) in (LOCK_TIMEOUT, DEADLOCK) or self._overtaken(link, receipts):
                return BranchState.PREPARED
            self._stop(error, receipts[0])
        except BaseException:
            with contextlib.suppress(Exception):
                run(link, "ROLLBACK")
            raise
        return BranchState.COMMITTED

    def _check_first(self, link: Link, move: Move, receipts: Sequence[Receipt]) -> None:
        """See that no other branch of the batch went before, where tasks may share a key."""
        if move.order is None or self.key_partitioned or not _went_before(link, receipts):
            return
        raise InDoubt(
            f"branch {receipts[0].id} is to be moved, but other branches of its batch were moved "
            "before it. Which of their rows are the last cannot be told. Nothing was moved: compare "
            "the table with the input, and rule by hand with 'poundlock txn'",
            sink=self.name,
        )

    def _overtaken(self, link: Link, receipts: Sequence[Receipt]) -> bool:
        """Whether another driver has ended one of them meanwhile: then the witness is asked anew."""
        with contextlib.suppress(pymysql.err.Error):
            return bool(_witnessed(link, receipts))
        return False

    def _stop(self, error: pymysql.err.Error, receipt: Receipt) -> NoReturn:
        """A decided batch that its target refuses is for a person to look at."""
        try:
            told(error, self.name)
        except Unavailable:
            raise
        except PoundlockError as reason:
            raise InDoubt(
                f"the batch of {receipt.id} is decided, but the target refuses its rows: "
                f"{reason.args[0]}. It took them when they were checked, so somebody has changed the "
                "table since. Nothing was moved and nothing is lost: undo the change and start the "
                "pipeline again",
                sink=self.name,
            ) from None

    def _move_of(self, receipts: Sequence[Receipt]) -> Move:
        handle: Mapping[str, Any] = receipts[0].handle
        return self.move(handle["columns"], order=_UNSAID if handle["ordered"] else None)

    # Finding and aborting.

    def find(self, namespace: Namespace) -> list[Stray]:
        with self._borrowed() as link:
            strays = [
                Stray(self.name, str(name), name.generation, "prepared",
                      {"mode": "xa", "task": branch.task})
                for name, branch in self._prepared(link, namespace).items()
            ]  # fmt: skip
            aside = stages(link, self.witness.database, namespace, self.name)
            over: Mapping[BranchName, BranchState] = {}
            if aside:
                with contextlib.suppress(pymysql.err.ProgrammingError):
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
        if _mode(stray) == "xa":
            branch = xid(name, int(str(stray.handle["task"])))
            return self._end_xa("ROLLBACK", name, branch, lambda link: self._settled(link, name))
        try:
            with self._borrowed() as link:
                state = self._settled(link, name)
                if state in (BranchState.ABORTED, BranchState.COMMITTED):
                    self._drop_stage(link, self.witness.database, name)
                return state
        except Unavailable:
            return BranchState.UNREACHABLE

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

    def _drop_stage(self, link: Link, database: str, name: BranchName) -> None:
        """Drop a staging table whose rows are settled. If it is in use, `prune` will."""
        try:
            run(link, f"DROP TABLE IF EXISTS {quoted(database, stage_name(name))}")
        except pymysql.err.Error as error:
            if code_of(error) not in (LOCK_TIMEOUT, DUPLICATE):
                raise

    # Connections.

    @contextlib.contextmanager
    def _borrowed(self, answer_timeout: float | None = None) -> Iterator[Link]:
        """Lend a connection of the driver's. One that failed is not lent again."""
        seconds = answer_timeout or _ANSWER_S
        with self._lock:
            link = self._links.pop() if self._links else None
        if link is not None:
            try:
                link.ping(reconnect=False)
            except (pymysql.err.Error, OSError):
                drop(link)
                link = None
        link = link or self.connect(seconds)
        link.patience(seconds)
        try:
            with said(self.name):
                yield link
        except BaseException:
            drop(link)
            raise
        with self._lock:
            self._links.append(link)

    def _many(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply a function to all, several at a time, in order of beginning."""
        if len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
            return list(pool.map(function, items))

    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            drop(link)


def _mode(branch: Receipt | Stray) -> str:
    return str(branch.handle["mode"])


def _name(receipt: Receipt) -> BranchName:
    name = parse_name(receipt.id)
    if name is None:
        raise UsageError(f"{receipt.id!r} is not the name of a branch in MySQL")
    return name


def _place(receipt: Receipt) -> Witness:
    """Return the witness table of a branch; its staging table is beside it."""
    return Witness(cast("list[str]", receipt.handle["witness"])[0])


def _stage_of(receipt: Receipt) -> str:
    return quoted(_place(receipt).database, stage_name(_name(receipt)))


def _by_place(receipts: Sequence[Receipt]) -> list[list[Receipt]]:
    """Sort branches by the witness table that they testify in."""
    found: dict[tuple[str, ...], list[Receipt]] = {}
    for receipt in receipts:
        key = tuple(cast("list[str]", receipt.handle["witness"]))
        found.setdefault(key, []).append(receipt)
    return list(found.values())


def _went_before(link: Link, receipts: Sequence[Receipt]) -> bool:
    """Whether other branches of the same batch were committed before these."""
    return any(
        _place(mine[0]).went_before(link, list(map(_name, mine))) for mine in _by_place(receipts)
    )


def _witnessed(link: Link, receipts: Sequence[Receipt]) -> dict[BranchName, BranchState]:
    """Read the witnesses of those branches that have one."""
    found: dict[BranchName, BranchState] = {}
    for mine in _by_place(receipts):
        found |= _place(mine[0]).states(link, map(_name, mine))
    return found
