"""The systems that an operator can inspect with only an address."""

from __future__ import annotations

from poundlock.core.model import Receipt

ASKED = ("Kafka", "PostgreSQL", "MySQL")  # the systems that have an inspector


def by_hand(receipt: Receipt) -> bool:
    """Whether an operator can commit a branch with the address of its system alone.

    Only the pipeline can move a staged branch, together with the others of its batch.
    """
    return receipt.system in ASKED and receipt.handle.get("mode") != "staged"
