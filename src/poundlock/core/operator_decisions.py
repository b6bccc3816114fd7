"""Errors that need an operator's decision: what is known, and how to decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from poundlock.core.model import Receipt
from poundlock.core.protocol import BatchHistory, Mismatch
from poundlock.errors import GuaranteeBroken, InDoubt


def _rule(log: str, batch: int) -> str:
    return f"poundlock txn commit --log {log} --batch {batch}"


def unknown_outcome(log: str, batch: int, receipt: Receipt) -> InDoubt:
    """Ask about a decided branch of which nobody can tell whether it was committed."""
    return InDoubt(
        f"batch {batch} is decided, but whether branch {receipt.id} was committed cannot be "
        "proven: its system has forgotten it and the witness is gone. Nothing was guessed. Look "
        f"whether its {receipt.fingerprint.rows} rows are there, write them by hand if they are not, "
        f"end the doubt with '{_rule(log, batch)} --accept-loss', and start the pipeline again",
        sink=receipt.sink,
    )


def unrepairable_loss(
    log: str, history: BatchHistory, lost: Collection[tuple[str, str]], problems: Sequence[Mismatch]
) -> GuaranteeBroken:
    """Ask about decided branches that were lost, where the replay gave other rows."""
    batch = history.decided.batch
    ids = ", ".join(id_ for _, id_ in sorted(lost)[:3])
    return GuaranteeBroken(
        f"batch {batch} was decided, then its system aborted {len(lost)} of {len(history.receipts)} "
        f"branches ({ids}), and the replay may not take their place: "
        + "; ".join(str(problem) for problem in problems)
        + f". Nothing was written. Decide with '{_rule(log, batch)} --accept-replay' (take the "
        "replay's rows, if a sink lost all its branches) or '--accept-loss' (go on without the "
        "lost rows), then start the pipeline again"
    )


def changed_replay(log: str, batch: int, problems: Sequence[Mismatch]) -> GuaranteeBroken:
    """Ask about a finished batch whose replay gave other rows, and so another state."""
    return GuaranteeBroken(
        f"batch {batch} is committed, but its replay computed other rows, so the state that "
        "Spark is about to keep does not belong to the output: "
        + "; ".join(str(problem) for problem in problems)
        + f". Make the query deterministic, or decide with '{_rule(log, batch)} --accept-replay', "
        "then start the pipeline again"
    )
