"""A driver that writes to a Delta table and is killed on the way. It prints one JSON object.

`test_delta.py` runs it, because the session of the other tests lacks Delta.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa

import poundlock as lock
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import Step
from poundlock.errors import BadRow, PoundlockError, UsageError
from poundlock.sinks import Delta
from poundlock.spark.pipeline.site import SparkSite

OURS = Namespace.new("trial", 1_700_000_000, 1)


class Died(Exception):
    """The driver was killed."""


def main(directory: Path) -> None:
    spark = lock.session(
        "local[2]",
        kafka=False,
        delta=True,
        parallelism=2,
        conf={"spark.ui.enabled": "false", "spark.databricks.delta.snapshotPartitions": "1"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    table = str(directory / "table")
    report: dict[str, object] = {"died": _run(spark, directory, table)}
    found = spark.read.format("delta").load(table)
    report["numbers"] = sorted(row.number for row in found.collect())
    history = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").collect()
    report["appends"] = sum(row.operation == "WRITE" for row in history)
    report["changed"] = _changed(spark, directory)
    report["commit"] = _commit(spark, directory)
    report["demands"] = _demands(spark, directory)
    report["wrong type"] = _wrong_type(spark, directory, table)
    report["at the start"] = _at_the_start(spark, directory, table)
    print(json.dumps(report))


def _run(spark, directory: Path, table: str) -> list[str]:
    source = lock.from_collection(
        spark,
        [(n, f"d{n % 2}") for n in range(40)],
        "number bigint, day string",
        batch_rows=10,
        directory=directory / "rows",
    )
    died: list[str] = []

    def pipeline() -> lock.Pipeline:
        return lock.pipeline(source, name="t", checkpoint_location=str(directory / "ck")).to(
            Delta(table, partition_by="day")
        )

    for at in (Step.DECIDED, Step.COMMITTED, Step.FINISHED):

        def observe(step: Step, facts: Mapping[str, object], at: Step = at) -> None:
            if step is at:
                raise Died

        try:
            pipeline().observe(observe).start(availableNow=True).awaitTermination()
        except Exception:  # noqa: BLE001 (Spark may wrap it in anything)
            died.append(at.value)
    pipeline().start(availableNow=True).awaitTermination()
    return died


def _changed(spark, directory: Path) -> list[object]:
    """The query has changed when the decided batch is committed."""
    table = str(directory / "changed")
    source = lock.from_collection(
        spark, [("left", "right")], "a string, b string", directory=directory / "rows"
    )

    def pipeline(*columns: str) -> lock.Pipeline:
        made = lock.pipeline(
            source.selectExpr(*columns), name="c", checkpoint_location=str(directory / "ck3")
        )
        return made.to(Delta(table, merge_schema=True))

    def die(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.DECIDED:
            raise Died

    with contextlib.suppress(Exception):
        pipeline("a", "b").observe(die).start(availableNow=True).awaitTermination()
    pipeline("b", "a", "1 AS c").start(availableNow=True).awaitTermination()
    return [row.asDict() for row in spark.read.format("delta").load(table).collect()]


def _commit(spark, directory: Path) -> dict[str, object]:
    """The sink by itself: repeats, an interrupted commit, a branch whose rows are lost."""
    table = str(directory / "second")

    def made() -> Delta:
        sink = Delta(table, name="out")
        sink.attach(SparkSite(spark, str(directory / "log")))
        sink.project({"number": Column("number", "bigint")})
        return sink

    def prepare(batch: int, task: int, attempt: int = 1) -> Receipt:
        sink = made()
        writer = sink.begin(Branch(Transaction(OURS, 1, batch, attempt), "out", task, task))
        writer.write(pa.RecordBatch.from_pydict({"number": [batch, task, attempt]}))
        prepared = writer.prepare()
        assert prepared is not None
        return Receipt("out", prepared.id, task, Fingerprint(3, 0))

    def count() -> int:
        if not Path(table).exists():
            return 0
        return spark.read.format("delta").load(table).count()

    def stored(receipt: Receipt, suffix: str) -> Path:
        return directory / "log" / "rows" / "out" / f"{receipt.id}{suffix}"

    seen: dict[str, object] = {}
    first = prepare(0, 0)
    seen["staged"] = ["prepared" if made().check([first]) == [None] else "gone", count()]
    seen["first"] = [made().commit([first])[0].value, count()]
    seen["again"] = [made().commit([first])[0].value, count()]
    second = prepare(1, 0)
    content = stored(second, ".arrow").read_bytes()
    made().commit([second])
    # As if the driver had died after Delta's commit and before it wrote the witness.
    stored(second, ".sent").unlink()
    stored(second, ".arrow").write_bytes(content)
    seen["half settled"] = [made().commit([second])[0].value, count()]
    lost, neighbour = prepare(2, 0), prepare(2, 1)
    stored(lost, ".arrow").unlink()
    states = made().commit([lost, neighbour])
    seen["lost"] = [states[0].value, count() - 3]
    seen["its neighbour"] = [states[1].value, count()]
    seen["replayed"] = [made().commit([neighbour, prepare(2, 2, attempt=2)])[1].value, count()]
    made().prune(OURS, 10)
    return seen


class _Tables:
    """Tables with constraints, and sinks that write to them."""

    def __init__(self, spark, directory: Path):
        self.spark, self.directory = spark, directory
        self._numbers = iter(range(100))

    def make_sink(self, table: str, frame: str = "n bigint") -> Delta:
        sink = Delta(table, name="checked")
        sink.attach(SparkSite(self.spark, str(self.directory / "log")))
        columns = (column.split(" ", 1) for column in frame.split(", "))
        sink.project({name: Column(f"`{name}`", kind) for name, kind in columns})
        sink.warnings = sink.preflight()  # type: ignore[attr-defined]
        return sink

    def create(self, columns: str) -> str:
        path = str(self.directory / f"demands {next(self._numbers)}")
        self.spark.sql(f"CREATE TABLE delta.`{path}` ({columns}) USING delta")
        return path

    def alter(self, path: str, change: str) -> None:
        self.spark.sql(f"ALTER TABLE delta.`{path}` {change}")

    def prepare(self, sink: Delta, **columns: list[object]) -> Receipt:
        rows = pa.RecordBatch.from_pydict(columns)
        writer = sink.begin(Branch(Transaction(OURS, 1, next(self._numbers), 1), "checked", 0, 0))
        writer.write(rows)
        prepared = writer.prepare()
        assert prepared is not None
        return Receipt("checked", prepared.id, 0, Fingerprint(len(rows), 0))

    def refusal(self, act: Callable[[], object]) -> str:
        try:
            return f"accepted: {act()}"
        except PoundlockError as error:
            text = f"{type(error).__name__}: {error} {error.__cause__}"
            return text.replace(str(self.directory), "DIR")


def _demands(spark, directory: Path) -> dict[str, object]:
    """Constraints of a table, checked before the decision if possible, and otherwise after it."""
    tables = _Tables(spark, directory)
    return (
        _constraints(tables)
        | _columns(tables)
        | _filled(tables)
        | _files(tables)
        | _partitions(tables)
    )


def _partitions(tables: _Tables) -> dict[str, object]:
    """Values that no directory can have, in a new table, and in one without such directories."""
    long, many = "x" * 300, ["a", "x" * 300, "b\0", "é", None, ""]
    seen: dict[str, object] = {}

    def refused(sink: Delta, day: list[object]) -> list[int] | str:
        branch = Branch(Transaction(OURS, 1, 10**6, 1), "checked", 0, 0)
        try:
            sink.begin(branch).write(
                pa.RecordBatch.from_pydict({"n": [1] * len(day), "day": pa.array(day, pa.string())})
            )
        except BadRow as error:
            return sorted(error.rows)
        return []

    def sink_for(path: str, **options: str) -> Delta:
        sink = Delta(path, name="checked", **options)  # type: ignore[arg-type]
        sink.attach(SparkSite(tables.spark, str(tables.directory / "log")))
        sink.project({"n": Column("n", "bigint"), "day": Column("day", "string")})
        sink.warnings = sink.preflight()  # type: ignore[attr-defined]
        return sink

    sink = sink_for(str(tables.directory / "by day"), partition_by="day")
    seen["locale"] = sink.warnings  # type: ignore[attr-defined]
    seen["unfit"] = refused(sink, many)
    seen["times"] = tables.refusal(lambda: _write_times(tables))
    good = tables.prepare(sink, n=[1, 2, 3], day=["x" * 251, "a", None])
    seen["fitting"] = sink.commit([good])[0].value
    path = str(tables.directory / "mapped")
    tables.spark.sql(
        f"CREATE TABLE delta.`{path}` (n BIGINT, day STRING) USING delta PARTITIONED BY (day) "
        "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    mapped = sink_for(path)
    seen["mapped"] = [
        refused(mapped, many),
        mapped.commit([tables.prepare(mapped, n=[1, 2], day=[long, "b\0"])])[0].value,
    ]
    return seen


def _write_times(tables: _Tables) -> None:
    """Write to a table that is partitioned by a time that Delta would store as others."""
    sink = Delta(str(tables.directory / "by time"), partition_by="t", name="checked")
    sink.attach(SparkSite(tables.spark, str(tables.directory / "log")))
    sink.project({"n": Column("n", "bigint"), "t": Column("t", "timestamp")})
    sink.preflight()
    year_one = -62_135_596_800_000_000
    hours = [1_792_888_200_000_000, 1_792_891_800_000_000]  # at both, a clock in Berlin shows 02:30
    times = [year_one, year_one - 1, None, 2**63 - 1, *hours]
    zoned = pa.array(times, pa.timestamp("us", "Europe/Berlin"))
    tables.prepare(sink, n=list(range(6)), t=zoned)  # type: ignore[arg-type]


def _constraints(tables: _Tables) -> dict[str, object]:
    """An existing constraint, and one that is added after the decision."""
    seen: dict[str, object] = {}
    path = tables.create("n BIGINT")
    tables.alter(path, "ADD CONSTRAINT small CHECK (n < 10000)")
    sink = tables.make_sink(path)
    seen["broken"] = tables.refusal(lambda: sink.check([tables.prepare(sink, n=[1, 54321])]))
    good = tables.prepare(sink, n=[1, 7654])
    assert sink.check([good]) == [None]
    tables.alter(path, "ADD CONSTRAINT smaller CHECK (n < 50)")
    seen["too late"] = tables.refusal(lambda: sink.commit([good]))
    tables.alter(path, "DROP CONSTRAINT smaller")
    seen["put right"] = sink.commit([good])[0].value
    tables.alter(path, "ADD COLUMN word STRING")
    tables.alter(path, "ADD CONSTRAINT w CHECK (word IS NULL OR word <> '')")
    seen["another column"] = tables.make_sink(path).warnings  # type: ignore[attr-defined]
    return seen


def _columns(tables: _Tables) -> dict[str, object]:
    """Columns in another case; nulls and lengths inside nested values."""
    seen: dict[str, object] = {}
    path = tables.create("id BIGINT NOT NULL, word VARCHAR(3)")
    first = tables.make_sink(path, "ID bigint, WORD string")
    seen["other letters"] = [
        tables.refusal(lambda: tables.prepare(first, ID=[1, None], WORD=["a", "b"])),
        tables.refusal(lambda: tables.prepare(first, ID=[1], WORD=["long"])),
    ]
    path = tables.create("s STRUCT<a: BIGINT NOT NULL>, w ARRAY<VARCHAR(3)>")
    sink = tables.make_sink(path, "s struct<a:bigint>, w array<string>")
    seen["inside"] = sink.warnings  # type: ignore[attr-defined]
    nulls: dict[str, list[object]] = {"s": [{"a": 1}, {"a": None}, None], "w": [["a"], None, []]}
    seen["null inside"] = tables.refusal(lambda: sink.check([tables.prepare(sink, **nulls)]))
    good = tables.prepare(sink, s=[{"a": 1}, {"a": 2}], w=[["abc"], None])
    seen["good inside"] = [sink.check([good])[0], sink.commit([good])[0].value]
    return seen


def _filled(tables: _Tables) -> dict[str, object]:
    """Generated columns, and an expression that fails."""
    seen: dict[str, object] = {}
    path = tables.create("n BIGINT, m BIGINT NOT NULL GENERATED ALWAYS AS (n + 1)")
    filled = tables.make_sink(path)
    good = tables.prepare(filled, n=[1])
    warnings = filled.warnings  # type: ignore[attr-defined]
    seen["filled"] = [warnings, filled.check([good])[0], filled.commit([good])[0].value]
    both = tables.make_sink(path, "n bigint, m bigint")
    seen["filled otherwise"] = tables.refusal(
        lambda: both.check([tables.prepare(both, n=[1], m=[5])])
    )
    path = tables.create("word STRING")
    tables.alter(path, "ADD CONSTRAINT number CHECK (CAST(word AS INT) > 0)")
    sink = tables.make_sink(path, "word string")
    seen["no number"] = tables.refusal(lambda: sink.check([tables.prepare(sink, word=["many"])]))
    return seen


def _files(tables: _Tables) -> dict[str, object]:
    """A path relative to the JVM's directory; damaged rows."""
    seen: dict[str, object] = {}
    sink = tables.make_sink(os.path.relpath(tables.create("n BIGINT")))
    good = tables.prepare(sink, n=[1])
    seen["relative"] = [sink.check([good])[0], sink.commit([good])[0].value]
    damaged = tables.prepare(sink, n=[1])
    file = tables.directory / "log" / "rows" / "checked" / f"{damaged.id}.arrow"
    file.write_bytes(file.read_bytes()[:-20])
    seen["damaged"] = tables.refusal(lambda: sink.commit([damaged]))
    return seen


