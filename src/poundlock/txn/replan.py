"""Has Spark plan an undecided batch anew: the way out for a batch that can never be in time.

Spark's plan of a batch, `offsets/N`, is fixed. Lower limits of the source count only for later batches.
So the plan is set aside where Spark does not read it, and Spark plans the batch anew when it starts.

Order of the steps: the log records that the plan is withdrawn, then the plan is moved. The record
fences a running driver, and no later driver decides the batch with this plan, whatever it still holds
in memory. If the command ends in between, run it again.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlparse

from poundlock.core.checkpoint import Checkpoint, FileCheckpoint, Plan
from poundlock.core.log import TransactionLog
from poundlock.core.mismatch import check_log_matches
from poundlock.core.model import Withdrawn
from poundlock.core.protocol import Stage, enter
from poundlock.errors import LogMismatch, UsageError
from poundlock.terminal import shown_output
from poundlock.txn.audit import Trail, signature

_LOG_DIRECTORY = "/poundlock"


def open_checkpoint(log: TransactionLog, location: str | None) -> Checkpoint:
    """Open the checkpoint at a location; by default the one around the log."""
    from poundlock.spark import storage

    if location is None:
        if not log.uri.endswith(_LOG_DIRECTORY):
            raise UsageError(
                f"the log at {log.uri} is not inside its checkpoint: give --checkpoint LOCATION too"
            )
        location = log.uri.removesuffix(_LOG_DIRECTORY)
    if urlparse(location).scheme == "file":
        return FileCheckpoint(unquote(urlparse(location).path))
    from poundlock.spark.session import session

    # Without a scheme, it is on Hadoop's default file system, which only Spark knows.
    with shown_output():
        spark = session("local[1]", conf={"spark.ui.enabled": "false"})
    return storage.open_checkpoint(spark, storage.resolved(spark, location))


def replan(
    log: TransactionLog, checkpoint: Checkpoint, batch: int, ask: Callable[[str], None]
) -> str:
    """Withdraw Spark's plan of an undecided batch. Return where it is kept.

    If batch 0 was withdrawn, but its tasks wrote state afterwards, move that instead.

    Raises `UsageError` if the batch is decided or finished, or if its plan is not the newest. `ask`
    asks the operator, and raises if the answer is no.
    """
    if batch == 0 and 0 in log.state.withdrawn and checkpoint.has_lost_state():
        return _set_late_state_aside(log, checkpoint, ask)
    plan = _newest_plan(log, checkpoint, batch)
    mark = Plan(plan).hash
    withdrawn = log.state.withdrawn.get(batch) == mark  # by this command, which was interrupted
    if not withdrawn:
        _check_undecided(log, checkpoint, batch, mark)
    ask(f"Have Spark plan batch {batch} anew? A running driver will be stopped.")
    aside = f"{batch}-{mark[:12]}"
    with Trail(log).act("replan", f"batch {batch}", batch=batch, plan=mark, aside=aside) as act:
        if not withdrawn:
            log.append(Withdrawn(batch, mark, signature()))
        act.touched = True  # the record is there
        if checkpoint.planned(batch) != plan:
            raise LogMismatch(
                f"the plan of batch {batch} was changed while this command ran: stop what uses the "
                "checkpoint, and repeat the command"
            )
        kept = checkpoint.set_aside(batch, plan, aside)
        act.outcome = "withdrawn"
    return kept


def _set_late_state_aside(
    log: TransactionLog, checkpoint: Checkpoint, ask: Callable[[str], None]
) -> str:
    """Move the state that tasks of the withdrawn plan of batch 0 wrote after it was withdrawn."""
    _check_matches(log, checkpoint)
    mark = log.state.withdrawn[0]
    ask("Set aside the state of batch 0? A running driver will be stopped.")
    with Trail(log).act("replan", "state of batch 0", batch=0, plan=mark) as act:
        log.append(Withdrawn(0, mark, signature()))  # the driver that wrote it decides nothing
        kept = checkpoint.set_state_aside(log)
        act.outcome = "withdrawn"
    return kept


def _check_matches(log: TransactionLog, checkpoint: Checkpoint) -> None:
    assert log.state.generation is not None
    check_log_matches(log, log.state.generation.namespace.pipeline, checkpoint.query())


def _newest_plan(log: TransactionLog, checkpoint: Checkpoint, batch: int) -> bytes:
    _check_matches(log, checkpoint)
    newest = max(checkpoint.plans(), default=None)
    plan = checkpoint.planned(batch)
    if plan is None or newest != batch:
        if newest != batch and batch in log.state.withdrawn:
            raise UsageError(
                f"the plan of batch {batch} has been withdrawn already: start the pipeline"
            )
        what = "it has none" if newest is None else f"the newest is that of batch {newest}"
        raise UsageError(
            f"the checkpoint at {checkpoint.uri} has no plan of batch {batch} that could be made "
            f"anew: {what}. Only the newest plan can"
        )
    return plan


def _check_undecided(log: TransactionLog, checkpoint: Checkpoint, batch: int, mark: str) -> None:
    before = checkpoint.planned(batch - 1)
    stage = enter(log.state, batch, mark, None if before is None else Plan(before).hash)
    if stage is not Stage.NONE or checkpoint.is_committed(batch):
        raise UsageError(
            f"batch {batch} is {stage.value if stage is not Stage.NONE else 'committed'}: its rows are "
            "fixed. Start the pipeline, which finishes it, and lower the limit of the source for the "
            "batches after it"
        )
