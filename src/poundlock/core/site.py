"""What a sink on the driver may use: a directory for rows, and tasks to send them.

Some systems cannot hold a branch. Their rows are stored beside the log between prepare and commit, and
tasks send them after the decision.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

from poundlock.errors import NotAuthorised, Unavailable, UsageError

T = TypeVar("T")
R = TypeVar("R")


class Site(Protocol):
    """Given to every sink of a pipeline, on the driver, before the first batch."""

    @property
    def rows_uri(self) -> str:
        """The pipeline's own directory for rows, beside its log. Every task can write to it."""
        ...

    @property
    def spark(self) -> Any:
        """The Spark session, or None."""
        ...

    @property
    def tasks_at_once(self) -> int | None:
        """How many tasks Spark runs at a time, None without Spark."""
        ...

    @property
    def speculation(self) -> bool:
        """Whether Spark may run a task twice at the same time (`spark.speculation`)."""
        ...

    def spread(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `function(item)` for each item, in order, computed by tasks. Everything is pickled.

        An error of the function is raised here.
        """
        ...

    def create(self, uri: str, data: Iterable[bytes]) -> bool:
        """Publish a whole, durable file, given in pieces. Return False if it exists already.

        Raises `Unavailable`.
        """
        ...


class LocalSite:
    """A site without Spark: this process and a local directory."""

    spark = None
    tasks_at_once = None
    speculation = False

    def __init__(self, rows_uri: str):
        self.rows_uri = rows_uri

    def spread(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        return [function(item) for item in items]

    def create(self, uri: str, data: Iterable[bytes]) -> bool:
        return create_local(local(uri), data)


def local(uri: str) -> Path:
    """Return the path of a local URI."""
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        raise UsageError(
            f"{uri} is not on a local disk, and other file systems need a Spark session"
        )
    return Path(parsed.path if parsed.scheme else uri)


def create_local(path: Path, data: Iterable[bytes]) -> bool:
    """Write, fsync, link, fsync the directory. Publishes the whole file, or nothing if it exists."""
    with reachable(str(path)):
        return _create(path, data)


def _create(path: Path, data: Iterable[bytes]) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(descriptor, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
    finally:
        os.unlink(aside)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True


@contextlib.contextmanager
def reachable(uri: str) -> Generator[None]:
    """Translate the errors of a file system, except that a file is missing."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise NotAuthorised(
            f"{uri}: {error}. Allow the user of the driver and the tasks to read and write there"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(
                f"{uri}: the disk is full ({error}). Nothing is lost: make room there, then try "
                "again"
            ) from error
        raise Unavailable(f"{uri}: {error}") from error
