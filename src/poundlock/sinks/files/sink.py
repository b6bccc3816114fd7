"""Files: rows into a directory, exactly once, by a manifest that names the files which count.

    DIR/day=1/part-NAME-00000.snappy.parquet     data in its final place; NAME is the branch
    DIR/_spark_metadata/17                        the manifest: one record shows a whole batch at once
    DIR/_poundlock/NAME.open                      a task is writing the branch
    DIR/_poundlock/NAME.staged                    a prepared branch: the manifest's lines for its files
    DIR/_poundlock/NAME.aborted                   the tombstone of a branch that must never count

Data is written to its final place, and publishing moves nothing: object stores have no rename, a copy
costs as much as writing, and no store moves many files at one instant. The manifest is the commit and
the witness in one: a branch is committed if the manifest names its files.

A tombstone alone would not stop a driver that was suspended after it looked for one. So whoever
writes a tombstone also appends an empty record to the manifest. The suspended driver then cannot create
its own record under that number, and it looks again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.mismatch import moved_target
from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import derive_sink_name
from poundlock.core.participant import Column, Commitment, Participant, Semantic, frame_mismatch
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.site import Site, reachable
from poundlock.errors import UsageError
from poundlock.filesystem import open_filesystem
from poundlock.sinks.files.branches import Branches, branch_of
from poundlock.sinks.files.manifest import METADATA, DataFile, Manifest, qualified, uri_of
from poundlock.sinks.files.types import (
    COMPRESSIONS,
    LINE,
    PARTITION,
    ParquetFile,
    TextFile,
    column_problems,
    csv_text,
    expressions,
    format_of,
    partition_text,
    text_line,
)
from poundlock.sinks.files.writer import OURS, FilesWriter, ListPrint
from poundlock.sinks.partitions import escaped


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
        retention_hours: Files that are older leave the manifest, so readers no longer see them. By
            default all stay, and the manifest grows with every file.
    """

    system = "Files"
    commitment = Commitment.STAGED
    after_restore = ""
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
        retention_hours: float | None = None,
    ):
        self.place = qualified(os.fspath(path))  # for file systems
        self.uri = uri_of(self.place)  # for the manifest
        label = name or derive_sink_name(self.place.rpartition("/")[2])
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
        if retention_hours is not None and not retention_hours > 0:
            raise UsageError(
                f"retention_hours={retention_hours}: give a positive number, or leave it out to keep "
                "all files",
                sink=self.name,
            )
        self.retention_hours = retention_hours
        self._header = header
        self._columns: dict[str, str] = {}  # types of the DataFrame, by name
        self._first_line: str | None = None
        self._site: Site | None = None
        self._manifest: Manifest | None = None
        self._is_new = False  # whether the directory had no manifest record when last checked

    def __repr__(self) -> str:
        return f"Files({self.place!r}, format={self.format!r}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_site": None, "_manifest": None}

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            hours = self.retention_hours
            self._manifest = Manifest(
                self.place, branch_of, None if hours is None else hours * 3600
            )
        return self._manifest

    @property
    def branches(self) -> Branches:
        return Branches(self.place, self.manifest, self._publish)

    def _publish(self, files: Sequence[DataFile]) -> bool:
        if self._site is None:
            raise UsageError("the sink is not part of a pipeline yet", sink=self.name)
        return self.manifest.publish(files, self._site.create)

    def reader_settings(self) -> str:
        needs = "multiLine, if texts have line breaks" if self.format == "csv" else "nothing"
        if self.semantic is not Semantic.EXACTLY_ONCE:
            return needs
        return (
            f"{needs} in Spark, if it reads the directory itself, not a partition of it or a pattern; "
            "others read the files that poundlock.sinks.files.committed() returns"
        )

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        problems = column_problems(columns, self.format, self.partition_by)
        if problems:
            raise frame_mismatch(self.name, problems, columns)
        self._columns = {name: column.type for name, column in columns.items()}
        data = {name: it for name, it in columns.items() if name not in self.partition_by}
        if self._header:
            self._first_line = ",".join(csv_text(name) for name in data)
        partitions = {
            PARTITION + name: partition_text(name, columns[name]) for name in self.partition_by
        }
        return partitions | expressions(data, self.format)

    def attach(self, site: Site) -> None:
        self._site = site

    def preflight(self) -> list[str]:
        system, root = open_filesystem(self.place)
        with reachable(self.place):
            found = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        names = {entry.base_name for entry in found}
        exact = self.semantic is Semantic.EXACTLY_ONCE
        problem = self._manifest_problem(names) if exact else self._plain_problem(names)
        if problem:
            raise UsageError(problem, sink=self.name)
        return []

    def _plain_problem(self, names: set[str]) -> str | None:
        """Say why files without a manifest cannot be written beside these."""
        if METADATA not in names:
            return None
        return (
            f"{self.place} has a manifest ({METADATA}), and readers would not see files that it "
            f"does not name: write semantic={self.semantic.value!r} to a directory of its own"
        )

    def _manifest_problem(self, names: set[str]) -> str | None:
        """Say why files with a manifest cannot be written beside these."""
        if METADATA not in names and any(name[0] not in "._" for name in names):
            return (
                f"{self.place} has files already, but no manifest ({METADATA}): with one, readers "
                "would no longer see them. Write to a new directory; to have both in one, first copy "
                "the old files there with a pipeline (poundlock.read_files)"
            )
        if METADATA in names and OURS not in names and Manifest(self.place).newest_file():
            return (
                f"{self.place} was written by Spark's own file sink, whose batch numbers are not ours: "
                "write to a new directory"
            )
        return self._layout_problem()

    def _layout_problem(self) -> str | None:
        """Compare with existing files: readers need one format, and the same partition columns."""
        published = self.manifest.newest_file()
        self._is_new = published is None
        for file in [published] if published else self.branches.first_staged():
            if not file.uri.startswith(f"{self.uri}/"):
                continue  # the same directory by another name: its path tells nothing
            *directories, name = file.below(self.uri).split("/")
            found = format_of(name), [part.partition("=")[0] for part in directories]
            if found != (self.format, [escaped(name) for name in self.partition_by]):
                return (
                    f"{self.place} holds {found[0]} partitioned by {_listed(found[1])}, and not "
                    f"{self.format} by {_listed(self.partition_by)}: readers would miss rows of one or "
                    "the other. Write to a new directory"
                )
        return None

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
        staged = self.branches.read_staged({it.id: ListPrint.of(it) for it in receipts})
        # In a new directory another pipeline may have started at the same time, with another layout.
        # Both look after they wrote their files, so the later one sees the files of the other.
        problem = self._layout_problem() if self._is_new else None
        return [
            problem if staged[receipt.id] is not None else "its files are gone"
            for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        for receipt in receipts:
            there = receipt.handle.get("directory", self.uri)
            if there != self.uri:
                raise moved_target(receipt, "directory", there, self.uri)
        states = self.branches.commit({it.id: ListPrint.of(it) for it in receipts})
        return [states[receipt.id] for receipt in receipts]

    def find(self, namespace: Namespace) -> list[Stray]:
        return [
            Stray(self.name, str(name), name.generation, state)
            for name, state in self.branches.list_open(namespace, self.name)
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        names = [stray.id for stray in strays]
        states = self.branches.abort(names)
        return [states[name] for name in names]

    def newest_generation(self, namespace: Namespace) -> int:
        return self.branches.newest_generation(namespace, self.name)

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        names = self.branches.newest_committed(state.generation.namespace, self.name)
        return state.first_unexplained(self.name, ((name.batch, str(name)) for name in names))

    def newest_batch(self, namespace: Namespace) -> int | None:
        names = self.branches.newest_committed(namespace, self.name)
        return max((name.batch for name in names), default=None)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        return self.branches.logs_of(pipeline, self.name)

    def prune(self, namespace: Namespace, floor: int) -> None:
        self.branches.prune(namespace, self.name, floor)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "nothing"


def _choice(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
