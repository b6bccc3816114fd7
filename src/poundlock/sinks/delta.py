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
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.model import Namespace, Receipt, checked_name
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.participant import Column, Commitment, Semantic
from poundlock.core.protocol import BranchState
from poundlock.errors import InDoubt, Unavailable, UsageError
from poundlock.kept import KeptBranches, Shelf, open_place, reachable

_WRITES = 1000  # of one batch: more than one only where branches were lost and repaired
_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
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
        self._check_table(spark)
        return []

    def _check_table(self, spark: Any) -> None:
        """Compare the columns with those of the table, if there is one: Delta would say no too late."""
        try:
            table = spark.read.format("delta").load(self.path).schema
        except Exception as error:
            if type(error).__name__ == "AnalysisException":
                return  # there is no table yet
            raise
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
        if problems:
            raise UsageError(
                f"the frame does not fit the table {self.path}: {'; '.join(problems)}",
                sink=self.name,
            )

    def _spark(self) -> Any:
        if self._site is None or self._site.spark is None:
            raise UsageError("Delta needs a Spark session on the driver", sink=self.name)
        return self._site.spark

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
        spark = self._spark()
        names = spark.sparkContext.parallelize([(name,) for name in members], len(members))
        rows = spark.createDataFrame(names, "name string").mapInArrow(
            partial(_read, self.shelved), self._schema
        )
        space = batch.namespace
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("txnAppId", f"poundlock.{space.pipeline}.{space.identity}.{self.name}")
            .option("txnVersion", str(self._version(batch, write)))
            .option("mergeSchema", str(self.merge_schema).lower())
        )
        if self.partition_by:
            writer = writer.partitionBy(*self.partition_by)
        try:
            writer.save(self.path)
        except Exception as error:
            kind = type(error).__name__
            if kind == "AnalysisException":
                raise InDoubt(
                    f"Delta refuses the batch: {str(error).splitlines()[0]}. The batch is decided and "
                    "its rows are kept: correct the table and start the pipeline again",
                    sink=self.name,
                ) from error
            raise Unavailable(
                f"{self.path} could not be written: {kind}: {str(error).splitlines()[0]}",
                sink=self.name,
            ) from error

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


def _read(shelf: Shelf, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for name in batch.column(0).to_pylist():
            yield from shelf.read(name)
