"""The directory of a Files sink: how it is spelled, and small files in it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Any
from urllib.parse import urlparse

import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import UsageError
from poundlock.filesystem import sync
from poundlock.sinks.files.manifest import spelled


def qualified(path: str) -> str:
    """Return a whole local path, or a URI that names its host or bucket: for readers anywhere."""
    parsed = urlparse(path)
    if parsed.scheme in ("", "file"):  # as Hadoop takes it, %20 is no blank
        return os.path.abspath(re.sub(r"^file:(//[^/]*)?", "", path))
    if not parsed.netloc:
        raise UsageError(
            f"{path} does not name its host or bucket: write {parsed.scheme}://NAME/..."
        )
    return path.rstrip("/")


def uri_of(place: str) -> str:
    """Return a place as the manifest spells it."""
    return spelled(f"file://{place}") if place.startswith("/") else place


def put(system: Any, path: str, data: bytes, uri: str) -> None:
    """Write a small file as a whole: under its name only once it is durable."""
    local = isinstance(system, pafs.LocalFileSystem)
    directory, _, name = path.rpartition("/")
    # A name that nobody else has: two drivers may put one mark.
    aside = f"{directory}/.{name}.{secrets.token_hex(4)}.tmp" if local else path
    with reachable(uri):
        try:
            with system.open_output_stream(aside, compression=None) as stream:
                stream.write(data)
            sync(system, aside)
            if local:
                system.move(aside, path)
        except BaseException:
            if local:  # nobody would look for it
                with contextlib.suppress(OSError):
                    system.delete_file(aside)
            raise
        if local:
            sync(system, path)
