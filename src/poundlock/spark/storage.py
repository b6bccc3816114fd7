"""Spark's checkpoint and the transaction log, on local disks and on Hadoop file systems.

On a Hadoop file system, an atomic call publishes a record: on HDFS a rename that does not replace, on
S3A a conditional create. Any other file system must first pass a probe: two writers race for one name.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from poundlock.core.checkpoint import Checkpoint, FileCheckpoint
from poundlock.core.log import NOTE, FileLog, NumberTaken, TransactionLog, record_numbers
from poundlock.errors import Unavailable, UsageError
from poundlock.spark import internals

T = TypeVar("T")

ATOMIC_RENAME = frozenset({"hdfs", "viewfs"})
CONDITIONAL_CREATE = frozenset({"s3a"})

_NO_OFFSET = "-"  # Spark's word in a plan


def resolved(spark: SparkSession, location: str) -> str:
    """Return what a location means to Spark: a path on the local disk, or a URI.

    A path without a scheme is on Hadoop's default file system (fs.defaultFS), which may be any.
    """
    if urlparse(location).scheme != "":
        return location
    try:
        path = internals.qualified_path(spark, location)
    except Py4JJavaError as error:
        raise UsageError(
            f"{location} has no scheme, and Hadoop's default file system (fs.defaultFS) cannot be "
            f"opened: {error.java_exception.toString()}. Give the location with its scheme, such as "
            "file: or hdfs:"
        ) from error
    return path.toUri().getPath() if path.toUri().getScheme() == "file" else path.toString()


def local_path(location: str) -> str | None:
    """Return the path of a local location, None for any other file system.

    Locations that users give must be `resolved` first.
    """
    parsed = urlparse(location)
    if parsed.scheme == "":
        return location
    return parsed.path if parsed.scheme == "file" else None


class HadoopFiles:
    """Calls on a Hadoop file system, in a thread that `query.stop()` cannot interrupt."""

    def __init__(self, spark: SparkSession, location: str):
        self._jvm = internals.jvm(spark)
        self._conf = internals.hadoop_conf(spark)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="poundlock-files")
        self._path = self._jvm.org.apache.hadoop.fs.Path
        self.system = self.call(lambda: self._path(location).getFileSystem(self._conf))
        self.root = self.call(lambda: self.system.makeQualified(self._path(location)).toString())
        self.scheme = urlparse(self.root).scheme

    def call(self, action: Callable[[], T]) -> T:
        """Run in this object's thread. A Java I/O error, of unknown outcome, becomes `Unavailable`."""
        try:
            return self._thread.submit(action).result()
        except Py4JJavaError as error:
            java = error.java_exception
            if "FileAlreadyExists" in java.getClass().getName():
                raise NumberTaken from error
            raise Unavailable(f"file system: {java.toString()}") from error

    def at(self, name: str) -> Any:
        return self._path(f"{self.root}/{name}")

    def make_root(self) -> None:
        self.call(lambda: self.system.mkdirs(self._path(self.root)))

    def read(self, name: str) -> bytes | None:
        def action() -> bytes | None:
            if not self.system.exists(self.at(name)):
                return None
            stream = self.system.open(self.at(name))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

        return self.call(action)

    def names(self, directory: str = "") -> list[str]:
        def action() -> list[str]:
            place = self.at(directory) if directory else self._path(self.root)
            if not self.system.exists(place):
                return []
            return [status.getPath().getName() for status in self.system.listStatus(place)]

        return self.call(action)

    def move(self, source: str, target: str) -> None:
        """Move a directory. Raises `Unavailable` if that is not certain."""

        def action() -> bool:
            self.system.mkdirs(self.at(target).getParent())
            self.system.rename(self.at(source), self.at(target))
            return self.system.exists(self.at(target)) and not self.system.exists(self.at(source))

        if not self.call(action):
            raise Unavailable(f"{self.root}/{source} could not be moved to {target}: try again")

    def delete(self, name: str) -> None:
        self.call(lambda: self.system.delete(self.at(name), False))

    def create(self, name: str, data: bytes) -> None:
        """Publish a whole file. Raise `NumberTaken` if the name exists."""
        self.create_in_pieces(name, [data])

    def create_in_pieces(self, name: str, data: Iterable[bytes]) -> None:
        if self.scheme in CONDITIONAL_CREATE:
            self.call(lambda: self._create_if_absent(name, data))
        else:
            self.call(lambda: self._write_and_rename(name, data))

    def _create_if_absent(self, name: str, data: Iterable[bytes]) -> None:
        # `must`, not `opt`: a store without conditional create must refuse instead of overwriting.
        builder = self.system.createFile(self.at(name)).overwrite(True)
        builder = builder.must("fs.option.create.conditional.overwrite", "true")
        stream = builder.build()
        for piece in data:  # an error leaves the stream open: closing it would publish a part
            stream.write(piece)
        stream.close()

    def _write_and_rename(self, name: str, data: Iterable[bytes]) -> None:
        aside = self.at(f".{uuid.uuid4().hex}.tmp")
        stream = self.system.create(aside, False)
        try:
            for piece in data:
                stream.write(piece)
            stream.hsync()
        except BaseException:
            stream.close()
            self.system.delete(aside, False)
            raise
        stream.close()
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            aside.toUri(), self._conf
        )
        none = self._jvm.org.apache.hadoop.fs.Options.Rename.NONE
        options = self._jvm.java.lang.reflect.Array.newInstance(none.getClass(), 1)
        options[0] = none
        try:
            context.rename(aside, self.at(name), options)
        except Py4JJavaError:
            self.system.delete(aside, False)
            raise

    def check_safe(self) -> None:
        """Check that two writers cannot create the same file. Raises `UsageError`."""
        if self.scheme not in ATOMIC_RENAME | CONDITIONAL_CREATE:
            self.make_root()
            self.probe()

    def probe(self, rounds: int = 20) -> None:
        """Let two writers race for one name, several times. Raises `UsageError` if both succeed."""
        for number in range(rounds):
            name = f".probe-{uuid.uuid4().hex}"
            barrier, winners = threading.Barrier(2), list[bytes]()

            def race(mine: bytes, name=name, barrier=barrier, winners=winners) -> None:
                barrier.wait()
                try:
                    self._write_and_rename(name, [mine])
                    winners.append(mine)
                except Py4JJavaError:
                    pass  # this writer did not win

            racers = [
                threading.Thread(target=race, args=(f"{number}-{side}".encode(),)) for side in "ab"
            ]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            found = self.read(name)
            self.delete(name)
            if len(winners) != 1 or found != winners[0]:
                raise UsageError(
                    f"the file system of {self.root} failed a test in which two writers race to "
                    f"create one file: {len(winners)} succeeded. Exactly one must succeed, and its "
                    "content must stay. Put the log on HDFS, S3A or a local disk (log_location=)"
                )


