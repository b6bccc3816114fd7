"""Reads the log's records quickly: each is read back many times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Set

from poundlock.core.log import Entry


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Decode equal bytes once: reading records back is most of what a schedule costs."""
    original = Entry.__dict__["decode"]

    @functools.lru_cache(1024)
    def decode(number: int, data: bytes, finished: frozenset[int]) -> Entry:
        return original.__func__(Entry, number, data, "the model", finished)

    def cached(number: int, data: bytes, where: str, finished: Set[int] = frozenset()) -> Entry:
        return decode(number, data, frozenset(finished))

    Entry.decode = staticmethod(cached)  # type: ignore
    try:
        yield
    finally:
        Entry.decode = original
