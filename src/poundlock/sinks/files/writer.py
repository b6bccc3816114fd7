"""The task's half of the Files sink: a branch's data files, and the marks that show its state."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.model import Branch, Receipt
from poundlock.core.naming import name_of
from poundlock.core.participant import PreparedBranch, Semantic, Writer
from poundlock.core.site import reachable
from poundlock.errors import BadRow, Rejected
from poundlock.filesystem import open_filesystem, sync
from poundlock.sinks.files.manifest import METADATA, DataFile, put
from poundlock.sinks.files.types import PARTITION, split, suffix
from poundlock.sinks.partitions import read_as_null, room_for_directories, too_long
from poundlock.sinks.text import not_utf8

if TYPE_CHECKING:
    from poundlock.sinks.files.sink import Files

OURS = "_poundlock"
OPEN, STAGED, ABORTED = ".open", ".staged", ".aborted"
_OBJECT_STORES = ("s3", "gcs", "abfs")
# Open files of one task: the least recently used is closed before another is opened. By default a
# process may have 1024; on an object store each has a buffer of megabytes.
_OPEN_FILES, _OPEN_OBJECTS = 256, 64


@dataclass(frozen=True, slots=True)
class ListPrint:
    """What a receipt says of the list of a branch's files: a list that lost lines looks whole."""

    files: int | None
    sha256: str | None

    @classmethod
    def of(cls, receipt: Receipt) -> ListPrint:
        files, sha256 = (receipt.handle.get(word) for word in ("files", "list"))
        return cls(int(str(files)) if files is not None else None, str(sha256) if sha256 else None)

    def fits(self, lines: bytes) -> bool:
        if self.files not in (None, len(lines.splitlines())):
            return False
        return self.sha256 in (None, hashlib.sha256(lines).hexdigest())


UNKNOWN = ListPrint(None, None)  # of a branch without a receipt


