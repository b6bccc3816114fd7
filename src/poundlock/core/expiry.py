"""Branches that expire: the check before the decision, and the warnings after it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from poundlock.core.model import Receipt
from poundlock.errors import OutOfTime

logger = logging.getLogger("poundlock")

_UNKNOWN_S = 0.005  # for a branch, until it has been measured
_FEW = 32  # so few branches tell more about connecting than about committing
_MARGIN = 2.0


class CommitRate:
    """How long each sink takes to commit a branch, as measured in earlier batches."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # for one branch, by sink

    def note(self, sink: str, branches: int, seconds: float) -> None:
        """Take over what a commit of this many branches took."""
        if branches >= _FEW:
            now = seconds / branches
            self._seconds[sink] = (self._seconds.get(sink, now) + now) / 2

    def seconds(self, sink: str) -> float:
        return _MARGIN * self._seconds.get(sink, _UNKNOWN_S)


def check_time_left(
    receipts: Iterable[Receipt], now: float, least_s: float, rate: CommitRate
) -> None:
    """Raise `OutOfTime` if a branch may expire before its turn to be committed.

    The branches that expire first are committed first. Each needs the time of those before it, and
    `least_s` more. But half of its time is always enough to ask for: otherwise a system that was slow
    once could keep every later batch from being decided.
    """
    needed_s = least_s
    for receipt in in_order_of_expiry(receipts):
        if receipt.expires_at is None:
            return
        needed_s += rate.seconds(receipt.sink)
        half_s = (receipt.expires_at - receipt.began_at) / 2
        wanted_s = min(needed_s, max(least_s, half_s))
        if receipt.expires_at - now < wanted_s:
            raise OutOfTime(
                f"branch {receipt.id} expires in {receipt.expires_at - now:.0f} s, less than the "
                f"{wanted_s:.0f} s that a commit of all branches may need: the batch took too long. "
                "Make batches smaller, use fewer tasks, or make the sink's transaction time-out longer",
                sink=receipt.sink,
            )


def in_order_of_expiry(receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return the branches in the order in which they are committed."""
    never = float("inf")
    return sorted(
        receipts, key=lambda it: (never if it.expires_at is None else it.expires_at, it.id)
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
