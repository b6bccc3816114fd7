"""The systems that an operator can look into with an address alone."""

from __future__ import annotations

from poundlock.core.model import Receipt

ASKED = ("Kafka", "PostgreSQL", "MySQL")  # those that have an inspector


def by_hand(receipt: Receipt) -> bool:
    """Whether an operator can commit a branch with the address of its system alone.

    A staged branch is moved with the others of its batch, as its pipeline knows how.
    """
    return receipt.system in ASKED and receipt.handle.get("mode") != "staged"
