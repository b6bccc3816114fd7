"""The directory of a Files sink: its spelling, and small files in it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Any
from urllib.parse import quote, urlparse

import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import UsageError
from poundlock.filesystem import sync

_UNQUOTED = "/=:@&+$,;'()!*~"  # what Hadoop does not quote in a path


def spelled(path: str) -> str:
    """Return a path as part of a URI, quoted as Hadoop does it."""
    return quote(path, safe=_UNQUOTED)


def qualified(path: str) -> str:
    """Return an absolute local path, or a URI that names its host or bucket."""
    parsed = urlparse(path)
    if parsed.scheme in ("", "file"):  # as in Hadoop, %20 does not mean a blank
        return os.path.abspath(re.sub(r"^file:(//[^/]*)?", "", path))
    if not parsed.netloc:
        raise UsageError(
            f"{path} does not name its host or bucket: write {parsed.scheme}://NAME/..."
        )
    return path.rstrip("/")


def uri_of(place: str) -> str:
    """Return a place as the manifest names it."""
    return spelled(f"file://{place}") if place.startswith("/") else place


def put(system: Any, path: str, data: bytes, uri: str) -> None:
    """Write a small file. It gets its name only when it is complete and durable."""
    local = isinstance(system, pafs.LocalFileSystem)
    directory, _, name = path.rpartition("/")
    # A random name, because two drivers may write the same mark.
    temporary = f"{directory}/.{name}.{secrets.token_hex(4)}.tmp" if local else path
    with reachable(uri):
        try:
            with system.open_output_stream(temporary, compression=None) as stream:
                stream.write(data)
            sync(system, temporary)
            if local:
                system.move(temporary, path)
        except BaseException:
            if local:  # no sweep looks for it
                with contextlib.suppress(OSError):
                    system.delete_file(temporary)
            raise
        if local:
            sync(system, path)
