"""Asking another system about each row, with many questions under way at a time.

The one module of streams that has an event loop and threads: the time goes into waiting for answers,
and one question after another would take the sum of it. It keeps nothing, and returns when all is
answered.

A question may be asked again when a batch is replayed: it should read, not write.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from poundlock.errors import OperatorFailed, PoundlockError, UsageError
from poundlock.stream.process import rows_of
from poundlock.stream.rows import Row
from poundlock.stream.times import Duration, milliseconds


class _Nulls(Mapping[str, Any]):
    """A row of nulls, whatever its columns are."""

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
    """Return the rows that the function makes of each row: none, one, or a list of them.

    Args:
        rows: What to ask about.
        function: An `async def`, all of whose calls share one event loop, another in each batch: make
            what belongs to a loop, such as a client, inside it. Or a plain function, which runs in
            threads and should give up waiting by itself: a thread cannot be stopped.
        name: The operator, for errors.
        concurrency: How many calls are under way at most.
        timeout: How long a row may take, with all its retries.
        ordered: Whether results come in the order of the rows, or as they are ready.
        on_timeout: "fail" gives up the batch; "null" makes a row of nulls; a function of the row makes
            what it returns.
        retries: How often a call that raised is made again, at once.
    """
    seconds = check(function, name, concurrency, timeout, on_timeout, retries)
    asker = _Asker(function, name, seconds, on_timeout, retries)
    return asyncio.run(asker.all(rows, concurrency, ordered))


def check(
    function: Any,
    name: str = "enrich",
    concurrency: int = 100,
    timeout: Duration | None = None,
    on_timeout: Any = "fail",
    retries: int = 0,
) -> float | None:
    """Raise `UsageError` for what `enrich` cannot do. Return the time-out in seconds."""
    if not callable(function):
        raise UsageError(f"operator {name!r} was given {function!r}: give a function of a row")
    for what, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
        if not isinstance(value, int) or value < least:
            raise UsageError(f"operator {name!r}: {what}={value!r}: give a number from {least} on")
    if on_timeout not in ("fail", "null") and not callable(on_timeout):
        raise UsageError(
            f"operator {name!r}: on_timeout={on_timeout!r}: give 'fail', 'null' or a function of a row"
        )
    return None if timeout is None else milliseconds(timeout, "timeout", least=1) / 1000


class _Asker:
    """The questions of one call of `enrich`."""

    def __init__(
        self,
        function: Callable[[Row], Any],
        name: str,
        timeout: float | None,
        on_timeout: str | Callable[[Row], Any],
        retries: int,
    ) -> None:
        self._function = function
        self._name = name
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._retries = retries
        self._async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._threads: ThreadPoolExecutor | None = None

    async def all(self, rows: Iterable[Row], concurrency: int, ordered: bool) -> list[Any]:
        waiting = enumerate(rows)
        answers: list[tuple[int, list[Any]]] = []

        async def ask_one_after_another() -> None:
            for place, row in waiting:
                answers.append((place, list(rows_of(await self._asked(row)))))

        if not self._async:
            # No more threads are started than calls are under way, but for those that were given up
            # and still hang: they must not hold up the others.
            self._threads = ThreadPoolExecutor(2**15, f"poundlock-{self._name}")
        try:
            await asyncio.gather(*(ask_one_after_another() for _ in range(concurrency)))
        finally:
            if self._threads:
                self._threads.shutdown(wait=False, cancel_futures=True)
        if ordered:
            answers.sort(key=lambda answer: answer[0])
        return [row for _, made in answers for row in made]

    async def _asked(self, row: Row) -> Any:
        if self._timeout is None:
            return await self._tried(row)
        try:
            return await asyncio.wait_for(self._tried(row), self._timeout)
        except asyncio.TimeoutError:  # another class before Python 3.11
            if self._on_timeout == "null":
                return NULLS
            if callable(self._on_timeout):
                return self._on_timeout(row)
            raise OperatorFailed(
                f"operator {self._name!r}: no answer within {self._timeout:g} s. The batch is given "
                "up; see whether the system that is asked is well, allow a longer timeout, or say what "
                "a row without an answer becomes with on_timeout"
            ) from None

    async def _tried(self, row: Row) -> Any:
        left = self._retries
        while True:
            try:
                return await self._called(row)
            except PoundlockError:
                raise
            except Exception as error:
                if not left:
                    times = f" {self._retries + 1} times" if self._retries else ""
                    raise OperatorFailed(
                        f"operator {self._name!r} failed{times}: {type(error).__name__}. The "
                        "batch is given up; correct the function or see whether the system that is "
                        "asked is well, and start again"
                    ) from error
                left -= 1

    async def _called(self, row: Row) -> Any:
        if self._async:
            return await self._function(row)
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._threads, self._called_in_thread, row)
        return await made if isinstance(made, Awaitable) else made

    def _called_in_thread(self, row: Row) -> Any:
        made = self._function(row)
        # A generator has not begun yet, and must not run in the event loop.
        return list(made) if inspect.isgenerator(made) else made
