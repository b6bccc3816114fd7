"""Enriches rows with answers from another system, with many calls at a time.

Calls mostly wait, so they run concurrently, in an event loop or in threads. No other module of this
package has either. `enrich` has no state and returns when all calls are done.

A replayed batch makes the calls again, so they should read and not write.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from poundlock.errors import OperatorFailed, PoundlockError, UsageError
from poundlock.stream.process import rows_of
from poundlock.stream.rows import Row
from poundlock.stream.times import Duration, milliseconds


class _Nulls(Mapping[str, Any]):
    """A row of nulls with any columns."""

    def __getitem__(self, name: str) -> None:
        return None

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


NULLS = _Nulls()


def enrich(
    rows: Iterable[Row],
    function: Callable[[Row], Any],
    *,
    name: str = "enrich",
    concurrency: int = 100,
    timeout: Duration | None = None,
    ordered: bool = True,
    on_timeout: str | Callable[[Row], Any] = "fail",
    retries: int = 0,
) -> list[Any]:
    """Return the rows that the function returns for all rows: none, one or a list for each.

    Args:
        rows: The rows to enrich.
        function: An `async def` or a plain function. All calls of an `async def` in a batch share one
            event loop, so create a client that belongs to a loop inside the function. A plain
            function runs in threads. It needs its own time-out, as a thread cannot be stopped.
        name: The operator's name, for errors.
        concurrency: The most calls at a time.
        timeout: The time limit for a row, with all its retries.
        ordered: Whether results come in the order of the rows, or as they are ready.
        on_timeout: "fail" aborts the batch. "null" gives a row of nulls. A function of the row returns
            the result.
        retries: How often a failed call is repeated, without a pause.
    """
    seconds = check(function, name, concurrency, timeout, on_timeout, retries)
    caller = _Caller(function, name, seconds, on_timeout, retries)
    return asyncio.run(caller.call_all(rows, concurrency, ordered))


def check(
    function: Any,
    name: str = "enrich",
    concurrency: int = 100,
    timeout: Duration | None = None,
    on_timeout: Any = "fail",
    retries: int = 0,
) -> float | None:
    """Raise `UsageError` for invalid arguments of `enrich`. Return the time-out in seconds."""
    if not callable(function):
        raise UsageError(f"operator {name!r} was given {function!r}: give a function of a row")
    for what, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"operator {name!r}: {what}={value!r}: give a whole number, {least} or more"
            )
    if on_timeout not in ("fail", "null") and not callable(on_timeout):
        raise UsageError(
            f"operator {name!r}: on_timeout={on_timeout!r}: give 'fail', 'null' or a function of a row"
        )
    return None if timeout is None else milliseconds(timeout, "timeout", least=1) / 1000


@dataclass
class _Caller:
    """Makes the calls of one `enrich`."""

    function: Callable[[Row], Any]
    name: str
    timeout: float | None
    on_timeout: str | Callable[[Row], Any]
    retries: int
    threads: ThreadPoolExecutor | None = None

    async def call_all(self, rows: Iterable[Row], concurrency: int, ordered: bool) -> list[Any]:
        waiting = enumerate(rows)
        answers: list[tuple[int, list[Any]]] = []

        async def call_in_turn() -> None:
            for place, row in waiting:
                answers.append((place, list(rows_of(await self._call_in_time(row)))))

        candidates = (self.function, type(self.function).__call__)
        if not any(map(inspect.iscoroutinefunction, candidates)):
            # There are as many threads as calls. The limit is high because calls that timed out may
            # keep their threads, which must not block other calls.
            self.threads = ThreadPoolExecutor(2**15, f"poundlock-{self.name}")
        try:
            await asyncio.gather(*(call_in_turn() for _ in range(concurrency)))
        finally:
            if self.threads:
                self.threads.shutdown(wait=False, cancel_futures=True)
        if ordered:
            answers.sort(key=lambda answer: answer[0])
        return [row for _, made in answers for row in made]

    async def _call_in_time(self, row: Row) -> Any:
        if self.timeout is None:
            return await self._retry(row)
        try:
            return await asyncio.wait_for(self._retry(row), self.timeout)
        except asyncio.TimeoutError:  # not the built-in TimeoutError before Python 3.11
            if self.on_timeout == "null":
                return NULLS
            if callable(self.on_timeout):
                return self.on_timeout(row)
            raise OperatorFailed(
                f"operator {self.name!r}: no answer within {self.timeout:g} s. The batch was aborted. "
                "Check the system that it calls, set a longer timeout, or choose another on_timeout"
            ) from None

    async def _retry(self, row: Row) -> Any:
        left = self.retries
        while True:
            try:
                return await self._call(row)
            except PoundlockError:
                raise
            except Exception as error:
                if not left:
                    times = f" {self.retries + 1} times" if self.retries else ""
                    raise OperatorFailed(
                        f"operator {self.name!r} failed{times}: {type(error).__name__}. The batch was "
                        "aborted. Correct the function or check the system that it calls, then start "
                        "again"
                    ) from error
                left -= 1

    async def _call(self, row: Row) -> Any:
        if self.threads is None:
            return await self.function(row)
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self.threads, self._call_in_thread, row)
        return await made if isinstance(made, Awaitable) else made

    def _call_in_thread(self, row: Row) -> Any:
        made = self.function(row)
        # Run a generator here, not in the event loop.
        return list(made) if inspect.isgenerator(made) else made
