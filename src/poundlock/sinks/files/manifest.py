"""The manifest of a directory: the list of its files that count. Spark's own file sink writes the same.

    DIR/_spark_metadata/0, 1, ... 8, 9.compact, 10, ...

Each batch adds one record: a line `v1`, then a line of JSON for each file. Every tenth record repeats
all lines before it, so that a reader needs at most ten. If there is a directory `_spark_metadata`,
`spark.read` and `spark.readStream` read the files named there and no others.

Numbers are consecutive and each record is created only if absent. So the next number is also a lock: a
driver that creates it knows that nothing was published since it looked.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlparse

import pyarrow.fs as pafs

from poundlock.core.site import reachable
from poundlock.errors import PoundlockError, Unavailable, UsageError
from poundlock.filesystem import open_filesystem, sync
from poundlock.sinks.files.published import Published

METADATA = "_spark_metadata"
_VERSION = "v1"
_EVERY = 10  # Spark's default. Readers take the interval from the compacted records that they find.
_STAYING = 100  # numbers before a compacted record, for readers that have begun
_RECORD = re.compile(r"(\d+)(\.compact)?")
_PATH = re.compile(r'\{"path":"([^"\\]+)"')  # as we and Spark begin a line, without escapes
_MODIFIED = re.compile(r'"modificationTime":(\d+)')
_UNQUOTED = "/=:@&+$,;'()!*~"  # what Hadoop does not quote in a path

_LINES_A_PIECE = 512

Create = Callable[[str, Iterable[bytes]], bool]


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


def _modified_ms(line: str) -> int:
    found = _MODIFIED.search(line)
    return int(found[1]) if found else DataFile.parse(line).modified_ms


def _base_name(line: str) -> str:
    """Return the name of the file in a line of the manifest. A long manifest has many lines."""
    path = _PATH.match(line)
    uri = path[1] if path else DataFile.parse(line).uri
    return unquote(uri.rpartition("/")[2])


class Manifest:
    """The manifest of one directory, as far as it has been read. Each `load` reads what is new.

    `owner` returns the owner of a file from its name, None if it has none. With `retention_s`, older
    files leave the manifest when it is compacted, as with the option of Spark's sink of that name.
    Nothing here holds the whole manifest: it is read and written line by line.
    """

    def __init__(
        self,
        uri: str,
        owner: Callable[[str], str | None] = lambda name: None,
        retention_s: float | None = None,
    ):
        self.uri = f"{uri.rstrip('/')}/{METADATA}"
        self.last = -1
        self.published = Published()
        self._owner = owner
        self._retention_s = retention_s

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
            self._add_owners(self._read(system, root, number))
        self.last = max(newest, self.last)

    def _add_owners(self, lines: Iterable[str]) -> None:
        for line in lines:
            owner = self._owner(_base_name(line))
            if owner is not None:
                self.published.add(owner)

    def named(self, names: Iterable[str]) -> set[str]:
        """Return those of the names that own a file in the manifest, as of the last `load`."""
        known = {name: self.published.has(name) for name in names}
        found = {name for name, answer in known.items() if answer}
        old = {name for name, answer in known.items() if answer is None}
        if old:
            owners = (self._owner(_base_name(line)) for line in self._lines())
            found |= {owner for owner in owners if owner in old}
        return found

    def publish(self, files: Sequence[DataFile], create: Create) -> bool:
        """Append one record, if nothing was published since `load`. If False: load again."""
        number = self.last + 1
        lines: Iterable[str] = (file.line() for file in files)
        if _compacted(number):
            lines = itertools.chain(filter(self._stays(), self._lines()), lines)
        data = _record(lines)
        if not create(f"{self.uri}/{_file(number)}", data):
            return False
        self.last = number
        self._add_owners(file.line() for file in files)
        if _compacted(number):
            with contextlib.suppress(
                PoundlockError, FileNotFoundError
            ):  # old records only take space
                self._drop_below(number - _STAYING)
        return True

    def _stays(self) -> Callable[[str], bool]:
        """Return whether a line is repeated: until its file is too old.

        The files of the newest batches stay, because they prove that their branches are committed.
        """
        if self._retention_s is None:
            return lambda line: True
        floor = (time.time() - self._retention_s) * 1000

        def stays(line: str) -> bool:
            if _modified_ms(line) >= floor:
                return True
            owner = self._owner(_base_name(line))
            return owner is not None and bool(self.published.has(owner))

        return stays

    def files(self) -> Iterator[DataFile]:
        """Return all files that the manifest names."""
        self.load()
        return map(DataFile.parse, self._lines())

    def newest_file(self) -> DataFile | None:
        """Return the file that was published last."""
        self.load()
        newest = collections.deque(self._lines(), maxlen=1)
        return DataFile.parse(newest[0]) if newest else None

    def _lines(self) -> Iterator[str]:
        """Return the lines of every record: from the last compacted one on."""
        system, root = open_filesystem(self.uri)
        number = self.last + 1
        for known in range(max(number // _EVERY * _EVERY - 1, 0), number):
            yield from self._read(system, root, known)

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

    def _read(self, system: Any, root: str, number: int) -> Iterator[str]:
        with reachable(self.uri), system.open_input_stream(f"{root}/{_file(number)}") as stream:
            lines = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            version = lines.readline().rstrip("\n")
            if version != _VERSION:
                raise Unavailable(
                    f"{self.uri}/{_file(number)} has version {version!r}, not {_VERSION}"
                )
            for line in lines:
                if text := line.rstrip("\n"):
                    yield text


def _record(lines: Iterable[str]) -> Iterator[bytes]:
    """Return a record in pieces. No line break ends it, as in Spark's own."""
    piece = [_VERSION]
    for line in lines:
        piece.append(line)
        if len(piece) > _LINES_A_PIECE:
            yield "\n".join(piece).encode()
            piece = [""]
    yield "\n".join(piece).encode()


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
