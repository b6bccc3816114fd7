"""The manifest of a directory: the list of its files that count. Spark's own file sink writes the same.

    DIR/_spark_metadata/0, 1, ... 8, 9.compact, 10, ...

Each batch adds one record: a line `v1`, then a line of JSON for each file. Every tenth record repeats
all lines before it, so that a reader needs at most ten. If there is a directory `_spark_metadata`,
`spark.read` and `spark.readStream` read the files named there and no others.

Numbers are consecutive and each record is created only if absent. So the next number is also a lock: a
driver that creates it knows that nothing was published since it looked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlparse

import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import PoundlockError, Unavailable, UsageError
from poundlock.filesystem import open_filesystem, sync

METADATA = "_spark_metadata"
_VERSION = "v1"
_EVERY = 10  # Spark's default. Readers take the interval from the compacted records that they find.
_STAYING = 100  # numbers before a compacted record, for readers that have begun
_RECORD = re.compile(r"(\d+)(\.compact)?")
_UNQUOTED = "/=:@&+$,;'()!*~"  # what Hadoop does not quote in a path

Create = Callable[[str, bytes], bool]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file as the manifest names it."""

    uri: str
    size: int
    modified_ms: int

    def line(self) -> str:
        return json.dumps(
            {
                "path": self.uri,
                "size": self.size,
                "isDir": False,
                "modificationTime": self.modified_ms,
                "blockReplication": 1,
                "blockSize": 32 << 20,  # only tells Spark how to split the file
                "action": "add",
            },
            separators=(",", ":"),
        )

    @classmethod
    def parse(cls, line: str) -> DataFile:
        fields = json.loads(line)
        return cls(fields["path"], fields["size"], fields["modificationTime"])

    @classmethod
    def at(cls, directory: str, path: str, size: int, modified_ms: int) -> DataFile:
        """Return the file at a path below a directory's URI."""
        return cls(f"{directory}/{spelled(path)}", size, modified_ms)

    def below(self, directory: str) -> str:
        """Return the path below a directory's URI."""
        return unquote(self.uri.removeprefix(f"{directory}/"))

    @property
    def base_name(self) -> str:
        return unquote(self.uri.rpartition("/")[2])


class Manifest:
    """The manifest of one directory, as far as it has been read. Each `load` reads what is new.

    `owner` returns the owner of a file from its name, None if it has none. `owners` are all that were
    found so far.
    """

    def __init__(self, uri: str, owner: Callable[[str], str | None] = lambda name: None):
        self.uri = f"{uri.rstrip('/')}/{METADATA}"
        self.last = -1
        self.owners = set[str]()
        self._owner = owner

    def load(self) -> None:
        """Read all records up to the newest."""
        system, root = open_filesystem(self.uri)
        found = self._numbers(system, root)
        newest = max(found, default=-1)
        compact = max((n for n in found if _compacted(n) and n > self.last), default=None)
        start = self.last + 1 if compact is None else compact
        for number in range(start, newest + 1):
            if number not in found:
                raise Unavailable(
                    f"{self.uri} has record {newest}, but not {number}: the listing is incomplete, or "
                    "someone deleted the record"
                )
            self._add_owners(DataFile.parse(line) for line in self._read(system, root, number))
        self.last = max(newest, self.last)

    def _add_owners(self, files: Iterable[DataFile]) -> None:
        owners = (self._owner(file.base_name) for file in files)
        self.owners.update(owner for owner in owners if owner is not None)

    def publish(self, files: Sequence[DataFile], create: Create) -> bool:
        """Append one record, if nothing was published since `load`. If False: load again."""
        number = self.last + 1
        lines = [file.line() for file in files]
        if _compacted(number):
            lines = [*self._before(number), *lines]
        data = "\n".join([_VERSION, *lines]).encode()
        if not create(f"{self.uri}/{_file(number)}", data):
            return False
        self.last = number
        self._add_owners(files)
        if _compacted(number):
            with contextlib.suppress(
                PoundlockError, FileNotFoundError
            ):  # old records only take space
                self._drop_below(number - _STAYING)
        return True

    def files(self) -> list[DataFile]:
        """Return all files that the manifest names."""
        self.load()
        if self.last < 0:
            return []
        lines = self._before(self.last + 1)
        return [DataFile.parse(line) for line in lines]

    def _before(self, number: int) -> list[str]:
        """Return the lines of every record below `number`: from the last compacted one on."""
        system, root = open_filesystem(self.uri)
        start = max(number // _EVERY * _EVERY - 1, 0)
        return [line for known in range(start, number) for line in self._read(system, root, known)]

    def _drop_below(self, floor: int) -> None:
        system, root = open_filesystem(self.uri)
        for number in self._numbers(system, root):
            if number < floor:
                with reachable(self.uri):
                    system.delete_file(f"{root}/{_file(number)}")

    def _numbers(self, system: Any, root: str) -> set[int]:
        with reachable(self.uri):
            entries = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        matches = (_RECORD.fullmatch(entry.base_name) for entry in entries)
        return {int(match[1]) for match in matches if match}

    def _read(self, system: Any, root: str, number: int) -> Iterable[str]:
        with reachable(self.uri), system.open_input_stream(f"{root}/{_file(number)}") as stream:
            version, *lines = stream.read().decode().split("\n")
        if version != _VERSION:
            raise Unavailable(f"{self.uri}/{_file(number)} has version {version!r}, not {_VERSION}")
        return [line for line in lines if line]


def _compacted(number: int) -> bool:
    return (number + 1) % _EVERY == 0


def _file(number: int) -> str:
    return f"{number}.compact" if _compacted(number) else str(number)


def committed(path: str | os.PathLike[str]) -> list[str]:
    """Return the URIs of the files that count in a directory, for readers other than Spark."""
    return [file.uri for file in Manifest(qualified(os.fspath(path))).files()]


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
