"""PostgreSQL: rows that replace others by key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from fix_postgres import DONE, LOST, Database, keyed

from poundlock.core.model import Receipt
from poundlock.core.participant import Commitment
from poundlock.errors import BadRow, Rejected, UsageError
from poundlock.sinks import Postgres
from poundlock.sinks.postgres.move import FLAG
from poundlock.spark.pipeline.site import SparkSite


class TestKeys:
    TABLE = "CREATE TABLE t (k int PRIMARY KEY, v text NOT NULL, at int)"
    NAMES = "k v at"

    def test_a_key_is_staged_by_default(self) -> None:
        assert Postgres("t", dsn="x", key=["k"]).commitment is Commitment.STAGED
        assert Postgres("t", dsn="x").commitment is Commitment.TRANSACTIONAL

    def test_an_upsert_appears_at_one_instant(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'old', 1), (9, 'stays', 1)")
        sink = db.sink(key="k")
        receipts = [
            db.prepare(sink, keyed((1, "new", 2), (2, "b", 2), names=self.NAMES), 0),
            db.prepare(sink, keyed((3, "c", 2), names=self.NAMES), 1),
        ]
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE, DONE]
        assert db("SELECT k, v FROM t ORDER BY k") == [(1, "new"), (2, "b"), (3, "c"), (9, "stays")]
        assert len(db("SELECT DISTINCT xmin FROM t WHERE k < 9")) == 1
        assert db.open() == []

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_keys_that_only_the_table_equates_are_refused(self, db: Database, mode: str) -> None:
        db(
            "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
        db("CREATE TABLE t (k text COLLATE loose PRIMARY KEY, at int)")
        sink = db.sink(key="k", order_by="at", mode=mode, key_partitioned=mode == "prepared")
        rows = keyed(("a", 1), ("A", 2), names="k at")
        with pytest.raises(BadRow, match="calls equal, so only one of the rows could stay"):
            sink.check([db.prepare(sink, rows)])
        sink.abort(sink.find(db.namespace))
        receipt = db.prepare(sink, keyed(("a", 1), ("a", 2), ("b", 0), names="k at"), batch=1)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert db("SELECT k, at FROM t ORDER BY k") == [("a", 2), ("b", 0)]

    @pytest.mark.parametrize("tasks", [1, 2])
    def test_duplicates_are_refused_or_ordered(self, db: Database, tasks: int) -> None:
        db(self.TABLE)
        first, second = (1, "secret", 5), (1, "later", 7)

        def prepared(sink: Postgres, batch: int, *rows: tuple[Any, ...]) -> list[Receipt]:
            if tasks == 1:
                return [db.prepare(sink, keyed(*rows, names=self.NAMES), 0, batch=batch)]
            return [
                db.prepare(sink, keyed(row, names=self.NAMES), task, batch=batch)
                for task, row in enumerate(rows)
            ]

        plain = db.sink(key="k")
        with pytest.raises(BadRow, match=r"the same key \(k\).*order_by") as caught:
            plain.check(prepared(plain, 0, first, second))
        assert "secret" not in str(caught.value)
        ordered = db.sink(key="k", order_by="at")
        receipts = prepared(ordered, 1, second, first)
        assert not any(ordered.check(receipts))
        assert set(ordered.commit(receipts)) == {DONE}
        assert db("SELECT k, v FROM t") == [(1, "later")]
        with pytest.raises(BadRow, match="and the same at"):
            ordered.check(prepared(ordered, 2, first, (1, "other", 5)))

    def test_a_flag_deletes_by_key_alone(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'goes', 1), (2, 'stays', 1), (3, 'changes', 1)")
        frame = {"k": "int", "v": "string", "at": "int", "gone": "boolean"}
        sink = db.sink(key="k", delete="gone", order_by="at", frame=frame)
        rows = keyed(
            (1, None, 2, True),
            (3, "changed", 2, False),
            (4, None, 2, True),
            (5, "back", 3, False),
            names=f"{self.NAMES} {FLAG}",
        )
        rows = rows.set_column(1, "v", pa.array([None, "changed", None, "back"], pa.string()))
        late = keyed((5, "x", 2, True), names=f"{self.NAMES} {FLAG}")
        receipts = [db.prepare(sink, rows), db.prepare(sink, late, 1)]
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE, DONE]
        assert db("SELECT k, v FROM t ORDER BY k") == [(2, "stays"), (3, "changed"), (5, "back")]
        empty = rows.slice(0, 1).set_column(3, FLAG, pa.array([False]))
        with pytest.raises(BadRow, match="check constraint"):
            db.prepare(sink, empty, 2, batch=1)

    @pytest.mark.parametrize("unique", ["UNIQUE (v)", "EXCLUDE USING btree (v WITH =)"])
    def test_a_value_freed_by_a_deletion_can_be_inserted(self, db: Database, unique: str) -> None:
        db(f"CREATE TABLE t (k int PRIMARY KEY, v text, {unique})")
        db("INSERT INTO t VALUES (1, 'a')")
        frame = {"k": "int", "v": "string", "gone": "boolean"}
        sink = db.sink(key="k", delete="gone", frame=frame)
        receipt = db.prepare(sink, keyed((1, "a", True), (2, "a", False), names=f"k v {FLAG}"))
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(2, "a")]

    def test_the_prepared_mode_with_a_key_is_refused_with_a_remedy(self, db: Database) -> None:
        db(self.TABLE)
        for options in ({"key": "k", "mode": "prepared"}, {}):
            with pytest.raises(UsageError, match=r"mode='staged'.*key_partitioned=True"):
                db.sink(**options)
        db("CREATE TABLE log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)")
        assert db.sink("log", frame={"v": "string"}).mode == "prepared"

    def test_an_upsert_can_be_prepared_with_a_partitioned_frame(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'old', 1)")
        sink = db.sink(key="k", mode="prepared", key_partitioned=True)
        receipts = [
            db.prepare(sink, keyed((1, "new", 2), names=self.NAMES), 0),
            db.prepare(sink, keyed((2, "b", 2), names=self.NAMES), 1),
        ]
        assert db("SELECT v FROM t") == [("old",)]
        with pytest.raises(Rejected, match="two tasks write the same key"):
            db.prepare(sink, keyed((1, "third", 3), names=self.NAMES), 2)
        assert len(db.open()) == 2
        assert sink.commit(receipts) == [DONE, DONE]
        assert db("SELECT k, v FROM t ORDER BY k") == [(1, "new"), (2, "b")]

    def test_a_retry_rolls_back_only_branches_of_its_own_task(self, db: Database) -> None:
        db(self.TABLE)
        sink = db.sink(key="k", mode="prepared", key_partitioned=True)
        mine, other = keyed((1, "a", 1), names=self.NAMES), keyed((2, "b", 1), names=self.NAMES)
        first = db.prepare(sink, mine, 0, task_attempt=0)
        sibling = db.prepare(sink, other, 1, task_attempt=1)
        again = db.prepare(sink, mine, 0, task_attempt=2, retry=1)
        assert sink.check([sibling, again]) == [None, None]
        assert sink.commit([first, sibling, again]) == [LOST, DONE, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(1,), (2,)]

    def test_speculation_is_refused_where_attempts_would_wait_for_each_other(
        self, db: Database
    ) -> None:
        conf = {"spark.speculation": "True"}
        context = SimpleNamespace(defaultParallelism=2, getConf=lambda: conf)
        site = SparkSite(cast(Any, SimpleNamespace(sparkContext=context)), "")
        db(self.TABLE)
        db("CREATE TABLE plain (k int, v text)")
        for options in ({"key": "k"}, {}):
            sink = Postgres("t", dsn=db.dsn, mode="prepared", key_partitioned=True, **options)
            sink.attach(site)
            with pytest.raises(UsageError, match=r"spark.speculation.*mode='staged'"):
                sink.preflight()
        for sink in (Postgres("t", dsn=db.dsn, key="k"), Postgres("plain", dsn=db.dsn)):
            sink.attach(site)
            sink.preflight()
            sink.close()

    def test_a_branch_that_blocks_nobody_is_not_rolled_back(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(key_partitioned=True)
        first = db.prepare(sink, keyed((1, "a")), 0, task_attempt=0)
        again = db.prepare(sink, keyed((1, "a")), 0, task_attempt=1, retry=1)
        assert sink.check([first, again]) == [None, None]

    def test_an_earlier_attempt_never_rolls_back_a_later_one(self, db: Database) -> None:
        db(self.TABLE)
        sink = db.sink(key="k", mode="prepared", key_partitioned=True)
        later = db.prepare(sink, keyed((1, "a", 1), names=self.NAMES), 0, task_attempt=2, retry=2)
        with pytest.raises(Rejected, match="lock_timeout"):
            db.prepare(sink, keyed((1, "a", 1), names=self.NAMES), 0, task_attempt=1, retry=1)
        assert sink.commit([later]) == [DONE]
