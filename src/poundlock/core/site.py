"""What surrounds a sink on the driver: where rows may be kept, and hands to send them.

Some systems cannot hold a branch themselves. Their rows are kept beside the log between prepare and
commit, and sent after the decision by tasks, not by the driver.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

from poundlock.errors import NotAuthorised, Unavailable, UsageError

T = TypeVar("T")
R = TypeVar("R")


class Site(Protocol):
    """Offered to every sink of a pipeline, on the driver, before its first batch."""

    @property
    def rows_uri(self) -> str:
        """A directory of the pipeline's own, beside its log, that every task can write to."""
        ...

    @property
    def spark(self) -> Any:
        """The Spark session; None where there is none."""
        ...

    @property
    def tasks_at_once(self) -> int | None:
        """How many tasks Spark runs at a time; None where there is no Spark."""
        ...

    @property
    def speculation(self) -> bool:
        """Whether Spark may run one task twice at a time (`spark.speculation`)."""
        ...

    def spread(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `function(item)` for each, in order, computed by tasks. Everything is pickled.

        What the function raises is raised here.
        """
        ...

    def create(self, uri: str, data: bytes) -> bool:
        """Publish a whole, durable file if there is none; False if there is. Raises `Unavailable`."""
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

    def create(self, uri: str, data: bytes) -> bool:
        return create_local(local(uri), data)


def local(uri: str) -> Path:
    """Return the path of a local URI."""
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        raise UsageError(f"{uri} is not on a local disk, and there is no Spark session to reach it")
    return Path(parsed.path if parsed.scheme else uri)


def create_local(path: Path, data: bytes) -> bool:
    """Write, fsync, link, fsync the directory: all of the file or none, and never over another."""
    with reachable(str(path)):
        return _create(path, data)


def _create(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
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
    """Say in our words what a file system refused. That a file is missing is the caller's to judge."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise NotAuthorised(
            f"{uri}: {error}. Let the user of the driver and of the tasks read and write there"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(
                f"{uri}: the disk is full ({error}). Nothing is lost: make room there, and the same "
                "can be done again"
            ) from error
        raise Unavailable(f"{uri}: {error}") from error
