"""A function of your own, called with the rows of a batch after the batch is decided.

Rows are stored beside the log between prepare and commit. So an aborted batch is never sent, and a
decided batch is always sent, whatever crashes. After a crash some of it may be sent again: at least
once. A repeated call has the same id, for a system that can recognise repeats.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from poundlock.core.model import checked_name
from poundlock.core.naming import BranchName
from poundlock.core.participant import Commitment, Semantic
from poundlock.errors import InDoubt, PoundlockError, UsageError
from poundlock.sinks.rowstore import StoredBranches


@dataclass(frozen=True, slots=True)
class Facts:
    """What a call works on."""

    pipeline: str
    sink: str
    batch: int
    id: str  # of this call: the same when the stored rows are sent again


# A call of such a function does not run it.
_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class WriteAhead(StoredBranches):
    """Rows to a function, at least once, after the decision.

    Args:
        function: Called as `function(rows, facts)` in a task, with a `pyarrow.RecordBatch` and `Facts`.
            It returns once the rows are safe, so it is neither `async` nor a generator. It may raise
            `poundlock.errors.Unavailable` to be called again later; any other error stops the
            pipeline, and the next start calls it again.
        name: The sink's name in its pipeline.
        semantic: It provides "at_least_once"; "exactly_once" is rejected.
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
        # An object can be called too.
        if any(is_later(it) for is_later in _LATER for it in (function, function.__call__)):
            raise UsageError(
                f"{function!r} is async or a generator, so a call does not run it. Give a plain "
                "function that returns once the rows are safe, for example one that calls "
                "asyncio.run(...)",
                sink=self.name,
            )

    def __repr__(self) -> str:
        return f"WriteAhead({self.function!r}, name={self.name!r})"

    def reader_settings(self) -> str:
        return "to recognise repeats, by the id of each call"

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        for number, part in enumerate(rows):
            facts = Facts(name.namespace.pipeline, name.sink, name.batch, f"{name}/{number}")
            try:
                answer = self.function(part, facts)
            except PoundlockError:
                raise
            except Exception as error:
                raise self._failure(
                    f"the function failed with {facts.id}: {type(error).__name__}: {error}"
                ) from error
            if inspect.isawaitable(answer) or isinstance(answer, Generator | AsyncGenerator):
                if inspect.iscoroutine(answer):
                    answer.close()  # otherwise Python warns of it too
                kind = type(answer).__name__
                raise self._failure(
                    f"the function answered {facts.id} with a {kind}, which nobody runs"
                )

    def _failure(self, problem: str) -> InDoubt:
        return InDoubt(
            f"{problem}. The batch is decided and its rows are stored: correct the function and start "
            "the pipeline again. It is then called with the same rows",
            sink=self.name,
        )
