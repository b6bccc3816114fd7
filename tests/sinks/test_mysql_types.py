"""MySQL and MariaDB: types and bad rows."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pymysql
import pytest
from fix_mysql import (
    BOTH,
    DONE,
    PARTITIONED,
    WAYS,
    Place,
    batch_of,
    begin,
    changed_settings,
    get_refusal,
    prepare,
    send_by,
    write_and_prepare,
)

from mysqld import IS_MARIADB
from poundlock.core.model import Fingerprint, Receipt
from poundlock.core.participant import Column
from poundlock.core.sparksql import to_json
from poundlock.errors import BadRow, Rejected, UsageError
from poundlock.sinks import MySQL

ODD = "a\tb\nc\\d'e\"f\0g\r \\N 𝄞 é ;%s"
TYPES: dict[str, tuple[str, str, pa.DataType, Sequence[Any]]] = {
    # column: MySQL's type, Spark's, Arrow's, values
    "flag": ("BOOLEAN", "boolean", pa.bool_(), [True, False, None]),
    "tiny": ("TINYINT", "tinyint", pa.int8(), [-128, 127, None]),
    "small": ("SMALLINT", "smallint", pa.int16(), [-32768, 32767, None]),
    "whole": ("INT", "int", pa.int32(), [-(2**31), 2**31 - 1, None]),
    "big": ("BIGINT", "bigint", pa.int64(), [-(2**63), 2**63 - 1, None]),
    "single": ("FLOAT", "float", pa.float32(), [0.5, -1.25e10, None]),
    "twice": ("DOUBLE", "double", pa.float64(), [0.1, 5e-324, None]),
    "exact": (
        "DECIMAL(38,18)",
        "decimal(38,18)",
        pa.decimal128(38, 18),
        [
            decimal.Decimal("12345678901234567890.123456789012345678"),
            decimal.Decimal("-0.000000000000000001"),
            None,
        ],
    ),
    "words": ("LONGTEXT", "string", pa.string(), [ODD, "", None]),
    "bytes": ("VARBINARY(300)", "binary", pa.binary(), [bytes(range(256)), b"", None]),
    "day": (
        "DATE",
        "date",
        pa.date32(),
        [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None],
    ),
    "instant": (
        "DATETIME(6)",
        "timestamp",
        pa.timestamp("us", "America/New_York"),
        [
            datetime.datetime(2024, 7, 1, 12, 0, 0, 1, datetime.timezone.utc),
            datetime.datetime(1, 1, 1, 0, 0, 0, 0, datetime.timezone.utc),
            None,
        ],
    ),
    "stamp": (
        "TIMESTAMP(6) NULL",
        "timestamp",
        pa.timestamp("us", "UTC"),
        [
            datetime.datetime(2038, 1, 1, 1, 2, 3, 999999, datetime.timezone.utc),
            datetime.datetime(1970, 1, 1, 0, 0, 1, 0, datetime.timezone.utc),
            None,
        ],
    ),
    "clock": (
        "DATETIME(6)",
        "timestamp_ntz",
        pa.timestamp("us"),
        [datetime.datetime(9999, 12, 31, 23, 59, 59, 999999), datetime.datetime(1969, 1, 1), None],
    ),
    "tree": (
        "JSON",
        "struct<a:int,b:array<string>>",
        pa.string(),
        ['{"a":1,"b":["\\n"]}', "[]", None],
    ),
}


def typed(columns: Mapping[str, Any] = TYPES) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, kind) for name, (_, _, kind, values) in columns.items()}
    )


def expected() -> list[tuple[Any, ...]]:
    def plain(value: Any) -> Any:
        return value.replace(tzinfo=None) if isinstance(value, datetime.datetime) else value

    return [tuple(map(plain, row)) for row in zip(*(v for *_, v in TYPES.values()), strict=True)]


def broken_text(*values: bytes) -> pa.Array:
    """Return texts that may not be UTF-8: Spark does not check it."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())


def typed_table(place: Place) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, *_) in TYPES.items())
    place.ask(f"CREATE TABLE t ({columns}) ENGINE=InnoDB")


