"""The witness tables of MySQL: a receipt names its own, because `witness_database` may have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from poundlock.core.model import Receipt
from poundlock.core.protocol import BranchState
from poundlock.errors import UsageError
from poundlock.sinks.mysql.target import quoted
from poundlock.sinks.sql.dialect import Link
from poundlock.sinks.sql.receipts import identities_of, witness_of
from poundlock.sinks.sql.staging import staging_name
from poundlock.sinks.sql.witness import Witness

STAGE_PREFIX = "poundlock_stage_"
_CREATE = (
    "CREATE TABLE IF NOT EXISTS {} ("
    "branch VARCHAR(250) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY, "
    "pipeline VARCHAR(63) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
    "identity VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
    "sink VARCHAR(63) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
    "generation BIGINT NOT NULL, batch BIGINT NOT NULL, state VARCHAR(9) NOT NULL, "
    "written_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, "
    "KEY (identity, pipeline, sink, batch)) ENGINE=InnoDB"
)


def witness_in(database: str, sink: str) -> Witness:
    table = quoted(database, "poundlock_witness")
    return Witness(sink, database, table, (_CREATE.format(table),), "url= or witness_database=")


def stage_in(database: str, branch: str) -> str:
    """Return the quoted name of a branch's staging table, which is beside its witness table."""
    return quoted(database, staging_name(STAGE_PREFIX, branch))


def stage_of(receipt: Receipt) -> str:
    return stage_in(witness_for(receipt).place, receipt.id)


def witness_for(receipt: Receipt) -> Witness:
    database = witness_of(receipt)[0]
    if database is None:
        raise UsageError(f"the receipt of branch {receipt.id} names no witness", sink=receipt.sink)
    return witness_in(database, receipt.sink)


@dataclass(frozen=True)
class Witnesses:
    """The witness tables of some receipts."""

    receipts: Sequence[Receipt]

    def groups(self) -> Iterator[tuple[Witness, list[Receipt]]]:
        """Yield each table with the receipts that name it."""
        found: dict[Witness, list[Receipt]] = {}
        for receipt in self.receipts:
            found.setdefault(witness_for(receipt), []).append(receipt)
        yield from found.items()

    def recognises(self, link: Link) -> bool:
        return all(it.recognises(link, identities_of(mine)) for it, mine in self.groups())

    def unproven(self, link: Link) -> dict[str, BranchState]:
        found: dict[str, BranchState] = {}
        for witness, mine in self.groups():
            ids = [receipt.id for receipt in mine]
            found |= zip(ids, witness.unproven(link, ids), strict=True)
        return found

    def states(self, link: Link) -> dict[str, BranchState]:
        found: dict[str, BranchState] = {}
        for witness, mine in self.groups():
            found |= witness.states(link, [receipt.id for receipt in mine])
        return found

    def insert(self, link: Link, state: BranchState = BranchState.COMMITTED) -> None:
        """Insert the rows, in the open transaction. Raises what `Witness` raises."""
        for witness, mine in self.groups():
            witness.insert(link, [receipt.id for receipt in mine], state)
        # After the inserts: from here on, a session that empties a table must wait.
        for witness, mine in self.groups():
            witness.require(link, identities_of(mine))

    def committed_others(self, link: Link) -> bool:
        return any(
            witness.committed_others(link, [receipt.id for receipt in mine])
            for witness, mine in self.groups()
        )
