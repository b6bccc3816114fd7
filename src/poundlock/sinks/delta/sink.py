"""Delta Lake: rows into a table, exactly once, a whole batch in one version of the table.

Rows are stored beside the log, and after the decision the driver's Spark session appends them in one
Delta transaction. With each version Delta remembers who wrote it, and that writer's own version
(`txnAppId`, `txnVersion`). It ignores a write that it has seen, so a repeat changes nothing.

Before a write, the driver creates an intent beside the stored rows, only if there is none: the list of
branches that the write has. So two drivers that commit one batch write the same rows with the same
version, and Delta ignores one of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Json, Namespace, Receipt, checked_name
from poundlock.core.naming import BranchName, derive_sink_name, parse_name
from poundlock.core.participant import Column, Commitment, Semantic, Writer, frame_mismatch
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.site import reachable
from poundlock.core.sparksql import holds, quoted
from poundlock.core.taskerrors import Seal
from poundlock.errors import BadRow, InDoubt, NotAuthorised, UsageError
from poundlock.filesystem import open_filesystem
from poundlock.sinks.delta.errors import translate_errors
from poundlock.sinks.delta.invariants import Invariants, names_in, read_requirements
from poundlock.sinks.partitions import SparkDirectories, room_for_directories
from poundlock.sinks.rowstore import RowStore, StoredBranches, StoredWriter

_WRITES = 1000  # at most, of one batch: there are several only if branches were lost and repaired
_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_SCHEMA = b"poundlock.schema"  # in the metadata of stored rows: their columns in Spark SQL
_UNFIT = "void|interval"
_FILE_SYSTEMS = {"s3a": "s3", "gs": "gcs", "abfs": "abfs", "abfss": "abfs", "hdfs": "hdfs"}
_NO_PARTITION = "array<|map<|struct<|variant|binary"
_NO_NAME = frozenset(" ,;{}()\n\t=")  # without column mapping, which a new table does not have


@dataclass(frozen=True, slots=True)
class _Batch:
    namespace: Namespace
    sink: str
    number: int

    def file(self, write: int) -> str:
        space = self.namespace
        return f"{space.pipeline}.{space.identity}.{self.sink}.{self.number}.{write}.intent"

    def version(self, write: int) -> int:
        return self.number * _WRITES + write


class Delta(StoredBranches):
    """A Delta table. The session must know Delta: `poundlock.session(delta=True)`.

    Args:
        path: The table's directory. The first batch creates it.
        name: The sink's name in its pipeline; the directory's by default.
        partition_by: Columns to partition a new table by.
        merge_schema: Add the DataFrame's columns that the table does not have.
        semantic: Only "exactly_once": tasks cannot write rows without a decision.
    """

    system = "Delta"
    commitment = Commitment.STAGED
    after_restore = ""
    only_appends = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        partition_by: str | Sequence[str] = (),
        merge_schema: bool = False,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        self.path = os.fspath(path).rstrip("/")
        self.name = checked_name("sink name", name or derive_sink_name(os.path.basename(self.path)))
        if Semantic(semantic) is not Semantic.EXACTLY_ONCE:
            raise UsageError(
                "Delta is written by the driver after the decision: leave semantic= out",
                sink=self.name,
            )
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self.merge_schema = merge_schema
        self._schema = ""
        self._invariants = Invariants()
        self._directories = SparkDirectories()
        self._place: str | None = None  # the path with its file system

    def __repr__(self) -> str:
        return f"Delta({self.path!r}, name={self.name!r})"

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        problems = [
            f"there is no column {name!r} to partition by"
            for name in self.partition_by
            if name not in columns
        ]
        problems += [
            f"column {name!r} has type {column.type}, which Delta cannot hold"
            for name, column in columns.items()
            if holds(column.type, _UNFIT)
        ]
        problems += [
            f"column {name!r} has type {columns[name].type}, by which Delta cannot partition"
            for name in self.partition_by
            if name in columns and holds(columns[name].type, _NO_PARTITION)
        ]
        if not columns.keys() - set(self.partition_by):
            problems.append("no column is left besides those to partition by")
        self._schema = ", ".join(
            f"{quoted(name)} {column.type}" for name, column in columns.items()
        )  # a start also compares the table with a frame that has problems
        if problems:
            raise frame_mismatch(self.name, problems, columns)
        return super().project(columns)

    def preflight(self) -> list[str]:
        spark = self._spark()
        if _EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
            raise UsageError(
                "this Spark session does not know Delta: open it with poundlock.session(delta=True), "
                "or with delta-spark's own configuration",
                sink=self.name,
            )
        self._place = str(self._path(spark).toString())
        try:
            table = spark.read.format("delta").load(self.path).schema
        except Exception as error:
            if type(error).__name__ != "AnalysisException":
                raise
            self._check_new(spark)
            return self._read_directories(spark, self.partition_by)
        schema, properties, partitions = read_requirements(spark, self.path)
        found = Invariants.of(schema, properties)
        self._check_table(spark, table, found, partitions)
        self._invariants, warnings = self._select_checks(spark, found)
        # Otherwise the names of directories are chosen at random.
        by_value = (
            properties.get("delta.columnMapping.mode", "none") == "none"
            and properties.get("delta.randomizeFilePrefixes") != "true"
        )
        return warnings + self._read_directories(spark, partitions, by_value=by_value)

    def target(self) -> dict[str, Json]:
        return {"path": self._place}

    def _read_directories(
        self, spark: Any, partitions: Sequence[str], *, by_value: bool = True
    ) -> list[str]:
        """Find out which directories Spark can make for values. Return warnings."""
        uri, jvm = self._path(spark).toUri(), spark._jvm
        encoding = str(jvm.System.getProperty("sun.jnu.encoding"))
        is_ascii = uri.getScheme() == "file" and encoding.upper() not in ("UTF-8", "UTF8")
        columns = tuple(name.lower() for name in partitions)
        file = "/part-00000-01234567-89ab-cdef-0123-456789abcdef.c000.snappy.parquet.crc"
        room = room_for_directories(_FILE_SYSTEMS.get(uri.getScheme(), ""), uri.getPath() + file)
        self._directories = SparkDirectories(columns, by_value, room, is_ascii)
        if not columns or not by_value or not is_ascii:
            return []
        return [
            f"the JVM's locale has the encoding {encoding}, so it can make directories only of ASCII "
            "characters: a row with others in a partition column is a bad row. Start Spark with "
            "LC_ALL=C.UTF-8"
        ]

    def _path(self, spark: Any) -> Any:
        path = spark._jvm.org.apache.hadoop.fs.Path(self.path)
        system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        return system.makeQualified(path)

    def _check_new(self, spark: Any) -> None:
        """Check that a table can be created. Delta would check it only after the decision."""
        path = self._path(spark)
        system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        # An interrupted write of this sink has left files too. It continues from its intent.
        if system.exists(path) and len(system.listStatus(path)) and not self._has_intents():
            raise UsageError(
                f"{self.path} is no Delta table, and not empty: its files would not be part of the "
                "table. Write to a new directory",
                sink=self.name,
            )
        schema = json.loads(spark.createDataFrame([], self._schema).schema.json())
        unfit = [name for name in names_in(schema) if _NO_NAME.intersection(name)]
        if unfit:
            raise UsageError(
                f"a new Delta table cannot have columns or fields called {unfit}: name them without "
                "blanks and any of ,;{}()=, or create the table first, with column mapping",
                sink=self.name,
            )

    def _check_table(
        self, spark: Any, table: Any, found: Invariants, partitions: Sequence[str]
    ) -> None:
        """Compare the columns with the table's. Delta would check them only after the decision."""
        frame = spark.createDataFrame([], self._schema).schema
        theirs, ours = (
            {field.name.lower(): field.dataType.simpleString() for field in schema.fields}
            for schema in (table, frame)
        )
        problems = [
            f"column {name!r} has type {kind}, but {theirs[name]} in the table"
            for name, kind in ours.items()
            if name in theirs and theirs[name] != kind
        ]
        if not self.merge_schema:
            problems += [
                f"the table has no column {name!r} (merge_schema=True adds it)"
                for name in ours
                if name not in theirs
            ]
        problems += [
            f"the table requires {name!r}, and the DataFrame has no such column"
            for name in sorted(found.required - found.filled - ours.keys())
        ]
        problems += self._partition_problems(partitions)
        if problems:
            raise UsageError(
                f"the DataFrame does not fit the table {self.path}: {'; '.join(problems)}",
                sink=self.name,
            )

    def _partition_problems(self, partitions: Sequence[str]) -> list[str]:
        ours, theirs = ([name.lower() for name in it] for it in (self.partition_by, partitions))
        if not ours or ours == theirs:
            return []
        return [
            f"the table is partitioned by {list(partitions)}, and not by {self.partition_by} "
            "(leave partition_by= out)"
        ]

    def _select_checks(self, spark: Any, found: Invariants) -> tuple[Invariants, list[str]]:
        """Return the checks that use only the DataFrame's columns, and warnings of the others."""
        frame = spark.createDataFrame([], self._schema)
        checks, warnings = dict[str, str](), list[str]()
        late = "so a row that breaks it stops the pipeline after the decision"
        for name, check in found.checks.items():
            try:
                frame.selectExpr(check)
                checks[name] = check
            except Exception as error:
                if type(error).__name__ != "AnalysisException":
                    raise
                if name not in found.filled:  # otherwise Delta computes the column
                    warnings.append(
                        f"the DataFrame lacks columns required by {name} of the table {self.path}, "
                        + late
                    )
        warnings += [
            f"the lengths inside {name} of the table {self.path} are not checked, {late}"
            for name in found.unseen
        ]
        return replace(found, checks=checks), warnings

    def _spark(self) -> Any:
        if self._site is None or self._site.spark is None:
            raise UsageError("Delta needs a Spark session on the driver", sink=self.name)
        return self._site.spark

    def begin(self, branch: Branch) -> Writer:
        return _Writer(self, branch)

    # Before the decision, on the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        reasons = super().check(receipts)
        if self._invariants.checks and not any(reasons):
            self._check_rows([receipt.id for receipt in receipts])
        return reasons

    def _check_rows(self, names: Sequence[str]) -> None:
        """Let Spark count the rows that the table will refuse. Raises `BadRow` if there are any."""
        checks = self._invariants.checks
        counts = [f"count_if(NOT coalesce(({check}), false))" for check in checks.values()]
        doing, seal = f"the rows cannot be checked against the table {self.path}", Seal()
        with translate_errors(doing, self.name, decided=False, seal=seal):
            found = self._rows(names, seal).selectExpr(*counts).first()
        broken = [f"{name} ({n} rows)" for name, n in zip(checks, found, strict=True) if n]
        if broken:
            raise BadRow(
                f"rows break constraints of the table {self.path}: {', '.join(broken)}. Correct the "
                "query",
                sink=self.name,
            )

    # After the decision, on the driver.

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        raise AssertionError("a batch is written as a whole, by the driver's session")

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        batches = dict[_Batch, list[str]]()
        for receipt in receipts:
            name = parse_name(receipt.id)
            assert name is not None
            batch = _Batch(name.namespace, name.sink, name.batch)
            batches.setdefault(batch, []).append(receipt.id)
        self._check_target(receipts)
        for batch, names in batches.items():
            self._commit_batch(batch, names)
        states = self.row_store.states()
        return [states[receipt.id] for receipt in receipts]

    def _commit_batch(self, batch: _Batch, names: Sequence[str]) -> None:
        assert self._site is not None
        while True:
            states, intents = self.row_store.states(), self._intents(batch)
            meant = set[str]()
            for write, members in enumerate(intents):
                # If a member was lost before the intent was created, nobody can execute the intent.
                if not any(states.get(name) is BranchState.ABORTED for name in members):
                    meant |= set(members)
                    self._execute(batch, write, members, states)
            self.row_store.settle(set(names) - set(states) - meant, sent=False)
            waiting = [n for n in names if n not in meant and states.get(n) is BranchState.PREPARED]
            if not waiting:
                return
            uri = f"{self.row_store.uri}/{batch.file(len(intents))}"
            # By this driver or another: look again.
            self._site.create(uri, [json.dumps(waiting).encode()])

    def _execute(
        self, batch: _Batch, write: int, members: Sequence[str], states: Mapping[str, BranchState]
    ) -> None:
        """Write the branches of an intent, unless they were written. Then mark all of them as sent."""
        found = {name: states.get(name) for name in members}
        if all(state is BranchState.COMMITTED for state in found.values()):
            return
        if not any(state is BranchState.COMMITTED for state in found.values()):
            gone = [name for name, state in found.items() if state is None]
            if gone:
                raise InDoubt(
                    f"the stored rows of {gone[0]} were taken away while they were written to "
                    f"{self.path}. Look for txn version {batch.version(write)} in the table's "
                    "history before you continue",
                    sink=self.name,
                )
            self._append(batch, write, members)
        self.row_store.settle(members, sent=True)

    def _append(self, batch: _Batch, write: int, members: Sequence[str]) -> None:
        seal, doing = Seal(), f"{self.path} could not be written"
        with translate_errors(doing, self.name, decided=True, seal=seal):
            writer = (
                self._rows(members, seal)
                .write.format("delta")
                .mode("append")
                .option("txnAppId", self._app_id(batch.namespace))
                .option("txnVersion", str(batch.version(write)))
                .option("mergeSchema", str(self.merge_schema).lower())
            )
            if self.partition_by:
                writer = writer.partitionBy(*self.partition_by)
            writer.save(self.path)

    def _rows(self, names: Sequence[str], seal: Seal) -> Any:
        """Return a DataFrame of the stored rows of branches, with the columns that they have.

        The pipeline's own DataFrame may have others, if it was started again with another query.
        """
        spark = self._spark()
        schema = _schema_of(next(self.row_store.read(names[0])))
        listed = spark.sparkContext.parallelize([(name,) for name in names], len(names))
        return spark.createDataFrame(listed, "name string").mapInArrow(
            partial(_read, self.row_store, schema, seal), schema
        )

    def _has_intents(self) -> bool:
        return any(file.endswith(".intent") for file in self.row_store.list_files())

    def _intents(self, batch: _Batch) -> list[list[str]]:
        system, root = open_filesystem(self.row_store.uri)
        found: list[list[str]] = []
        while True:
            try:
                path = f"{root}/{batch.file(len(found))}"
                with reachable(self.row_store.uri), system.open_input_stream(path) as stream:
                    found.append(json.loads(stream.read()))
            except FileNotFoundError:
                return found

    def committed_beyond(self, state: LogState) -> str | None:
        """Look also at the table. The stored rows are kept beside the log, and restored with it."""
        assert state.generation is not None
        batch = self.newest_batch(state.generation.namespace)
        if batch is not None and not state.explains(self.name, batch):
            return f"rows of batch {batch}"
        return super().committed_beyond(state)

    def newest_batch(self, namespace: Namespace) -> int | None:
        version = self._transactions().get(self._app_id(namespace))
        return version.get() // _WRITES if version.isDefined() else None

    def logs_of(self, pipeline: str) -> frozenset[str]:
        apps = str(self._transactions().keys().mkString("\n"))
        ours = rf"^poundlock\.{re.escape(pipeline)}\.([0-9a-f]+)\.{re.escape(self.name)}$"
        return super().logs_of(pipeline).union(re.findall(ours, apps, re.MULTILINE))

    def _transactions(self) -> Any:
        spark = self._spark()
        with translate_errors(f"{self.path} could not be read", self.name, decided=False):
            none, delta = spark._jvm.scala.Option.empty(), spark._jvm.org.apache.spark.sql.delta
            table = delta.DeltaLog.forTable(spark._jsparkSession, self.path)
            return table.update(False, none, none).transactions()

    def _app_id(self, namespace: Namespace) -> str:
        return f"poundlock.{namespace.pipeline}.{namespace.identity}.{self.name}"

    def prune(self, namespace: Namespace, floor: int) -> None:
        ours = re.escape(f"{namespace.pipeline}.{namespace.identity}.{self.name}.")
        intents = re.compile(ours + r"(\d+)\.\d+\.intent")
        for file in self.row_store.list_files():
            if (match := intents.fullmatch(file)) and int(match[1]) < floor:
                self.row_store.delete(file)
        super().prune(namespace, floor)


