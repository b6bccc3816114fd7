"""One batch as a Spark job: the coordinator's `Job`, over `mapInArrow`."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row

from poundlock.core.job import Votes
from poundlock.core.model import Branch, Fingerprint, Receipt, Transaction
from poundlock.core.participant import Participant
from poundlock.errors import BadRow, Rejected, Unavailable
from poundlock.spark import internals
from poundlock.spark.failures import operator_error
from poundlock.spark.pipeline.task import VOTE_SCHEMA, WriteTask, read_votes

logger = logging.getLogger("poundlock")


class DriverBranch(Protocol):
    """A participant with one branch, which the driver writes, such as the source's offsets."""

    name: str
    tries: int  # of the last `prepare`; what an earlier one sent may still be under way

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of what this batch writes."""
        ...

    def prepare(self, branch: Branch) -> Receipt:
        """Open, write and prepare the branch."""
        ...


@dataclass(frozen=True)
class SparkJob:
    """A batch's routed frame with its sinks."""

    frame: DataFrame
    sinks: Sequence[Participant]
    stateful: bool
    dead_letters: Mapping[str, Participant | None] = field(default_factory=dict)
    prepare_timeout_s: float | None = None
    driver_branches: Sequence[DriverBranch] = ()
    at_most_once: bool = False
    least_time_left_s: float = 0
    cut: Mapping[str, str] = field(default_factory=dict)  # see `cut`
    # What else the error of a bad row says: where the batch is from, and what the user can do.
    after_bad_row: Callable[[], str] = lambda: ""

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        # Bad rows are found only by writing: a sink that sends dead letters to one of `sinks` writes.
        senders = [
            name for name, target in self.dead_letters.items() if target and target.name in sinks
        ]
        task = WriteTask(
            self.sinks,
            self.dead_letters,
            transaction,
            sinks.union(senders),
            held_ids,
            self.at_most_once,
            self.least_time_left_s,
        )
        receipts, totals, settled = self._run(task)
        for branch in self.driver_branches:
            totals[branch.name] = branch.fingerprint()
            if branch.name in sinks and totals[branch.name].rows:
                ids = held_ids.get(branch.name, frozenset())
                receipts.append(
                    branch.prepare(Branch(transaction, branch.name, 0, transaction.attempt, 0, ids))
                )
                settled = settled and branch.tries == 1
        return Votes(tuple(receipts), totals, settled, self.cut)

    def drain(self) -> Mapping[str, Fingerprint]:
        _, totals, _ = self._run(WriteTask(self.sinks, self.dead_letters))
        return totals | {branch.name: branch.fingerprint() for branch in self.driver_branches}

    def _run(self, task: WriteTask) -> tuple[list[Receipt], dict[str, Fingerprint], bool]:
        """Return receipts, totals, and whether each task ran once."""
        try:
            with self._time_limit() as overran:
                rows = self._collect(task)
        except (PySparkException, Py4JError) as error:
            if overran.is_set():
                raise Rejected(
                    f"not every task had voted after {self.prepare_timeout_s:g} s "
                    "(prepare_timeout): tasks that have not voted count as rejected. Make batches "
                    "smaller or the limit longer"
                ) from error
            if failed := task.seal.find(str(error), Unavailable) or operator_error(error):
                raise failed from error
            raise Rejected(f"the tasks failed: {_first_line(error)}") from error
        try:
            receipts, totals, bad = read_votes([row.vote for row in rows])
        except BadRow as error:
            self._explain(error)
            raise
        for name, count in bad.items():
            target = self.dead_letters[name]
            where = f"sent to sink {target.name}" if target else "left out (on_bad_row='skip')"
            logger.warning("sink %s could not take %d rows: they are %s", name, count, where)
        totals = {sink.name: Fingerprint() for sink in self.sinks} | totals
        return receipts, totals, self._ran_once(rows)

    def _explain(self, error: BadRow) -> None:
        """Say of a bad row that is not left out where it is from."""
        taking = {sink.name for sink in self.sinks} - self.dead_letters.keys()
        if error.sink in taking and (more := self.after_bad_row()):
            error.args = (f"{str(error.args[0]).rstrip('.')}. {more}",)

    def _ran_once(self, rows: Sequence[Row]) -> bool:
        """Return whether each task and its stage ran once.

        A speculative copy of a task that was not needed is not noticed. Its ids are those of a second
        attempt, so they are not used in a later run that was not repeated either.
        """
        tracker = self.frame.sparkSession.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in {row.stage for row in rows}]
        return not any(row.attempt for row in rows) and not any(
            stage is not None and stage.currentAttemptId for stage in stages
        )

    def _collect(self, task: WriteTask) -> list[Row]:
        if not task.at_most_once:
            return self.frame.mapInArrow(task, VOTE_SCHEMA).collect()
        # A stage that is submitted again numbers the attempts of its tasks from 0 again, so a task
        # could not tell that it had been run before.
        with internals.computed(self.frame) as computed:
            return computed.mapInArrow(task, VOTE_SCHEMA).collect()

    @contextmanager
    def _time_limit(self) -> Iterator[threading.Event]:
        """Cancel this thread's jobs after the time limit, and set the event."""
        overran = threading.Event()
        if self.prepare_timeout_s is None:
            yield overran
            return
        context, tag = self.frame.sparkSession.sparkContext, f"poundlock-{uuid.uuid4().hex}"

        def cancel() -> None:
            overran.set()
            context.cancelJobsWithTag(tag)

        timer = threading.Timer(self.prepare_timeout_s, cancel)
        timer.daemon = True
        context.addJobTag(tag)
        timer.start()
        try:
            yield overran
        finally:
            timer.cancel()
            context.removeJobTag(tag)


_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]")


def _first_line(error: Exception) -> str:
    """Return one line that says why the tasks failed: Python's if there is one, or else Java's."""
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("at ", "File "))]
    # What follows the name of a condition may quote a row, and a row may look like an error.
    if (named := _CONDITION.search("".join(lines[:1]))) and "PYTHON" not in named[1]:
        return f"Spark reports {named[1]}. Its own error has the details"
    python = [line for line in lines if "Error" in line]
    java = [line for line in lines if "Exception: " in line]
    return (python or java or lines or [type(error).__name__])[0][:500]
