"""Branches that expire: the check before the decision, and the warnings after it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from poundlock.core.model import Receipt
from poundlock.errors import OutOfTime

logger = logging.getLogger("poundlock")


def check_time_left(receipts: Iterable[Receipt], now: float, least_s: float) -> None:
    """Raise `OutOfTime` if a branch has less than `least_s` seconds left."""
    for receipt in receipts:
        if receipt.expires_at is not None and receipt.expires_at - now < least_s:
            raise OutOfTime(
                f"branch {receipt.id} expires in {receipt.expires_at - now:.0f} s, less than the "
                f"{least_s:.0f} s that a commit may need: the batch took too long. Make batches "
                "smaller or the sink's transaction time-out longer",
                sink=receipt.sink,
            )


def check_task(lifetime: tuple[float, float] | None, rows: int, now: float, least_s: float) -> None:
    """Raise `OutOfTime` if the branch that a task is writing can no longer be committed in time."""
    if lifetime is None:
        return
    began_at, expires_at = lifetime
    if expires_at - now < least_s:
        raise OutOfTime(
            f"the task has taken {now - began_at:.0f} s for {rows} rows so far, and is not done. Its "
            f"transaction may stay open for {expires_at - began_at:.0f} s, of which a commit may need "
            f"{least_s:.0f} s. Make batches smaller or the sink's transaction time-out longer"
        )


class ExpiryWarnings:
    """Warns once when a half, and once when four fifths, of a decided branch's time is over."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str, float]] = set()

    def warn(self, batch: int, waiting: Iterable[Receipt], now: float) -> None:
        for receipt in waiting:
            if receipt.expires_at is None:
                continue
            share = (now - receipt.began_at) / max(receipt.expires_at - receipt.began_at, 1e-9)
            for mark in (0.5, 0.8):
                key = (receipt.sink, receipt.id, mark)
                if share >= mark and key not in self._warned:
                    self._warned.add(key)
                    logger.warning(
                        "batch %d: branch %s of sink %s is decided but not committed, and %.0f %% of "
                        "its time is over: %.0f s are left",
                        *(batch, receipt.id, receipt.sink, 100 * share, receipt.expires_at - now),
                    )
