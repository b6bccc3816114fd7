"""Delta Lake: rows into a table, exactly once, a whole batch in one version of the table.

Rows are kept beside the log, and after the decision the driver's Spark session appends them in one
transaction of Delta's. Delta remembers with each version who wrote it and how far that writer was
(`txnAppId`, `txnVersion`), and passes over a write that it has seen: a repeat changes nothing.

What goes into one write is first put down as an intent on the shelf, created only if absent. So two
drivers that commit one batch write the same rows under the same number, and one of them is passed over.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from poundlock import errors
from poundlock.core.model import Branch, Namespace, Receipt, checked_name
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Column, Commitment, Semantic, Writer
from poundlock.core.protocol import BranchState
from poundlock.core.site import reachable
from poundlock.core.sparksql import holds, quoted
from poundlock.errors import BadRow, InDoubt, PoundlockError, Unavailable, UsageError
from poundlock.filesystem import open_filesystem
from poundlock.sinks.rowstore import RowStore, StoredBranches, StoredWriter

_WRITES = 1000  # of one batch: more than one only where branches were lost and repaired
_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
# Words of a column's metadata.
_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"
_GENERATED = "delta.generationExpression"
_FILLED = (_GENERATED, "delta.identity.", "CURRENT_DEFAULT")
_CONSTRAINT = "delta.constraints."
_SCHEMA = b"poundlock.schema"  # in the metadata of kept rows: their columns in Spark's words
_UNFIT = "void|interval"
_NO_PARTITION = "array<|map<|struct<|variant|binary"
_NO_NAME = frozenset(" ,;{}()\n\t=")  # in a table that has no column mapping, as new ones have none


@dataclass(frozen=True, slots=True)
class _Batch:
    namespace: Namespace
    sink: str
    number: int

    def file(self, write: int) -> str:
        space = self.namespace
        return f"{space.pipeline}.{space.identity}.{self.sink}.{self.number}.{write}.intent"


class Delta(StoredBranches):
    """A Delta table. The session must know Delta: `poundlock.session(delta=True)`.

    Args:
        path: The table's directory. It is made by the first batch.
        name: The sink's name in its pipeline; the directory's by default.
        partition_by: Columns to partition a new table by.
        merge_schema: Add columns to the table that the frame has and the table has not.
        semantic: "exactly_once"; rows cannot be written straight through.
    """

    system = "Delta"
    commitment = Commitment.STAGED
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
        label = name or re.sub(r"[^A-Za-z0-9_-]+", "-", self.path.rpartition("/")[2]).strip("-_")
        self.name = checked_name("sink name", label)
        if Semantic(semantic) is not Semantic.EXACTLY_ONCE:
            raise UsageError(
                "Delta is written by the driver after the decision: leave semantic= out",
                sink=self.name,
            )
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self.merge_schema = merge_schema
        self._schema = ""
        self._invariants = _Invariants()

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
            f"column {name!r} has type {columns[name].type}, which no table is partitioned by"
            for name in self.partition_by
            if name in columns and holds(columns[name].type, _NO_PARTITION)
        ]
        if not columns.keys() - set(self.partition_by):
            problems.append("no column is left beside those to partition by")
        if problems:
            raise UsageError(f"the frame does not fit: {'; '.join(problems)}", sink=self.name)
        self._schema = ", ".join(
            f"{quoted(name)} {column.type}" for name, column in columns.items()
        )
        return {name: column.sql for name, column in columns.items()}

    def preflight(self) -> list[str]:
        spark = self._spark()
        if _EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
            raise UsageError(
                "this Spark session does not know Delta: open it with poundlock.session(delta=True), "
                "or with delta-spark's own configuration",
                sink=self.name,
            )
        try:
            table = spark.read.format("delta").load(self.path).schema
        except Exception as error:
            if type(error).__name__ != "AnalysisException":
                raise
            self._check_new(spark)
            return []
        schema, properties, partitions = _demands(spark, self.path)
        found = _Invariants.of(schema, properties)
        self._check_table(spark, table, found, partitions)
        self._invariants, warnings = self._known(spark, found)
        return warnings

    def _check_new(self, spark: Any) -> None:
        """See that a table can be made: Delta would say no too late."""
        hadoop = spark._jvm.org.apache.hadoop.fs
        path = hadoop.Path(self.path)
        system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        # A write of ours that was cut short has left files too, and goes on from its intent.
        if system.exists(path) and len(system.listStatus(path)) and not self._has_intents():
            raise UsageError(
                f"{self.path} is no Delta table, and not empty: what is there would not be part of the "
                "table. Write to a new directory",
                sink=self.name,
            )
        schema = json.loads(spark.createDataFrame([], self._schema).schema.json())
        unfit = [name for name in _names(schema) if _NO_NAME.intersection(name)]
        if unfit:
            raise UsageError(
                f"a new Delta table cannot have columns or fields called {unfit}: name them without "
                "blanks and any of ,;{}()=, or make the table first, with column mapping",
                sink=self.name,
            )

    def _check_table(
        self, spark: Any, table: Any, found: _Invariants, partitions: Sequence[str]
    ) -> None:
        """Compare the columns with those of the table: Delta would say no too late."""
        there = {field.name.lower(): field.dataType.simpleString() for field in table.fields}
        mine = {
            field.name.lower(): field.dataType.simpleString()
            for field in spark.createDataFrame([], self._schema).schema.fields
        }
        problems = [
            f"column {name!r} has type {kind}, but {there[name]} in the table"
            for name, kind in mine.items()
            if name in there and there[name] != kind
        ]
        if not self.merge_schema:
            problems += [
                f"the table has no column {name!r} (merge_schema=True adds it)"
                for name in mine
                if name not in there
            ]
        problems += [
            f"the table requires {name!r}, and the frame has no such column"
            for name in sorted(found.required - found.filled - mine.keys())
        ]
        asked, has = ([name.lower() for name in names] for names in (self.partition_by, partitions))
        if asked and asked != has:
            problems.append(
                f"the table is partitioned by {list(partitions)}, and not by {self.partition_by} "
                "(leave partition_by= out)"
            )
        if problems:
            raise UsageError(
                f"the frame does not fit the table {self.path}: {'; '.join(problems)}",
                sink=self.name,
            )

    def _known(self, spark: Any, found: _Invariants) -> tuple[_Invariants, list[str]]:
        """Keep the checks that the frame's columns are enough for; warn of the others."""
        frame = spark.createDataFrame([], self._schema)
        checks, warnings = dict[str, str](), list[str]()
        late = (
            f"of the table {self.path}: a row that breaks it stops the pipeline after the decision"
        )
        for name, check in found.checks.items():
            try:
                frame.selectExpr(check)
                checks[name] = check
            except Exception as error:
                if type(error).__name__ != "AnalysisException":
                    raise
                if name not in found.filled:  # else Delta makes the column itself
                    warnings.append(f"the frame has not all columns for {name} {late}")
        warnings += [f"nobody looks at the lengths inside {name} {late}" for name in found.unseen]
        return replace(found, checks=checks), warnings

    def _spark(self) -> Any:
        if self._site is None or self._site.spark is None:
            raise UsageError("Delta needs a Spark session on the driver", sink=self.name)
        return self._site.spark

    # In a task.

    def begin(self, branch: Branch) -> Writer:
        return _Writer(self, branch)

    # Before the decision, on the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        reasons = super().check(receipts)
        if self._invariants.checks and not any(reasons):
            self._look_at([receipt.id for receipt in receipts])
        return reasons

    def _look_at(self, names: Sequence[str]) -> None:
        """Have Spark look for rows that the table will refuse. Say why, and how many."""
        checks = self._invariants.checks
        counts = [f"count_if(NOT coalesce(({check}), false))" for check in checks.values()]
        with _in_our_words(
            f"the rows cannot be held against {self.path}", self.name, decided=False
        ):
            found = self._rows(names).selectExpr(*counts).first()
        broken = [f"{name} ({n} rows)" for name, n in zip(checks, found, strict=True) if n]
        if broken:
            raise BadRow(
                f"rows break what the table {self.path} demands: {', '.join(broken)}. Correct the "
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
                # A member that was found gone before the intent was put down: nobody can execute it.
                if not any(states.get(name) is BranchState.ABORTED for name in members):
                    meant |= set(members)
                    self._execute(batch, write, members, states)
            for name in set(names) - set(states) - meant:
                self.row_store.settle(name, sent=False)
            waiting = [n for n in names if n not in meant and states.get(n) is BranchState.PREPARED]
            if not waiting:
                return
            uri = f"{self.row_store.uri}/{batch.file(len(intents))}"
            self._site.create(uri, json.dumps(waiting).encode())  # ours, or another's: look again

    def _execute(
        self, batch: _Batch, write: int, members: Sequence[str], states: Mapping[str, BranchState]
    ) -> None:
        """Write what an intent names, unless it was written. Afterwards all of it counts as sent."""
        found = {name: states.get(name) for name in members}
        if all(state is BranchState.COMMITTED for state in found.values()):
            return
        if not any(state is BranchState.COMMITTED for state in found.values()):
            gone = [name for name, state in found.items() if state is None]
            if gone:
                raise InDoubt(
                    f"the kept rows of {gone[0]} were taken away while they were written to "
                    f"{self.path}. Look at the table's history for txn version "
                    f"{self._version(batch, write)} before going on",
                    sink=self.name,
                )
            self._append(batch, write, members)
        for name in members:
            self.row_store.settle(name, sent=True)

    def _append(self, batch: _Batch, write: int, members: Sequence[str]) -> None:
        space = batch.namespace
        with _in_our_words(f"{self.path} could not be written", self.name, decided=True):
            writer = (
                self._rows(members)
                .write.format("delta")
                .mode("append")
                .option("txnAppId", f"poundlock.{space.pipeline}.{space.identity}.{self.name}")
                .option("txnVersion", str(self._version(batch, write)))
                .option("mergeSchema", str(self.merge_schema).lower())
            )
            if self.partition_by:
                writer = writer.partitionBy(*self.partition_by)
            writer.save(self.path)

    def _rows(self, names: Sequence[str]) -> Any:
        """Make a frame of the kept rows of branches, with the columns that they were kept with.

        Those of the pipeline's frame may be others by now: it was started again with another query.
        """
        spark = self._spark()
        schema = _schema_of(next(self.row_store.read(names[0])))
        listed = spark.sparkContext.parallelize([(name,) for name in names], len(names))
        return spark.createDataFrame(listed, "name string").mapInArrow(
            partial(_read, self.row_store, schema), schema
        )

    @staticmethod
    def _version(batch: _Batch, write: int) -> int:
        return batch.number * _WRITES + write

    def _has_intents(self) -> bool:
        system, root = open_filesystem(self.row_store.uri)
        with reachable(self.row_store.uri):
            there = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        return any(entry.base_name.endswith(".intent") for entry in there)

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

    def prune(self, namespace: Namespace, floor: int) -> None:
        system, root = open_filesystem(self.row_store.uri)
        pattern = re.compile(
            re.escape(f"{namespace.pipeline}.{namespace.identity}.{self.name}.")
            + r"(\d+)\.\d+\.intent"
        )
        with reachable(self.row_store.uri):
            for entry in system.get_file_info(pafs.FileSelector(root, allow_not_found=True)):
                match = pattern.fullmatch(entry.base_name)
                if match and int(match[1]) < floor:
                    system.delete_file(entry.path)
        super().prune(namespace, floor)


@dataclass(frozen=True, slots=True)
class _Invariants:
    """What the table demands of rows, and would say only after the decision. Names in lower case."""

    required: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()  # by Delta itself, where the frame has no such column
    longest: Mapping[str, int] = field(default_factory=dict[str, int])
    unseen: tuple[str, ...] = ()  # columns with lengths inside
    checks: Mapping[str, str] = field(default_factory=dict[str, str])  # name to SQL

    @classmethod
    def of(cls, schema: Mapping[str, Any], properties: Mapping[str, str]) -> _Invariants:
        longest, unseen, checks = dict[str, int](), list[str](), dict[str, str]()
        required, filled = set[str](), set[str]()
        for column in schema["fields"]:
            name, metadata = column["name"].lower(), column["metadata"]
            if not column["nullable"]:
                required.add(name)
            if any(word.startswith(_FILLED) for word in metadata):
                filled.add(name)
            if _GENERATED in metadata:
                checks[name] = f"{quoted(name)} <=> ({metadata[_GENERATED]})"
            if length := re.fullmatch(r"(?:var)?char\((\d+)\)", metadata.get(_LENGTH, "")):
                longest[name] = int(length[1])
            elif _LENGTH in metadata:
                unseen.append(name)
            checks |= _nested(quoted(name), column["type"])
        for name, check in properties.items():
            if name.startswith(_CONSTRAINT):
                checks[f"constraint {name.removeprefix(_CONSTRAINT)}"] = check
        return cls(frozenset(required), frozenset(filled), longest, tuple(unseen), checks)

    def broken(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Name the rows that the table will not take, and why each."""
        found = dict[int, str]()
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if name.lower() in self.required:
                found |= _at(column.is_null(), f"{name} is null, and the table requires it")
            if longest := self.longest.get(name.lower()):
                lengths = pc.call_function("utf8_length", [column])
                too_long = pc.call_function("greater", [lengths, pa.scalar(longest)])
                found |= _at(too_long.fill_null(False), f"{name} is longer than {longest}")
        return found


def _nested(place: str, kind: Any) -> dict[str, str]:
    """Spell in SQL what is required inside a struct, to any depth: Delta then requires that too."""
    if not isinstance(kind, Mapping) or kind["type"] != "struct":
        return {}
    checks = dict[str, str]()
    for inner in kind["fields"]:
        there = f"{place}.{quoted(inner['name'])}"
        if not inner["nullable"]:
            checks[f"{there} NOT NULL"] = f"{there} IS NOT NULL"
        checks |= _nested(there, inner["type"])
    return checks


def _names(kind: Any) -> Iterator[str]:
    """Yield the names of columns, and of fields to any depth, in a schema as JSON."""
    if isinstance(kind, Mapping):
        for inner in kind.get("fields", ()):
            yield inner["name"]
            yield from _names(inner["type"])
        for part in ("elementType", "keyType", "valueType"):
            yield from _names(kind.get(part))


def _demands(spark: Any, path: str) -> tuple[Mapping[str, Any], Mapping[str, str], Sequence[str]]:
    """Read a table's schema, with notes of Delta's that Spark's own hides, properties, partitions."""
    log = spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)
    metadata = log.unsafeVolatileSnapshot().metadata()
    as_java = spark._jvm.scala.jdk.javaapi.CollectionConverters.asJava
    properties, partitions = metadata.configuration(), metadata.partitionColumns()
    return json.loads(metadata.schemaString()), dict(as_java(properties)), list(as_java(partitions))


def _at(mask: Any, reason: str) -> dict[int, str]:
    return dict.fromkeys(pc.call_function("indices_nonzero", [mask]).to_pylist(), reason)


class _Writer(StoredWriter):
    def __init__(self, sink: Delta, branch: Branch):
        super().__init__(sink.row_store, branch)
        self._sink = sink

    def write(self, rows: pa.RecordBatch) -> None:
        broken = self._sink._invariants.broken(rows)
        if broken:
            reasons = "; ".join(sorted(set(broken.values())))
            raise BadRow(
                f"{len(broken)} rows do not fit the table {self._sink.path}: {reasons}",
                sink=self._sink.name,
                rows=broken,
            )
        # Rows say themselves what they are: who commits them may have another frame.
        super().write(rows.replace_schema_metadata({_SCHEMA: self._sink._schema}))


@contextmanager
def _in_our_words(what: str, sink: str, *, decided: bool) -> Generator[None]:
    """Raise Spark's errors as ours, without the values of rows that its words carry."""
    problem: PoundlockError | None = None
    try:
        yield
    except PoundlockError:
        raise
    except Exception as error:  # noqa: BLE001 (Spark's and py4j's are of many kinds)
        problem = _told(error, what, sink, decided=decided)
    if problem is not None:
        raise problem


def _told(error: Exception, what: str, sink: str, *, decided: bool) -> PoundlockError:
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while cause is not None and cause.getCause() is not None:
        cause = cause.getCause()
    kind = type(error).__name__ if cause is None else cause.getClass().getName()
    said = str(error) if cause is None else str(cause.getMessage())
    if ours := re.search(r"^poundlock\.errors\.(InDoubt|NotAuthorised): (.*)$", said, re.MULTILINE):
        return getattr(errors, ours[1])(f"{what}: {ours[2]}", sink=sink)  # a task could not read
    refused = ""
    if type(error).__name__ == "AnalysisException":
        refused = f"Delta refuses the batch: {str(error).splitlines()[0]}"
    elif kind.endswith("InvariantViolationException"):
        refused = "a row breaks a demand of the table that was not there, or not seen, before"
    elif kind.startswith("org.apache.spark.Spark") and not decided:
        refused = f"a row makes an expression of the table fail ({kind.rpartition('.')[2]})"
    if refused and decided:
        return InDoubt(
            f"{what}: {refused}. The batch is decided and its rows are kept: correct the table and "
            "start the pipeline again",
            sink=sink,
        )
    if refused:
        return BadRow(f"{what}: {refused}. Correct the query", sink=sink)
    # What a disk says is no row's.
    text = f": {said}" if kind.startswith(("java.io.", "java.nio.")) else ""
    return Unavailable(f"{what} ({kind}{text}). Nothing is lost: it is tried again", sink=sink)


def _schema_of(rows: pa.RecordBatch) -> str:
    found = (rows.schema.metadata or {}).get(_SCHEMA)
    if found is None:
        raise InDoubt("kept rows do not say of which Spark types they are: they are not ours")
    return found.decode()


def _read(
    shelf: RowStore, schema: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for name in batch.column(0).to_pylist():
            for rows in shelf.read(name):
                if _schema_of(rows) != schema:  # Spark would take columns by their places
                    raise InDoubt(
                        f"the rows kept for {name} have other columns than those of the same batch "
                        f"beside them: {_schema_of(rows)}, not {schema}. None of them was written"
                    )
                yield rows
