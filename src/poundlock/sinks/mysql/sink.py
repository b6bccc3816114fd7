"""MySQL and MariaDB: rows into a table, exactly once, by XA or by staging tables.

`xa`: a task loads its rows into an XA branch and prepares it; the driver commits each branch. `staged`:
a task loads its rows into a staging table; the driver moves the whole batch in one transaction. The
transaction that makes rows visible also inserts a witness row: see `poundlock.sinks.sql.witness`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from poundlock.core.model import Branch, Namespace, Receipt, checked_name
from poundlock.core.participant import (
    Column,
    Commitment,
    MissingOrder,
    Semantic,
    Writer,
    frame_mismatch,
)
from poundlock.errors import LogMismatch, NotAuthorised, UsageError
from poundlock.sinks.mysql import target as tables
from poundlock.sinks.mysql.link import (
    Connections,
    Link,
    connect,
    connect_arguments,
    connection_limits,
)
from poundlock.sinks.mysql.move import DELETE, ORDER, Move
from poundlock.sinks.mysql.prepared import AT_ONCE, PreparedBranches, prepared_branches
from poundlock.sinks.mysql.staged import StagedBranches
from poundlock.sinks.mysql.target import Target, TargetColumn, differences, expression, quoted
from poundlock.sinks.mysql.witness import Witnesses, witness_in
from poundlock.sinks.mysql.writer import RowWriter
from poundlock.sinks.sql import connections as bound
from poundlock.sinks.sql.branches import BranchesByMode, SqlSink
from poundlock.sinks.sql.receipts import PREPARED, STAGED, mode_of
from poundlock.sinks.sql.staging import contended_key
from poundlock.sinks.sql.witness import Witness

_MODES = (None, "xa", "staged")
_VARIABLES = (
    *("innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "local_infile", "wsrep_on"),
    *("read_only", "super_read_only", "max_allowed_packet"),
    "xa_detach_on_prepare",
)
_BESIDE_ROWS = 64 << 10  # bytes of the largest packet that are kept for everything but rows


class MySQL(SqlSink):
    """A table of MariaDB 10.5 or later, or of MySQL 8 or later.

    Args:
        table: The table, or `database.table`. It must exist, and use InnoDB.
        url: `mysql://user:password@host:port/database`, or `env:NAME` or `file:PATH` that holds it.
        name: The sink's name in its pipeline; the table's by default.
        key: Column or columns of a unique key. With it, a row replaces the one with the same key;
            without it, rows are appended.
        delete: Boolean column: where it is true, the row with this key is deleted.
        order_by: Column that chooses between rows of a batch with the same key: the highest value wins.
            Without it, such rows are refused.
        mode: "xa" or "staged"; by default staged with a key, or if two tasks could write the same
            value of a unique key, else XA.
        key_partitioned: No two tasks write the same key, because the frame is partitioned by it.
        witness_database: Where the witness table and the staging tables are; the target's by default.
        lock_timeout: Seconds that a branch waits for a lock before it votes no.
        connections: The most that are open at once; by default one for each task that Spark can run
            at once, and four for the driver. The start fails if the server allows fewer.
        semantic: "exactly_once", "at_least_once" or "none".
    """

    system = "MySQL"

    def __init__(
        self,
        table: str,
        *,
        url: str,
        name: str | None = None,
        key: str | Sequence[str] | None = None,
        delete: str | None = None,
        order_by: str | None = None,
        mode: str | None = None,
        key_partitioned: bool = False,
        witness_database: str | None = None,
        lock_timeout: float = 10,
        connections: int | None = None,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        database, _, own = table.rpartition(".")
        self._database, self._witness_database = database or None, witness_database
        self._frame: dict[str, str] = {}  # what is written: column to Spark's type
        self.name = checked_name("sink name", name or own)
        self.url = url
        self.table = own
        self.key = (key,) if isinstance(key, str) else tuple(key or ())
        self.delete, self.order_by = delete, order_by
        self.mode, self.key_partitioned = mode, key_partitioned
        self.lock_timeout, self.connection_count = lock_timeout, connections
        self.connections = Connections(self.connect, self.name)
        self.semantic = Semantic(semantic)
        if lock_timeout <= 0:
            raise UsageError("lock_timeout must be more than 0 seconds", sink=self.name)
        self._check_arguments()
        quoted(self.table)
        if not url.startswith(("env:", "file:")):  # those are read when they are needed
            connect_arguments(url)
            quoted(self.database, self.witness.place)
        self.known: Target | None = None
        self.bulks, self.loads, self.packet = False, True, 0
        self.chosen = mode or ("staged" if self.key else "xa")

    def __repr__(self) -> str:
        return f"MySQL({self.table!r}, name={self.name!r})"

    def _check_arguments(self) -> None:
        if self.mode not in _MODES:
            raise UsageError(
                f"mode={self.mode!r}: give 'xa' or 'staged', or omit it", sink=self.name
            )
        for option, value in (("delete", self.delete), ("order_by", self.order_by)):
            if value and not self.key:
                raise UsageError(
                    f"{option}= needs key=: without one, rows are only appended", sink=self.name
                )
        if self.mode == "xa" and self.key and not self.key_partitioned:
            raise contended_key(self.name, ", ".join(self.key))

    @property
    def commitment(self) -> Commitment:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Commitment.STAGED if self.chosen == "staged" else Commitment.TRANSACTIONAL

    def reader_settings(self) -> str:
        return "nothing"

    # What the frame must have.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        by_name = {name.lower(): name for name in columns}
        problems = [
            f"columns {by_name[name.lower()]!r} and {name!r} have the same name in MySQL, which does "
            "not tell upper from lower case: rename one"
            for name in columns
            if by_name[name.lower()] != name
        ]
        roles = [("key", name) for name in self.key]
        roles += [("delete", self.delete), ("order_by", self.order_by)]
        for role, name in roles:
            if name and name.lower() not in by_name:
                problems.append(f"there is no column {name!r} for {role}=")
        wanted: dict[str, str] = {}
        for name, column in columns.items():
            spelled = expression(name, column)
            if self.delete and name.lower() == self.delete.lower():
                if column.type != "boolean":
                    problems.append(f"column {name!r} for delete= is {column.type}, not boolean")
                wanted[DELETE] = column.sql
            elif spelled is None:
                problems.append(
                    f"column {name!r} has type {column.type}, which no MySQL column holds: cast it "
                    "to string"
                )
            else:
                wanted[name] = spelled
                if self._orders(name):
                    wanted[ORDER] = spelled
                    if spelled != column.sql:
                        problems.append(
                            f"column {name!r} for order_by= is {column.type}, which has "
                            "no order in MySQL"
                        )
        self._frame = {
            name: column.type
            for name, column in columns.items()
            if name in wanted or expression(name, column) is None
        }
        if self.known is not None:
            problems += self._compared(self.known)[0]
        if problems:
            raise frame_mismatch(self.name, problems, columns, target=f"table {self.table}")
        return wanted

    def _compared(self, target: Target) -> tuple[list[str], list[str]]:
        frame = {
            name: type_name
            for name, type_name in self._frame.items()
            if target.column(name) is not None or not self._orders(name)
        }
        return differences(target, frame) if frame else ([], [])

    def _orders(self, name: str) -> bool:
        return self.order_by is not None and name.lower() == self.order_by.lower()

    def missing_order(self) -> MissingOrder | None:
        if self.key and self.order_by is None:
            return MissingOrder(self.key, "order_by", refuses=True)
        return None

    # What the server and the table must offer.

    def preflight(self) -> list[str]:
        self.known = None
        target = self.target
        problems, warnings = self._compared(target)
        if problems:
            raise UsageError(
                f"table {self.table} does not fit the frame: {'; '.join(problems)}", sink=self.name
            )
        with self.connections.lend() as link:
            version = str(link.run("SELECT VERSION()")[0][0])
            places = ", ".join(f"'{name}'" for name in _VARIABLES)
            variables = {
                str(name).lower(): str(value).upper()
                for name, value in link.run(
                    f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({places})"
                )
            }
            self._check_table(target)
            warnings += bound.check(
                self.connection_count,
                tasks=self._tasks,
                driver=AT_ONCE,
                limits=connection_limits(link),
                sink=self.name,
            )
            if self.semantic is Semantic.EXACTLY_ONCE:
                self._choose(target)
                self._check_upserts(variables)
                self._check_speculation(target)
                self._check_server(version, variables)
                warnings += self._cautions(version, variables)
                if self.chosen == "xa":
                    self._check_rights(link)
            self.bulks = link.bulks
        self.loads = variables.get("local_infile") in ("ON", "1")
        largest = int(variables["max_allowed_packet"])
        self.packet = max(largest - _BESIDE_ROWS, largest // 2)
        if not self.loads and not self.bulks:
            warnings.append("local_infile is off: rows are sent by INSERT, which is slower")
        return warnings

    def _check_table(self, target: Target) -> None:
        if target.engine != "innodb":
            raise UsageError(
                f"table {self.table} uses the engine {target.engine}, which has no transactions. "
                f"Convert it: ALTER TABLE {self.table} ENGINE=InnoDB",
                sink=self.name,
            )
        if not self.key:
            return
        missing = [name for name in self.key if target.column(name) is None]
        if missing:
            raise UsageError(
                f"the table has no column {', '.join(map(repr, missing))} for key=", sink=self.name
            )
        wanted = frozenset(name.lower() for name in self.key)
        if wanted not in target.unique:
            there = "; ".join(", ".join(sorted(key)) for key in target.unique) or "none"
            raise UsageError(
                f"table {self.table} has no unique key over {', '.join(self.key)}, which key= "
                f"needs. It has: {there}. Add one, or give another key=",
                sink=self.name,
            )

    def _choose(self, target: Target) -> None:
        """Choose the mode if the user did not: rows that could block other tasks are staged.

        They can under a unique key, or if a trigger writes a row that all tasks share.
        """
        if self.mode == "xa" and self.meeting(target) and not self.key_partitioned:
            raise contended_key(self.name, ", ".join(sorted(self.meeting(target)[0])))
        if self.mode is not None or self.key or self.key_partitioned:
            return
        meets = self.meeting(target) or "trigger" in target.strict
        self.chosen = "staged" if meets else "xa"

    def _check_upserts(self, variables: Mapping[str, str]) -> None:
        if self.key and self.chosen == "xa" and variables.get("xa_detach_on_prepare") == "ON":
            raise UsageError(
                "mode='xa' with key= needs a temporary table, which MySQL does not let an XA branch "
                "read while xa_detach_on_prepare is ON, its default. Use mode='staged'",
                sink=self.name,
            )

    def _check_speculation(self, target: Target) -> None:
        """Refuse two attempts of one task at a time if one would wait for the other's keys."""
        if self.speculates and self.chosen == "xa" and (self.key or self.meeting(target)):
            raise UsageError(
                "spark.speculation is true: a second attempt of a task writes the same keys as "
                "the first. It would wait for the first attempt's prepared branch, or roll "
                "it back. Use mode='staged', or set spark.speculation to false",
                sink=self.name,
            )

    def _check_server(self, version: str, variables: Mapping[str, str]) -> None:
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        maria = "mariadb" in version.lower()
        oldest = (10, 5) if maria else (8, 0)
        if numbers < oldest:
            raise UsageError(
                f"the server is {version}: exactly-once needs MariaDB 10.5 or MySQL 8.0, or later. "
                "Older servers roll back a prepared branch when its connection closes",
                sink=self.name,
            )
        if variables.get("wsrep_on") in ("ON", "1"):
            raise UsageError(
                "the server is part of a Galera cluster, which has no XA and loses committed "
                "transactions in a crash: use a single server, or one with replicas",
                sink=self.name,
            )
        if "ON" in (variables.get("read_only"), variables.get("super_read_only")):
            raise UsageError("the server is read-only: name the primary in url=", sink=self.name)

    def _cautions(self, version: str, variables: Mapping[str, str]) -> list[str]:
        warnings: list[str] = []
        if variables.get("innodb_flush_log_at_trx_commit") != "1":
            warnings.append(
                "innodb_flush_log_at_trx_commit is not 1: a crash of the server's machine may lose "
                "what it has prepared or committed"
            )
        if variables.get("log_bin") in ("ON", "1"):
            if variables.get("sync_binlog") != "1":
                warnings.append("sync_binlog is not 1: after a crash replicas may lack rows")
            if self.chosen == "xa" and "mariadb" in version.lower():
                warnings.append(
                    "the binary log is on: with it, XA does not survive every crash in MariaDB, "
                    "and replicas may differ afterwards. mode='staged' does not use XA"
                )
            elif self.chosen == "xa":
                warnings.append(
                    "the binary log is on: if other programs use XA on this server, with an XID "
                    "format other than 1, a crash of MySQL may roll prepared branches back. They are "
                    "then written again from the source; mode='staged' does not use XA"
                )
        return warnings

    def _check_rights(self, link: Link) -> None:
        try:
            prepared_branches(link)
        except Exception as error:  # whatever it is, the sweep could find nothing
            raise NotAuthorised(
                "the account may not list XA branches, so none could be found after a crash. In "
                "MySQL, GRANT XA_RECOVER_ADMIN ON *.* TO the account; or use mode='staged'",
                sink=self.name,
            ) from error

    # The table, the witness and the connections.

    @property
    def database(self) -> str:
        """The target's database: the one in `table`, or else the one in the address."""
        if self._database is None:
            self._database = connect_arguments(self.url)["database"]
        if self._database is None:
            raise UsageError(
                f"the database of table {self.table!r} is not known: name it in the url, or as "
                "'database.table'",
                sink=self.name,
            )
        return self._database

    @property
    def witness(self) -> Witness:
        return witness_in(self._witness_database or self.database, self.name)

    # For the writers.

    def connect(self, answer_timeout: float = 600.0, idle: int = 28_800) -> Link:
        return connect(
            self.url,
            sink=self.name,
            lock_timeout=self.lock_timeout,
            answer_timeout=answer_timeout,
            idle=idle,
        )

    @property
    def into(self) -> str:
        return quoted(self.database, self.table)

    @property
    def target(self) -> Target:
        """The table, as the server describes it; read once."""
        if self.known is None:
            with self.connections.lend() as link:
                self.known = tables.read(link, self.database, self.table)
        if self.known is None:
            key = f" with a unique key over {', '.join(self.key)}" if self.key else ""
            raise UsageError(
                f"there is no table {self.database}.{self.table}, or the account may not see it. "
                f"Create it{key}, or grant SELECT, INSERT, UPDATE and DELETE on it",
                sink=self.name,
            )
        return self.known

    def shaped(self, rows: Any) -> Any:
        """Drop the `order_by` column if the target does not have it."""
        if self.order_by is None or self.target.column(self.order_by) is not None:
            return rows
        extra = [name for name in rows.schema.names if name.lower() == self.order_by.lower()]
        return rows.drop_columns(extra) if extra else rows

    def move(self, names: Sequence[str], *, order: TargetColumn | None) -> Move:
        """Return how rows with these columns go into the target."""
        target = self.target
        spelled = {key: column.name for key, column in target.columns.items()}
        written = tuple(
            spelled.get(name.lower(), name) for name in names if name not in (ORDER, DELETE)
        )
        key = tuple(spelled.get(name.lower(), name) for name in self.key)
        return Move(target, written, key, order, bool(self.key and self.delete))

    def meeting(self, target: Target) -> list[frozenset[str]]:
        """Return the unique keys that two tasks could share: none with a new AUTO_INCREMENT."""
        given = {name.lower() for name in self._frame}
        fresh = {key for key, col in target.columns.items() if col.serial and key not in given}
        return [unique for unique in target.unique if not unique & fresh]

    # In a task.

    def begin(self, branch: Branch) -> Writer:
        return RowWriter(self, branch)

    # On the driver.

    def standing_in(self, name: str) -> MySQL:
        other = super().standing_in(name)
        assert isinstance(other, MySQL)
        other.connections = Connections(other.connect, name)
        other.chosen = "xa"  # the former sink may have used XA: a missing right to list must show
        return other

    def lend(self) -> AbstractContextManager[Link]:
        return self.connections.lend()

    @property
    def branches(self) -> BranchesByMode:
        by_mode = {
            PREPARED: PreparedBranches(
                self.connections, self.witness, required=self.chosen == "xa"
            ),
            STAGED: self._staged,
        }
        return BranchesByMode(by_mode, PREPARED if self.chosen == "xa" else STAGED)

    @property
    def _staged(self) -> StagedBranches:
        return StagedBranches(
            self.connections, self.witness, self._target_at, key_partitioned=self.key_partitioned
        )

    def _target_at(self, link: Link, database: str, table: str) -> Target:
        if (database, table) == (self.database, self.table):
            return self.target
        found = tables.read(link, database, table)
        if found is None:
            raise LogMismatch(
                f"rows are staged for table {database}.{table}, which no longer exists. Restore it, "
                "or start once with the old options",
                sink=self.name,
            )
        return found

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self.connections.lend() as link:
            if not Witnesses(receipts).recognises(link):
                return ["its witness table has since been dropped or emptied"] * len(receipts)
        return self.branches.check(receipts)

    def commit_together(self, receipts: Sequence[Receipt]) -> bool:
        return any(mode_of(receipt, PREPARED) == STAGED for receipt in receipts)

    def prune(self, namespace: Namespace, floor: int) -> None:
        with self.connections.lend() as link:
            keep = self._staged.drop_ended(link, namespace)
            self.witness.prune(link, namespace, floor, keep)

    def close(self) -> None:
        self.connections.close()