class HadoopLog(TransactionLog):
    """The log on a Hadoop file system."""

    def __init__(self, files: HadoopFiles):
        super().__init__(files.root)
        self._files = files
        files.check_safe()

    def _create(self, number: int, data: bytes) -> None:
        self._files.create(f"{number:020}.json", data)

    def _read(self, number: int) -> bytes | None:
        return self._files.read(f"{number:020}.json")

    def _numbers(self) -> list[int]:
        return record_numbers(self._files.names())

    def _delete(self, number: int) -> None:
        self._files.delete(f"{number:020}.json")

    def put_note(self, name: str, data: bytes) -> None:
        self._files.create(name, data)

    def notes(self) -> dict[str, bytes]:
        names = [name for name in self._files.names() if name.startswith(NOTE)]
        return {name: self._files.read(name) or b"" for name in names}


def open_log(spark: SparkSession, location: str) -> TransactionLog:
    """Open the log at a location. Raises `UsageError` if its file system is not safe."""
    path = local_path(location)
    if path is not None:
        return FileLog(path)
    return HadoopLog(HadoopFiles(spark, location))


def has_decided(spark: SparkSession, location: str) -> bool:
    """Return whether the log at a location has a decided batch that is not finished."""
    path = local_path(location)
    if path is None:
        log: TransactionLog = HadoopLog(HadoopFiles(spark, location))
    elif Path(path).is_dir():
        log = FileLog(path, create=False)
    else:
        return False
    return bool(log.load().unfinished)


class HadoopCheckpoint(Checkpoint):
    """A checkpoint on a Hadoop file system, which makes files durable by itself."""

    def __init__(self, files: HadoopFiles):
        super().__init__(files.root)
        self._files = files

    def _read(self, name: str) -> bytes | None:
        return self._files.read(name)

    def _names(self, directory: str) -> list[str]:
        return self._files.names(directory)

    def _move_state(self, target: str) -> None:
        self._files.move("state", target)

    def _replace(self, name: str, data: bytes) -> None:
        self._files.delete(name)
        self._files.create(name, data)

    def _remove(self, name: str, data: bytes) -> None:
        if self._files.read(name) == data:
            self._files.delete(name)


def open_checkpoint(spark: SparkSession, location: str) -> Checkpoint:
    """Open the checkpoint of a query, which need not exist yet."""
    path = local_path(location)
    return HadoopCheckpoint(HadoopFiles(spark, location)) if path is None else FileCheckpoint(path)


def source_offsets(plan: bytes, sources: int) -> list[Any]:
    """Return the end offsets in Spark's plan, in the order of the sources; None if a source has none.

    A plan of format v1 has a line for each source. One of format v2 is a map by the source's id, in
    any order, and sources without an offset are not in it.
    """
    version, _, *lines = plan.decode().split("\n")
    if version == "v1":
        texts = lines
    elif version == "v2":
        by_id = dict(line.split(":", 1) for line in lines)
        ids = [str(index) for index in range(sources)]
        if named := sorted(by_id.keys() - ids):
            raise UsageError(
                f"Spark's plan knows sources as {', '.join(named)}, but a source with a consumer "
                "group has no name: set spark.sql.streaming.queryEvolution.enableSourceEvolution to "
                "false, with a new checkpoint location"
            )
        texts = [by_id.get(id_, _NO_OFFSET) for id_ in ids]
    else:
        raise UsageError(f"Spark's offset log has format {version}, which this release cannot read")
    return [None if text == _NO_OFFSET else json.loads(text) for text in texts]
