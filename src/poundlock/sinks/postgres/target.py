"""What a branch needs to know of where it goes: plain values, which travel to the tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg import sql

from poundlock.core.model import Branch, Json, Receipt
from poundlock.core.naming import BranchName, name_of, parse_name
from poundlock.errors import LogMismatch, UsageError

_LONGEST = 199  # bytes of a prepared transaction's name


@dataclass(frozen=True)
class Target:
    """A table and how rows enter it."""

    sink: str
    dsn: str = field(repr=False)
    schema: str | None
    table: str
    key: tuple[str, ...]
    delete: str | None
    order_by: str | None
    witness_schema: str
    lock_timeout: float
    key_partitioned: bool

    @property
    def identifier(self) -> sql.Identifier:
        return (
            sql.Identifier(self.schema, self.table) if self.schema else sql.Identifier(self.table)
        )

    @property
    def witness(self) -> sql.Identifier:
        return sql.Identifier(self.witness_schema, "witness")

    def staging(self, branch: str) -> sql.Identifier:
        return sql.Identifier(self.witness_schema, staging_name(branch))

    def recorded(self, schema: str) -> dict[str, Json]:
        """What the rows of a staging table mean: for the receipt, as options may be others later."""
        return {"schema": schema, "table": self.table, "key": list(self.key), "delete": self.delete,
                "order_by": self.order_by}  # fmt: skip

    def as_recorded(self, receipts: Sequence[Receipt]) -> Target:
        """The target as it was when these branches were written."""
        found = [receipt.handle["into"] for receipt in receipts if "into" in receipt.handle]
        if not found:
            return self
        into: Any = found[0]
        if any(other != into for other in found):
            raise LogMismatch(
                f"branches of one batch were written for different tables or by different keys, "
                f"{receipts[0].id} and others: the sink's options were changed between. Drop their "
                f"staging tables in {self.witness_schema}, and the batch is computed again",
                sink=self.sink,
            )
        return replace(self, **{**into, "key": tuple(into["key"])})

    @property
    def wait(self) -> str:
        return f"{int(self.lock_timeout * 1000)}ms"


def staging_name(branch: str) -> str:
    """Name a branch's staging table. The whole name of the branch is in the table's comment."""
    return "staged_" + hashlib.sha256(branch.encode()).hexdigest()[:48]


def branch_id(branch: Branch) -> str:
    """Name a branch in PostgreSQL: the task too, so that a retry finds what came before it."""
    spelled = f"{name_of(branch)}/{branch.task}"
    if len(spelled.encode()) > _LONGEST:
        raise UsageError(
            f"the branch name {spelled} is longer than the {_LONGEST} bytes that PostgreSQL allows: "
            "give the pipeline or the sink a shorter name"
        )
    return spelled


def read_id(text: str) -> tuple[BranchName, int] | None:
    """Read a branch's name and task; None if it is not one of ours."""
    spelled, _, task = text.partition("/")
    name = parse_name(spelled)
    return None if name is None or not task.isdecimal() else (name, int(task))
