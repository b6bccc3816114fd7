"""What a receipt of ours says: the mode, the branch, and where its witness and its staged rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from poundlock.core.model import Receipt, Stray
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.protocol import BranchState
from poundlock.errors import LogMismatch, UsageError
from poundlock.sinks.mysql.branches import Witness
from poundlock.sinks.mysql.link import Link
from poundlock.sinks.mysql.move import stage_name
from poundlock.sinks.mysql.names import quoted

# What the rows of a branch mean, whatever the sink's options are by the time it is ended.
MEANING = ("into", "columns", "key", "ordered", "deletes")


def mode_of(branch: Receipt | Stray) -> str:
    return str(branch.handle["mode"])


def branch_of(receipt: Receipt) -> BranchName:
    name = parse_name(receipt.id)
    if name is None:
        raise UsageError(f"{receipt.id!r} is not the name of a branch in MySQL")
    return name


def place_of(receipt: Receipt) -> Witness:
    """Return the witness table of a branch; its staging table is beside it."""
    return Witness(cast("list[str]", receipt.handle["witness"])[0])


def known_of(receipt: Receipt) -> str:
    """Return the identity that the branch's witness table had when the branch was written."""
    return cast("list[str]", receipt.handle["witness"])[1]


def proves(link: Link, receipt: Receipt) -> bool:
    """Whether the branch's witness table can say how it ended: no, if it is gone or was emptied."""
    witness = place_of(receipt)
    found = witness.identity(link)
    if found is not None and found != known_of(receipt):
        raise LogMismatch(
            f"branch {receipt.id} was written to another server, or the witness table "
            f"{witness.table} was emptied or made anew since: connect to the server that has it",
            sink=receipt.sink,
        )
    return found is not None


def stage_of(receipt: Receipt) -> str:
    return quoted(place_of(receipt).database, stage_name(branch_of(receipt)))


def by_place(receipts: Sequence[Receipt]) -> list[list[Receipt]]:
    """Sort branches by the witness table that they testify in."""
    found: dict[tuple[str, ...], list[Receipt]] = {}
    for receipt in receipts:
        key = tuple(cast("list[str]", receipt.handle["witness"]))
        found.setdefault(key, []).append(receipt)
    return list(found.values())


def went_before(link: Link, receipts: Sequence[Receipt]) -> bool:
    """Whether other branches of the same batch were committed before these."""
    return any(
        place_of(mine[0]).went_before(link, list(map(branch_of, mine)))
        for mine in by_place(receipts)
    )


def witnessed(link: Link, receipts: Sequence[Receipt]) -> dict[BranchName, BranchState]:
    """Read the witnesses of those branches that have one."""
    found: dict[BranchName, BranchState] = {}
    for mine in by_place(receipts):
        found |= place_of(mine[0]).states(link, map(branch_of, mine))
    return found


def unproven(link: Link, receipts: Sequence[Receipt]) -> dict[BranchName, BranchState]:
    """Say what tables prove that do not tell all: nothing but what they say was committed."""
    found = witnessed(link, receipts)
    committed, unknown = BranchState.COMMITTED, BranchState.NO_WITNESS
    return {
        name: committed if found.get(name) is committed else unknown
        for name in map(branch_of, receipts)
    }
