"""PostgreSQL: rows into a table, exactly once, appended or upserted by key.

A branch waits for the decision in one of two ways. Prepared: COPY into the target, a witness row,
PREPARE TRANSACTION; the server holds it. Staged: COPY into a table beside the target; after the
decision all tables of the batch are moved in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from psycopg import sql

from poundlock.core.model import Branch, Namespace, Receipt, checked_name
from poundlock.core.participant import Column, Commitment, MissingOrder, Semantic, frame_mismatch
from poundlock.core.protocol import BranchState
from poundlock.core.sparksql import to_json
from poundlock.errors import LogMismatch, NotAuthorised, UsageError
from poundlock.sinks.postgres.allowed import (
    closed_sequences,
    connection_limits,
    missing_grant,
    missing_rights,
    own_rules,
)
from poundlock.sinks.postgres.catalog import Index, Table, read_table
from poundlock.sinks.postgres.link import Connections, Link, database_of, system_of
from poundlock.sinks.postgres.move import FLAG, hurdles, staged_branches
from poundlock.sinks.postgres.prepared import PreparedBranches
from poundlock.sinks.postgres.staged import StagedBranches
from poundlock.sinks.postgres.target import Target
from poundlock.sinks.postgres.types import family, misfits
from poundlock.sinks.postgres.writer import PostgresWriter
from poundlock.sinks.sql import connections as bound
from poundlock.sinks.sql.branches import BranchesByMode, SqlSink
from poundlock.sinks.sql.receipts import PREPARED, STAGED, identities_of, mode_of
from poundlock.sinks.sql.staging import contended_key
from poundlock.sinks.sql.witness import Witness

_OLDEST = 120_000
_OTHER_CLUSTER = (
    "PostgreSQL cluster than the one that dsn names: change dsn back, or name a promoted standby of "
    "the first cluster"
)


class Postgres(SqlSink):
    """A table in PostgreSQL.

    Args:
        table: The table, as "table" or "schema.table".
        dsn: The database, in libpq's form, or `env:NAME` or `file:PATH` that holds it.
        name: The sink's name in its pipeline; the table's by default.
        schema: The table's schema; by default the first in the search path that has the table.
        key: Columns with a unique index: a row replaces the one with the same key.
        delete: A boolean column of the frame: rows in which it is true are deleted by their key. It is
            not written.
        order_by: The column that chooses between rows of a batch with the same key: the highest
            value wins. Without it such rows are refused.
        mode: "prepared" or "staged"; by default staged with a key, else prepared.
        key_partitioned: No two tasks write the same key, because the frame is partitioned by it.
        witness_schema: Where the witness and the staging tables are; created if it is missing.
        lock_timeout: Seconds that a statement waits for a lock.
        connections: The most that are open at once; by default one for each task that Spark can run
            at once, and one for the driver. The start fails if the server allows fewer.
        semantic: "exactly_once", "at_least_once" or "none".
    """

    system = "PostgreSQL"

    def __init__(
        self,
        table: str,
        *,
        dsn: str,
        name: str | None = None,
        schema: str | None = None,
        key: Sequence[str] | str | None = None,
        delete: str | None = None,
        order_by: str | None = None,
        mode: str | None = None,
        key_partitioned: bool = False,
        witness_schema: str = "poundlock",
        lock_timeout: float = 10.0,
        connections: int | None = None,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        if schema is None and "." in table:
            schema, _, table = table.partition(".")
        self.name = checked_name("sink name", name or table)
        self.semantic = Semantic(semantic)
        keys = (key,) if isinstance(key, str) else tuple(key or ())
        if mode not in (None, PREPARED, STAGED):
            raise UsageError(f"mode={mode!r}: give 'prepared' or 'staged'", sink=self.name)
        for option, value in (("delete", delete), ("order_by", order_by)):
            if value is not None and not keys:
                raise UsageError(f"{option}={value!r} needs key=", sink=self.name)
        if lock_timeout < 0.001:  # PostgreSQL counts milliseconds; 0 means forever
            raise UsageError("lock_timeout must be 0.001 seconds or more", sink=self.name)
        if "%" in witness_schema:
            raise UsageError("witness_schema must be a name without %", sink=self.name)
        self.mode = mode or (STAGED if keys else PREPARED)
        self.commitment = Commitment.STAGED if self.mode == STAGED else Commitment.TRANSACTIONAL
        self.connection_count = connections
        self.target = Target(
            self.name,
            dsn,
            schema,
            table,
            keys,
            delete,
            order_by,
            witness_schema,
            lock_timeout,
            key_partitioned,
        )
        self._types: dict[str, str] = {}  # of the frame's columns, once it is known
        self._table: Table | None = None
        self.connections = Connections(dsn, self.name, self.target.wait)

    def __repr__(self) -> str:
        return f"Postgres({self.target.table!r}, name={self.name!r}, mode={self.mode!r})"

    # What the frame must have.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        target, problems = self.target, list[str]()
        wanted: dict[str, str] = {}
        types: dict[str, str] = {}
        for name, column in columns.items():
            if name == target.delete:
                if column.type != "boolean":
                    problems.append(
                        f"column {name!r} has type {column.type}, but delete= needs boolean"
                    )
                wanted[FLAG] = f"coalesce({column.sql}, false)"
                continue
            kind = family(column.type)
            if kind is None:
                problems.append(f"column {name!r} has type {column.type}, which no column can hold")
            wanted[name] = to_json(name, column) if kind == "json" else column.sql
            types[name] = column.type
        for option, names in (
            ("key", target.key),
            ("delete", [target.delete] if target.delete else []),
            ("order_by", [target.order_by] if target.order_by else []),
        ):
            problems += [
                f"there is no column {name!r} for {option}="
                for name in names
                if name not in columns
            ]
        self._types = types  # a start also compares the table with a frame that has problems
        if problems:
            raise frame_mismatch(self.name, problems, columns)
        return wanted

    def missing_order(self) -> MissingOrder | None:
        key, order = self.target.key, self.target.order_by
        return MissingOrder(key, "order_by", refuses=True) if key and order is None else None

    # What the server must offer.

    def preflight(self) -> list[str]:
        with self.connections.lend() as link:
            self._check_server(link)
            target = self.target
            table = read_table(link, target.schema, target.table, key=target.key)
            self._check_columns(table)
            self._check_rights(link, table)
            self._check_rules(link, table)
            self._check_mode(link, table)
            self._table = table
            warnings = bound.check(
                self.connection_count,
                tasks=self._tasks,
                driver=1,
                limits=connection_limits(link),
                sink=self.name,
            )
            return warnings + self._warnings(link, table)

    def _check_server(self, link: Link) -> None:
        version = link.info.server_version
        if version < _OLDEST:
            raise UsageError(
                f"the server is PostgreSQL {version // 10_000}; 12 or later is needed",
                sink=self.name,
            )
        [(standby, read_only)] = link.run(
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"
        )
        if standby:
            raise UsageError(
                "the server is a standby, which cannot be written to: give the primary in dsn, or "
                "several hosts with target_session_attrs=read-write",
                sink=self.name,
            )
        if read_only:
            raise UsageError(
                "the session is read-only: default_transaction_read_only is on. Turn it off for the "
                "role, the database or in dsn",
                sink=self.name,
            )

    def _check_columns(self, table: Table) -> None:
        """Name every difference between the frame and the table, column by column."""
        target, problems = self.target, misfits(self._types, table)
        problems += [
            f"{name}: key= or order_by= names it, but the table has no such column"
            for name in (*target.key, *([target.order_by] if target.order_by else []))
            if table.column(name) is None and name not in self._types
        ]
        problems += [
            f"{column.name}: it is GENERATED ALWAYS, so no row can be replaced: leave it out of the "
            "frame, or SET GENERATED BY DEFAULT"
            for column in table.columns
            if target.key
            and column.identity == "a"
            and column.name in self._types
            and column.name not in target.key
        ]
        if problems:
            raise UsageError(
                f"the frame does not fit table {table.schema}.{table.name}: " + "; ".join(problems),
                sink=self.name,
            )
        if target.key and not any(
            index.plain and set(index.columns) == set(target.key) for index in table.indexes
        ):
            names = ", ".join(target.key)
            raise UsageError(
                f"{table.schema}.{table.name} has no unique index on exactly ({names}), which "
                f"key= needs: CREATE UNIQUE INDEX ON {table.schema}.{table.name} ({names})",
                sink=self.name,
            )

    def _check_rights(self, link: Link, table: Table) -> None:
        words = ["INSERT"]
        if self.target.key:
            words += ["SELECT", "UPDATE", *(["DELETE"] if self.target.delete else [])]
        # A move needs rights only to the columns; LOCK TABLE, in a task, needs one to the table.
        exact = self.semantic is Semantic.EXACTLY_ONCE
        columns = list(self._types) if exact and self.mode == STAGED else []
        lacking = ", ".join(missing_rights(link, table, words, columns))
        role = sql.Identifier(link.info.user).as_string()
        if lacking:
            name = table.identifier.as_string()
            raise NotAuthorised(
                f"the role may not write to the table. Run: GRANT {lacking} ON {name} TO {role}",
                sink=self.name,
            )
        sequences = closed_sequences(link, table, list(self._types))
        if sequences:
            raise NotAuthorised(
                f"the role may not use the sequences of the table. Run: GRANT USAGE ON SEQUENCE "
                f"{', '.join(sequences)} TO {role}",
                sink=self.name,
            )
        if self.semantic is Semantic.EXACTLY_ONCE or self.target.key:
            grant = missing_grant(link, self.target, staging=not self._straight)
            if grant is not None:
                raise NotAuthorised(
                    "the role lacks a permission for the witness or staging tables. Run: " + grant,
                    sink=self.name,
                )

    @property
    def _straight(self) -> bool:
        """Whether rows are copied into the table itself, and not into a staging table."""
        exact = self.semantic is Semantic.EXACTLY_ONCE
        return not self.target.key and not (exact and self.mode == STAGED)

    def _check_rules(self, link: Link, table: Table) -> None:
        """Check that no rule or row level security silently leaves rows out."""
        secured, rules = own_rules(link, table)
        if secured and self.target.delete is not None:
            raise UsageError(
                f"row level security of {table.name} hides rows from this role, and hidden rows are "
                "not deleted: give the role BYPASSRLS, or leave out delete=",
                sink=self.name,
            )
        if self._straight and (secured or rules):
            what = f"rule {rules[0]}" if rules else "row level security"
            raise UsageError(
                f"{table.name} has {what}, which COPY bypasses or refuses: use mode='staged'"
                + (
                    "" if self.semantic is Semantic.EXACTLY_ONCE else " and semantic='exactly_once'"
                ),
                sink=self.name,
            )

    def _check_mode(self, link: Link, table: Table) -> None:
        if self.mode != PREPARED or self.semantic is not Semantic.EXACTLY_ONCE:
            return
        if _setting(link, "max_prepared_transactions") == 0:
            raise UsageError(
                "max_prepared_transactions is 0, so the server cannot prepare branches. Use "
                "mode='staged', which prepares none; or run ALTER SYSTEM SET "
                "max_prepared_transactions = 64 and restart the server",
                sink=self.name,
            )
        by = self._held_by(table)
        if by is not None and self.speculates:
            raise UsageError(
                f"spark.speculation is on, and two attempts of one task write the same key ({by}). "
                "The second could continue only by rolling back the first's branch, which may "
                "already be decided. Use mode='staged', or set spark.speculation to false",
                sink=self.name,
            )
        if by is not None and not self.target.key_partitioned:
            raise contended_key(self.name, by)

    def _held_by(self, table: Table) -> str | None:
        """Return where a prepared branch can make another one wait; None if nowhere."""
        meeting = [index.name for index in table.indexes if self._may_meet(table, index)]
        if meeting:
            return f"unique index {meeting[0]}"
        return f"key {', '.join(self.target.key)}" if self.target.key else None

    def _may_meet(self, table: Table, index: Index) -> bool:
        """Whether two tasks can write the same entry: not if the table generates a part of it."""
        for name in index.columns:
            column = table.column(name) if name else None
            if column is not None and column.unlike_any and name not in self._types:
                return False
        return True

    def _warnings(self, link: Link, table: Table) -> list[str]:
        warnings: list[str] = []
        if self.mode == PREPARED and self.semantic is Semantic.EXACTLY_ONCE:
            limit = _setting(link, "max_prepared_transactions")
            if self._tasks is not None and limit < 2 * self._tasks:
                warnings.append(
                    f"max_prepared_transactions is {limit}: a batch with more tasks than that will be "
                    "refused"
                )
        warnings += [
            f"the server runs with {name} = off: acknowledged transactions can be lost"
            for name in ("fsync", "full_page_writes")
            if link.run("SELECT current_setting(%s)", [name]) == [("off",)]
        ]
        if link.run("SELECT 1 FROM pg_class WHERE oid = %s AND relpersistence = 'u'", [table.oid]):
            warnings.append("the table is unlogged: a crash of the server empties it")
        if self.mode == STAGED and self._types:
            rehearsed = hurdles(self.target, table, tuple(self._types))
            if rehearsed:
                warnings.append(
                    f"each move is rehearsed before the decision, which doubles its time: a staging "
                    f"table cannot copy {', '.join(rehearsed[:3])}"
                )
        return warnings

    # In a task.

    def begin(self, branch: Branch) -> PostgresWriter:
        # Only if its locks would block this attempt. Otherwise the sweep ends an earlier branch.
        held_up = self._table is None or self._held_by(self._table) is not None
        return PostgresWriter(
            self.target,
            self.mode,
            self.semantic,
            self._types,
            branch,
            clears=branch.retry > 0 and held_up and not self.speculates,
        )

    # On the driver.

    def standing_in(self, name: str) -> Postgres:
        other = super().standing_in(name)
        assert isinstance(other, Postgres)
        other.target = replace(self.target, sink=name)
        other.connections = Connections(self.target.dsn, name, self.target.wait)
        return other

    def lend(self) -> AbstractContextManager[Link]:
        return self.connections.lend()

    @property
    def witness(self) -> Witness:
        return self.target.witness

    @property
    def branches(self) -> BranchesByMode:
        by_mode = {
            PREPARED: PreparedBranches(self.connections, self.target),
            STAGED: StagedBranches(self.connections, self.target),
        }
        return BranchesByMode(by_mode, self.mode)

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self.connections.lend() as link:
            self._check_system(link, receipts)
            if not self.target.witness.recognises(link, identities_of(receipts)):
                return ["its witness table has since been dropped or emptied"] * len(receipts)
            return self.branches.check(receipts)

    def commit_together(self, receipts: Sequence[Receipt]) -> bool:
        return any(mode_of(receipt, self.mode) == STAGED for receipt in receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        with self.connections.lend() as link:
            self._check_system(link, receipts)
            states = self.branches.commit(receipts)
        if BranchState.UNREACHABLE in states:
            self.close()
        return states

    def prune(self, namespace: Namespace, floor: int) -> None:
        with self.connections.lend() as link:
            # While a staging table exists, its witness row keeps it from being moved again.
            keep = list(staged_branches(link, self.target))
            self.target.witness.prune(link, namespace, floor, keep)

    def close(self) -> None:
        self.connections.close()

    def _check_system(self, link: Link, receipts: Sequence[Receipt]) -> None:
        """Check that the branches were written here: another database cannot prove them lost."""
        for word, ask, other in (
            ("system", system_of, _OTHER_CLUSTER),
            ("database", database_of, "database of this server: name that one in dsn"),
        ):
            there = {str(receipt.handle.get(word)) for receipt in receipts} - {"None"}
            here = ask(link) if there else None
            if here is not None and there != {str(here)}:
                raise LogMismatch(
                    f"branch {receipts[0].id} was written to another {other}", sink=self.name
                )


def _setting(link: Link, name: str) -> int:
    return int(link.run("SELECT current_setting(%s)::int", [name])[0][0])
