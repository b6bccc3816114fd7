"""A function of your own, called with the rows of a batch once the batch is decided.

Rows are kept beside the log from prepare to commit, so a batch that is aborted is never sent, and one
that is decided is sent whatever dies. After a crash some of it may be sent again: at least once. Each
call is given an id that is the same when it is repeated, for a system that can tell repeats apart.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from poundlock.core.model import checked_name
from poundlock.core.naming import BranchName
from poundlock.core.participant import Column, Commitment, Semantic
from poundlock.errors import InDoubt, PoundlockError, UsageError
from poundlock.sinks.rowstore import StoredBranches


@dataclass(frozen=True, slots=True)
class Facts:
    """What a call is about."""

    pipeline: str
    sink: str
    batch: int
    id: str  # of this call: the same when the kept rows are sent again


# Calling one of these runs nothing of it.
_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class WriteAhead(StoredBranches):
    """Rows to a function, at least once, after the decision.

    Args:
        function: Called as `function(rows, facts)` in a task, with a `pyarrow.RecordBatch` and `Facts`.
            It returns once the rows are safe, so it is neither `async` nor a generator. It may raise
            `poundlock.errors.Unavailable` to be called again later; any other error stops the
            pipeline, and the next start calls it again.
        name: The sink's name in its pipeline.
        semantic: "at_least_once" is what it gives; asking for "exactly_once" is refused.
    """

    system = "WriteAhead"
    commitment = Commitment.LOGGED

    def __init__(
        self,
        function: Callable[[pa.RecordBatch, Facts], Any],
        *,
        name: str,
        semantic: str | Semantic | None = None,
    ):
        self.name = checked_name("sink name", name)
        self.asked = None if semantic is None else Semantic(semantic)
        self.function = function
        # An object may be called, too.
        if any(is_later(it) for is_later in _LATER for it in (function, function.__call__)):
            raise UsageError(
                f"{function!r} is async or a generator: to call it runs nothing of it. Give a plain "
                "function that returns once the rows are safe, such as one that calls "
                "asyncio.run(...)",
                sink=self.name,
            )

    def __repr__(self) -> str:
        return f"WriteAhead({self.function!r}, name={self.name!r})"

    def reader_settings(self) -> str:
        return "to tell repeats apart, by the id of each call"

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {name: column.sql for name, column in columns.items()}

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        for number, part in enumerate(rows):
            facts = Facts(name.namespace.pipeline, name.sink, name.batch, f"{name}/{number}")
            try:
                answer = self.function(part, facts)
            except PoundlockError:
                raise
            except Exception as error:
                told = f"the function failed with {facts.id}: {type(error).__name__}: {error}"
                raise self._stopped(told) from error
            if inspect.isawaitable(answer) or isinstance(answer, Generator | AsyncGenerator):
                if inspect.iscoroutine(answer):
                    answer.close()  # or Python mentions it, too
                kind = type(answer).__name__
                raise self._stopped(
                    f"the function answered {facts.id} with a {kind}, which nobody runs"
                )

    def _stopped(self, told: str) -> InDoubt:
        return InDoubt(
            f"{told}. The batch is decided and its rows are kept: correct the function and start the "
            "pipeline again, it is then called with the same rows",
            sink=self.name,
        )
