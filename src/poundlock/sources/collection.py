"""A collection as a source: rows of this program become a stream that can be replayed.

Spark's checkpoint records which files it has read. So the rows are written once, as files in a
directory that is named by a hash of its content. After a restart the same rows have the same names and
are not read again. Deleted files are written again with the same content. Other rows make another
source.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from poundlock.core.model import checked_name
from poundlock.core.site import reachable
from poundlock.errors import UsageError
from poundlock.filesystem import open_filesystem, sync
from poundlock.ownership import own_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FIRST = 946_684_800  # Spark reads files in the order of their times, so these never change


def from_collection(
    spark: SparkSession,
    rows: Any,
    schema: Any = None,
    *,
    batch_rows: int | None = None,
    name: str | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Make a streaming DataFrame of existing rows.

    Args:
        rows: Whatever `spark.createDataFrame` takes: tuples, dictionaries, a pandas or Arrow table.
        schema: As `spark.createDataFrame` takes it.
        batch_rows: How many rows a batch has; all in one by default.
        name: A name to use instead of the content's hash. A restart with other rows is rejected.
            Without one, other rows are another source, and need a new checkpoint.
        directory: Where to write the rows. All machines must reach it. By default a private directory
            below the home directory, on this machine.
    """
    if batch_rows is not None and batch_rows < 1:
        raise UsageError(f"batch_rows={batch_rows}: a batch needs at least one row")
    frame = spark.createDataFrame(rows, schema)
    table = frame.toArrow()
    content = _digest(table, None)
    label = checked_name("collection name", name) if name else content
    # Other batches are other files, which Spark would read again.
    content = _digest(table, batch_rows)
    place = f"{os.fspath(directory).rstrip('/')}/{label}" if directory else str(_default() / label)
    _write(table, batch_rows or max(table.num_rows, 1), place, content)
    reader = spark.readStream.schema(frame.schema).option("recursiveFileLookup", "false")
    if batch_rows is not None:
        reader = reader.option("maxFilesPerTrigger", "1")
    return reader.parquet(place)


def _default() -> Path:
    """Return a directory that only this user can read and write, because rows may be private."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return own_directory(Path(state) / "poundlock" / "collections")


def _digest(table: pa.Table, batch_rows: int | None) -> str:
    digest = hashlib.sha256(f"{table.schema.remove_metadata()}\n{batch_rows}\n".encode())
    # Not Arrow's bytes, which may differ for equal rows.
    for row in table.combine_chunks().to_pylist():
        digest.update(repr(row).encode())
    return digest.hexdigest()[:32]


def _is_intact(system: Any, path: str, rows: pa.Table) -> bool:
    """Return whether a file has exactly these rows."""
    try:
        with system.open_input_file(path) as stream:
            found = pq.read_table(stream)
    except pa.ArrowInvalid:
        return False
    # Row by row, so that the files are compared as Spark reads them.
    return found.column_names == rows.column_names and list(map(repr, found.to_pylist())) == list(
        map(repr, rows.to_pylist())
    )


def _write(table: pa.Table, size: int, place: str, content: str) -> None:
    """Write missing files, and check those that exist. Their names contain the content's hash."""
    system, root = open_filesystem(place)
    with reachable(place):
        system.create_dir(root, recursive=True)
        entries = system.get_file_info(pafs.FileSelector(root))
        there = {entry.base_name for entry in entries if not entry.base_name.startswith(".")}
        starts = range(0, table.num_rows, size)
        names = [f"{number:06}-{content}.parquet" for number in range(len(starts))]
        if there - set(names):
            raise UsageError(
                f"{place} was written with different rows or different batches: a collection must "
                "stay the same. Give the new one another name=, and its pipeline a new checkpoint"
            )
        for number, (name, start) in enumerate(zip(names, starts, strict=True)):
            part = table.slice(start, size)
            if name in there:
                if not _is_intact(system, f"{root}/{name}", part):
                    raise UsageError(
                        f"{place}/{name} does not have the rows that were written to it: it is "
                        "damaged, or something else has written there. Delete the file: it is then "
                        "written again"
                    )
                continue
            aside = f"{root}/.{uuid.uuid4().hex}.tmp"
            with system.open_output_stream(aside, compression=None) as stream:
                pq.write_table(part, stream, coerce_timestamps="us")
            if isinstance(system, pafs.LocalFileSystem):
                os.utime(aside, (_FIRST + number, _FIRST + number))
            sync(system, aside)
            system.move(aside, f"{root}/{name}")
            sync(system, f"{root}/{name}")
