"""Staging tables, and the statements that move their rows into the target.

    a staging table      poundlock_stage_HASH, with the branch's id as comment; one for each branch
    its columns          those of the target that the frame has, and `poundlock_row`; for an upsert also
                         `poundlock_order` and `poundlock_delete`

Of several rows with the same key, the one with the highest order wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from poundlock.core.model import Namespace
from poundlock.sinks.mysql.link import Link
from poundlock.sinks.mysql.target import Target, TargetColumn, columns, quoted
from poundlock.sinks.mysql.witness import STAGE_PREFIX
from poundlock.sinks.sql.naming import parse_id

ROW, ORDER, DELETE = "poundlock_row", "poundlock_order", "poundlock_delete"

_FLAG = TargetColumn(DELETE, "tinyint", "tinyint(1)", nullable=True)


def list_stages(link: Link, database: str, namespace: Namespace, sink: str) -> list[str]:
    """List the branches of exactly this namespace and sink that have a staging table."""
    listed = link.run(
        "SELECT TABLE_COMMENT FROM information_schema.TABLES "
        "WHERE TABLE_SCHEMA = %s AND TABLE_NAME LIKE %s",
        (database, STAGE_PREFIX.replace("_", "\\_") + "%"),
    )
    found = [(comment, parse_id(comment)) for (comment,) in listed]
    return [text for text, branch in found if branch and branch.belongs_to(namespace, sink)]


@dataclass(frozen=True)
class Move:
    """How the rows of some stages with the same columns are moved."""

    target: Target
    written: tuple[str, ...]  # the target's columns that the frame has, in the target's spelling
    key: tuple[str, ...] = ()  # of an upsert; empty: append
    order: TargetColumn | None = None  # the type of the column that resolves duplicates
    deletes: bool = False

    def create(self, stage: str, comment: str, *, temporary: bool = False) -> str:
        """Return the statement that creates a stage."""
        held = [self.target.columns[name.lower()] for name in self.written]
        if self.deletes:  # a deletion needs only its key
            held = [replace(it, nullable=it.name not in self.key) for it in held]
        parts = [f"{quoted(column.name)} {column.definition()}" for column in held]
        parts += [f"{quoted(ROW)} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY"]
        if self.order is not None:
            parts.append(f"{quoted(ORDER)} {self.order.definition()}")
        if self.deletes:
            parts.append(f"{quoted(DELETE)} {_FLAG.definition()}")
        kind = "TEMPORARY TABLE" if temporary else "TABLE"
        return (
            f"CREATE {kind} {stage} ({', '.join(parts)}) ENGINE=InnoDB "
            f"DEFAULT CHARACTER SET utf8mb4 COMMENT='{comment}'"
        )

    @property
    def may_be_refused(self) -> bool:
        return self.target.may_refuse(self.written, self.key)

    @property
    def extra(self) -> dict[str, TargetColumn]:
        """The columns of a stage that the target does not have."""
        own = {ORDER: self.order} if self.order is not None else {}
        return own | ({DELETE: _FLAG} if self.deletes else {})

    def run(self, link: Link, tables: Sequence[str]) -> int:
        """Move the rows of all stages, in the open transaction; return how many were inserted."""
        if not self.key:
            return sum(link.change(self._append(table)) for table in tables)
        if self.deletes:
            link.change(self._delete(tables))
        if self._only_key():
            return link.change(self._upsert(tables))
        link.change(self._update(tables))
        return link.change(self._insert_new(tables))

    def duplicates(self, link: Link, tables: Sequence[str]) -> bool:
        """Whether rows with the same key conflict: they have the same order, or none."""
        if not self.key:
            return False
        if self.order is None:
            by, union = columns(self.key), " UNION ALL "
            seen = by
        else:  # equal rows do not conflict
            by, union = columns([*self.key, ORDER]), " UNION "
            rest = [*self._others, *([DELETE] if self.deletes else [])]
            seen = ", ".join([by, *map(self._exactly, rest)])
        rows = union.join(f"SELECT {seen} FROM {table}" for table in tables)
        if self.order is not None and len(tables) == 1:
            rows = f"SELECT DISTINCT {seen} FROM {tables[0]}"
        return bool(link.run(f"SELECT 1 FROM ({rows}) r GROUP BY {by} HAVING COUNT(*) > 1 LIMIT 1"))

    def alike(self, link: Link, tables: Sequence[str]) -> bool:
        """Whether keys differ, but are equal in the collation of the table, blanks at the end included.

        Without an order they are duplicates like any other.
        """
        texts = [name for name in self.key if self._exactly(name) != quoted(name)]
        if not texts or self.order is None:
            return False
        seen = ", ".join([columns(self.key), *map(self._exactly, texts)])
        rows = " UNION ".join(f"SELECT DISTINCT {seen} FROM {table}" for table in tables)
        by = columns(self.key)
        return bool(link.run(f"SELECT 1 FROM ({rows}) r GROUP BY {by} HAVING COUNT(*) > 1 LIMIT 1"))

    def _exactly(self, name: str) -> str:
        """Return an expression that compares a column exactly, whatever its collation."""
        column = self.target.column(name)
        if column is not None and column.type == "json":
            return f"CAST(CAST({quoted(name)} AS CHAR) AS BINARY)"
        return f"CAST({quoted(name)} AS BINARY)" if column and column.charset else quoted(name)

    def _only_key(self) -> bool:
        """Whether there is no other unique key: ON DUPLICATE KEY UPDATE acts on any of them."""
        return all(
            key == frozenset(name.lower() for name in self.key) for key in self.target.unique
        )

    def _winners(self, tables: Sequence[str], *, deleted: bool | None) -> str:
        """Return a subquery of the rows that win."""
        held = [*self.written, *self.extra]
        rows = " UNION ALL ".join(
            f"SELECT {columns(held)}, {number} AS poundlock_stage, {quoted(ROW)} FROM {table}"
            for number, table in enumerate(tables)
        )
        if self.order is not None:
            rows = (
                f"SELECT {columns(held)}, ROW_NUMBER() OVER (PARTITION BY {columns(self.key)} "
                f"ORDER BY {quoted(ORDER)} DESC, poundlock_stage DESC, {quoted(ROW)} DESC) "
                f"AS poundlock_place FROM ({rows}) a"
            )
        conditions = ["poundlock_place = 1"] if self.order is not None else []
        if self.deletes and deleted is not None:
            conditions.append(f"COALESCE({quoted(DELETE)}, 0) {'<>' if deleted else '='} 0")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"(SELECT {columns(self.written)} FROM ({rows}) b{where})"

    def _insert(self, source: str) -> str:
        """Return an INSERT of the rows that `source` calls `w`."""
        names, values = columns(self.written), columns(self.written, "w")
        return f"INSERT INTO {self._into} ({names}) SELECT {values} FROM {source}"

    def _append(self, table: str) -> str:
        return self._insert(f"{table} w ORDER BY w.{quoted(ROW)}")

    def _upsert(self, tables: Sequence[str]) -> str:
        sets = [f"{quoted(n)} = VALUES({quoted(n)})" for n in self._others or self.key[:1]]
        return self._insert(
            f"{self._winners(tables, deleted=False)} w ON DUPLICATE KEY UPDATE {', '.join(sets)}"
        )

    def _update(self, tables: Sequence[str]) -> str:
        sets = [f"t.{quoted(n)} = w.{quoted(n)}" for n in self._others or self.key[:1]]
        return (
            f"UPDATE {self._into} t JOIN {self._winners(tables, deleted=False)} w "
            f"ON {self._same_key} SET {', '.join(sets)}"
        )

    def _insert_new(self, tables: Sequence[str]) -> str:
        return self._insert(
            f"{self._winners(tables, deleted=False)} w "
            f"LEFT JOIN {self._into} t ON {self._same_key} WHERE t.{quoted(self.key[0])} IS NULL"
        )

    def _delete(self, tables: Sequence[str]) -> str:
        return (
            f"DELETE t FROM {self._into} t JOIN {self._winners(tables, deleted=True)} w "
            f"ON {self._same_key}"
        )

    @property
    def _into(self) -> str:
        return quoted(self.target.database, self.target.table)

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self.written if name not in self.key)

    @property
    def _same_key(self) -> str:
        return " AND ".join(f"t.{quoted(name)} = w.{quoted(name)}" for name in self.key)
