"""Any file system that pyarrow can write to: open it, and make written files durable."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import UsageError


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI or a local path, and the path in it."""
    with reachable(uri):
        if "://" not in uri and not uri.startswith("file:"):
            return pafs.LocalFileSystem(), os.path.abspath(uri)
        try:  # Hadoop has other names for S3 than Arrow.
            return pafs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", uri))
        except pa.ArrowInvalid as error:
            raise UsageError(f"{uri} cannot be opened: {error}") from error


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
