"""What is particular to PostgreSQL: types, constraints, keys, locks, roles. Judged by plain SQL."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import itertools
import json
import math
import pickle
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
import pytest

from poundlock.core.coordinator import Coordinator, Settings
from poundlock.core.log import MemoryLog
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Stray, Transaction
from poundlock.core.participant import Column, Commitment
from poundlock.core.protocol import BranchState
from poundlock.errors import (
    BadRow,
    GuaranteeBroken,
    InDoubt,
    LogMismatch,
    NotAuthorised,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.servers import postgres
from poundlock.sinks import Postgres
from poundlock.sinks.postgres import witness
from poundlock.sinks.postgres.move import FLAG, drop
from poundlock.sinks.postgres.session import connect, told
from poundlock.sinks.postgres.target import staging_name

DONE, LOST, OPEN = BranchState.COMMITTED, BranchState.ABORTED, BranchState.PREPARED
UNKNOWN = BranchState.NO_WITNESS
UTC = dt.timezone.utc
D = decimal.Decimal
NOISE = random.Random(1).randbytes(4000).hex()  # too long for an index, even compressed
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node() -> Iterator[postgres.Postgres]:
    with postgres.running() as running:
        yield running


class Database:
    """A database of the test's own, and eyes that are not the sink's."""

    def __init__(self, node: postgres.Postgres):
        self.node, self.name = node, f"db_{next(_numbers)}"
        self.renew()
        self._create()

    def renew(self) -> None:
        """Another pipeline, so that the names of its branches are new too."""
        self.namespace = Namespace.new("trial", 1_700_000_000, next(_numbers))

    def _create(self) -> None:
        with psycopg.connect(self.node.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self.name}")  # type: ignore[arg-type]
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    @property
    def dsn(self) -> str:
        return self.node.dsn(self.name)

    def __call__(self, statement: str) -> list[Any]:
        done = self.connection.execute(statement)  # type: ignore[arg-type]
        return done.fetchall() if done.description else []

    def open(self) -> list[Any]:
        held = f"SELECT gid FROM pg_prepared_xacts WHERE database = '{self.name}'"
        return self(held) + self("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'")

    def sink(
        self, table: str = "t", *, frame: dict[str, str] | None = None, **options: Any
    ) -> Postgres:
        made = Postgres(table, dsn=options.pop("dsn", self.dsn), **{"lock_timeout": 0.5, **options})
        if frame:
            made.project({name: Column(name, kind) for name, kind in frame.items()})
        made.preflight()
        return made

    def branch(self, task: int = 0, **options: Any) -> Branch:
        transaction = Transaction(
            self.namespace, 1, options.pop("batch", 0), options.pop("attempt", 1)
        )
        attempt = options.pop("task_attempt", task)
        return Branch(transaction, "t", task, attempt, **options)

    def prepare(
        self, sink: Postgres, rows: pa.RecordBatch, task: int = 0, **options: Any
    ) -> Receipt:
        writer = pickle.loads(pickle.dumps(sink)).begin(self.branch(task, **options))
        try:
            writer.write(rows)
            done = writer.prepare()
        except BaseException:
            writer.abort()
            raise
        assert done is not None
        fingerprint = Fingerprint(len(rows), 0)
        return Receipt("t", done.id, task, fingerprint, done.handle, done.began_at)


@pytest.fixture(scope="module")
def shared(node: postgres.Postgres) -> Iterator[Database]:
    database = Database(node)
    yield database
    database.connection.close()


@pytest.fixture
def db(shared: Database) -> Iterator[Database]:
    """An empty database: one for all, for each of their own takes the server long to write out."""
    shared.renew()
    yield shared
    for (gid,) in shared(f"SELECT gid FROM pg_prepared_xacts WHERE database = '{shared.name}'"):
        shared(f"ROLLBACK PREPARED '{gid}'")
    ours = "nspname !~ '^pg_' AND nspname <> 'information_schema'"
    for (schema,) in shared(f"SELECT quote_ident(nspname) FROM pg_namespace WHERE {ours}"):
        shared(f"DROP SCHEMA {schema} CASCADE")
    shared("CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC")


def _keywords(dsn: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    return " ".join(f"{name}={value}" for name, value in parts.items())


def keyed(*rows: tuple[Any, ...], names: str = "k v") -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    arrays = [pa.array(c, pa.int32() if isinstance(c[0], int) and not isinstance(c[0], bool) else None)
              for c in columns]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, names.split())


class TestTypes:
    # PostgreSQL's type, Arrow's as Spark sends it, and values.
    COLUMNS: ClassVar[dict[str, tuple[str, pa.DataType, list[Any]]]] = {
        "truth": ("bool", pa.bool_(), [True, False]),
        "tiny": ("int2", pa.int8(), [-128, 127]),
        "small": ("int2", pa.int16(), [-(2**15), 2**15 - 1]),
        "whole": ("int4", pa.int32(), [-(2**31), 2**31 - 1]),
        "big": ("int8", pa.int64(), [-(2**63), 2**63 - 1]),
        "wider": ("int8", pa.int8(), [-128, 127]),
        "counted": ("numeric", pa.int64(), [-(2**63), 2**63 - 1]),
        "real": ("float4", pa.float32(), [1.5, -math.inf]),
        "double": ("float8", pa.float64(), [math.inf, 5e-324]),
        "money": ("numeric(10,2)", pa.decimal128(10, 2), [D("-12345678.91"), D("0.00")]),
        "huge": ("numeric(38,10)", pa.decimal128(38, 10),
                 [D("-9999999999999999999999999999.9999999999"), D("0.0000000001")]),
        "text": ("text", pa.string(), ["grüße 👋\t\\N", ""]),
        "short": ("varchar(5)", pa.string(), ["grüße", "ab   "]),
        "fixed": ("char(3)", pa.string(), ["abc", "a  "]),
        "mood": ("mood", pa.string(), ["sad", "well"]),
        "dom": ("positive", pa.int32(), [1, 2**31 - 1]),
        "bytes": ("bytea", pa.binary(), [b"\x00\xff\\", b""]),
        "day": ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
        "at": ("timestamptz", pa.timestamp("us", "Europe/Berlin"),
               [dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)]),
        "wall": ("timestamp", pa.timestamp("us"),
                 [dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1, 1, 1)]),
        "long": ("interval", pa.duration("us"), [dt.timedelta(-3, 0, 7), dt.timedelta(0)]),
        "clock": ("time", pa.time64("ns"), [dt.time(23, 59, 59, 999999), dt.time(0)]),
    }  # fmt: skip

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_every_type_whole(self, db: Database, mode: str) -> None:
        db("CREATE TYPE mood AS ENUM ('sad', 'well')")
        db("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
        db(
            "CREATE TABLE t ("
            + ", ".join(f"{n} {kind}" for n, (kind, _, _) in self.COLUMNS.items())
            + ")"
        )
        rows = pa.RecordBatch.from_arrays(
            [pa.array([*values, None], arrow) for _, arrow, values in self.COLUMNS.values()],
            list(self.COLUMNS),
        )
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, rows)
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        first, second, nulls = db("SELECT * FROM t")
        for place, (name, (_, _, values)) in enumerate(self.COLUMNS.items()):
            assert (name, first[place], second[place]) == (name, *values)
        assert set(nulls) == {None}

    def test_json_and_uuid_and_nan(self, db: Database) -> None:
        db("CREATE TABLE t (doc jsonb, text json, id uuid, f float8)")
        ids = [str(uuid.uuid4()), str(uuid.uuid4()).upper(), None]
        docs = ['{"a": [1, null, "ä"]}', "[]", None]
        rows = pa.RecordBatch.from_pydict(
            {"doc": docs, "text": docs, "id": ids, "f": [math.nan, None, 1.0]}
        )
        sink = db.sink()
        assert sink.commit([db.prepare(sink, rows)]) == [DONE]
        found = db("SELECT doc, text, id, f FROM t")
        assert [row[0] for row in found] == [{"a": [1, None, "ä"]}, [], None]
        assert [row[1] for row in found] == [row[0] for row in found]
        assert [str(row[2]) for row in found] == [ids[0], (ids[1] or "").lower(), "None"]
        assert math.isnan(found[0][3]) and found[1][3] is None

    @pytest.mark.parametrize(("precision", "scale"), [(1, 0), (9, 9), (18, 1), (19, 0), (38, 37)])
    def test_decimals_of_any_size(self, db: Database, precision: int, scale: int) -> None:
        db("CREATE TABLE t (n int, d numeric)")
        chance = random.Random(precision)
        with decimal.localcontext() as context:
            context.prec = 60
            limit = 10**precision
            values = [D(chance.randrange(1 - limit, limit) // 10 ** chance.randrange(precision))
                      .scaleb(-scale) for _ in range(500)]  # fmt: skip
        rows = pa.RecordBatch.from_arrays(
            [pa.array(range(500), pa.int32()), pa.array(values, pa.decimal128(precision, scale))],
            ["n", "d"],
        ).slice(3)
        sink = db.sink()
        assert sink.commit([db.prepare(sink, rows)]) == [DONE]
        assert [row[0] for row in db("SELECT d FROM t ORDER BY n")] == values[3:]

    def test_a_slice_with_nulls_is_spelled_as_a_whole(self, db: Database) -> None:
        db("CREATE TABLE t (a int, s text, b bool, x bytea)")
        given = [(n if n % 3 else None, f"row {n}" if n % 2 else None, None if n % 5 else True,
                  b"x" * n if n % 7 else None) for n in range(200)]  # fmt: skip
        columns = list(zip(*given, strict=True))
        rows = pa.RecordBatch.from_arrays(
            [pa.array(c, kind) for c, kind in
             zip(columns, (pa.int32(), pa.string(), pa.bool_(), pa.binary()), strict=True)],
            ["a", "s", "b", "x"],
        ).slice(50, 100)  # fmt: skip
        sink = db.sink()
        assert sink.commit([db.prepare(sink, rows)]) == [DONE]
        assert sorted(map(str, db("SELECT a, s, b, x FROM t"))) == sorted(map(str, given[50:150]))

    def test_dates_beyond_the_calendar_are_named(self, db: Database) -> None:
        db("CREATE TABLE t (d date, at timestamptz)")
        sink = db.sink()
        days = pa.array([0, 2**31 - 1, -(2**31), -2_440_588], pa.int32()).cast(pa.date32())
        times = pa.array([0, 0, 0, -(2**63)], pa.int64()).cast(pa.timestamp("us", "UTC"))
        writer = sink.begin(db.branch())
        with pytest.raises(BadRow, match="calendar") as caught:
            writer.write(pa.RecordBatch.from_arrays([days, times], ["d", "at"]))
        assert set(caught.value.rows) == {1, 2, 3}
        writer.abort()

    def test_what_a_type_would_round_is_a_bad_row(self, db: Database) -> None:
        db("CREATE TABLE t (a timestamptz(0), b timestamp(3), c time(1), d timestamptz(6))")
        frame = {"a": "timestamp", "b": "timestamp_ntz", "c": "time(6)", "d": "timestamp"}
        sink = db.sink(frame=frame)
        whole, milli = dt.datetime(1969, 1, 1, 1, 1, 1), dt.datetime(1969, 1, 1, 1, 1, 1, 1000)
        micro, tenth = dt.datetime(2024, 1, 1, 1, 1, 1, 1), dt.time(1, 1, 1, 100_000)

        def rows(*given: tuple[Any, ...]) -> pa.RecordBatch:
            kinds = (pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.time64("ns"))
            columns = zip(zip(*given, strict=True), (*kinds, kinds[0]), strict=True)
            return pa.RecordBatch.from_arrays([pa.array(c, kind) for c, kind in columns], [*frame])

        writer = sink.begin(db.branch())
        with pytest.raises(BadRow, match="more digits after the second") as caught:
            writer.write(rows((whole, milli, tenth, micro), (milli, milli, tenth, micro),
                              (whole, micro, tenth, micro), (whole, milli, micro.time(), micro),
                              (None, None, None, None)))  # fmt: skip
        assert set(caught.value.rows) == {1, 2, 3}
        writer.abort()
        assert sink.commit([db.prepare(sink, rows((whole, milli, tenth, micro)))]) == [DONE]
        assert db("SELECT b, c FROM t") == [(milli, tenth)]
        db("CREATE TABLE i (v interval(0)); CREATE TABLE h (v interval hour)")
        for table in ("i", "h"):
            with pytest.raises(UsageError, match="would round it"):
                db.sink(table, frame={"v": "interval day to second"})

    def test_domains_over_domains(self, db: Database) -> None:
        db("CREATE DOMAIN d1 AS varchar(5) NOT NULL; CREATE DOMAIN d2 AS d1 CHECK (VALUE <> 'no')")
        db("CREATE TABLE t (k int PRIMARY KEY, v d2)")
        frame = {"k": "int", "v": "string", "gone": "boolean"}
        sink = db.sink(key="k", delete="gone", frame=frame)
        names = f"k v {FLAG}"
        with pytest.raises(BadRow, match="longer than 5"):
            db.prepare(sink, keyed((1, "toolong", False), names=names))
        refused = db.prepare(sink, keyed((1, "no", False), names=names), 1)
        with pytest.raises(BadRow, match="d2"):
            sink.check([refused])
        deletion = keyed((1, "x", True), names=names).set_column(1, "v", pa.nulls(1, pa.string()))
        receipt = db.prepare(sink, deletion, 2)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        with pytest.raises(BadRow, match="null"):
            db.prepare(db.sink(mode="staged"), deletion.select([0, 1]), 3)

    def test_complex_types_become_json_by_spark(self) -> None:
        sink = Postgres("t", dsn="host=nowhere")
        wanted = sink.project(
            {"a": Column("`a`", "array<int>"), "m": Column("`m`", "map<string,int>"),
             "n": Column("`n`", "int")}
        )  # fmt: skip
        assert wanted["a"].startswith("to_json(`a`,") and wanted["m"].startswith("to_json(`m`,")
        assert wanted["n"] == "`n`"
        for option in ("'timestampFormat', '", "'timestampNTZFormat', '"):  # not milliseconds
            assert "ss.SSSSSS" in wanted["a"].partition(option)[2].partition(", ")[0]


class TestTheFrameMustFit:
    def test_every_difference_is_named(self, db: Database) -> None:
        db("CREATE TABLE t (id int NOT NULL, small int2, price numeric(6,2), at timestamp, "
           "need text NOT NULL, made int GENERATED ALWAYS AS (1) STORED, ok text)")  # fmt: skip
        frame = {"id": "bigint", "small": "smallint", "price": "decimal(10,4)", "at": "timestamp",
                 "made": "int", "ok": "string", "extra": "int"}  # fmt: skip
        with pytest.raises(UsageError) as caught:
            db.sink(frame=frame)
        text = str(caught.value)
        for name in ("id: bigint", "price:", "at:", "need:", "made:", "extra:"):
            assert name in text, (name, text)
        assert "small:" not in text and "ok:" not in text

    def test_missing_columns_of_options_are_named_together(self) -> None:
        sink = Postgres("t", dsn="x", key=["a", "b"], delete="gone", order_by="ts")
        with pytest.raises(UsageError) as caught:
            sink.project({"a": Column("a", "int"), "v": Column("v", "void")})
        for name in ("'b'", "'gone'", "'ts'", "void"):
            assert name in str(caught.value)

    def test_no_table(self, db: Database) -> None:
        with pytest.raises(UsageError, match="no table"):
            db.sink("nowhere")
        db('CREATE SCHEMA other; CREATE TABLE other."Readings" (k int)')
        with pytest.raises(
            UsageError, match=r'no table "readings" .*, but other\."Readings"\. Create'
        ):
            db.sink("readings")
        db("CREATE VIEW seen AS SELECT 1 AS a")
        with pytest.raises(UsageError, match="not a table"):
            db.sink("seen")

    def test_a_key_needs_its_index(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        with pytest.raises(UsageError, match="CREATE UNIQUE INDEX"):
            db.sink(key=["k"])

    def test_an_index_that_was_never_finished_is_none(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); INSERT INTO t VALUES (1, 'a'), (1, 'b')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            db("CREATE UNIQUE INDEX CONCURRENTLY ON t (k)")
        with pytest.raises(UsageError, match="CREATE UNIQUE INDEX"):
            db.sink(key=["k"])

    def test_a_number_that_only_the_table_gives_cannot_be_replaced(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, n bigint GENERATED ALWAYS AS IDENTITY)")
        with pytest.raises(UsageError, match="n: it is GENERATED ALWAYS"):
            db.sink(key="k", frame={"k": "int", "n": "bigint"})
        db.sink(key="k", frame={"k": "int"})

    @pytest.mark.parametrize("options", [{"lock_timeout": 0.0004}, {"witness_schema": "w%s"}])
    def test_options_that_mean_something_else(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(options))):
            Postgres("t", dsn="x", **options)

    def test_a_check_of_the_whole_row_is_rehearsed(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        db("CREATE FUNCTION ok(t) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1.k < 5'")
        db("ALTER TABLE t ADD CHECK (ok(t.*))")
        sink = db.sink(mode="staged")
        good, bad = (db.prepare(sink, keyed((k, "a")), k) for k in (1, 9))
        assert sink.check([good]) == [None] and sink.commit([good]) == [DONE]
        with pytest.raises(BadRow, match="check constraint"):
            sink.check([bad])

    def test_names_that_need_quotes(self, db: Database) -> None:
        db('CREATE SCHEMA "Odd One"')
        db('CREATE TABLE "Odd One"."T ""x" ("a b" int PRIMARY KEY, "SELECT" text)')
        sink = db.sink('T "x', schema="Odd One", name="t", key=["a b"], witness_schema='W "w')
        rows = keyed((1, "x"), (2, "y"), names="a_b SELECT").rename_columns(["a b", "SELECT"])
        receipt = db.prepare(sink, rows)
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        assert len(db('SELECT * FROM "Odd One"."T ""x"')) == 2


class TestBadRows:
    TABLE = "CREATE TABLE t (k int NOT NULL CHECK (k < 100), v varchar(5))"

    @pytest.mark.parametrize(
        ("rows", "bad", "reason"),
        [
            ([(1, "a"), (None, "b")], {1}, "k is null"),
            ([(1, "toolong"), (2, "b")], {0}, "longer than 5"),
            ([(1, "a"), (2, "b\0")], {1}, "code zero"),
        ],
    )
    def test_seen_before_they_are_sent(
        self, db: Database, rows: Sequence[tuple[Any, ...]], bad: set[int], reason: str
    ) -> None:
        db(self.TABLE)
        writer = db.sink().begin(db.branch())
        with pytest.raises(BadRow, match=reason) as caught:
            writer.write(keyed(*rows))
        assert set(caught.value.rows) == bad
        writer.abort()
        assert db.open() == []

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_a_constraint_refuses_the_branch_and_shows_no_data(
        self, db: Database, mode: str
    ) -> None:
        db(self.TABLE)
        sink = db.sink(mode=mode)
        with pytest.raises(BadRow, match="check constraint") as caught:
            db.prepare(sink, keyed((1, "fine"), (12345, "vv")))
        assert "12345" not in str(caught.value) and caught.value.__cause__ is None
        assert db.open() == []

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_a_tolerant_branch_goes_on_without_them(self, db: Database, mode: str) -> None:
        db(self.TABLE)
        sink = db.sink(mode=mode)
        writer = sink.begin(db.branch(tolerant=True))
        writer.write(keyed((1, "a"), (2, "b")))
        with pytest.raises(BadRow):
            writer.write(keyed((3, "c"), (1000, "d")))
        writer.write(keyed((4, "e")))
        done = writer.prepare()
        assert done is not None
        receipt = Receipt("t", done.id, 0, Fingerprint(3, 0), done.handle)
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(1,), (2,), (4,)]

    def test_a_trigger_that_raises_is_told_without_its_words(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        for how in ("", " USING ERRCODE = 'check_violation'", " USING ERRCODE = 'ZZ001'"):
            db("CREATE OR REPLACE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS "
               f"$$BEGIN RAISE EXCEPTION 'no: %', NEW.v{how}; END$$")  # fmt: skip
            db(
                "CREATE OR REPLACE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION judge()"
            )
            sink = db.sink()
            with pytest.raises(BadRow, match="function judge raises") as caught:
                db.prepare(sink, keyed((1, "secret")))
            assert "secret" not in str(caught.value)
            staged = db.sink(mode="staged")
            receipt = db.prepare(staged, keyed((1, "secret")), 1)
            with pytest.raises(BadRow, match="function judge raises"):
                staged.check([receipt])
            staged.abort(staged.find(db.namespace))
            db.renew()

    @pytest.mark.parametrize("refuses", ["trigger", "index"])
    def test_a_tolerant_branch_goes_on_whatever_refuses(self, db: Database, refuses: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        if refuses == "index":
            db("CREATE INDEX ON t (v)")
        else:
            db("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS "
               "$$BEGIN IF NEW.k > 1 THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END$$")  # fmt: skip
            db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        sink = db.sink()
        writer = sink.begin(db.branch(tolerant=True))
        writer.write(keyed((1, "a")))
        with pytest.raises(BadRow):
            writer.write(keyed((2, NOISE)))
        writer.write(keyed((1, "b")))
        done = writer.prepare()
        assert done is not None
        assert sink.commit([Receipt("t", done.id, 0, Fingerprint(2, 0), done.handle)]) == [DONE]

    def test_text_that_is_none(self, db: Database) -> None:
        db("CREATE TABLE t (a varchar(9), b text)")
        words = pa.array([b"ok", b"\xff\xfe no"], pa.binary())
        broken = pa.Array.from_buffers(pa.string(), 2, words.buffers())
        rows = pa.RecordBatch.from_arrays([broken, broken], ["a", "b"])
        with pytest.raises(BadRow, match="invalid byte sequence") as caught:
            db.prepare(db.sink(), rows)
        assert "0xff" not in str(caught.value)

    def test_an_enum_value_is_not_told(self, db: Database) -> None:
        db("CREATE TYPE mood AS ENUM ('sad')")
        db("CREATE TABLE t (m mood, j jsonb)")
        for row in (("secret", "{}"), ("sad", "{secret")):
            with pytest.raises(BadRow) as caught:
                db.prepare(db.sink(), keyed(row, names="m j"))
            assert "secret" not in str(caught.value)


class TestKeys:
    TABLE = "CREATE TABLE t (k int PRIMARY KEY, v text NOT NULL, at int)"
    NAMES = "k v at"

    def test_a_key_is_staged_by_default(self) -> None:
        assert Postgres("t", dsn="x", key=["k"]).commitment is Commitment.STAGED
        assert Postgres("t", dsn="x").commitment is Commitment.TRANSACTIONAL

    def test_upsert_appears_at_one_instant(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'old', 1), (9, 'stays', 1)")
        sink = db.sink(key="k")
        receipts = [db.prepare(sink, keyed((1, "new", 2), (2, "b", 2), names=self.NAMES), 0),
                    db.prepare(sink, keyed((3, "c", 2), names=self.NAMES), 1)]  # fmt: skip
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE, DONE]
        assert db("SELECT k, v FROM t ORDER BY k") == [(1, "new"), (2, "b"), (3, "c"), (9, "stays")]
        assert len(db("SELECT DISTINCT xmin FROM t WHERE k < 9")) == 1
        assert db.open() == []

    @pytest.mark.parametrize("tasks", [1, 2])
    def test_duplicates_are_refused_or_ordered(self, db: Database, tasks: int) -> None:
        db(self.TABLE)
        first, second = (1, "secret", 5), (1, "later", 7)

        def prepared(sink: Postgres, batch: int, *rows: tuple[Any, ...]) -> list[Receipt]:
            if tasks == 1:
                return [db.prepare(sink, keyed(*rows, names=self.NAMES), 0, batch=batch)]
            return [db.prepare(sink, keyed(row, names=self.NAMES), task, batch=batch)
                    for task, row in enumerate(rows)]  # fmt: skip

        plain = db.sink(key="k")
        with pytest.raises(BadRow, match=r"one key \(k\).*order_by") as caught:
            plain.check(prepared(plain, 0, first, second))
        assert "secret" not in str(caught.value)
        ordered = db.sink(key="k", order_by="at")
        receipts = prepared(ordered, 1, second, first)
        assert not any(ordered.check(receipts))
        assert set(ordered.commit(receipts)) == {DONE}
        assert db("SELECT k, v FROM t") == [(1, "later")]
        with pytest.raises(BadRow, match="and one at"):
            ordered.check(prepared(ordered, 2, first, (1, "other", 5)))

    def test_a_flag_deletes_by_key_alone(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'goes', 1), (2, 'stays', 1), (3, 'changes', 1)")
        frame = {"k": "int", "v": "string", "at": "int", "gone": "boolean"}
        sink = db.sink(key="k", delete="gone", order_by="at", frame=frame)
        rows = keyed((1, None, 2, True), (3, "changed", 2, False), (4, None, 2, True),
                     (5, "back", 3, False), names=f"{self.NAMES} {FLAG}")  # fmt: skip
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
    def test_what_a_deletion_sets_free_can_be_taken(self, db: Database, unique: str) -> None:
        db(f"CREATE TABLE t (k int PRIMARY KEY, v text, {unique})")
        db("INSERT INTO t VALUES (1, 'a')")
        frame = {"k": "int", "v": "string", "gone": "boolean"}
        sink = db.sink(key="k", delete="gone", frame=frame)
        receipt = db.prepare(sink, keyed((1, "a", True), (2, "a", False), names=f"k v {FLAG}"))
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(2, "a")]

    def test_prepared_with_a_key_is_refused_with_the_cure(self, db: Database) -> None:
        db(self.TABLE)
        for options in ({"key": "k", "mode": "prepared"}, {}):
            with pytest.raises(UsageError, match=r"mode='staged'.*key_partitioned=True"):
                db.sink(**options)
        db("CREATE TABLE log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)")
        assert db.sink("log", frame={"v": "string"}).mode.value == "prepared"

    def test_prepared_upsert_where_the_frame_is_partitioned(self, db: Database) -> None:
        db(self.TABLE)
        db("INSERT INTO t VALUES (1, 'old', 1)")
        sink = db.sink(key="k", mode="prepared", key_partitioned=True)
        receipts = [db.prepare(sink, keyed((1, "new", 2), names=self.NAMES), 0),
                    db.prepare(sink, keyed((2, "b", 2), names=self.NAMES), 1)]  # fmt: skip
        assert db("SELECT v FROM t") == [("old",)]
        with pytest.raises(Rejected, match="two tasks touch one key"):
            db.prepare(sink, keyed((1, "third", 3), names=self.NAMES), 2)
        assert len(db.open()) == 2
        assert sink.commit(receipts) == [DONE, DONE]
        assert db("SELECT k, v FROM t ORDER BY k") == [(1, "new"), (2, "b")]

    def test_a_retry_rolls_back_what_its_own_task_left_and_no_other(self, db: Database) -> None:
        db(self.TABLE)
        sink = db.sink(key="k", mode="prepared", key_partitioned=True)
        mine, other = keyed((1, "a", 1), names=self.NAMES), keyed((2, "b", 1), names=self.NAMES)
        first = db.prepare(sink, mine, 0, task_attempt=0)
        sibling = db.prepare(sink, other, 1, task_attempt=1)
        again = db.prepare(sink, mine, 0, task_attempt=2, retry=1)
        assert sink.check([sibling, again]) == [None, None]
        assert sink.commit([first, sibling, again]) == [LOST, DONE, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(1,), (2,)]

    def test_speculation_is_refused_where_attempts_would_meet(self, db: Database) -> None:
        conf = {"spark.speculation": "True"}
        spark = SimpleNamespace(
            sparkContext=SimpleNamespace(defaultParallelism=2, getConf=lambda: conf)
        )
        site: Any = SimpleNamespace(spark=spark)
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

    def test_nothing_is_rolled_back_that_holds_nobody_up(self, db: Database) -> None:
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


class TestStaging:
    def test_a_foreign_key_is_rehearsed(self, db: Database) -> None:
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
    def test_whatever_may_refuse_a_row_does_so_before_the_decision(
        self, db: Database, table: str, rows: pa.RecordBatch
    ) -> None:
        db(f"CREATE TABLE t ({table})")
        sink = db.sink(mode="staged", frame={"k": "int" if "k int" in table else "string"})
        receipt = db.prepare(sink, rows)
        with pytest.raises(BadRow):
            sink.check([receipt])
        with pytest.raises(InDoubt, match="cannot be moved"):  # and it is not tried for ever
            sink.commit([receipt])

    def test_a_key_too_long_for_its_index(self, db: Database) -> None:
        db("CREATE TABLE t (k text PRIMARY KEY, v text)")
        sink = db.sink(key="k")
        receipt = db.prepare(sink, keyed((NOISE, "a")))
        with pytest.raises(BadRow, match="exceeds"):
            sink.check([receipt])
        longer = db.prepare(
            sink, keyed(("x" * 100_000, "a")), 1
        )  # which the index takes, compressed
        assert sink.check([longer]) == [None]
        assert sink.commit([longer]) == [DONE]

    def test_a_constant_default_needs_no_rehearsal(self, db: Database) -> None:
        db("CREATE TABLE t (k int, a text DEFAULT 'x''y', b timestamptz DEFAULT now(), c numeric "
           "DEFAULT (-1.5), d jsonb DEFAULT '{}', e varchar(9) DEFAULT 'z', f bigserial, "
           "g uuid DEFAULT gen_random_uuid())")  # fmt: skip
        sink = Postgres("t", dsn=db.dsn, mode="staged")
        sink.project({"k": Column("k", "int")})
        assert sink.preflight() == []
        sink.close()

    def test_a_move_that_still_fails_stops_and_loses_nothing(self, db: Database) -> None:
        db("CREATE TABLE t (k int UNIQUE, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.check([receipt]) == [None]
        db("INSERT INTO t VALUES (1, 'intruder')")
        with pytest.raises(InDoubt, match="cannot be moved"):
            sink.commit([receipt])
        db("DELETE FROM t")
        assert sink.commit([receipt]) == [DONE]

    def test_rows_changed_behind_our_back(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a"), (2, "b")))
        db(f"DELETE FROM poundlock.{staging_name(receipt.id)} WHERE k = 1")
        with pytest.raises(GuaranteeBroken, match=r"has 2 rows, and 1 were moved: somebody"):
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

    def test_a_batch_that_lost_a_branch_is_given_up_whole(self, db: Database) -> None:
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
        replay = [db.prepare(sink, rows, task, attempt=2, task_attempt=8 + task)
                  for task, rows in enumerate((first, second))]  # fmt: skip
        assert sink.commit(replay) == [DONE, DONE]
        assert db("SELECT k, v FROM t") == [(2, "later batch")]

    def test_a_tombstone_takes_the_batch_with_it(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in (0, 1)]
        assert sink.abort([Stray("t", receipts[0].id, 1, "staged")]) == [LOST]
        assert sink.commit(receipts) == [LOST, LOST]
        assert db.open() == [] and db("SELECT * FROM t") == []

    def test_what_was_moved_stays_and_the_rest_follows(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in range(3)]
        assert sink.commit(receipts[:1]) == [DONE]
        db(f"DROP TABLE poundlock.{staging_name(receipts[1].id)}")
        assert sink.commit(receipts) == [DONE, LOST, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (2,)]

    def test_columns_that_the_table_fills(self, db: Database) -> None:
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

    def test_a_reader_of_a_staging_table_holds_up_nothing(
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
            assert "stay for now" in caplog.text
            [found] = sink.find(db.namespace)
            assert sink.abort([found]) == [LOST]
            assert sink.find(db.namespace) == [] and len(db.open()) == 3
            sink.prune(db.namespace, 99)  # what is still there keeps its witness
            assert sink.commit([*decided, stray]) == [DONE, DONE, LOST]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (1,)]
        assert sink.find(db.namespace) == [] and db.open() == []
        assert sink.commit(decided) == [DONE, DONE]
        assert db("SELECT k FROM t ORDER BY k") == [(0,), (1,)]

    def test_a_move_that_waits_says_why(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipt = db.prepare(sink, keyed((1, "a")))
        with psycopg.connect(db.dsn) as other:
            other.execute("LOCK TABLE t")
            assert sink.commit([receipt]) == [OPEN]
        assert f"branch {receipt.id} is not moved yet: somebody holds a lock" in caplog.text

    def test_a_drop_takes_few_locks(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[int] = []

        def counted(connection: psycopg.Connection[Any], *rest: Any) -> None:
            drop(connection, *rest)
            mine = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()"
            held.extend(connection.execute(mine).fetchone() or ())

        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode="staged")
        receipts = [db.prepare(sink, keyed((task, "a")), task) for task in range(20)]
        monkeypatch.setattr("poundlock.sinks.postgres.move.drop", counted)
        assert set(sink.commit(receipts)) == {DONE}
        assert max(held) < 64 and db.open() == []  # 64: PostgreSQL's max_locks_per_transaction

    def test_a_full_lock_table_is_told_with_its_cure(self) -> None:
        problem = told(psycopg.errors.OutOfMemory("out of shared memory"))
        assert isinstance(problem, Rejected) and "max_locks_per_transaction" in str(problem)


class TestTheRoleHasTimeouts:
    @pytest.mark.parametrize("options", [{"mode": "staged"}, {"key": "k"}], ids=str)
    def test_a_move_is_not_cut(self, db: Database, options: dict[str, Any]) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        db("CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
           "'BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END'")  # fmt: skip
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()")
        sink = db.sink(dsn=f"options='-c statement_timeout=250ms' {_keywords(db.dsn)}", **options)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        sink.close()

    @pytest.mark.parametrize("tolerant", [False, True])
    def test_a_task_may_take_its_time(self, db: Database, tolerant: bool) -> None:
        db("CREATE TABLE t (k int, v text)")
        limits = "-c statement_timeout=100ms -c idle_in_transaction_session_timeout=100ms"
        sink = db.sink(dsn=f"options='{limits}' {_keywords(db.dsn)}")
        writer = sink.begin(db.branch(tolerant=tolerant))
        writer.write(keyed((1, "a")))
        db("SELECT pg_sleep(0.3)")
        writer.write(keyed((2, "b")))
        assert writer.prepare() is not None
        sink.close()


class TestTheTableIsAltered:
    """While the stream runs."""

    AT = pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us"))

    @pytest.mark.parametrize("options", [{"mode": "prepared"}, {"mode": "staged"}], ids=str)
    @pytest.mark.parametrize(
        ("made", "spark", "values", "altered"),
        [
            ("int8", "bigint", pa.array([2**62 + 12345]), "ALTER TABLE t ALTER v TYPE float8"),
            ("timestamp", "timestamp_ntz", AT, "ALTER TABLE t ALTER v TYPE timestamptz"),
            ("int8", "bigint", pa.array([7]), "DROP TABLE t; CREATE TABLE public.t (v timestamptz)"),
            ("numeric(10,2)", "decimal(10,2)", pa.array([D("1.75")], pa.decimal128(10, 2)),
             "ALTER TABLE t ALTER v TYPE int"),
        ],
    )  # fmt: skip
    def test_no_value_is_taken_for_another(
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

    def test_not_while_a_prepared_branch_waits(self, db: Database) -> None:
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
    def test_what_it_no_longer_takes_is_refused_before_the_decision(
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


def test_a_table_that_is_widened_amid_a_batch(db: Database) -> None:
    """Some of its branches have the old type and some the new: all are written once more."""
    db("CREATE TABLE t (k int, v varchar(10))")
    sink = db.sink(mode="staged", frame={"k": "int", "v": "string"})
    old = db.prepare(sink, keyed((1, "a")), 0)
    db("ALTER TABLE t ALTER v TYPE varchar(20)")
    new = db.prepare(sink, keyed((2, "b")), 1)
    with pytest.raises(Rejected, match="was altered while the batch was written"):
        sink.check([old, new])
    again = [db.prepare(sink, keyed((n, "c")), n, attempt=2, task_attempt=n + 9) for n in (0, 1)]
    assert sink.check(again) == [None, None] and sink.commit(again) == [DONE, DONE]


def test_a_key_whose_index_is_dropped_amid_a_batch(db: Database) -> None:
    db("CREATE TABLE t (k int CONSTRAINT one UNIQUE, v text)")
    sink = db.sink(key="k")
    receipt = db.prepare(sink, keyed((1, "a")))
    db("ALTER TABLE t DROP CONSTRAINT one")
    with pytest.raises(Rejected, match="was altered while the batch was written"):
        sink.check([receipt])


class TestTheOptionsAreChanged:
    """Between the decision and the commit."""

    FRAME: ClassVar[dict[str, str]] = {"k": "int", "v": "string"}

    def test_a_deletion_stays_one(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        db("INSERT INTO t VALUES (3, 'goes')")
        sink = db.sink(key="k", delete="gone", frame={**self.FRAME, "gone": "boolean"})
        rows = keyed((1, "new", False), (3, "never", True), names=f"k v {FLAG}")
        receipt = db.prepare(sink, rows)
        assert db.sink(mode="staged", frame=self.FRAME).commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(1, "new")]

    def test_rows_go_where_they_were_meant_to(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int, v text)")
        receipt = db.prepare(db.sink(mode="staged"), keyed((1, "a")))
        other = db.sink("u", name="t", mode="staged")
        later = db.prepare(other, keyed((2, "b")), 1)
        with pytest.raises(LogMismatch, match="different tables"):
            other.commit([receipt, later])
        assert other.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t") == [(1,)] and db("SELECT * FROM u") == []


def test_a_staged_batch_goes_whole_though_the_mode_was_changed(db: Database) -> None:
    db("CREATE TABLE t (k int PRIMARY KEY, v text, at int)")
    sink = db.sink(key="k", order_by="at")
    receipts = [db.prepare(sink, keyed((1, f"at {at}", at), names="k v at"), task)
                for task, at in enumerate((9, 1))]  # fmt: skip
    later = db.sink(key="k", order_by="at", mode="prepared", key_partitioned=True)
    own = db.prepare(later, keyed((2, "b", 1), names="k v at"), 5)
    assert (
        later.commit_together(receipts)
        and not later.commit_together([own])
        and not sink.commit_together([own])
    )
    coordinator = Coordinator(MemoryLog(), {"t": later}, settings=Settings(commits_at_once=1))
    assert list(coordinator._portions(receipts)) == [receipts]


@pytest.mark.parametrize("mode", ["prepared", "staged"])
def test_a_branch_is_finished_as_it_was_written(db: Database, mode: str) -> None:
    """Though the pipeline was started again with the other mode."""
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


class TestTheWitness:
    def test_a_zombie_cannot_prepare_what_was_given_up(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        zombie = sink.begin(db.branch())
        zombie.write(keyed((1, "a")))
        receipt = Receipt("t", zombie._id, 0, Fingerprint(1, 0))
        assert sink.commit([receipt]) == [LOST]
        with pytest.raises(Rejected, match="aborted by the driver"):
            zombie.prepare()
        assert db.open() == [] and db("SELECT * FROM t") == []

    def test_an_undecided_witness_is_no_answer(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        receipt = db.prepare(sink, keyed((1, "a")))
        foreign = sink.begin(db.branch(1))
        foreign.write(keyed((2, "b")))
        foreign._finish_copy()
        foreign._bear_witness()  # as far as a task may come before its machine stops
        unknown = Receipt("t", foreign._id, 1, Fingerprint(1, 0))
        assert sink.commit([receipt, unknown]) == [DONE, OPEN]
        foreign.abort()
        assert sink.commit([unknown]) == [LOST]

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_a_table_in_its_place_proves_nothing(self, db: Database, mode: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.commit([receipt]) == [DONE]
        elsewhere = db.sink(mode=mode, witness_schema="elsewhere")
        db.prepare(elsewhere, keyed((2, "b")), 1)  # makes a witness there
        assert elsewhere.commit([receipt]) == [UNKNOWN]
        db("DROP SCHEMA poundlock CASCADE")
        again = db.sink(mode=mode)
        assert again.commit([receipt]) == [UNKNOWN]
        assert not db("SELECT to_regclass('poundlock.witness')")[0][0]
        assert again.abort([Stray("t", receipt.id, 1, mode)]) == [LOST]  # none of a decision
        assert again.commit([receipt]) == [UNKNOWN]
        assert again.check([receipt]) == ["its witness table was dropped or emptied meanwhile"]
        db("UPDATE poundlock.witness SET state = 'committed'")
        assert again.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t") == [(1,)]

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    @pytest.mark.parametrize("how", ["TRUNCATE poundlock.witness", "DELETE FROM poundlock.witness"])
    def test_an_emptied_table_proves_nothing(self, db: Database, mode: str, how: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.commit([receipt]) == [DONE]
        db(how)
        assert sink.commit([receipt]) == [UNKNOWN]
        assert db("SELECT * FROM poundlock.witness") == []  # no tombstone that would say otherwise
        later = db.prepare(sink, keyed((2, "b")), 1)  # it goes on with new ones
        assert sink.check([later]) == [None]
        assert sink.commit([later]) == [DONE]
        assert sink.commit([receipt]) == [UNKNOWN]
        assert db("SELECT k FROM t ORDER BY k") == [(1,), (2,)]

    def test_a_table_that_is_being_read_is_not_emptied(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        db.prepare(sink, keyed((1, "a")))
        with psycopg.connect(db.dsn) as reader:
            assert witness.hold(reader, sink.target)
            db("SET lock_timeout = '200ms'")
            for how in ("DELETE FROM", "TRUNCATE"):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    db(f"{how} poundlock.witness")

    def test_another_cluster_is_not_believed(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        receipt = db.prepare(sink, keyed((1, "a")))
        assert receipt.handle["system"]
        moved = Receipt("t", receipt.id, 0, receipt.fingerprint, {"system": "123"})
        with pytest.raises(LogMismatch, match="another PostgreSQL cluster"):
            sink.commit([moved])

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_another_database_is_told(self, db: Database, node: postgres.Node, mode: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, keyed((1, "a")))
        other = Database(node)
        other("CREATE TABLE t (k int, v text)")
        with pytest.raises(LogMismatch, match="another database"):
            other.sink().commit([receipt])
        assert sink.commit([receipt]) == [DONE]
        with pytest.raises(LogMismatch, match="another database"):
            other.sink().commit([receipt])
        other.connection.close()


class TestRoles:
    @pytest.fixture
    def role(self, db: Database) -> Iterator[Callable[[], str]]:
        name = f"role_{db.name}"
        db(f"CREATE ROLE {name} LOGIN PASSWORD 'hidden'")
        db("CREATE TABLE t (k int, v text)")
        yield lambda: f"host=127.0.0.1 port={db.connection.info.port} dbname={db.name} user={name} " \
                      "password=hidden"  # fmt: skip
        db(f"DROP OWNED BY {name}")
        db(f"DROP ROLE {name}")

    def test_each_missing_right_is_named(self, db: Database, role: Callable[[], str]) -> None:
        name = f"role_{db.name}"
        with pytest.raises(NotAuthorised, match=f"GRANT INSERT ON .* TO .?{name}"):
            db.sink(dsn=role())
        db(f"GRANT INSERT ON t TO {name}")
        with pytest.raises(NotAuthorised, match="GRANT CREATE ON DATABASE"):
            db.sink(dsn=role())
        db(f"GRANT CREATE ON DATABASE {db.name} TO {name}")
        sink = db.sink(dsn=role())
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.commit([receipt]) == [DONE]
        sink.close()

    def test_a_sequence_that_may_not_be_drawn_from(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("ALTER TABLE t ADD id bigserial")
        db(f"GRANT INSERT ON t TO {name}; GRANT CREATE ON DATABASE {db.name} TO {name}")
        frame = {"k": "int", "v": "string"}
        with pytest.raises(NotAuthorised, match="GRANT USAGE ON SEQUENCE t_id_seq TO"):
            db.sink(dsn=role(), mode="staged", frame=frame)
        db(f"GRANT USAGE ON SEQUENCE t_id_seq TO {name}")
        sink = db.sink(dsn=role(), mode="staged", frame=frame)
        assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
        sink.close()

    def test_another_role_may_not_finish(self, db: Database, role: Callable[[], str]) -> None:
        name = f"role_{db.name}"
        receipt = db.prepare(db.sink(), keyed((1, "a")))
        db(f"GRANT INSERT ON t TO {name}; GRANT ALL ON SCHEMA poundlock TO {name}; "
           f"GRANT ALL ON poundlock.witness TO {name}")  # fmt: skip
        sink = db.sink(dsn=role())
        [reason] = sink.check([receipt])
        assert reason and "prepared by role poundlock" in reason
        with pytest.raises(NotAuthorised, match="another role"):
            sink.commit([receipt])
        sink.close()

    @pytest.mark.parametrize("granted", ["USAGE", "CREATE"])
    def test_a_schema_needs_both_rights(
        self, db: Database, role: Callable[[], str], granted: str
    ) -> None:
        name = f"role_{db.name}"
        db(f"CREATE SCHEMA poundlock; GRANT {granted} ON SCHEMA poundlock TO {name}; "
           f"GRANT INSERT ON public.t TO {name}")  # fmt: skip
        for mode in ("prepared", "staged"):
            with pytest.raises(NotAuthorised, match="GRANT CREATE, USAGE ON SCHEMA"):
                db.sink(dsn=role(), mode=mode)

    def test_a_witness_that_is_there_needs_no_right_to_create(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db.prepare(db.sink(), keyed((1, "a")), 9)
        db(f"GRANT INSERT ON t TO {name}; GRANT USAGE ON SCHEMA poundlock TO {name}; "
           f"GRANT ALL ON poundlock.witness TO {name}")  # fmt: skip
        sink = db.sink(dsn=role())
        assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
        sink.close()
        with pytest.raises(NotAuthorised, match="GRANT CREATE, USAGE ON SCHEMA"):
            db.sink(dsn=role(), mode="staged")

    def test_a_witness_that_somebody_made_for_us_is_begun(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("CREATE SCHEMA poundlock")
        db(witness._CREATE.format(psycopg.sql.Identifier("poundlock", "witness")).as_string())
        db(f"GRANT INSERT ON t TO {name}; GRANT USAGE ON SCHEMA poundlock TO {name}; "
           f"GRANT ALL ON poundlock.witness TO {name}")  # fmt: skip
        sink = db.sink(dsn=role())
        receipt = db.prepare(sink, keyed((1, "a")))
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]
        sink.close()

    def test_rights_to_the_columns_will_do(self, db: Database, role: Callable[[], str]) -> None:
        name, frame = f"role_{db.name}", {"k": "int", "v": "string"}
        db(f"ALTER TABLE t ADD x int, ADD PRIMARY KEY (k); GRANT INSERT (k, v) ON t TO {name}; "
           f"GRANT CREATE ON DATABASE {db.name} TO {name}")  # fmt: skip
        with pytest.raises(NotAuthorised, match="GRANT INSERT ON"):
            db.sink(dsn=role(), frame=frame, mode="prepared", key_partitioned=True)
        sink = db.sink(dsn=role(), frame=frame, mode="staged")
        assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
        sink.close()
        db(f"GRANT SELECT (k, v), UPDATE (v) ON t TO {name}")
        with pytest.raises(NotAuthorised, match="GRANT UPDATE ON"):
            db.sink(dsn=role(), frame=frame, key="k")
        db(f"GRANT UPDATE (k) ON t TO {name}")
        sink = db.sink(dsn=role(), frame=frame, key="k")
        receipt = db.prepare(sink, keyed((1, "b")), 1)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        sink.close()

    def test_a_limit_of_the_role_is_one_too(self, db: Database, role: Callable[[], str]) -> None:
        name = f"role_{db.name}"
        db(f"GRANT INSERT ON t TO {name}; GRANT CREATE ON DATABASE {db.name} TO {name}")
        db(f"ALTER ROLE {name} CONNECTION LIMIT 3")
        with pytest.raises(UsageError, match="the role's CONNECTION LIMIT allows 3"):
            db.sink(dsn=role(), connections=4)

    def test_row_level_security_leaves_nothing_out(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("ALTER TABLE t ADD PRIMARY KEY (k), ENABLE ROW LEVEL SECURITY")
        db(f"CREATE POLICY p ON t USING (k < 10); GRANT ALL ON t TO {name}; "
           f"GRANT CREATE ON DATABASE {db.name} TO {name}")  # fmt: skip
        with pytest.raises(UsageError, match="what is hidden is not deleted"):
            db.sink(dsn=role(), key="k", delete="gone")
        with pytest.raises(UsageError, match=r"row level security.*use mode='staged'"):
            db.sink(dsn=role(), key_partitioned=True, mode="prepared")
        sink = db.sink(dsn=role(), key="k")
        receipt = db.prepare(sink, keyed((11, "a")))
        with pytest.raises(NotAuthorised, match="row-level security"):
            sink.check([receipt])
        sink.close()

    @pytest.mark.parametrize(
        "dsn",
        [
            "postgresql://u:first@s3cretTail@127.0.0.1:1/db",
            "postgresql://u:s3/cretTail@127.0.0.1/db",
            "postgresql://u:12/s3cretTail@127.0.0.1/db",
            "host=127.0.0.1 port=s3cretTail",
        ],
    )
    def test_a_password_that_was_not_encoded_is_not_told(self, dsn: str) -> None:
        with pytest.raises(UsageError, match="percent-encode") as caught:
            Postgres("t", dsn=dsn).preflight()
        assert "cretTail" not in str(caught.value)

    def test_a_wrong_password_is_told_without_it(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        wrong = role().replace("hidden", "nonsense")
        with pytest.raises(NotAuthorised, match="password authentication failed") as caught:
            db.sink(dsn=wrong)
        assert "nonsense" not in str(caught.value) and caught.value.__cause__ is None

    def test_a_dsn_is_never_shown(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = Postgres("t", dsn="postgresql://u:hidden@127.0.0.1/x")
        assert "hidden" not in repr(sink) and "hidden" not in repr(sink.target)
        with pytest.raises(UsageError) as caught:
            Postgres("t", dsn="this is hidden nonsense").preflight()
        assert "hidden" not in str(caught.value)
        monkeypatch.setenv("PG_DSN", db.dsn)
        db("CREATE TABLE t (k int, v text)")
        assert db.sink(dsn="env:PG_DSN").find(db.namespace) == []


class TestTroubles:
    def test_a_lost_connection_leaves_nothing(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        for mode in ("prepared", "staged"):
            sink = db.sink(mode=mode)
            writer = sink.begin(db.branch())
            writer.write(keyed((1, "a")))
            pid = writer._connection.info.backend_pid
            db(f"SELECT pg_terminate_backend({pid}, 5000)")
            more = keyed(*((number, "x" * 100) for number in range(1000)))

            def go_on(writer: Any = writer, more: pa.RecordBatch = more) -> None:
                for _ in range(100):
                    writer.write(more)
                writer.prepare()

            with pytest.raises(Unavailable):
                go_on()
            writer.abort()
            assert db.open() == [] and db("SELECT * FROM t") == []
            receipt = db.prepare(sink, keyed((1, "a")), 5)  # the sink itself goes on
            db(f"SELECT pg_terminate_backend({sink.driver._connection.info.backend_pid}, 5000)")
            assert sink.check([receipt]) == [None]  # one that was cut while it was idle is replaced
            assert sink.commit([receipt]) == [DONE]
            db("DELETE FROM t; DROP SCHEMA poundlock CASCADE")

    def test_a_trigger_that_leaves_rows_out_is_seen(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        db("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        with pytest.raises(Rejected, match="leaves rows out"):
            db.prepare(db.sink(), keyed((1, "a")))
        staged = db.sink(mode="staged")
        receipt = db.prepare(staged, keyed((1, "a")))
        with pytest.raises(Rejected, match="leaves rows out"):
            staged.check([receipt])

    @pytest.mark.parametrize(
        "columns", ["k int PRIMARY KEY, v text", "k int, v text, PRIMARY KEY (k, v)"]
    )
    def test_a_trigger_that_leaves_rows_out_of_an_upsert(self, db: Database, columns: str) -> None:
        db(f"CREATE TABLE t ({columns})")
        db("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        key = ["k", "v"] if "(k, v)" in columns else "k"
        staged = db.sink(key=key)
        receipt = db.prepare(staged, keyed((1, "a")))
        with pytest.raises(Rejected, match=r"does not take 1 rows.*leaves rows out"):
            staged.check([receipt])
        with pytest.raises(GuaranteeBroken, match="leaves rows out"):
            staged.commit([receipt])
        with pytest.raises(Rejected, match="leaves rows out"):
            db.prepare(db.sink(key=key, mode="prepared", key_partitioned=True), keyed((1, "a")), 1)
        db("DROP TRIGGER g ON t; INSERT INTO t VALUES (1, 'a')")
        assert staged.commit([receipt]) == [DONE]  # what is there already is not left out

    def test_a_read_only_server_is_waited_for(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        role = f"options='-c default_transaction_read_only=on' {_keywords(db.dsn)}"
        for mode in ("prepared", "staged"):
            sink = db.sink(mode=mode)
            receipt = db.prepare(sink, keyed((1, "a")), batch=len(mode))
            blocked = Postgres("t", dsn=role, mode=mode)
            if mode == "staged":
                assert blocked.commit([receipt]) == [OPEN]
            assert sink.commit([receipt]) == [DONE]
            blocked.close()

    def test_a_role_that_may_only_read_is_refused_at_the_start(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        reading = f"options='-c default_transaction_read_only=on' {_keywords(db.dsn)}"
        with pytest.raises(UsageError, match="default_transaction_read_only is on"):
            db.sink(dsn=reading)
        sink = db.sink()
        db.prepare(sink, keyed((1, "a")))
        blocked = Postgres("t", dsn=reading)
        found = blocked.find(db.namespace)
        assert blocked.abort(found) == [BranchState.UNREACHABLE]
        assert "not rolled back yet" in caplog.text
        blocked.close()
        assert sink.abort(found) == [LOST]

    def test_what_cannot_be_prepared_is_told_with_the_cure(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        db(
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NOTIFY x; RETURN NEW; END'"
        )
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        with pytest.raises(UsageError, match=r"NOTIFY.*use mode='staged'"):
            db.prepare(db.sink(), keyed((1, "a")))

    def test_rules_which_copy_does_not_see_are_refused(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int, v text)")
        db("CREATE RULE r AS ON INSERT TO t DO INSTEAD INSERT INTO u VALUES (NEW.k, NEW.v)")
        with pytest.raises(UsageError, match=r"has rule r.*use mode='staged'"):
            db.sink()
        staged = db.sink(mode="staged")
        receipt = db.prepare(staged, keyed((1, "a")))
        assert staged.check([receipt]) == [None] and staged.commit([receipt]) == [DONE]
        assert db("SELECT k FROM t") == [] and db("SELECT k FROM u") == [(1,)]  # as the rule has it

    def test_a_machine_that_is_gone_is_noticed(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        with db.sink().driver.use() as connection:
            found = connection.info.get_parameters()
        assert (found["tcp_user_timeout"], found["keepalives_idle"]) == ("120000", "10")

    def test_nothing_is_prepared_for_a_session(self, db: Database) -> None:
        """A pooler may give each transaction another one."""
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        for batch in range(7):
            receipt = db.prepare(sink, keyed((1, "a")), batch=batch)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        with sink.driver.use() as connection:
            assert connection.execute("SELECT * FROM pg_prepared_statements").fetchall() == []

    def test_less_than_exactly_once_writes_through(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        for semantic in ("at_least_once", "none"):
            sink = db.sink(key="k", semantic=semantic)
            writer = sink.begin(db.branch())
            writer.write(keyed((1, semantic)))
            assert writer.prepare() is None
            assert db("SELECT v FROM t") == [(semantic,)]
        assert db.open() == []

    def test_too_few_connections_are_refused(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        with pytest.raises(UsageError, match="max_connections allows"):
            db.sink(connections=10_000)
        context = SimpleNamespace(defaultParallelism=5, getConf=dict)
        site: Any = SimpleNamespace(spark=SimpleNamespace(sparkContext=context))
        for connections, said in ((5, ["connections=5, but 6 may be opened"]), (6, []), (None, [])):
            sink = Postgres("t", dsn=db.dsn, connections=connections)
            sink.attach(site)
            assert [it.split(" (")[0] for it in sink.preflight() if "opened" in it] == said
            sink.close()
        context.defaultParallelism = 10_000
        sink = Postgres("t", dsn=db.dsn)
        sink.attach(site)
        with pytest.raises(UsageError, match="10001 connections are wanted"):
            sink.preflight()
        sink.close()

    def test_a_server_that_prepares_nothing(self) -> None:
        with postgres.running(max_prepared_transactions=0) as plain:
            db = Database(plain)
            db("CREATE TABLE t (k int, v text)")
            with pytest.raises(UsageError, match=r"max_prepared_transactions is 0.*mode='staged'"):
                db.sink()
            sink = db.sink(mode="staged")
            assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
            db.connection.close()

    @pytest.mark.parametrize("isolation", ["read\\\\ committed", "serializable"])
    def test_racing_to_create_the_witness(self, db: Database, isolation: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        db("CREATE TABLE t (k int, v text)")
        as_given = f"options='-c default_transaction_isolation={isolation}' {_keywords(db.dsn)}"
        sink = db.sink(dsn=as_given)
        with ThreadPoolExecutor(6) as pool:
            receipts = list(
                pool.map(lambda task: db.prepare(sink, keyed((task, "a")), task), range(6))
            )
        assert sink.commit(receipts) == [DONE] * 6
        sink.close()


@pytest.mark.parametrize(
    "options", [{"mode": "prepared"}, {"mode": "staged"}, {"key": "k"}], ids=str
)
def test_connections_cut_at_random(db: Database, options: dict[str, Any]) -> None:
    """Nothing is lost or repeated, wherever in a branch's life its connection ends."""
    unique = " PRIMARY KEY" if "key" in options else ""
    db(f"CREATE TABLE t (k int{unique}, v text)")
    sink = db.sink(**options)
    ended = threading.Event()

    def cut() -> None:
        with psycopg.connect(db.dsn, autocommit=True, application_name="cutter") as connection:
            while not ended.wait(0.02):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE random() < 0.3 "
                    "AND application_name = 'poundlock' AND datname = current_database()"
                )

    def patient(step: Callable[[], Any]) -> Any:
        for _ in range(200):
            with contextlib.suppress(Unavailable, Rejected):
                return step()
        pytest.fail("never came through")

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for batch in range(6):
            for attempt in itertools.count(1):
                try:
                    receipts = [
                        db.prepare(sink, keyed((batch * 2 + task, "x")), task, batch=batch,
                                   attempt=attempt, task_attempt=attempt * 2 + task)
                        for task in (0, 1)
                    ]  # fmt: skip
                    assert sink.check(receipts) == [None, None]
                    break
                except (Unavailable, Rejected):
                    patient(lambda: sink.abort(sink.find(db.namespace)))
            states: list[BranchState] = []
            while states != [DONE, DONE]:
                states = patient(lambda found=receipts: sink.commit(found))
                assert LOST not in states
    finally:
        ended.set()
        cutter.join()
    patient(lambda: sink.abort(sink.find(db.namespace)))
    assert sorted(row[0] for row in db("SELECT k FROM t")) == list(range(12))
    assert db.open() == []


