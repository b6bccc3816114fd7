"""What the receipts of all SQL sinks hold. A system may add more.

mode     "prepared" or "staged": how the branch was written; the sink's mode may have changed
witness  where the witness table is, and its identity when the branch was written
into     of a staged branch: what its rows mean; see `staging.StagedRows`
shape    of a staged branch: a hash of the target's columns, to see whether they were altered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poundlock.core.model import Receipt, Stray

PREPARED, STAGED = "prepared", "staged"


def mode_of(branch: Receipt | Stray, default: str) -> str:
    """Return the mode that a branch was written in."""
    found = branch.handle.get("mode") if isinstance(branch, Receipt) else branch.state
    return str(found) if found in (PREPARED, STAGED) else default


def witness_of(receipt: Receipt) -> tuple[str, str] | tuple[None, None]:
    """Return where a branch's witness table is, and its identity; None where a receipt has none."""
    found: Any = receipt.handle.get("witness")
    return (found[0], found[1]) if found else (None, None)


def identities_of(receipts: Sequence[Receipt]) -> list[str | None]:
    return [witness_of(receipt)[1] for receipt in receipts]