class FilesWriter(Writer):
    """One branch in a task: one or more files for each partition that it has rows of."""

    def __init__(self, sink: Files, branch: Branch):
        self._sink, self._name = sink, str(name_of(branch))
        self._began_at = time.time()
        self._exact = sink.semantic is Semantic.EXACTLY_ONCE
        self._system, self._root = open_filesystem(sink.place)
        # Without a manifest a file counts when it is complete. Until then it has a hidden name. Object
        # stores need none: they show only complete files, and would copy a file to rename it.
        stored = self._system.type_name in _OBJECT_STORES
        self._hidden = "" if self._exact or stored else "."
        # A file's number has five digits or some more, and Hadoop writes a checksum beside a file.
        ending = suffix(sink.format, sink.compression)
        longest = f"{self._root}//..part-{self._name}-0000000000{ending}.crc"
        self._room = room_for_directories(self._system.type_name, longest)
        self._most_open = _OPEN_OBJECTS if stored else _OPEN_FILES
        self._open = dict[str, tuple[str, Any]]()  # by partition, the least recently used first
        self._begun: list[str] = []  # paths below the root, of all files that may exist
        self._done: list[str] = []  # and of those that are complete
        with reachable(sink.place):
            self._system.create_dir(self._root, recursive=True)
            if self._exact:
                # Before the first file. From now on readers look for a manifest, and see nothing.
                self._system.create_dir(f"{self._root}/{METADATA}")
                self._system.create_dir(f"{self._root}/{OURS}")
        if self._exact:
            put(self._system, self._mark(OPEN), b"", sink.place)

    def _mark(self, kind: str) -> str:
        return f"{self._root}/{OURS}/{self._name}{kind}"

    def write(self, rows: pa.RecordBatch) -> None:
        bad: dict[int, str] = {}
        for column in self._sink.partition_by:
            values = rows.column(PARTITION + column)
            broken = np.flatnonzero(not_utf8(values))
            bad |= dict.fromkeys(broken.tolist(), f"its {column} is not UTF-8")
            bad |= read_as_null(f"its {column}", values)
        self._raise_bad(bad)
        parts = list(split(rows, self._sink.partition_by))
        for directory, _, places in parts:
            if problem := too_long(directory, self._room):
                bad |= dict.fromkeys(places.tolist(), problem)
        self._raise_bad(bad)
        with reachable(self._sink.place):
            for directory, mine, _ in parts:
                self._file(directory, mine.schema).write(mine)

    def _raise_bad(self, bad: dict[int, str]) -> None:
        if bad:
            raise BadRow(
                f"{len(bad)} rows have a partition value that cannot be a directory's name: "
                + next(iter(bad.values())),
                sink=self._sink.name,
                rows=bad,
            )

    def _file(self, directory: str, schema: pa.Schema) -> Any:
        found = self._open.pop(directory, None)
        if found is None:
            if len(self._open) >= self._most_open:
                self._close_one(next(iter(self._open)))
            self._check_open()
            ending = suffix(self._sink.format, self._sink.compression)
            name = f"{self._hidden}part-{self._name}-{len(self._begun):05}{ending}"
            place = f"{directory}/{name}".lstrip("/")
            self._begun.append(place)
            if directory:
                self._system.create_dir(f"{self._root}/{directory}", recursive=True)
            stream = self._system.open_output_stream(f"{self._root}/{place}", compression=None)
            try:
                found = (place, self._sink.open_file(stream, schema))
            except BaseException:
                with contextlib.suppress(OSError):
                    stream.close()  # or deleting the file would not free its space
                raise
        self._open[directory] = found
        return found[1]

    def _check_open(self) -> None:
        """Raise `Rejected` if the driver has aborted the branch: no sweep would find a new file."""
        if not self._exact:
            return
        marks = self._system.get_file_info([self._mark(OPEN), self._mark(ABORTED)])
        if [it.type == pafs.FileType.NotFound for it in marks] != [False, True]:
            raise Rejected(
                f"branch {self._name} was aborted while it was written", sink=self._sink.name
            )

    def _close_one(self, directory: str) -> None:
        place, file = self._open.pop(directory)
        file.close()
        self._done.append(place)

    def prepare(self) -> PreparedBranch | None:
        try:
            return self._prepare()
        except FileNotFoundError as error:
            self.abort()
            raise Rejected(
                f"branch {self._name}: its files were deleted while it was written ({error})",
                sink=self._sink.name,
            ) from error

    def _prepare(self) -> PreparedBranch | None:
        with reachable(self._sink.place):
            for directory in list(self._open):
                self._close_one(directory)
            for place in self._done:
                sync(self._system, f"{self._root}/{place}")
            self._sync_directories()
            if not self._exact:
                self._show()
                return None
            files = self._files()
            try:
                self._check_open()
            except Rejected:
                self.abort()
                raise
        lines = "\n".join(file.line() for file in files).encode()
        put(self._system, self._mark(STAGED), lines, self._sink.place)
        return PreparedBranch(
            self._name,
            {
                "directory": self._sink.uri,
                "files": len(files),
                "list": hashlib.sha256(lines).hexdigest(),
            },
            began_at=self._began_at,
            expires_at=None,
        )

    def _files(self) -> list[DataFile]:
        found = self._system.get_file_info([f"{self._root}/{place}" for place in self._done])
        return [
            DataFile.at(self._sink.uri, place, entry.size, (entry.mtime_ns or 0) // 1_000_000)
            for place, entry in zip(self._done, found, strict=True)
        ]

    def _sync_directories(self) -> None:
        """Make new partition directories durable: each is an entry of its parent."""
        above = {place.rpartition("/")[0] for place in self._done} - {""}
        for directory in above:
            parts = directory.split("/")
            for depth in range(len(parts)):
                sync(self._system, "/".join([self._root, *parts[: depth + 1]]))

    def _show(self) -> None:
        for place in self._done if self._hidden else ():
            directory, _, name = place.rpartition("/")
            shown = f"{directory}/{name[1:]}".lstrip("/")
            self._system.move(f"{self._root}/{place}", f"{self._root}/{shown}")
            sync(self._system, f"{self._root}/{shown}")

    def abort(self) -> None:
        for directory in list(self._open):
            with contextlib.suppress(Exception):
                self._close_one(directory)
        # The marks last: the sweep goes by them, and deletes what cannot be deleted now.
        places = [f"{self._root}/{place}" for place in self._begun]
        with contextlib.suppress(Exception):
            for path in (*places, self._mark(STAGED), self._mark(OPEN)):
                with contextlib.suppress(FileNotFoundError):
                    self._system.delete_file(path)
