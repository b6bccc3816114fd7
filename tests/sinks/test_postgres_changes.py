"""PostgreSQL: tables and options that change during a batch."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import DONE, LOST, Database, keyed

from poundlock.core.coordinator import Coordinator
from poundlock.core.log import MemoryLog
from poundlock.core.surroundings import Settings
from poundlock.errors import BadRow, InDoubt, LogMismatch, Rejected, UsageError
from poundlock.sinks.postgres.move import FLAG

D = decimal.Decimal


class TestAlteredTables:
    """A table is altered while the stream runs."""

    AT = pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us"))

    @pytest.mark.parametrize("options", [{"mode": "prepared"}, {"mode": "staged"}], ids=str)
    @pytest.mark.parametrize(
        ("made", "spark", "values", "altered"),
        [
            ("int8", "bigint", pa.array([2**62 + 12345]), "ALTER TABLE t ALTER v TYPE float8"),
            ("timestamp", "timestamp_ntz", AT, "ALTER TABLE t ALTER v TYPE timestamptz"),
            (
                "int8",
                "bigint",
                pa.array([7]),
                "DROP TABLE t; CREATE TABLE public.t (v timestamptz)",
            ),
            (
                "numeric(10,2)",
                "decimal(10,2)",
                pa.array([D("1.75")], pa.decimal128(10, 2)),
                "ALTER TABLE t ALTER v TYPE int",
            ),
        ],
    )
    def test_no_value_is_converted_after_a_change_of_type(
        self,
        db: Database,
        options: dict[str, Any],
        made: str,
        spark: str,
        values: pa.Array,
        altered: str,
    ) -> None:
        db(f"CREATE TABLE t (v {made})")
        sink = db.sink(frame={"v": spark}, **options)
        rows = pa.RecordBatch.from_arrays([values], ["v"])
        before = db.prepare(sink, rows) if options["mode"] == "staged" else None
        db(altered)
        with pytest.raises(UsageError, match="was altered, and the frame no longer fits: v:"):
            db.prepare(sink, rows, 1)
        if before is not None:
            with pytest.raises(Rejected, match="was altered while the batch was written"):
                sink.check([before])
            with pytest.raises(InDoubt, match=r"was altered: v is .* in staging|\[42804\]"):
                sink.commit([before])
        assert db("SELECT * FROM t") == []

    def test_a_table_with_a_prepared_branch_cannot_be_altered(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        writer = sink.begin(db.branch())
        db("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            db("ALTER TABLE t ALTER k TYPE float4")
        db("RESET lock_timeout")
        writer.abort()

    @pytest.mark.parametrize(
        "altered",
        [
            "ALTER TABLE t ADD CHECK (k < 100)",
            "ALTER TABLE t ALTER v SET NOT NULL",
            "ALTER TABLE t ADD x int NOT NULL",
        ],
    )
    def test_rows_that_a_new_constraint_refuses_are_found_before_the_decision(
        self, db: Database, altered: str
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged", frame={"k": "int", "v": "string"})
        rows = pa.RecordBatch.from_pydict(
            {"k": pa.array([1000], pa.int32()), "v": pa.array([None], pa.string())}
        )
        receipt = db.prepare(sink, rows)
        db(altered)
        with pytest.raises(Rejected, match="was altered"):
            sink.check([receipt])
        with pytest.raises((BadRow, UsageError)):
            db.prepare(sink, rows, 1)


def test_a_table_widened_during_a_batch_makes_it_run_again(db: Database) -> None:
    """Some branches have the old type and some the new, so all are written again."""
    db("CREATE TABLE t (k int, v varchar(10))")
    sink = db.sink(mode="staged", frame={"k": "int", "v": "string"})
    old = db.prepare(sink, keyed((1, "a")), 0)
    db("ALTER TABLE t ALTER v TYPE varchar(20)")
    new = db.prepare(sink, keyed((2, "b")), 1)
    with pytest.raises(Rejected, match="was altered while the batch was written"):
        sink.check([old, new])
    again = [db.prepare(sink, keyed((n, "c")), n, attempt=2, task_attempt=n + 9) for n in (0, 1)]
    assert sink.check(again) == [None, None] and sink.commit(again) == [DONE, DONE]


def test_a_batch_is_refused_after_its_key_index_is_dropped(db: Database) -> None:
    db("CREATE TABLE t (k int CONSTRAINT one UNIQUE, v text)")
    sink = db.sink(key="k")
    receipt = db.prepare(sink, keyed((1, "a")))
    db("ALTER TABLE t DROP CONSTRAINT one")
    with pytest.raises(Rejected, match="was altered while the batch was written"):
        sink.check([receipt])


class TestChangedOptions:
    """Options are changed between the decision and the commit."""

    FRAME: ClassVar[dict[str, str]] = {"k": "int", "v": "string"}

    def test_a_staged_deletion_is_still_a_deletion(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        db("INSERT INTO t VALUES (3, 'goes')")
        sink = db.sink(key="k", delete="gone", frame={**self.FRAME, "gone": "boolean"})
        rows = keyed((1, "new", False), (3, "never", True), names=f"k v {FLAG}")
        receipt = db.prepare(sink, rows)
        assert db.sink(mode="staged", frame=self.FRAME).commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(1, "new")]

    def test_staged_rows_are_moved_to_their_original_table(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int, v text)")
        receipt = db.prepare(db.sink(mode="staged"), keyed((1, "a")))
        other = db.sink("u", name="t", mode="staged")
        later = db.prepare(other, keyed((2, "b")), 1)
        with pytest.raises(LogMismatch, match="different tables"):
            other.commit([receipt, later])
        assert other.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t") == [(1,)] and db("SELECT * FROM u") == []


def test_a_staged_batch_is_committed_whole_after_a_change_of_mode(db: Database) -> None:
    db("CREATE TABLE t (k int PRIMARY KEY, v text, at int)")
    sink = db.sink(key="k", order_by="at")
    receipts = [
        db.prepare(sink, keyed((1, f"at {at}", at), names="k v at"), task)
        for task, at in enumerate((9, 1))
    ]
    later = db.sink(key="k", order_by="at", mode="prepared", key_partitioned=True)
    own = db.prepare(later, keyed((2, "b", 1), names="k v at"), 5)
    assert (
        later.commit_together(receipts)
        and not later.commit_together([own])
        and not sink.commit_together([own])
    )
    coordinator = Coordinator(MemoryLog(), {"t": later}, settings=Settings(commits_at_once=1))
    assert list(coordinator._committer._groups(receipts)) == [receipts]


@pytest.mark.parametrize("mode", ["prepared", "staged"])
def test_a_branch_is_finished_in_the_mode_it_was_written_in(db: Database, mode: str) -> None:
    """The pipeline was started again in the other mode."""
    db("CREATE TABLE t (k int, v text)")
    decided = db.prepare(db.sink(mode=mode), keyed((1, "a")))
    stray = db.prepare(db.sink(mode=mode), keyed((2, "b")), 1)
    later = db.sink(mode="staged" if mode == "prepared" else "prepared")
    own = db.prepare(later, keyed((3, "c")), 2)
    assert later.newest_generation(db.namespace) == 1
    assert later.check([own, decided]) == [None, None]
    assert later.commit([own, decided]) == [DONE, DONE]
    found = later.find(db.namespace)
    assert [it.id for it in found] == [stray.id]
    assert later.abort(found) == [LOST]
    assert db("SELECT k FROM t ORDER BY k") == [(1,), (3,)] and db.open() == []
