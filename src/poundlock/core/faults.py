"""Gathers what is wrong before a start, so that one start tells all of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from poundlock.errors import PoundlockError, Unavailable, UsageError, error_context


class Faults:
    """The errors of checks that do not depend on each other."""

    def __init__(self) -> None:
        self._found: list[PoundlockError] = []

    @contextmanager
    def gather(self, *, sink: str | None = None) -> Generator[None]:
        """Keep the error that ends the block, and go on after it."""
        try:
            with error_context(sink=sink):
                yield
        except PoundlockError as error:
            self._found += error.faults or [error]

    @property
    def sinks(self) -> frozenset[str]:
        """The sinks that an error names."""
        return frozenset(error.sink for error in self._found if error.sink)

    def raise_any(self) -> None:
        """Raise the error that was gathered, or one that lists all."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        lines = [f"  {number}. {error}" for number, error in enumerate(self._found, 1)]
        error = self._kind()(
            "\n".join([f"{len(lines)} things are wrong, and nothing was started:", *lines])
        )
        error.faults = tuple(self._found)
        raise error

    def _kind(self) -> type[PoundlockError]:
        kinds = {type(error) for error in self._found}
        if len(kinds) == 1:
            return kinds.pop()
        wrong_use = any(isinstance(error, UsageError) for error in self._found)
        return UsageError if wrong_use else Unavailable
