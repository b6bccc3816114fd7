"""Files: rows into a directory, exactly once, by a manifest that names the files which count.

    DIR/day=1/part-NAME-00000.snappy.parquet     data, where it will stay; NAME is the branch's
    DIR/_spark_metadata/17                        the manifest: one record shows a whole batch at once
    DIR/_poundlock/NAME.open                      a task is writing the branch
    DIR/_poundlock/NAME.staged                    a prepared branch: the manifest's lines for its files
    DIR/_poundlock/NAME.aborted                   the tombstone of one that must never count

Data lies in its final place from the start and publishing moves nothing: object stores have no rename,
a copy costs as much as the writing did, and no store moves many files at one instant. The manifest is
the commit and the witness in one: a branch is committed if it names the branch's files.

A tombstone alone would not stop a driver that slept since it looked for one. So whoever leaves a
tombstone also takes the manifest's next number with an empty record: the sleeper's own record then
finds its number taken, and it looks again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import (
    Column,
    Commitment,
    Participant,
    Semantic,
)
from poundlock.core.protocol import BranchState
from poundlock.core.site import Site, reachable
from poundlock.core.sparksql import TIMES, holds
from poundlock.errors import UsageError
from poundlock.filesystem import open_filesystem
from poundlock.sinks.files.manifest import METADATA, DataFile, Manifest
from poundlock.sinks.files.place import put, qualified, uri_of
from poundlock.sinks.files.rows import (
    COMPRESSIONS,
    LINE,
    PARTITION,
    ParquetFile,
    TextFile,
    csv_text,
    escaped,
    format_of,
    text_line,
)
from poundlock.sinks.files.writer import ABORTED, OPEN, OURS, STAGED, FilesWriter

_DATA = re.compile(r"part-(.+)-\d{5,}\.[.\w]+")
_NO_TYPE = {
    "parquet": r"void|interval|variant",
    "json": r"void|variant",
    "csv": r"void|interval|variant|binary|array<|map<|struct<",
}
_BLANKS = "'ignoreLeadingWhiteSpace', 'false', 'ignoreTrailingWhiteSpace', 'false'"  # or cut off
_NO_PARTITION = r"void|interval|variant|binary|array<|map<|struct<"


class Files(Participant):
    """A directory of Parquet, JSON or CSV files.

    Args:
        path: The directory: a local path that all machines share, or a URI that Spark and Arrow know.
        format: "parquet", "json" or "csv".
        partition_by: Columns that become directories, `day=2026-01-31`.
        name: The sink's name in its pipeline; the directory's by default.
        compression: Parquet: "snappy" (the default), "zstd", "gzip", "lz4", "none". JSON and CSV:
            "none" (the default), "gzip", "bz2".
        header: CSV: begin each file with the columns' names.
        semantic: "exactly_once"; or "at_least_once" or "none", which write plain files without a
            manifest.
    """

    system = "Files"
    commitment = Commitment.STAGED
    only_appends = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "parquet",
        partition_by: str | Sequence[str] = (),
        name: str | None = None,
        compression: str | None = None,
        header: bool = False,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        self.place = qualified(os.fspath(path))  # as file systems take it
        self.uri = uri_of(self.place)  # as the manifest spells it
        label = name or re.sub(r"[^A-Za-z0-9_-]+", "-", self.place.rpartition("/")[2]).strip("-_")
        self.name = checked_name("sink name", label)
        self.semantic = Semantic(semantic)
        if format not in COMPRESSIONS:
            raise UsageError(f"format={format!r}: choose {_choice(COMPRESSIONS)}", sink=self.name)
        self.format = format
        known = COMPRESSIONS[format]
        self.compression = compression or next(iter(known))
        if self.compression not in known:
            raise UsageError(
                f"compression={compression!r} with {format}: choose {_choice(known)}",
                sink=self.name,
            )
        if header and format != "csv":
            raise UsageError(f"header= is for CSV, not for {format}", sink=self.name)
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self._header = header
        self._columns: dict[str, str] = {}  # of the frame, by name
        self._first_line: str | None = None
        self._site: Site | None = None
        self._manifest: Manifest | None = None
        self._is_new = False  # the directory, when we last looked: nothing was published in it

    def __repr__(self) -> str:
        return f"Files({self.place!r}, format={self.format!r}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_site": None, "_manifest": None}

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest(self.place, _branch_of)
        return self._manifest

    def reader_settings(self) -> str:
        needs = "multiLine, if texts have line breaks" if self.format == "csv" else "nothing"
        if self.semantic is not Semantic.EXACTLY_ONCE:
            return needs
        return (
            f"{needs} in Spark, if it reads the directory itself, not a partition of it or a pattern; "
            "others read the files that poundlock.sinks.files.committed() names"
        )

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        problems = [
            f"there is no column {name!r} to partition by"
            for name in self.partition_by
            if name not in columns
        ]
        data = {name: col for name, col in columns.items() if name not in self.partition_by}
        if not data:
            problems.append("no column is left for the files beside those to partition by")
        for name, column in columns.items():
            unfit = _NO_PARTITION if name in self.partition_by else _NO_TYPE[self.format]
            if holds(column.type, unfit):
                use = "a directory's name" if name in self.partition_by else self.format
                problems.append(f"column {name!r} has type {column.type}, which {use} cannot hold")
        if problems:
            raise UsageError(
                f"the frame does not fit: {'; '.join(problems)}. It has "
                + ", ".join(f"{name} {column.type}" for name, column in columns.items()),
                sink=self.name,
            )
        self._columns = {name: column.type for name, column in columns.items()}
        wanted = {
            PARTITION + name: f"CAST({columns[name].sql} AS STRING)" for name in self.partition_by
        }
        if self.format == "parquet":
            return wanted | {name: column.sql for name, column in data.items()}
        if self._header:
            self._first_line = ",".join(csv_text(name) for name in data)
        row = ", ".join(f"'{_quoted(name)}', {column.sql}" for name, column in data.items())
        if self.format == "json":
            return wanted | {LINE: f"to_json(named_struct({row}), map({TIMES}))"}
        line = f"to_csv(named_struct({row}), map({TIMES}, {_BLANKS}))"
        if len(data) == 1:  # Spark fails on a line that would be empty; its own files have this one
            (only,) = data.values()
            line = f"CASE WHEN {only.sql} IS NULL THEN '\"\"' ELSE {line} END"
        return wanted | {LINE: line}

    def attach(self, site: Site) -> None:
        self._site = site

    def preflight(self) -> list[str]:
        system, root = open_filesystem(self.place)
        with reachable(self.place):
            found = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        names = {entry.base_name for entry in found}
        exact = self.semantic is Semantic.EXACTLY_ONCE
        if not exact and METADATA in names:
            raise UsageError(
                f"{self.place} has a manifest ({METADATA}), and readers would not see files that it "
                f"does not name: write semantic={self.semantic.value!r} to a directory of its own",
                sink=self.name,
            )
        if exact and METADATA not in names and any(name[0] not in "._" for name in names):
            raise UsageError(
                f"{self.place} has files already, but no manifest ({METADATA}): with one, readers "
                "would no longer see them. Write to a new directory; to have both in one, first bring "
                "the old files there through a pipeline (poundlock.read_files)",
                sink=self.name,
            )
        if exact and METADATA in names and OURS not in names and Manifest(self.place).files():
            raise UsageError(
                f"{self.place} was written by Spark's own file sink, whose batch numbers are not ours: "
                "write to a new directory",
                sink=self.name,
            )
        if exact and (problem := self._misfit()):
            raise UsageError(problem, sink=self.name)
        return []

    def _misfit(self) -> str | None:
        """Compare with files that are there: readers take one format, and columns from directories."""
        published = self.manifest.files()[-1:]
        self._is_new = not published
        for file in published or self._first_staged():
            if not file.uri.startswith(f"{self.uri}/"):
                continue  # the same directory by another name: nothing can be told from that
            *directories, name = file.below(self.uri).split("/")
            found = format_of(name), [part.partition("=")[0] for part in directories]
            if found != (self.format, [escaped(name) for name in self.partition_by]):
                return (
                    f"{self.place} holds {found[0]} partitioned by {_listed(found[1])}, and not "
                    f"{self.format} by {_listed(self.partition_by)}: readers would miss rows of one or "
                    "the other. Write to a new directory"
                )
        return None

    def _first_staged(self) -> list[DataFile]:
        """Return a file of each branch that waits."""
        names = [str(name) for name, marks in self._marks().items() if STAGED in marks]
        return [files[0] for files in self._staged(names).values() if files]

    def check_conflict(self, other: Participant) -> None:
        if isinstance(other, Files) and other.place == self.place and other._layout != self._layout:
            raise UsageError(
                f"sink {other.name!r} writes to {self.place} too, but not the same columns in the same "
                "format, with the same partition_by, header and semantic: give each its own directory",
                sink=self.name,
            )

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.format, self.partition_by, self._header, self.semantic, self._columns

    # In a task.

    def original_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {name.removeprefix(PARTITION): value for name, value in row.items() if name != LINE}
        if self.format == "json":
            return found | json.loads(row[LINE])
        return found | ({"line": row[LINE]} if self.format == "csv" else {})

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        columns = {
            PARTITION + name: dead_letters.column(name).cast(pa.string())
            for name in self.partition_by
        }
        data = dead_letters.drop_columns(self.partition_by)
        if self.format == "parquet":
            return pa.RecordBatch.from_pydict(
                columns | dict(zip(data.schema.names, data.columns, strict=True))
            )
        lines = [text_line(self.format, row) for row in data.to_pylist()]  # bad rows are few
        return pa.RecordBatch.from_pydict(columns | {LINE: pa.array(lines, pa.string())})

    def begin(self, branch: Branch) -> FilesWriter:
        return FilesWriter(self, branch)

    def open_file(self, stream: Any, schema: pa.Schema) -> ParquetFile | TextFile:
        if self.format == "parquet":
            return ParquetFile(stream, self.compression, schema)
        return TextFile(stream, self.compression, self._first_line)

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        staged = self._staged([receipt.id for receipt in receipts])
        # In a new directory another pipeline may have begun at the same time. Whoever of the two looks
        # last sees the files of the other, for both look when theirs are there.
        misfit = self._misfit() if self._is_new else None
        return [
            misfit if staged[receipt.id] is not None else "its files are gone"
            for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        names = [receipt.id for receipt in receipts]
        while True:
            states, dying = self._look(names)
            staged = self._staged([n for n in names if n not in states and n not in dying])
            ready = {name: files for name, files in staged.items() if files is not None}
            if not ready or self._publish([file for files in ready.values() for file in files]):
                break
        states |= dict.fromkeys(ready, BranchState.COMMITTED)
        states |= self._bury([name for name in names if name not in states])
        over = (name for name, state in states.items() if state is BranchState.COMMITTED)
        self._drop(name + mark for name in over for mark in (STAGED, OPEN))
        return [states[name] for name in names]

    def find(self, namespace: Namespace) -> list[Stray]:
        self.manifest.load()
        return [
            Stray(self.name, str(name), name.generation, "staged" if STAGED in marks else "open")
            for name, marks in self._marks().items()
            if self._is_mine(name, namespace)
            and marks & {OPEN, STAGED}
            and str(name) not in self.manifest.owners
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        names = [stray.id for stray in strays]
        states, _ = self._look(names)
        states |= self._bury([name for name in names if name not in states])
        return [states[name] for name in names]

    def newest_generation(self, namespace: Namespace) -> int:
        self.manifest.load()
        named = (parse_name(name) for name in self.manifest.owners)
        known = [*(name for name in named if name is not None), *self._marks()]
        mine = (name.generation for name in known if self._is_mine(name, namespace))
        return max(mine, default=0)

    def prune(self, namespace: Namespace, floor: int) -> None:
        self.manifest.load()
        self._drop(
            f"{name}{mark}"
            for name, marks in self._marks().items()
            if self._is_mine(name, namespace) and name.batch < floor
            for mark in marks
            if mark == ABORTED or str(name) in self.manifest.owners
        )

    # What the directory says.

    def _is_mine(self, name: BranchName, namespace: Namespace) -> bool:
        return (name.namespace, name.sink) == (namespace, self.name)

    def _marks(self) -> dict[BranchName, set[str]]:
        """Return what lies in our own directory about each branch."""
        system, root = open_filesystem(f"{self.place}/{OURS}")
        with reachable(self.place):
            entries = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        marks = dict[BranchName, set[str]]()
        for entry in entries:
            text, dot, kind = entry.base_name.rpartition(".")
            name = parse_name(text)
            if name is not None:
                marks.setdefault(name, set()).add(dot + kind)
        return marks

    def _look(self, names: Sequence[str]) -> tuple[dict[str, BranchState], set[str]]:
        """Say of each branch that is over how it ended, and which have died but are not buried yet.

        The manifest counts more than a tombstone. A tombstone with other marks beside it was left by
        somebody who perhaps went no further, so all of it is done again.
        """
        self.manifest.load()
        marks = {str(name): kinds for name, kinds in self._marks().items()}
        states, dying = dict[str, BranchState](), set[str]()
        for name in names:
            if name in self.manifest.owners:
                states[name] = BranchState.COMMITTED
            elif marks.get(name) == {ABORTED}:
                states[name] = BranchState.ABORTED
            elif ABORTED in marks.get(name, ()):
                dying.add(name)
        return states, dying

    def _staged(self, names: Sequence[str]) -> dict[str, list[DataFile] | None]:
        """Return the files of each prepared branch; None where one of them is gone or was changed."""
        system, root = open_filesystem(self.place)
        staged = dict[str, list[DataFile] | None]()
        for name in names:
            try:
                with (
                    reachable(self.place),
                    system.open_input_stream(f"{root}/{OURS}/{name}{STAGED}") as stream,
                ):
                    lines = stream.read().decode().splitlines()
            except FileNotFoundError:
                staged[name] = None
                continue
            files = [DataFile.parse(line) for line in lines]
            with reachable(self.place):
                found = system.get_file_info([f"{root}/{file.below(self.uri)}" for file in files])
            whole = all(entry.size == file.size for entry, file in zip(found, files, strict=True))
            staged[name] = files if whole else None
        return staged

    def _publish(self, files: Sequence[DataFile]) -> bool:
        if self._site is None:
            raise UsageError("the sink is not part of a pipeline yet", sink=self.name)
        return self.manifest.publish(files, self._site.create)

    def _bury(self, names: Sequence[str]) -> dict[str, BranchState]:
        """Leave tombstones, see that nobody published meanwhile, then delete the files."""
        if not names:
            return {}
        system, root = open_filesystem(self.place)
        with reachable(self.place):
            system.create_dir(f"{root}/{OURS}", recursive=True)
        for name in names:
            for mark in (OPEN, ABORTED):  # both: a tombstone alone means that all of this is done
                put(system, f"{root}/{OURS}/{name}{mark}", b"", self.place)
        while not self._publish([]):
            self.manifest.load()
        dead = [name for name in names if name not in self.manifest.owners]
        self._delete_data(set(dead))
        self._drop(name + mark for name in dead for mark in (STAGED, OPEN))
        states = dict.fromkeys(names, BranchState.COMMITTED)
        return states | dict.fromkeys(dead, BranchState.ABORTED)

    def _delete_data(self, names: set[str]) -> None:
        """Delete the files of branches. Aborts are rare enough to look everywhere for them."""
        system, root = open_filesystem(self.place)
        with reachable(self.place):
            entries = system.get_file_info(pafs.FileSelector(root, recursive=True))
            for entry in entries:
                if _branch_of(entry.base_name) in names:
                    with contextlib.suppress(FileNotFoundError):
                        system.delete_file(entry.path)

    def _drop(self, files: Iterable[str]) -> None:
        system, root = open_filesystem(f"{self.place}/{OURS}")
        for file in files:
            with reachable(self.place), contextlib.suppress(FileNotFoundError):
                system.delete_file(f"{root}/{file}")


def committed(path: str | os.PathLike[str]) -> list[str]:
    """Return the URIs of the files that count in a directory, for readers other than Spark."""
    return [file.uri for file in Manifest(qualified(os.fspath(path))).files()]


def _branch_of(file: str) -> str | None:
    """Return the name of the branch that a file's name carries."""
    match = _DATA.fullmatch(file)
    return match[1] if match else None


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "nothing"


def _choice(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace("'", "\\'")
