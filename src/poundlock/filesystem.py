"""Any file system that pyarrow can write to: open it, and make written files durable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import UsageError

T = TypeVar("T")
R = TypeVar("R")


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI or a local path, and the path in it."""
    with reachable(uri):
        if "://" not in uri and not uri.startswith("file:"):
            return pafs.LocalFileSystem(), os.path.abspath(uri)
        try:  # Hadoop has other names for S3 than Arrow.
            return pafs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", uri))
        except pa.ArrowInvalid as error:
            raise UsageError(f"{uri} cannot be opened: {error}") from error


_AT_ONCE = 32


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return `function(item)` for each item, in order. For calls that wait for a file system.

    All are tried. The first error is raised at the end.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="poundlock-files") as pool:
        waiting = [pool.submit(function, item) for item in items]
    return [future.result() for future in waiting]


def sync(system: Any, path: str) -> None:
    """Make a local file and its name durable. On other file systems they are by themselves."""
    if not isinstance(system, pafs.LocalFileSystem):
        return
    for place in (path, str(Path(path).parent)):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