class TestTypes:
    @BOTH
    @WAYS
    def test_every_type_arrives_unchanged(self, place: Place, mode: str, way: str) -> None:
        typed_table(place)
        sink = place.sink(mode=mode, look=False)
        frame = {name: Column(f"`{name}`", spark) for name, (_, spark, *_) in TYPES.items()}
        projected = sink.project(frame)
        assert projected["tree"] == to_json("tree", frame["tree"]) and "SSSSSS" in projected["tree"]
        assert list(projected) == list(TYPES)
        expected_warnings = [] if IS_MARIADB or mode == "staged" else ["the binary log is on"]
        assert [warning.partition(":")[0] for warning in sink.preflight()] == expected_warnings
        send_by(sink, way)
        receipt = prepare(sink, typed())
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        seen = place.ask("SELECT * FROM t ORDER BY big IS NULL, flag DESC")
        trees = [[row[-1] and json.loads(row[-1]) for row in rows] for rows in (seen, expected())]
        assert [row[:-1] for row in seen] == [row[:-1] for row in expected()]
        assert trees[0] == trees[1]  # MySQL has its own format for them

    @BOTH
    @WAYS
    def test_rows_sent_in_pieces_arrive(
        self, place: Place, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from poundlock.sinks.mysql import sender

        for name in ("_LOADED", "_INSERTED", "_BULK"):
            monkeypatch.setattr(sender, name, 1000)
        place.ask("CREATE TABLE t (n INT, b BLOB)")
        sink = place.sink(mode=mode)
        send_by(sink, way)
        receipt = prepare(sink, {"n": list(range(50)), "b": [bytes([n]) * 100 for n in range(50)]})
        assert sink.commit([receipt]) == [DONE]
        assert place.rows(what="n, LENGTH(b)") == sorted([(n, 100) for n in range(50)], key=repr)
        bad = {"n": [1] * 30 + [2**40] + [1] * 19, "b": [b"x" * 100] * 50}
        error = get_refusal(sink, pa.RecordBatch.from_pydict(bad))
        assert isinstance(error, BadRow) and set(error.rows) == (set() if way == "insert" else {30})

    @WAYS
    @pytest.mark.parametrize("size", [250, 251, 65_535, 65_536, 5 << 20, 17 << 20])
    def test_values_of_every_size_arrive(self, place: Place, way: str, size: int) -> None:
        """Sizes around those at which a bulk changes its format, splits rows, or is not used."""
        place.ask("CREATE TABLE t (n INT, x LONGTEXT, b LONGBLOB)")
        sink = place.sink()
        send_by(sink, way)
        if way == "bulk":
            sink.packet = min(sink.packet, 16 << 20)
        long, large = "é" * (size // 2), b"x" * size
        rows = {"n": [1, 2, 3, 4], "x": ["a", long, None, ""], "b": [b"", b"\1", None, large]}
        assert sink.commit([prepare(sink, rows)]) == [DONE]
        assert place.ask("SELECT n, LENGTH(x), LENGTH(b), SHA2(x, 256) FROM t ORDER BY n") == [
            (1, 1, 0, hashlib.sha256(b"a").hexdigest()),
            (2, size // 2 * 2, 1, hashlib.sha256(long.encode()).hexdigest()),
            (3, None, None, None),
            (4, 0, size, hashlib.sha256(b"").hexdigest()),
        ]

    def test_rows_are_inserted_in_packets_that_the_server_accepts(self, place: Place) -> None:
        place.ask("CREATE TABLE t (n INT, b LONGBLOB)")
        with changed_settings(place, max_allowed_packet=1 << 20):
            sink = place.sink()
            send_by(sink, "insert")
            rows = {"n": list(range(1500)), "b": [b"x" * 1000] * 1500}
            assert sink.commit([prepare(sink, rows)]) == [DONE]
            writer = begin(sink, 1, tolerant=True)
            with pytest.raises(BadRow, match="max_allowed_packet") as caught:
                writer.write(batch_of({"n": [1, 2, 3], "b": [b"x", b"x" * (600 << 10), b"x"]}))
            assert set(caught.value.rows) == {1}
            writer.abort()
        assert place.ask("SELECT COUNT(*), SUM(LENGTH(b)) FROM t") == [(1500, 1_500_000)]

    @WAYS
    def test_a_slice_with_nulls_arrives(self, place: Place, way: str) -> None:
        place.ask("CREATE TABLE t (n BIGINT, x TEXT, b BLOB, d DATE, ts DATETIME(6), f DOUBLE)")
        sink = place.sink()
        send_by(sink, way)
        day, at = datetime.date(1, 1, 1), datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999)
        columns = {
            "n": pa.array([0, None, -(2**63), 3, 4]),
            "x": pa.array(["a", "", None, "d\te", "f"]),
            "b": pa.array([b"a", None, b"\0\1", b"", b"x"]),
            "d": pa.array([day, day, None, day, day]),
            "ts": pa.array([at, None, at, at, at], pa.timestamp("us")),
            "f": pa.array([0.0, -0.5, None, 1e300, 2.0]),
        }
        whole = pa.RecordBatch.from_pydict(columns)
        assert sink.commit([prepare(sink, whole.slice(1, 3))]) == [DONE]
        assert place.ask("SELECT * FROM t ORDER BY n IS NULL DESC, n") == [
            (None, "", None, day, None, -0.5),
            (-(2**63), None, b"\0\1", None, at, None),
            (3, "d\te", b"", day, at, 1e300),
        ]

    @WAYS
    def test_values_arrive_in_wider_types(self, place: Place, way: str) -> None:
        place.ask(
            "CREATE TABLE t (a BIGINT UNSIGNED, b DECIMAL(20,2), c DOUBLE, d BINARY(2), "
            f"e {'UUID' if IS_MARIADB else 'CHAR(36)'}, f {'INET6' if IS_MARIADB else 'CHAR(9)'}, "
            "g JSON, h DATETIME, i FLOAT, j DOUBLE)"
        )
        sink = place.sink()
        send_by(sink, way)
        uuid = "123e4567-e89b-12d3-a456-426614174000"
        rows = {
            "a": pa.array([2**62]),
            "b": pa.array([7]),
            "c": pa.array([True]),
            "d": pa.array([b"\0\1"]),
            "e": pa.array([uuid]),
            "f": pa.array(["::1"]),
            "g": pa.array(['{"a": [1, "ü"]}']),
            "h": pa.array([datetime.date(9999, 12, 31)]),
            "i": pa.array([0.1], pa.float32()),
            "j": pa.array([0.1], pa.float32()),
        }
        assert sink.commit([prepare(sink, pa.RecordBatch.from_pydict(rows))]) == [DONE]
        shown = "a, b, c, d, CAST(e AS CHAR), CAST(f AS CHAR), g, h, i, j"
        assert place.ask(f"SELECT {shown} FROM t") == [
            (
                2**62,
                decimal.Decimal("7.00"),
                1.0,
                b"\0\1",
                uuid,
                "::1",
                '{"a": [1, "ü"]}',
                datetime.datetime(9999, 12, 31),
                0.1,
                0.10000000149011612,  # exactly the float
            )
        ]

    @WAYS
    def test_the_extreme_floats_arrive(self, place: Place, way: str) -> None:
        """The shortest decimal text of the largest float would be out of range."""
        place.ask("CREATE TABLE t (x FLOAT)")
        sink = place.sink()
        send_by(sink, way)
        values = pa.array([3.4028234663852886e38, -3.4028234663852886e38, 1e-45, 0.1], pa.float32())
        assert sink.commit([prepare(sink, {"x": values})]) == [DONE]
        assert sorted(place.ask("SELECT x * 1e0 FROM t")) == [
            (x,) for x in sorted(values.to_pylist())
        ]

    @BOTH
    def test_members_of_enum_and_set_arrive(self, place: Place, mode: str) -> None:
        """The names need escaping, and some are numbers."""
        members = ["it's", "back\\slash", "line\nfeed", "é (1),'2'", "2", ""]
        spelled = ", ".join(pymysql.converters.escape_string(it).join("''") for it in members)
        place.ask(f"CREATE TABLE t (n INT, e ENUM({spelled}), s SET('3', 'x'))")
        sink = place.sink(mode=mode)
        sets = ["3", "x", "3,x", "", None, "3"]
        receipt = prepare(sink, {"n": list(range(6)), "e": members, "s": sets})
        assert sink.commit([receipt]) == [DONE]
        assert place.ask("SELECT e, s FROM t ORDER BY n") == list(zip(members, sets, strict=True))

    def test_names_are_quoted(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE `we``ird 'x` (`a b``c` INT, `%s` VARCHAR(5), PRIMARY KEY (`a b``c`))"
        )
        sink = MySQL(
            f"{place.database}.we`ird 'x", url=place.server.address, name="out", key="a b`c"
        )
        sink.preflight()
        receipt = prepare(sink, {"a b`c": [1, 2], "%s": ["x", "%d"]})
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        assert place.rows("`we``ird 'x`") == [(1, "x"), (2, "%d")]

    @pytest.mark.parametrize("name", ["a\0b", "x" * 65, "blank "])
    def test_impossible_names_are_get_refusal(self, place: Place, name: str) -> None:
        with pytest.raises(UsageError, match="cannot be a name"):
            place.sink(name, look=False)


class TestBadRows:
    CASES: tuple[tuple[str, str, Any, set[int], str], ...] = (
        ("not a number", "x DOUBLE", pa.array([1.0, float("nan"), float("inf")]), {1, 2}, "finite"),
        ("null", "x INT NOT NULL", pa.array([1, None, 3]), {1}, "NOT NULL"),
        ("too long", "x VARCHAR(3)", pa.array(["abc", "äöü", "abcd"]), {2}, "longer than 3"),
        ("bytes", "x VARBINARY(2)", pa.array([b"ab", b"abc"]), {1}, "longer than 2"),
        ("filled up", "x BINARY(2)", pa.array([b"ab", b"a", None, b"abc"]), {1, 3}, "would pad it"),
        ("blank", "x CHAR(3)", pa.array(["a", "a ", "", None, " a"]), {1}, "blank"),
        ("out of range", "x TINYINT", pa.array([1, 300, 2, -129]), {1, 3}, "range"),
        ("unsigned", "x INT UNSIGNED", pa.array([0, -1]), {1}, "range"),
        ("enum", "x ENUM('a')", pa.array(["a", "b", None, "1", "A", ""]), {1, 3, 4, 5}, "members"),
        ("set", "x SET('a','b')", pa.array(["b,a", "3", None, "a,c", "", "a"]), {1, 3}, "members"),
        ("bytes of no text", "x TEXT", broken_text(b"ok", b"\xff", "é".encode()), {1}, "not UTF-8"),
        ("bytes of no word", "x VARCHAR(2)", broken_text(b"ab", b"\xff"), {1}, "not UTF-8"),
        ("characters", "x TEXT CHARACTER SET utf8mb3", pa.array(["é", "𝄞"]), {1}, "characters"),
        (
            "year",
            "x DATE",
            pa.array([0, 10**7], pa.int32()).cast(pa.date32()),
            {1},
            "years 1 to 9999",
        ),
        (
            "fraction",
            "x DATETIME(3)",
            pa.array([1_000, 1_001], pa.int64()).cast(pa.timestamp("us")),
            {1},
            "fraction",
        ),
        (
            "epoch",
            "x TIMESTAMP(6) NULL",
            pa.array([5_000_000, 2**55], pa.int64()).cast(pa.timestamp("us", "UTC")),
            {1},
            "range",
        ),
        (
            "decimal",
            "x DECIMAL(3,1)",
            pa.array([decimal.Decimal("1.5"), decimal.Decimal("100.5")]),
            {1},
            "range",
        ),
    )

    @BOTH
    @pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
    def test_a_bad_row_is_named_by_row_and_column(self, place: Place, mode: str, case: Any) -> None:
        _, column, values, bad, words = case
        place.ask(f"CREATE TABLE t (n INT, {column})")
        sink = place.sink(mode=mode)
        rows = pa.RecordBatch.from_pydict({"n": list(range(len(values))), "x": values})
        error = get_refusal(sink, rows)
        assert isinstance(error, BadRow)
        assert words in str(error) and "column x" in str(error)
        assert set(error.rows) == bad
        assert place.rows() == []

    @BOTH
    @WAYS
    def test_a_tolerant_branch_keeps_the_good_rows(self, place: Place, mode: str, way: str) -> None:
        place.ask("CREATE TABLE t (n INT, x TINYINT)")
        sink = place.sink(mode=mode)
        send_by(sink, way)
        writer = begin(sink, tolerant=True)
        writer.write(batch_of({"n": [1], "x": [1]}))
        with pytest.raises(BadRow):
            writer.write(batch_of({"n": [2, 3, 4], "x": [2, 300, 4]}))
        writer.write(batch_of({"n": [2, 4], "x": [2, 4]}))
        made = writer.prepare()
        assert made is not None
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(3, 0), made.handle)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, 1), (2, 2), (4, 4)]

    @BOTH
    @pytest.mark.parametrize("way", ["bulk", "insert"])
    def test_a_tolerant_branch_keeps_no_piece_of_a_refused_write(
        self, place: Place, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server has the pieces before the bad one already, and all rows are written again."""
        from poundlock.sinks.mysql import sender as module

        monkeypatch.setattr(module, "_INSERTED", 100)
        monkeypatch.setattr(module, "_BULK", 100)
        place.ask("CREATE TABLE t (n INT, x TINYINT)")
        sink = place.sink(mode=mode)
        send_by(sink, way)
        numbers = list(range(50))
        writer = begin(sink, tolerant=True)
        with pytest.raises(BadRow):
            writer.write(batch_of({"n": numbers, "x": [1] * 49 + [300]}))
        writer.write(batch_of({"n": numbers[:49], "x": [1] * 49}))
        made = writer.prepare()
        assert made is not None
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(49, 0), made.handle)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert sorted(place.ask("SELECT n FROM t")) == [(n,) for n in numbers[:49]]

    def test_a_changed_value_without_a_warning_is_noticed(self, place: Place) -> None:
        """A load has then changed the value, and gives no further details."""
        place.ask("CREATE TABLE t (n INT)")
        sink = place.sink()
        send_by(sink, "load")
        writer: Any = begin(sink)
        writer._link.run("SET SESSION max_error_count = 0")
        writer.write(batch_of({"n": [1, 2**40]}))
        with pytest.raises(BadRow, match="max_error_count"):
            writer.prepare()
        writer.abort()
        assert place.rows() == []

    @BOTH
    def test_rows_and_columns_quoted_in_data_are_ignored(self, place: Place, mode: str) -> None:
        place.ask(f"CREATE TABLE t (n INT, x {'UUID' if IS_MARIADB else 'JSON'})")
        rows = {"n": [1, 2, 3], "x": [None, "column geheim at row 7", None]}
        error = get_refusal(place.sink(mode=mode), rows)
        assert isinstance(error, BadRow) and set(error.rows) == ({1} if IS_MARIADB else set())
        assert "column x" in str(error) and "geheim" not in str(error)

    @WAYS
    def test_an_added_column_makes_no_row_bad(self, place: Place, way: str) -> None:
        """Otherwise a tolerant branch would leave every row out."""
        place.ask("CREATE TABLE t (n INT)")
        sink = place.sink(mode="xa")
        send_by(sink, way)
        place.ask("ALTER TABLE t ADD c INT NOT NULL")
        writer = begin(sink, tolerant=True)
        with pytest.raises(Rejected, match=r"c (of the table )?is NOT NULL") as caught:
            write_and_prepare(writer, {"n": [1, 2, 3]})
        assert not isinstance(caught.value, BadRow)
        assert place.rows() == []

    @BOTH
    def test_a_dropped_column_makes_no_row_bad(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (n INT, x INT)")
        sink = place.sink(mode=mode)
        writer = begin(sink, tolerant=True)
        with pytest.raises(UsageError, match="no column 'y'"):
            writer.write(batch_of({"n": [1], "y": [1]}))
        writer.abort()

    def test_no_error_quotes_a_row(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x ENUM('a'), y INT UNIQUE)")
        sink = place.sink(**PARTITIONED[True])
        for rows in ({"x": ["geheim"], "y": [1]}, {"x": ["a", "a"], "y": [424242, 424242]}):
            error = get_refusal(sink, rows)
            text = str(error) + repr(error.__cause__) + repr(getattr(error, "rows", ""))
            assert "geheim" not in text and "424242" not in text
        send_by(sink, "insert")
        text = str(get_refusal(sink, {"x": ["geheim"], "y": [1]}))
        assert "geheim" not in text and "column x" in text
