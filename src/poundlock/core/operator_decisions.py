"""Errors that need an operator's decision. Each says what is known and how to decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from poundlock.core.model import Receipt
from poundlock.core.protocol import BatchHistory, Mismatch
from poundlock.errors import GuaranteeBroken, InDoubt, OutOfTime


def decision_command(log: str, batch: int, sinks: Iterable[str]) -> str:
    """Return the command with which an operator decides about sinks in a batch, without its choice."""
    named = "".join(f" --sink {sink}" for sink in sorted(sinks))
    return f"poundlock txn commit --log {log} --batch {batch}{named}"


def with_way_out(error: OutOfTime, log: str, batch: int) -> OutOfTime:
    """Return the error of a batch that was never in time, with the command that has it planned anew."""
    error.args = (
        f"{error.args[0]}. Spark's plan of a batch is fixed: to have this one planned anew, stop the "
        "pipeline, lower the limit of its source (such as maxOffsetsPerTrigger), run 'poundlock txn "
        f"replan --log {log} --batch {batch}', and start it again",
    )
    return error


def unknown_outcome(log: str, batch: int, receipt: Receipt) -> InDoubt:
    """Return the error for a decided branch that may or may not have been committed."""
    return InDoubt(
        f"batch {batch} is decided, but it cannot be proven whether branch {receipt.id} was "
        "committed: its system has neither the branch nor its witness. Check whether its "
        f"{receipt.fingerprint.rows} rows are in the system, and write them by hand if they are not. "
        f"Then run '{decision_command(log, batch, [receipt.sink])} --accept-loss' and start the "
        "pipeline again",
        sink=receipt.sink,
    )


def unrepairable_loss(
    log: str,
    history: BatchHistory,
    lost: Collection[tuple[str, str]],
    problems: Sequence[Mismatch],
    cut: Mapping[str, str],
) -> GuaranteeBroken:
    """Return the error for lost branches that the replay cannot replace, because its rows differ.

    `cut` is that of the replay.
    """
    batch = history.decided.batch
    command = decision_command(log, batch, {problem.sink for problem in problems})
    ids = ", ".join(id_ for _, id_ in sorted(lost)[:3])
    same = all(problem.only_cut for problem in problems)
    recut = _recut(history.decided.cut, cut) if same else ""
    return GuaranteeBroken(
        f"batch {batch} was decided, then its system aborted {len(lost)} of {len(history.receipts)} "
        f"branches ({ids}), and the replay cannot replace them: "
        + "; ".join(str(problem) for problem in problems)
        + ". Nothing was written. "
        + (f"{recut}. Otherwise run" if recut else "Run")
        + f" '{command} --accept-replay' (accept the replay's rows, if a sink lost all its branches) "
        "or '--accept-loss' (continue without the lost rows), then start the pipeline again"
    )


def _recut(recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say how a replay would get the cut of the decision."""
    former = [f"{name}={value}" for name, value in recorded.items() if now.get(name) != value]
    if former:
        return f"To get the former partitions, start once with {' and '.join(former)}"
    return (
        "Spark's settings are those of the decision, so the query or an option of its source (such as "
        "minPartitions) has changed: put it back for one start"
    )


def changed_replay(log: str, batch: int, problems: Sequence[Mismatch]) -> GuaranteeBroken:
    """Return the error for a finished batch whose replay gave other rows, and so another state."""
    command = decision_command(log, batch, {problem.sink for problem in problems})
    return GuaranteeBroken(
        f"batch {batch} is committed, but its replay computed other rows. Spark's state would no "
        "longer match the output: "
        + "; ".join(str(problem) for problem in problems)
        + f". Make the query deterministic, or run '{command} --accept-replay', then start the "
        "pipeline again"
    )
