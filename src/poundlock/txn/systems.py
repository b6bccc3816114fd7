"""Systems, as a person looks into them: one file each. See `poundlock.core.inspector`."""

from __future__ import annotations

from poundlock.core.model import Receipt

ASKED = ("Kafka", "PostgreSQL", "MySQL")  # those that have an inspector

# What a receipt's handle has in each system, and in no other of ours.
_MARKS = {
    "Kafka": {"producer_id", "epoch"},
    "PostgreSQL": {"mode", "database", "witness"},
    "MySQL": {"mode", "connection", "witness"},
    "Redis": {"shape", "chunks", "witness"},
    "Files": {"files"},
}


def system_of(receipt: Receipt) -> str:
    """Name the system that a branch was written to; empty where the receipt does not tell."""
    return next((name for name, marks in _MARKS.items() if marks <= receipt.handle.keys()), "")


def by_hand(receipt: Receipt) -> bool:
    """Whether a person can commit a branch with the address of its system alone.

    A staged branch is moved with the others of its batch, as its pipeline knows how.
    """
    return system_of(receipt) in ASKED and receipt.handle.get("mode") != "staged"