def _wrong_type(spark, directory: Path, table: str) -> str:
    source = lock.from_collection(
        spark, [("x", 1)], "number string, extra int", directory=directory / "rows"
    )
    sink = Delta(table)
    try:
        lock.pipeline(source, name="w", checkpoint_location=str(directory / "ck2")).to(sink).start()
    except UsageError as error:
        return str(error)
    return "accepted"


def _at_the_start(spark, directory: Path, table: str) -> dict[str, str]:
    """What Delta would refuse after the decision, for an existing and for a new table."""
    source = lock.from_collection(
        spark, [(1, "a")], "number bigint, day string", directory=directory / "rows"
    )
    plain = str(directory / "plain")
    spark.range(2).write.parquet(plain)
    seen: dict[str, str] = {}

    def start(case: str, sink: Delta, *select: str) -> None:
        checkpoint = str(directory / f"ck {case}")
        pipeline = lock.pipeline(source, name="s", checkpoint_location=checkpoint)
        try:
            pipeline.to(sink, select=select or None).start(availableNow=True).awaitTermination()
            seen[case] = str(spark.read.format("delta").load(sink.path).count())
        except UsageError as error:
            seen[case] = str(error)

    start("other partitions", Delta(table, partition_by="number"))
    start("plain files", Delta(plain))
    start("blanks", Delta(directory / "blanks"), "named_struct('a b', number) AS s")
    fields = "named_struct('user-id', number, 'interval_s', 1, '`', 2) AS s"
    start("names", Delta(directory / "names"), "day", fields)
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
