"""PostgreSQL: staging tables."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import DONE, LOST, NOISE, OPEN, Database, keyed

from poundlock.core.model import Stray
from poundlock.core.participant import Column
from poundlock.errors import BadRow, GuaranteeBroken, InDoubt, Rejected
from poundlock.sinks import Postgres
from poundlock.sinks.postgres.errors import translate_error
from poundlock.sinks.postgres.move import FLAG, drop
from poundlock.sinks.postgres.target import staging_name


class TestStaging:
    def test_a_foreign_key_is_checked_before_the_decision(self, db: Database) -> None:
        db("CREATE TABLE parent (id int PRIMARY KEY)")
        db("CREATE TABLE t (k int REFERENCES parent DEFERRABLE INITIALLY DEFERRED, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        with pytest.raises(BadRow, match="foreign key"):
            sink.check([receipt])
        assert db("SELECT * FROM t") == []
        db("INSERT INTO parent VALUES (1)")
        assert sink.check([receipt]) == [None]
        assert db("SELECT * FROM t") == []
        assert sink.commit([receipt]) == [DONE]

    @pytest.mark.parametrize(
        ("table", "rows"),
        [
            ("k int, inv int GENERATED ALWAYS AS (100 / k) STORED", keyed((0,), names="k")),
            ("k text); CREATE INDEX ON t ((k::int)", keyed(("x",), names="k")),
            ("k int, d int DEFAULT (1 / (random() * 0)::int)", keyed((1,), names="k")),
            ("k text); CREATE INDEX ON t (k", keyed((NOISE,), names="k")),
            ("k jsonb); CREATE INDEX ON t (k", keyed((f'"{NOISE}"',), names="k")),
        ],
    )
    def test_every_refusal_is_found_before_the_decision(
        self, db: Database, table: str, rows: pa.RecordBatch
    ) -> None:
        db(f"CREATE TABLE t ({table})")
        sink = db.sink(mode="staged", frame={"k": "int" if "k int" in table else "string"})
        receipt = db.prepare(sink, rows)
        with pytest.raises(BadRow):
            sink.check([receipt])
        with pytest.raises(InDoubt, match="cannot be moved"):  # it is not retried for ever
            sink.commit([receipt])

    def test_a_key_too_long_for_its_index_is_a_bad_row(self, db: Database) -> None:
        db("CREATE TABLE t (k text PRIMARY KEY, v text)")
        sink = db.sink(key="k")
        receipt = db.prepare(sink, keyed((NOISE, "a")))
        with pytest.raises(BadRow, match="exceeds"):
            sink.check([receipt])
        # The index accepts it, because it compresses well.
        longer = db.prepare(sink, keyed(("x" * 100_000, "a")), 1)
        assert sink.check([longer]) == [None]
        assert sink.commit([longer]) == [DONE]

    def test_a_constant_default_needs_no_rehearsal(self, db: Database) -> None:
        db(
            "CREATE TABLE t (k int, a text DEFAULT 'x''y', b timestamptz DEFAULT now(), c numeric "
            "DEFAULT (-1.5), d jsonb DEFAULT '{}', e varchar(9) DEFAULT 'z', f bigserial, "
            "g uuid DEFAULT gen_random_uuid())"
        )
        sink = Postgres("t", dsn=db.dsn, mode="staged")
        sink.project({"k": Column("k", "int")})
        assert sink.preflight() == []
        sink.close()

    def test_a_move_that_still_fails_loses_nothing(self, db: Database) -> None:
        db("CREATE TABLE t (k int UNIQUE, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.check([receipt]) == [None]
        db("INSERT INTO t VALUES (1, 'intruder')")
        with pytest.raises(InDoubt, match="cannot be moved"):
            sink.commit([receipt])
        db("DELETE FROM t")
        assert sink.commit([receipt]) == [DONE]

    def test_rows_that_others_deleted_are_noticed(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a"), (2, "b")))
        db(f"DELETE FROM poundlock.{staging_name(receipt.id)} WHERE k = 1")
        with pytest.raises(
            GuaranteeBroken, match=r"has 2 rows, and 1 were moved: a staging table was changed"
        ):
            sink.commit([receipt])
        assert db("SELECT * FROM t") == []
        db(f"DROP TABLE poundlock.{staging_name(receipt.id)}")
        assert sink.commit([receipt]) == [LOST]

    def test_a_locked_target_is_waited_for(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        with psycopg.connect(db.dsn) as other:
            other.execute("LOCK TABLE t")
            assert sink.commit([receipt]) == [OPEN]
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t") == [(1,)]

    def test_a_batch_with_a_lost_branch_is_aborted_whole(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text, at int)")
        db("INSERT INTO t VALUES (2, 'of a batch before', 9)")
        frame = {"k": "int", "v": "string", "at": "int", "gone": "boolean"}
        sink = db.sink(key="k", order_by="at", delete="gone", frame=frame)
        names = f"k v at {FLAG}"
        first = keyed((1, "older", 1, False), (2, "later batch", 1, False), names=names)
        second = keyed((1, "newer", 2, True), names=names)
        lost, ready = db.prepare(sink, first, 0), db.prepare(sink, second, 1)
        db(f"DROP TABLE poundlock.{staging_name(lost.id)}")
        assert sink.commit([lost, ready]) == [LOST, LOST]
        assert db.open() == [] and db("SELECT v FROM t") == [("of a batch before",)]
        assert sink.commit([lost, ready]) == [LOST, LOST]
        replay = [
            db.prepare(sink, rows, task, attempt=2, task_attempt=8 + task)
            for task, rows in enumerate((first, second))
        ]
        assert sink.commit(replay) == [DONE, DONE]
        assert db("SELECT k, v FROM t") == [(2, "later batch")]

    def test_a_tombstone_aborts_the_whole_batch(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in (0, 1)]
        assert sink.abort([Stray("t", receipts[0].id, 1, "staged")]) == [LOST]
        assert sink.commit(receipts) == [LOST, LOST]
        assert db.open() == [] and db("SELECT * FROM t") == []

    def test_moved_rows_stay_and_the_remaining_branches_are_moved(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in range(3)]
        assert sink.commit(receipts[:1]) == [DONE]
        db(f"DROP TABLE poundlock.{staging_name(receipts[1].id)}")
        assert sink.commit(receipts) == [DONE, LOST, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (2,)]

    def test_generated_columns_are_filled_by_the_table(self, db: Database) -> None:
        db(
            "CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, k int, v text, "
            "twice int GENERATED ALWAYS AS (k * 2) STORED, made date NOT NULL DEFAULT now())"
        )
        for mode in ("staged", "prepared"):
            sink = db.sink(mode=mode, frame={"k": "int", "v": "string"})
            receipt = db.prepare(sink, keyed((1, "a"), (2, "b")), batch=len(mode))
            assert sink.check([receipt]) == [None]
            assert sink.commit([receipt]) == [DONE]
        assert [row[0] for row in db("SELECT twice FROM t ORDER BY id")] == [2, 4, 2, 4]

    def test_a_reader_of_a_staging_table_blocks_nothing(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        decided = [db.prepare(sink, keyed((task, "a")), task) for task in (0, 1)]
        stray = db.prepare(sink, keyed((2, "a")), 2)
        tables = [f"poundlock.{staging_name(receipt.id)}" for receipt in (*decided, stray)]
        with psycopg.connect(db.dsn) as reader:  # as pg_dump does
            reader.execute(f"LOCK TABLE {', '.join(tables)} IN ACCESS SHARE MODE")  # type: ignore[arg-type]
            assert sink.commit(decided) == [DONE, DONE]
            assert "cannot be dropped yet" in caplog.text
            [found] = sink.find(db.namespace)
            assert sink.abort([found]) == [LOST]
            assert sink.find(db.namespace) == [] and len(db.open()) == 3
            sink.prune(db.namespace, 99)  # remaining tables keep their witness
            assert sink.commit([*decided, stray]) == [DONE, DONE, LOST]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (1,)]
        assert sink.find(db.namespace) == [] and db.open() == []
        assert sink.commit(decided) == [DONE, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (1,)]

    def test_a_waiting_move_logs_the_reason(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        with psycopg.connect(db.dsn) as other:
            other.execute("LOCK TABLE t")
            assert sink.commit([receipt]) == [OPEN]
        assert (
            f"branch {receipt.id} is not moved yet: another session holds a needed lock"
            in caplog.text
        )

    def test_a_drop_needs_few_locks(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[int] = []

        def count_locks(connection: psycopg.Connection[Any], *rest: Any) -> None:
            drop(connection, *rest)
            mine = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()"
            held.extend(connection.execute(mine).fetchone() or ())

        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in range(20)]
        monkeypatch.setattr("poundlock.sinks.postgres.move.drop", count_locks)
        assert set(sink.commit(receipts)) == {DONE}
        assert max(held) < 64 and db.open() == []  # 64: PostgreSQL's max_locks_per_transaction

    def test_a_full_lock_table_is_reported_with_a_remedy(self) -> None:
        problem = translate_error(psycopg.errors.OutOfMemory("out of shared memory"))
        assert isinstance(problem, Rejected) and "max_locks_per_transaction" in str(problem)