class TestAnswersThatProveNothing:
    def test_a_branch_that_somebody_is_just_finishing(self, db: Database) -> None:
        """The other one waits for a standby that is not there: nothing is visible yet."""
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int)")
        sink = db.sink(mode="prepared")
        receipt = db.prepare(sink, keyed((1, "a")))

        def stand_by(name: str) -> None:
            db(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
            db("SELECT pg_reload_conf()")

        def waits(session: psycopg.Connection[Any]) -> bool:
            asked = (
                f"SELECT wait_event FROM pg_stat_activity WHERE pid = {session.info.backend_pid}"
            )
            return db(asked) == [("SyncRep",)]

        def waits_for_it() -> bool:
            """Whether commits do: the process that tells them reads its settings in its own time."""
            with psycopg.connect(db.dsn, autocommit=True) as probe:
                thread = threading.Thread(target=probe.execute, args=["INSERT INTO u VALUES (1)"])
                thread.start()
                while thread.is_alive():
                    if waits(probe):
                        db(f"SELECT pg_cancel_backend({probe.info.backend_pid})")
                        thread.join()
                        return True
            return False

        with psycopg.connect(db.dsn, autocommit=True) as other:
            finish: Any = f"COMMIT PREPARED '{receipt.id}'"
            thread = threading.Thread(target=other.execute, args=[finish])
            stand_by("nobody")
            try:
                deadline = time.monotonic() + 60
                while not waits_for_it():
                    assert time.monotonic() < deadline
                thread.start()
                while not waits(other):
                    assert time.monotonic() < deadline
                assert sink.commit([receipt]) == [OPEN]
                assert db("SELECT * FROM t") == []
            finally:
                stand_by("")
                if thread.ident:
                    thread.join()
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(1, "a")]

    def test_a_transaction_that_had_failed_is_no_prepared_branch(self, db: Database) -> None:
        """The server answers PREPARE by ROLLBACK, and by no error."""
        db("CREATE TABLE t (k int, v text)")
        writer: Any = db.sink(mode="prepared").begin(db.branch())
        with pytest.raises(psycopg.errors.DivisionByZero):
            writer._connection.execute("SELECT 1 / 0")
        with pytest.raises(Rejected, match="PREPARE TRANSACTION was answered by ROLLBACK"):
            writer._end("PREPARE TRANSACTION 'poundlock'", "PREPARE TRANSACTION")
        writer.abort()
        assert db.open() == []

    def test_what_is_acknowledged_is_durable_whatever_the_role_is_set_to(
        self, db: Database
    ) -> None:
        db(f"ALTER DATABASE {db.name} SET synchronous_commit = off")
        try:
            with connect(db.dsn) as connection:
                assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
            with psycopg.connect(db.dsn) as connection:
                assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
        finally:
            db(f"ALTER DATABASE {db.name} RESET synchronous_commit")


