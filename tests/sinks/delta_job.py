"""A driver that writes to a Delta table and dies on the way. Prints one JSON object.

Run by `test_delta.py`, for the session of the other tests does not know Delta.
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
from poundlock.errors import PoundlockError, UsageError
from poundlock.sinks import Delta
from poundlock.spark.pipeline.site import SparkSite

OURS = Namespace.new("trial", 1_700_000_000, 1)


class Died(Exception):
    """The driver is no more."""


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
        spark, [(n, f"d{n % 2}") for n in range(40)], "number bigint, day string", batch_rows=10,
        directory=directory / "rows",
    )  # fmt: skip
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
        except Exception:  # noqa: BLE001 (whatever Spark makes of it)
            died.append(at.value)
    pipeline().start(availableNow=True).awaitTermination()
    return died


def _changed(spark, directory: Path) -> list[object]:
    """A query that is another one when what was decided is committed."""
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
    """The participant's own half: repeats, a settlement cut short, a branch whose rows are gone."""
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

    def shelf(receipt: Receipt, suffix: str) -> Path:
        return directory / "log" / "rows" / "out" / f"{receipt.id}{suffix}"

    seen: dict[str, object] = {}
    first = prepare(0, 0)
    seen["staged"] = ["prepared" if made().check([first]) == [None] else "gone", count()]
    seen["first"] = [made().commit([first])[0].value, count()]
    seen["again"] = [made().commit([first])[0].value, count()]
    second = prepare(1, 0)
    kept = shelf(second, ".arrow").read_bytes()
    made().commit([second])
    # As if the driver had died after Delta's commit, before it could leave the witness.
    shelf(second, ".sent").unlink()
    shelf(second, ".arrow").write_bytes(kept)
    seen["half settled"] = [made().commit([second])[0].value, count()]
    lost, neighbour = prepare(2, 0), prepare(2, 1)
    shelf(lost, ".arrow").unlink()
    states = made().commit([lost, neighbour])
    seen["lost"] = [states[0].value, count() - 3]
    seen["its neighbour"] = [states[1].value, count()]
    seen["replayed"] = [made().commit([neighbour, prepare(2, 2, attempt=2)])[1].value, count()]
    made().prune(OURS, 10)
    return seen


def _demands(spark, directory: Path) -> dict[str, object]:
    """What a table demands of rows: known before the decision or, if it must be, after it."""
    seen: dict[str, object] = {}
    numbers = iter(range(100))

    def made(table: str, frame: str = "n bigint") -> Delta:
        sink = Delta(table, name="checked")
        sink.attach(SparkSite(spark, str(directory / "log")))
        columns = (column.split(" ", 1) for column in frame.split(", "))
        sink.project({name: Column(f"`{name}`", kind) for name, kind in columns})
        sink.told = sink.preflight()  # type: ignore[attr-defined]
        return sink

    def table(columns: str) -> str:
        path = str(directory / f"demands {next(numbers)}")
        spark.sql(f"CREATE TABLE delta.`{path}` ({columns}) USING delta")
        return path

    def prepare(sink: Delta, rows: pa.RecordBatch) -> Receipt:
        writer = sink.begin(Branch(Transaction(OURS, 1, next(numbers), 1), "checked", 0, 0))
        writer.write(rows)
        prepared = writer.prepare()
        assert prepared is not None
        return Receipt("checked", prepared.id, 0, Fingerprint(len(rows), 0))

    def refusal(act: Callable[[], object]) -> str:
        try:
            return f"taken: {act()}"
        except PoundlockError as error:
            said = f"{type(error).__name__}: {error} {error.__cause__}"
            return said.replace(str(directory), "DIR")

    def of(**columns: list[object]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(columns)

    # A constraint that is there, and one that comes after the decision.
    path = table("n BIGINT")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT small CHECK (n < 10000)")
    sink = made(path)
    seen["broken"] = refusal(lambda: sink.check([prepare(sink, of(n=[1, 54321]))]))
    good = prepare(sink, of(n=[1, 7654]))
    assert sink.check([good]) == [None]
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT smaller CHECK (n < 50)")
    seen["too late"] = refusal(lambda: sink.commit([good]))
    spark.sql(f"ALTER TABLE delta.`{path}` DROP CONSTRAINT smaller")
    seen["put right"] = sink.commit([good])[0].value
    spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMN word STRING")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT w CHECK (word IS NULL OR word <> '')")
    seen["another column"] = made(path).told  # type: ignore[attr-defined]

    # Columns in other letters; nulls and lengths inside; columns that Delta fills.
    path = table("id BIGINT NOT NULL, word VARCHAR(3)")
    sink = made(path, "ID bigint, WORD string")
    seen["other letters"] = [
        refusal(lambda: prepare(sink, of(ID=[1, None], WORD=["a", "b"]))),
        refusal(lambda: prepare(sink, of(ID=[1], WORD=["long"]))),
    ]
    path = table("s STRUCT<a: BIGINT NOT NULL>, w ARRAY<VARCHAR(3)>")
    sink = made(path, "s struct<a:bigint>, w array<string>")
    seen["inside"] = sink.told  # type: ignore[attr-defined]
    seen["null inside"] = refusal(
        lambda: sink.check(
            [prepare(sink, of(s=[{"a": 1}, {"a": None}, None], w=[["a"], None, []]))]
        )
    )
    good = prepare(sink, of(s=[{"a": 1}, {"a": 2}], w=[["abc"], None]))
    seen["good inside"] = [sink.check([good])[0], sink.commit([good])[0].value]
    path = table("n BIGINT, m BIGINT NOT NULL GENERATED ALWAYS AS (n + 1)")
    sink = made(path)
    good = prepare(sink, of(n=[1]))
    seen["filled"] = [sink.told, sink.check([good])[0], sink.commit([good])[0].value]  # type: ignore
    sink = made(path, "n bigint, m bigint")
    seen["filled otherwise"] = refusal(lambda: sink.check([prepare(sink, of(n=[1], m=[5]))]))
    path = table("word STRING")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT number CHECK (CAST(word AS INT) > 0)")
    sink = made(path, "word string")
    seen["no number"] = refusal(lambda: sink.check([prepare(sink, of(word=["many"]))]))

    # A path that is relative, which only the JVM's own directory resolves; rows that are damaged.
    path = os.path.relpath(table("n BIGINT"))
    sink = made(path)
    good = prepare(sink, of(n=[1]))
    seen["relative"] = [sink.check([good])[0], sink.commit([good])[0].value]
    damaged = prepare(sink, of(n=[1]))
    file = directory / "log" / "rows" / "checked" / f"{damaged.id}.arrow"
    file.write_bytes(file.read_bytes()[:-20])
    seen["damaged"] = refusal(lambda: sink.commit([damaged]))
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
    """What Delta would refuse after the decision, of a table that is there and of a new one."""
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
