"""Staged branches: the names of their tables, what the rows mean, and batches that lost a branch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from poundlock.core.model import Json, Receipt
from poundlock.errors import BadRow, LogMismatch, UsageError


def staging_name(prefix: str, branch: str) -> str:
    """Name a branch's staging table. The id, which can be too long, is in the table's comment."""
    return prefix + hashlib.sha256(branch.encode()).hexdigest()[:40]


@dataclass(frozen=True)
class StagedRows:
    """What the rows of a staging table mean. The sink's options may have changed since."""

    schema: str
    table: str
    key: tuple[str, ...]
    order_by: str | None
    delete: str | None
    columns: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        lists: dict[str, Json] = {"key": list(self.key), "columns": list(self.columns)}
        return asdict(self) | lists

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> StagedRows:
        """Return what the rows of a batch mean. Raises `LogMismatch` if its branches differ."""
        found: list[Any] = [receipt.handle["into"] for receipt in receipts]
        if any(other != found[0] for other in found):
            raise LogMismatch(
                f"branch {receipts[0].id} and others of its batch were staged for different tables, "
                "keys or columns: the sink's options were changed since. Drop the staging tables "
                "of these branches, and the batch is computed again",
                sink=receipts[0].sink,
            )
        into = found[0]
        return cls(**{**into, "key": tuple(into["key"]), "columns": tuple(into["columns"])})


def duplicate_keys(sink: str, key: Sequence[str], order_by: str | None) -> BadRow:
    """Return the error for a batch in which two rows have the same key and neither wins."""
    problem = f"two rows of a batch have the same key ({', '.join(key)})"
    if order_by is None:
        problem += ". Name the column that chooses between them with order_by= (the highest wins)"
    else:
        problem += f" and the same {order_by}, so neither wins. Order by a column that differs"
    return BadRow(f"{problem}, or aggregate before writing", sink=sink)


def alike_keys(sink: str, key: Sequence[str]) -> BadRow:
    """Return the error for a batch with keys that differ, but that the table takes for one."""
    return BadRow(
        f"rows of a batch have keys ({', '.join(key)}) that differ, but that the collation of the "
        "table calls equal, so only one of the rows could stay. Give the column a collation that tells "
        "all texts apart, or make the texts equal before writing, for example with lower() and rtrim()",
        sink=sink,
    )


def contended_key(sink: str, key: str) -> UsageError:
    """Return the error for a sink in which one task's prepared branch could block another task."""
    return UsageError(
        f"two tasks that write the same key ({key}) would wait for each other's prepared branch "
        "until lock_timeout. Use mode='staged'; or, if the frame is partitioned by the key "
        "(repartition), set key_partitioned=True",
        sink=sink,
    )


def split_batch(
    waiting: Sequence[Receipt], lost: Sequence[Receipt], *, aborted: bool, begun: bool
) -> tuple[list[Receipt], list[Receipt]]:
    """Return which branches of a batch to move, and which to give up.

    If a branch is lost or was aborted, and none of its batch was moved before, all are given up. Then
    the replay replaces the whole batch, and becomes visible at one instant. A replay of the lost branch
    alone could bring back a row that the others delete or replace.
    """
    if (lost or aborted) and not begun:
        return [], list(waiting)
    gone = {receipt.id for receipt in lost}
    return [receipt for receipt in waiting if receipt.id not in gone], list(lost)