class TestTheServer:
    def test_data_and_address_outlive_kill_and_stop(self, tmp_path: Path) -> None:
        with postgres.running(tmp_path) as server:
            address = server.url
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
            server.kill()
            assert not server.running()
            server.start()
            server.stop()
            server.start()
            assert server.url == address
            with psycopg.connect(server.dsn()) as connection:
                assert connection.execute("SELECT n FROM kept").fetchone() == (1,)
                assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)
                assert connection.execute("SHOW fsync").fetchone() == ("on",)
            password = (tmp_path / "password").read_text()
            assert password not in server.url and password in server.dsn()
            assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600
            wrong = server.dsn().replace(password, "guessed")
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                psycopg.connect(wrong)

    def test_tables_are_made_where_they_are_seen(self, db: Database) -> None:
        db("CREATE SCHEMA poundlock; CREATE TABLE t (n int)")  # the role's name, and the witness's
        assert db("SELECT schemaname FROM pg_tables WHERE tablename = 't'") == [("public",)]

    def test_binaries_of_the_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POUNDLOCK_POSTGRES_BIN", str(tmp_path))
        with pytest.raises(UsageError, match="no initdb"):
            postgres.binaries()


def test_a_receipt_is_plain_json_without_rows_or_secrets(db: Database) -> None:
    db("CREATE TABLE t (k int, v text)")
    receipt = db.prepare(db.sink(), keyed((1, "a secret row")))
    text = json.dumps(receipt.to_json())
    assert "secret" not in text and db.dsn not in text