class _Writer(StoredWriter):
    def __init__(self, sink: Delta, branch: Branch):
        super().__init__(sink.row_store, branch, sink.target())
        self._sink = sink

    def write(self, rows: pa.RecordBatch) -> None:
        broken = self._sink._directories.unfit(rows) | self._sink._invariants.broken(rows)
        if broken:
            reasons = "; ".join(sorted(set(broken.values())))
            raise BadRow(
                f"rows do not fit the table {self._sink.path} ({len(broken)} in all): {reasons}",
                sink=self._sink.name,
                rows=broken,
            )
        # The rows carry their schema, because the driver that commits them may have another DataFrame.
        super().write(rows.replace_schema_metadata({_SCHEMA: self._sink._schema}))


def _schema_of(rows: pa.RecordBatch) -> str:
    found = (rows.schema.metadata or {}).get(_SCHEMA)
    if found is None:
        raise InDoubt(
            "stored rows have no Spark types in their metadata, so this sink did not write them"
        )
    return found.decode()


def _read(
    store: RowStore, schema: str, seal: Seal, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    names = (name for batch in batches for name in batch.column(0).to_pylist())
    with seal.on(InDoubt, NotAuthorised):
        for name in names:
            for rows in store.read(name):
                if _schema_of(rows) != schema:  # Spark would assign columns by position
                    raise InDoubt(
                        f"the stored rows of {name} have other columns than the others of the same "
                        f"batch: {_schema_of(rows)}, not {schema}. None of them was written"
                    )
                yield rows
