"""PostgreSQL: types, frames that do not fit, and bad rows."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import random
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import DONE, NOISE, Database, keyed

from poundlock.core.model import Fingerprint, Receipt
from poundlock.core.participant import Column
from poundlock.errors import BadRow, UsageError
from poundlock.sinks import Postgres
from poundlock.sinks.postgres.move import FLAG

UTC = dt.timezone.utc
D = decimal.Decimal


class TestTypes:
    # PostgreSQL's type, the Arrow type that Spark sends, and values.
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
        "huge": (
            "numeric(38,10)",
            pa.decimal128(38, 10),
            [D("-9999999999999999999999999999.9999999999"), D("0.0000000001")],
        ),
        "text": ("text", pa.string(), ["grüße 👋\t\\N", ""]),
        "short": ("varchar(5)", pa.string(), ["grüße", "ab   "]),
        "fixed": ("char(3)", pa.string(), ["abc", "a  "]),
        "mood": ("mood", pa.string(), ["sad", "well"]),
        "dom": ("positive", pa.int32(), [1, 2**31 - 1]),
        "bytes": ("bytea", pa.binary(), [b"\x00\xff\\", b""]),
        "day": ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
        "at": (
            "timestamptz",
            pa.timestamp("us", "Europe/Berlin"),
            [dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)],
        ),
        "wall": (
            "timestamp",
            pa.timestamp("us"),
            [dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1, 1, 1)],
        ),
        "long": ("interval", pa.duration("us"), [dt.timedelta(-3, 0, 7), dt.timedelta(0)]),
        "clock": ("time", pa.time64("ns"), [dt.time(23, 59, 59, 999999), dt.time(0)]),
    }

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_every_type_arrives_unchanged(self, db: Database, mode: str) -> None:
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

    def test_json_and_uuid_and_nan_arrive(self, db: Database) -> None:
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
    def test_decimals_of_any_size_arrive(self, db: Database, precision: int, scale: int) -> None:
        db("CREATE TABLE t (n int, d numeric)")
        chance = random.Random(precision)
        with decimal.localcontext() as context:
            context.prec = 60
            limit = 10**precision
            values = [
                D(chance.randrange(1 - limit, limit) // 10 ** chance.randrange(precision)).scaleb(
                    -scale
                )
                for _ in range(500)
            ]
        rows = pa.RecordBatch.from_arrays(
            [pa.array(range(500), pa.int32()), pa.array(values, pa.decimal128(precision, scale))],
            ["n", "d"],
        ).slice(3)
        sink = db.sink()
        assert sink.commit([db.prepare(sink, rows)]) == [DONE]
        assert [row[0] for row in db("SELECT d FROM t ORDER BY n")] == values[3:]

    def test_a_slice_with_nulls_arrives(self, db: Database) -> None:
        db("CREATE TABLE t (a int, s text, b bool, x bytea)")
        given = [
            (
                n if n % 3 else None,
                f"row {n}" if n % 2 else None,
                None if n % 5 else True,
                b"x" * n if n % 7 else None,
            )
            for n in range(200)
        ]
        columns = list(zip(*given, strict=True))
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array(c, kind)
                for c, kind in zip(
                    columns, (pa.int32(), pa.string(), pa.bool_(), pa.binary()), strict=True
                )
            ],
            ["a", "s", "b", "x"],
        ).slice(50, 100)
        sink = db.sink()
        assert sink.commit([db.prepare(sink, rows)]) == [DONE]
        assert sorted(map(str, db("SELECT a, s, b, x FROM t"))) == sorted(map(str, given[50:150]))

    def test_dates_beyond_the_calendar_are_named(self, db: Database) -> None:
        db("CREATE TABLE t (d date, at timestamptz)")
        sink = db.sink()
        days = pa.array([0, 2**31 - 1, -(2**31), -2_440_588], pa.int32()).cast(pa.date32())
        times = pa.array([0, 0, 0, -(2**63)], pa.int64()).cast(pa.timestamp("us", "UTC"))
        writer = sink.begin(db.branch())
        with pytest.raises(BadRow, match="outside PostgreSQL's range of dates") as caught:
            writer.write(pa.RecordBatch.from_arrays([days, times], ["d", "at"]))
        assert set(caught.value.rows) == {1, 2, 3}
        writer.abort()

    def test_a_value_that_the_type_would_round_is_a_bad_row(self, db: Database) -> None:
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
        with pytest.raises(BadRow, match="more fractional digits than its type keeps") as caught:
            writer.write(
                rows(
                    (whole, milli, tenth, micro),
                    (milli, milli, tenth, micro),
                    (whole, micro, tenth, micro),
                    (whole, milli, micro.time(), micro),
                    (None, None, None, None),
                )
            )
        assert set(caught.value.rows) == {1, 2, 3}
        writer.abort()
        assert sink.commit([db.prepare(sink, rows((whole, milli, tenth, micro)))]) == [DONE]
        assert db("SELECT b, c FROM t") == [(milli, tenth)]
        db("CREATE TABLE i (v interval(0)); CREATE TABLE h (v interval hour)")
        for table in ("i", "h"):
            with pytest.raises(UsageError, match="would round it"):
                db.sink(table, frame={"v": "interval day to second"})

    def test_domains_over_domains_are_checked(self, db: Database) -> None:
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
            {
                "a": Column("`a`", "array<int>"),
                "m": Column("`m`", "map<string,int>"),
                "n": Column("`n`", "int"),
            }
        )
        assert wanted["a"].startswith("to_json(`a`,") and "to_json(`m`," in wanted["m"]
        assert wanted["n"] == "`n`"
        for option in ("'timestampFormat', '", "'timestampNTZFormat', '"):  # not only milliseconds
            assert "ss.SSSSSS" in wanted["a"].partition(option)[2].partition(", ")[0]


class TestFrames:
    def test_every_difference_is_named(self, db: Database) -> None:
        db(
            "CREATE TABLE t (id int NOT NULL, small int2, price numeric(6,2), at timestamp, "
            "need text NOT NULL, made int GENERATED ALWAYS AS (1) STORED, ok text)"
        )
        frame = {
            "id": "bigint",
            "small": "smallint",
            "price": "decimal(10,4)",
            "at": "timestamp",
            "made": "int",
            "ok": "string",
            "extra": "int",
        }
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

    def test_a_missing_table_is_reported(self, db: Database) -> None:
        with pytest.raises(UsageError, match="no table"):
            db.sink("nowhere")
        db('CREATE SCHEMA other; CREATE TABLE other."Readings" (k int)')
        with pytest.raises(
            UsageError, match=r'no table "readings" .*, but there is other\."Readings"\. Create'
        ):
            db.sink("readings")
        db("CREATE VIEW seen AS SELECT 1 AS a")
        with pytest.raises(UsageError, match="not a table"):
            db.sink("seen")

    def test_a_key_needs_its_index(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        with pytest.raises(UsageError, match="CREATE UNIQUE INDEX"):
            db.sink(key=["k"])

    def test_an_unfinished_index_does_not_count(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); INSERT INTO t VALUES (1, 'a'), (1, 'b')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            db("CREATE UNIQUE INDEX CONCURRENTLY ON t (k)")
        with pytest.raises(UsageError, match="CREATE UNIQUE INDEX"):
            db.sink(key=["k"])

    def test_a_column_generated_always_cannot_be_replaced(self, db: Database) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, n bigint GENERATED ALWAYS AS IDENTITY)")
        with pytest.raises(UsageError, match="n: it is GENERATED ALWAYS"):
            db.sink(key="k", frame={"k": "int", "n": "bigint"})
        db.sink(key="k", frame={"k": "int"})

    @pytest.mark.parametrize("options", [{"lock_timeout": 0.0004}, {"witness_schema": "w%s"}])
    def test_invalid_options_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(options))):
            Postgres("t", dsn="x", **options)

    def test_a_check_of_the_whole_row_is_evaluated_before_the_decision(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        db("CREATE FUNCTION ok(t) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1.k < 5'")
        db("ALTER TABLE t ADD CHECK (ok(t.*))")
        sink = db.sink(mode="staged")
        good, bad = (db.prepare(sink, keyed((k, "a")), k) for k in (1, 9))
        assert sink.check([good]) == [None] and sink.commit([good]) == [DONE]
        with pytest.raises(BadRow, match="check constraint"):
            sink.check([bad])

    def test_names_are_quoted(self, db: Database) -> None:
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
    def test_bad_rows_are_found_before_they_are_sent(
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
    def test_a_tolerant_branch_goes_on_without_the_bad_rows(self, db: Database, mode: str) -> None:
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

    def test_an_error_from_a_trigger_is_reported_without_its_message(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        for how in ("", " USING ERRCODE = 'check_violation'", " USING ERRCODE = 'ZZ001'"):
            db(
                "CREATE OR REPLACE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$BEGIN RAISE EXCEPTION 'no: %', NEW.v{how}; END$$"
            )
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
    def test_a_tolerant_branch_goes_on_after_any_refusal(self, db: Database, refuses: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        if refuses == "index":
            db("CREATE INDEX ON t (v)")
        else:
            db(
                "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN IF NEW.k > 1 THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END$$"
            )
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

    def test_invalid_text_is_a_bad_row(self, db: Database) -> None:
        db("CREATE TABLE t (a varchar(9), b text)")
        words = pa.array([b"ok", b"\xff\xfe no"], pa.binary())
        broken = pa.Array.from_buffers(pa.string(), 2, words.buffers())
        rows = pa.RecordBatch.from_arrays([broken, broken], ["a", "b"])
        with pytest.raises(BadRow, match="column a is not UTF-8") as caught:
            db.prepare(db.sink(), rows)
        assert "0xff" not in str(caught.value)
        assert caught.value.sink == "t" and caught.value.rows.keys() == {1}

    @pytest.mark.parametrize("kind", ["varchar(3)", "char(3)"])
    def test_blanks_that_would_be_cut_off_are_a_bad_row(self, db: Database, kind: str) -> None:
        db(f"CREATE TABLE t (a {kind})")
        rows = pa.RecordBatch.from_pydict({"a": ["ab ", "abc ", "     ", None, "abc"]})
        with pytest.raises(BadRow, match="column a is longer than 3 characters") as caught:
            db.prepare(db.sink(), rows)
        assert caught.value.rows.keys() == {1, 2}
        good = rows.take(pa.array([0, 3, 4]))
        sink = db.sink()
        assert sink.commit([db.prepare(sink, good)]) == [DONE]
        assert db("SELECT a FROM t") == [("ab ",), (None,), ("abc",)]

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_xml_is_what_an_insert_would_store(self, db: Database, mode: str) -> None:
        """A binary COPY decodes the bytes as the text declares, and an INSERT does not."""
        db("CREATE TABLE t (n bigint, x xml)")
        head = '<?xml version="1.0" encoding={}?><a b="encoding=\'EUC-JP\'">{}</a>'
        texts = [
            head.format('"ISO-8859-1"', "é"),
            head.format("'windows-1252'", "€"),
            head.format('"UTF-8"', "é漢"),
            head.format('"utf8"', "é"),
            '<?xml version="1.0"?><a>é</a>',
            "<a>é encoding</a>",
            None,
        ]
        rows = pa.RecordBatch.from_pydict({"n": list(range(len(texts))), "x": texts})
        sink = db.sink(mode=mode)
        assert sink.commit([db.prepare(sink, rows.slice(0, 4)), db.prepare(sink, rows.slice(4), 1)])
        db("CREATE TABLE plain (n int, x xml)")
        for number, text in enumerate(texts):
            db.connection.execute("INSERT INTO plain VALUES (%s, %s)", (number, text))
        shown = "SELECT x::text, xpath('/a/text()', x)::text FROM {} ORDER BY n"
        assert db(shown.format("t")) == db(shown.format("plain"))
        bad = [head.format('"ISO-8859-1"', "漢"), head.format('"no-such"', "a"), texts[0]]
        with pytest.raises(BadRow, match="column x declares an encoding that cannot") as caught:
            db.prepare(sink, pa.RecordBatch.from_pydict({"n": [1, 2, 3], "x": bad}), batch=1)
        assert caught.value.rows.keys() == {0, 1}

    @pytest.mark.parametrize(
        ("row", "column"),
        [
            (("secret", "{}"), "m"),
            (("sad", "{secret"), "j"),
            (("sad", '{"secret": "\\u0000"}'), "j"),
            (("sad", '{"secret\\nCOPY t, line 1, column secret": "\\u0000"}'), "j"),
        ],
    )
    def test_an_invalid_value_is_not_shown_but_its_column_is(
        self, db: Database, row: tuple[str, str], column: str
    ) -> None:
        db("CREATE TYPE mood AS ENUM ('sad')")
        db("CREATE TABLE t (m mood, j jsonb)")
        with pytest.raises(BadRow, match=rf"\(column {column}\)") as caught:
            db.prepare(db.sink(), keyed(row, names="m j"))
        assert "secret" not in str(caught.value)
