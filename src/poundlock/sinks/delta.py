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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from poundlock.core.model import Branch, Namespace, Receipt, checked_name
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Column, Commitment, Semantic, Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import BadRow, InDoubt, PoundlockError, Unavailable, UsageError
from poundlock.kept import KeptBranches, KeptWriter, Shelf, open_place, reachable

_WRITES = 1000  # of one batch: more than one only where branches were lost and repaired
_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"  # where Spark keeps it in a column's metadata
_CONSTRAINT = "delta.constraints."
_UNFIT = re.compile(r"(^|[<,:])(void|interval)")


@dataclass(frozen=True, slots=True)
class _Batch:
    namespace: Namespace
    sink: str
    number: int

    def file(self, write: int) -> str:
        space = self.namespace
        return f"{space.pipeline}.{space.identity}.{self.sink}.{self.number}.{write}.intent"


class Delta(KeptBranches):
    """A Delta table. The session must know Delta: `poundlock.session(delta=True)`.

    Args:
        path: The table's directory. It is made by the first batch.
        name: The sink's name in its pipeline; the directory's by default.
        partition_by: Columns to partition a new table by.
        merge_schema: Add columns to the table that the frame has and the table has not.
        semantic: "exactly_once"; rows cannot be written straight through.
    """

    commitment = Commitment.STAGED

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
            if _UNFIT.search(column.type)
        ]
        if problems:
            raise UsageError(f"the frame does not fit: {'; '.join(problems)}", sink=self.name)
        self._schema = ", ".join(
            f"`{name.replace('`', '``')}` {column.type}" for name, column in columns.items()
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
            if type(error).__name__ == "AnalysisException":
                return []  # there is no table yet
            raise
        self._check_table(spark, table)
        quoted = self.path.replace("`", "``")
        detail = spark.sql(f"DESCRIBE DETAIL delta.`{quoted}`").select("properties").first()
        found = _Invariants.of(table, detail["properties"])
        self._invariants, warnings = self._known(spark, found)
        return warnings

    def _check_table(self, spark: Any, table: Any) -> None:
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
            f"the table requires {field.name!r}, and the frame has no such column"
            for field in table.fields
            if not field.nullable and field.name.lower() not in mine
        ]
        if problems:
            raise UsageError(
                f"the frame does not fit the table {self.path}: {'; '.join(problems)}",
                sink=self.name,
            )

    def _known(self, spark: Any, found: _Invariants) -> tuple[_Invariants, list[str]]:
        """Keep the constraints that the frame's columns are enough for; warn of the others."""
        frame = spark.createDataFrame([], self._schema)
        checks, warnings = dict[str, str](), list[str]()
        for name, check in found.checks.items():
            try:
                frame.selectExpr(check)
                checks[name] = check
            except Exception as error:
                if type(error).__name__ != "AnalysisException":
                    raise
                warnings.append(
                    f"constraint {name} of the table {self.path} needs columns that the frame has "
                    "not: a row that breaks it is found after the decision, and stops the pipeline"
                )
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
        if any(reasons) or not self._invariants.checks:
            return reasons
        broken = self._broken([receipt.id for receipt in receipts])
        told = (
            f"rows break {broken} of the table {self.path}. Correct the query" if broken else None
        )
        return [told] * len(receipts)

    def _broken(self, names: Sequence[str]) -> str:
        """Have Spark look for rows that break a constraint. Say which, and how many."""
        with _in_our_words(f"{self.path}: its constraints could not be checked", self.name):
            counts = self._rows(names).selectExpr(*self._invariants.counts()).first()
        return ", ".join(
            f"constraint {name} ({count} rows)"
            for name, count in zip(self._invariants.checks, counts, strict=True)
            if count
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
        states = self.shelved.states()
        return [states[receipt.id] for receipt in receipts]

    def _commit_batch(self, batch: _Batch, names: Sequence[str]) -> None:
        assert self._site is not None
        while True:
            states, intents = self.shelved.states(), self._intents(batch)
            meant = set[str]()
            for write, members in enumerate(intents):
                # A member that was found gone before the intent was put down: nobody can execute it.
                if not any(states.get(name) is BranchState.ABORTED for name in members):
                    meant |= set(members)
                    self._execute(batch, write, members, states)
            for name in set(names) - set(states) - meant:
                self.shelved.settle(name, sent=False)
            waiting = [n for n in names if n not in meant and states.get(n) is BranchState.PREPARED]
            if not waiting:
                return
            uri = f"{self.shelved.uri}/{batch.file(len(intents))}"
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
            self.shelved.settle(name, sent=True)

    def _append(self, batch: _Batch, write: int, members: Sequence[str]) -> None:
        space = batch.namespace
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
        with _in_our_words(f"{self.path} could not be written", self.name):
            writer.save(self.path)

    def _rows(self, names: Sequence[str]) -> Any:
        """Make a frame of the kept rows of branches."""
        spark = self._spark()
        listed = spark.sparkContext.parallelize([(name,) for name in names], len(names))
        return spark.createDataFrame(listed, "name string").mapInArrow(
            partial(_read, self.shelved), self._schema
        )

    @staticmethod
    def _version(batch: _Batch, write: int) -> int:
        return batch.number * _WRITES + write

    def _intents(self, batch: _Batch) -> list[list[str]]:
        system, root = open_place(self.shelved.uri)
        found: list[list[str]] = []
        while True:
            try:
                path = f"{root}/{batch.file(len(found))}"
                with reachable(self.shelved.uri), system.open_input_stream(path) as stream:
                    found.append(json.loads(stream.read()))
            except FileNotFoundError:
                return found

    def prune(self, namespace: Namespace, floor: int) -> None:
        system, root = open_place(self.shelved.uri)
        pattern = re.compile(
            re.escape(f"{namespace.pipeline}.{namespace.identity}.{self.name}.")
            + r"(\d+)\.\d+\.intent"
        )
        with reachable(self.shelved.uri):
            for entry in system.get_file_info(pafs.FileSelector(root, allow_not_found=True)):
                match = pattern.fullmatch(entry.base_name)
                if match and int(match[1]) < floor:
                    system.delete_file(entry.path)
        super().prune(namespace, floor)


@dataclass(frozen=True, slots=True)
class _Invariants:
    """What the table demands of rows, and would say only after the decision."""

    required: frozenset[str] = frozenset()
    longest: Mapping[str, int] = field(default_factory=dict[str, int])
    checks: Mapping[str, str] = field(default_factory=dict[str, str])  # name to SQL

    @classmethod
    def of(cls, table: Any, properties: Mapping[str, str]) -> _Invariants:
        longest = dict[str, int]()
        for column in table.fields:
            match = re.search(r"char\((\d+)\)", column.metadata.get(_LENGTH, ""))
            if match:
                longest[column.name] = int(match[1])
        checks = {
            name.removeprefix(_CONSTRAINT): check
            for name, check in properties.items()
            if name.startswith(_CONSTRAINT)
        }
        required = frozenset(column.name for column in table.fields if not column.nullable)
        return cls(required, longest, checks)

    def counts(self) -> list[str]:
        """Spell in SQL how many rows break each constraint. One that is unknown counts as broken."""
        return [f"count_if(NOT coalesce(({check}), false))" for check in self.checks.values()]

    def broken(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Name the rows that the table will not take, and why each."""
        found = dict[int, str]()
        for name in self.required & set(rows.schema.names):
            found |= _at(rows.column(name).is_null(), f"{name} is null, and the table requires it")
        for name in self.longest.keys() & set(rows.schema.names):
            lengths = pc.call_function("utf8_length", [rows.column(name)])
            too_long = pc.call_function("greater", [lengths, pa.scalar(self.longest[name])])
            found |= _at(too_long.fill_null(False), f"{name} is longer than {self.longest[name]}")
        return found


def _at(mask: Any, reason: str) -> dict[int, str]:
    return dict.fromkeys(pc.call_function("indices_nonzero", [mask]).to_pylist(), reason)


class _Writer(KeptWriter):
    def __init__(self, sink: Delta, branch: Branch):
        super().__init__(sink.shelved, branch)
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
        super().write(rows)


@contextmanager
def _in_our_words(what: str, sink: str) -> Iterator[None]:
    """Raise Spark's errors as ours, without the values of rows that its words carry."""
    problem: PoundlockError | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 (Spark's and py4j's are of many kinds)
        problem = _told(error, what, sink)
    if problem is not None:
        raise problem


def _told(error: Exception, what: str, sink: str) -> PoundlockError:
    kept = (
        "The batch is decided and its rows are kept: correct the table and start the pipeline again"
    )
    if type(error).__name__ == "AnalysisException":
        refusal = str(error).splitlines()[0]
        return InDoubt(f"{what}: Delta refuses the batch: {refusal}. {kept}", sink=sink)
    cause = getattr(error, "java_exception", None)
    while cause is not None and cause.getCause() is not None:
        cause = cause.getCause()
    kind = type(error).__name__ if cause is None else cause.getClass().getName()
    if kind.endswith("InvariantViolationException"):
        return InDoubt(
            f"{what}: a row breaks a constraint that the table did not have when the pipeline "
            f"started. {kept}",
            sink=sink,
        )
    text = ""
    if cause is not None and kind.startswith(("java.io.", "java.nio.")):  # a disk's words, no row's
        text = f": {cause.getMessage()}"
    return Unavailable(f"{what} ({kind}{text}). Nothing is lost: it is tried again", sink=sink)


def _read(shelf: Shelf, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for name in batch.column(0).to_pylist():
            yield from shelf.read(name)
