"""MySQL and MariaDB: what is particular to them, against a real server, judged by a plain client."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import itertools
import json
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from mysqld import IS_MARIADB, running
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.naming import BranchName, name_of, parse_name
from poundlock.core.participant import Column, Commitment, Writer
from poundlock.core.protocol import BranchState
from poundlock.core.sparksql import to_json
from poundlock.errors import (
    BadRow,
    InDoubt,
    LogMismatch,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.servers import mariadb
from poundlock.sinks import MySQL
from poundlock.sinks.mysql import link as links
from poundlock.sinks.mysql.branches import Witness, xid
from poundlock.sinks.mysql.link import run
from poundlock.sinks.mysql.move import DELETE, ORDER, stage_name

OURS = Namespace.new("trial", 1_700_000_000, 1)
DONE, LOST, OPEN = BranchState.COMMITTED, BranchState.ABORTED, BranchState.PREPARED
_numbers = itertools.count()


class Place:
    """A database of its own, seen by a client that is not ours."""

    def __init__(self, server: mariadb.MariaDB):
        self.server, self.database = server, f"place_{next(_numbers)}"
        self.ask(f"CREATE DATABASE {self.database} CHARACTER SET utf8mb4", database=None)

    @contextmanager
    def client(self, database: str | None = "") -> Iterator[Any]:
        arguments = self.server.connect_arguments() | {
            "database": self.database if database == "" else database
        }
        client = pymysql.connect(
            **arguments, autocommit=True, init_command="SET time_zone='+00:00'"
        )
        with closing(client), client.cursor() as cursor:
            yield cursor

    def ask(self, statement: str, database: str | None = "") -> list[tuple[Any, ...]]:
        with self.client(database) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def sink(self, table: str = "t", *, look: bool = True, **options: Any) -> MySQL:
        options = {"url": self.server.address, "name": "out", "lock_timeout": 1} | options
        made = MySQL(f"{self.database}.{table}", **options)
        if look:
            made.preflight()
        return made

    def rows(self, table: str = "t", what: str = "*") -> list[tuple[Any, ...]]:
        return sorted(self.ask(f"SELECT {what} FROM {table}"), key=repr)

    def leftovers(self) -> list[Any]:
        """Staging tables, and XA branches of any database: none must be left by any test."""
        return [*self.ask("SHOW TABLES LIKE 'poundlock\\_stage%'"), *self.ask("XA RECOVER")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mariadb.MariaDB]:
    with running(tmp_path_factory.mktemp("mysql")) as started:
        yield started


@pytest.fixture
def place(server: mariadb.MariaDB) -> Iterator[Place]:
    made = Place(server)
    yield made
    left = made.leftovers()
    for number, first, _, data in made.ask("XA RECOVER"):  # or the next test would find it too
        name = data if isinstance(data, str) else data.decode()
        made.ask(f"XA ROLLBACK '{name[:first]}','{name[first:]}',{number}")
    assert left == []


def begin(sink: MySQL, task: int = 0, *, batch: int = 0, attempt: int = 1, **where: Any) -> Writer:
    transaction = Transaction(OURS, 1, batch, attempt)
    where = {"task_attempt": task} | where
    copy: MySQL = pickle.loads(pickle.dumps(sink))
    return copy.begin(Branch(transaction, sink.name, task, **where))


def batch_of(rows: Mapping[str, Sequence[Any]] | pa.RecordBatch) -> pa.RecordBatch:
    return rows if isinstance(rows, pa.RecordBatch) else pa.RecordBatch.from_pydict(dict(rows))


def prepare(sink: MySQL, rows: Any, task: int = 0, **where: Any) -> Receipt:
    writer, written = begin(sink, task, **where), batch_of(rows)
    writer.write(written)
    made = writer.prepare()
    assert made is not None
    receipt = Receipt(sink.name, made.id, task, Fingerprint(len(written), 0), made.handle)
    return Receipt.from_json(receipt.to_json())  # type: ignore[arg-type]


def name_in(receipt: Receipt) -> BranchName:
    name = parse_name(receipt.id)
    assert name is not None
    return name


def stage_of(receipt: Receipt) -> str:
    return stage_name(name_in(receipt))


def refused(
    sink: MySQL, rows: Any, kind: type[PoundlockError] = BadRow, task: int = 0
) -> PoundlockError:
    """Write what is not to be taken, and give up, as a task does."""
    with pytest.raises(kind) as caught:
        write_and_prepare(begin(sink, task), rows)
    return caught.value


def write_and_prepare(writer: Writer, rows: Any) -> None:
    try:
        writer.write(batch_of(rows))
        writer.prepare()
    finally:
        writer.abort()


def account(place: Place, rights: str) -> str:
    """Make an account with rights on the database; return its address."""
    name, port = f"poor_{place.database}", place.server.connect_arguments()["port"]
    place.ask(f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'p'")
    place.ask(f"GRANT {rights} ON {place.database}.* TO {name}@'127.0.0.1'")
    return f"mysql://{name}:p@127.0.0.1:{port}/{place.database}"


PARTITIONED: tuple[dict[str, Any], ...] = ({}, {"mode": "xa", "key_partitioned": True})
WAYS = pytest.mark.parametrize("way", [*(["bulk"] if IS_MARIADB else []), "load", "insert"])
BOTH = pytest.mark.parametrize("mode", ["xa", "staged"])
UPSERTS = pytest.mark.parametrize("mode", [*(["xa"] if IS_MARIADB else []), "staged"])

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
        "DECIMAL(38,18)", "decimal(38,18)", pa.decimal128(38, 18),
        [decimal.Decimal("12345678901234567890.123456789012345678"),
         decimal.Decimal("-0.000000000000000001"), None],
    ),
    "words": ("LONGTEXT", "string", pa.string(), [ODD, "", None]),
    "bytes": ("VARBINARY(300)", "binary", pa.binary(), [bytes(range(256)), b"", None]),
    "day": (
        "DATE", "date", pa.date32(),
        [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None],
    ),
    "instant": (
        "DATETIME(6)", "timestamp", pa.timestamp("us", "America/New_York"),
        [datetime.datetime(2024, 7, 1, 12, 0, 0, 1, datetime.timezone.utc),
         datetime.datetime(1, 1, 1, 0, 0, 0, 0, datetime.timezone.utc), None],
    ),
    "stamp": (
        "TIMESTAMP(6) NULL", "timestamp", pa.timestamp("us", "UTC"),
        [datetime.datetime(2038, 1, 1, 1, 2, 3, 999999, datetime.timezone.utc),
         datetime.datetime(1970, 1, 1, 0, 0, 1, 0, datetime.timezone.utc), None],
    ),
    "clock": (
        "DATETIME(6)", "timestamp_ntz", pa.timestamp("us"),
        [datetime.datetime(9999, 12, 31, 23, 59, 59, 999999), datetime.datetime(1969, 1, 1), None],
    ),
    "tree": ("JSON", "struct<a:int,b:array<string>>", pa.string(), ['{"a":1,"b":["\\n"]}', "[]", None]),
}  # fmt: skip


def typed(columns: Mapping[str, Any] = TYPES) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, kind) for name, (_, _, kind, values) in columns.items()}
    )


def send_by(sink: MySQL, way: str) -> None:
    """Have rows sent in one of the ways, as for a server that has no better."""
    assert sink.bulks == IS_MARIADB and sink.loads
    sink.bulks, sink.loads = way == "bulk", way != "insert"


def expected() -> list[tuple[Any, ...]]:
    def plain(value: Any) -> Any:
        return value.replace(tzinfo=None) if isinstance(value, datetime.datetime) else value

    return [tuple(map(plain, row)) for row in zip(*(v for *_, v in TYPES.values()), strict=True)]


def typed_table(place: Place) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, *_) in TYPES.items())
    place.ask(f"CREATE TABLE t ({columns}) ENGINE=InnoDB")


class TestEveryTypeArrivesAsItWas:
    @BOTH
    @WAYS
    def test_whole(self, place: Place, mode: str, way: str) -> None:
        typed_table(place)
        sink = place.sink(mode=mode, look=False)
        frame = {name: Column(f"`{name}`", spark) for name, (_, spark, *_) in TYPES.items()}
        projected = sink.project(frame)
        assert projected["tree"] == to_json("`tree`") and "SSSSSS" in projected["tree"]
        assert list(projected) == list(TYPES)
        told = [] if IS_MARIADB or mode == "staged" else ["the binary log is on"]
        assert [said.partition(":")[0] for said in sink.preflight()] == told
        send_by(sink, way)
        receipt = prepare(sink, typed())
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        seen = place.ask("SELECT * FROM t ORDER BY big IS NULL, flag DESC")
        trees = [[row[-1] and json.loads(row[-1]) for row in rows] for rows in (seen, expected())]
        assert [row[:-1] for row in seen] == [row[:-1] for row in expected()]
        assert trees[0] == trees[1]  # MySQL spells them in its own way

    @BOTH
    @WAYS
    def test_in_pieces(
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
        error = refused(sink, pa.RecordBatch.from_pydict(bad))
        assert isinstance(error, BadRow) and set(error.rows) == (set() if way == "insert" else {30})

    @WAYS
    @pytest.mark.parametrize("size", [250, 251, 65_535, 65_536, 5 << 20, 17 << 20])
    def test_of_every_size(self, place: Place, way: str, size: int) -> None:
        """Around the lengths where a bulk spells them otherwise, cuts, and gives up."""
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

    def test_rows_are_inserted_in_packets_that_the_server_takes(self, place: Place) -> None:
        place.ask("CREATE TABLE t (n INT, b LONGBLOB)")
        with settings(place, max_allowed_packet=1 << 20):
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
    def test_a_slice_with_nulls(self, place: Place, way: str) -> None:
        place.ask("CREATE TABLE t (n BIGINT, x TEXT, b BLOB, d DATE, ts DATETIME(6), f DOUBLE)")
        sink = place.sink()
        send_by(sink, way)
        day, at = datetime.date(1, 1, 1), datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999)
        columns = {
            "n": pa.array([0, None, -(2**63), 3, 4]), "x": pa.array(["a", "", None, "d\te", "f"]),
            "b": pa.array([b"a", None, b"\0\1", b"", b"x"]), "d": pa.array([day, day, None, day, day]),
            "ts": pa.array([at, None, at, at, at], pa.timestamp("us")),
            "f": pa.array([0.0, -0.5, None, 1e300, 2.0]),
        }  # fmt: skip
        whole = pa.RecordBatch.from_pydict(columns)
        assert sink.commit([prepare(sink, whole.slice(1, 3))]) == [DONE]
        assert place.ask("SELECT * FROM t ORDER BY n IS NULL DESC, n") == [
            (None, "", None, day, None, -0.5), (-(2**63), None, b"\0\1", None, at, None),
            (3, "d\te", b"", day, at, 1e300),
        ]  # fmt: skip

    @WAYS
    def test_into_other_types_that_hold_them(self, place: Place, way: str) -> None:
        place.ask(
            "CREATE TABLE t (a BIGINT UNSIGNED, b DECIMAL(20,2), c DOUBLE, d BINARY(2), "
            f"e {'UUID' if IS_MARIADB else 'CHAR(36)'}, f {'INET6' if IS_MARIADB else 'CHAR(9)'}, "
            "g JSON, h DATETIME, i FLOAT, j DOUBLE)"
        )
        sink = place.sink()
        send_by(sink, way)
        uuid = "123e4567-e89b-12d3-a456-426614174000"
        rows = {
            "a": pa.array([2**62]), "b": pa.array([7]), "c": pa.array([True]),
            "d": pa.array([b"\0\1"]), "e": pa.array([uuid]), "f": pa.array(["::1"]),
            "g": pa.array(['{"a": [1, "ü"]}']), "h": pa.array([datetime.date(9999, 12, 31)]),
            "i": pa.array([0.1], pa.float32()), "j": pa.array([0.1], pa.float32()),
        }  # fmt: skip
        assert sink.commit([prepare(sink, pa.RecordBatch.from_pydict(rows))]) == [DONE]
        shown = "a, b, c, d, CAST(e AS CHAR), CAST(f AS CHAR), g, h, i, j"
        assert place.ask(f"SELECT {shown} FROM t") == [
            (2**62, decimal.Decimal("7.00"), 1.0, b"\0\1", uuid, "::1", '{"a": [1, "ü"]}',
             datetime.datetime(9999, 12, 31), 0.1, 0.1),
        ]  # fmt: skip

    @WAYS
    def test_the_ends_of_float(self, place: Place, way: str) -> None:
        """Spelled in as few digits as tell them apart, the largest would be beyond."""
        place.ask("CREATE TABLE t (x FLOAT)")
        sink = place.sink()
        send_by(sink, way)
        values = pa.array([3.4028234663852886e38, -3.4028234663852886e38, 1e-45, 0.1], pa.float32())
        assert sink.commit([prepare(sink, {"x": values})]) == [DONE]
        assert sorted(place.ask("SELECT x * 1e0 FROM t")) == [
            (x,) for x in sorted(values.to_pylist())
        ]

    @BOTH
    def test_members_of_enum_and_set(self, place: Place, mode: str) -> None:
        """However the server spells them, and where a number is the name of one."""
        members = ["it's", "back\\slash", "line\nfeed", "é (1),'2'", "2", ""]
        spelled = ", ".join(pymysql.converters.escape_string(it).join("''") for it in members)
        place.ask(f"CREATE TABLE t (n INT, e ENUM({spelled}), s SET('3', 'x'))")
        sink = place.sink(mode=mode)
        sets = ["3", "x", "3,x", "", None, "3"]
        receipt = prepare(sink, {"n": list(range(6)), "e": members, "s": sets})
        assert sink.commit([receipt]) == [DONE]
        assert place.ask("SELECT e, s FROM t ORDER BY n") == list(zip(members, sets, strict=True))

    def test_names_that_need_quoting(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE `we``ird 'x` (`a b``c` INT, `%s` VARCHAR(5), PRIMARY KEY (`a b``c`))"
        )
        sink = MySQL(f"{place.database}.we`ird 'x", url=place.server.address, name="out",
                     key="a b`c")  # fmt: skip
        sink.preflight()
        receipt = prepare(sink, {"a b`c": [1, 2], "%s": ["x", "%d"]})
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        assert place.rows("`we``ird 'x`") == [(1, "x"), (2, "%d")]

    @pytest.mark.parametrize("name", ["a\0b", "x" * 65, "blank "])
    def test_names_that_cannot_be(self, place: Place, name: str) -> None:
        with pytest.raises(UsageError, match="cannot be a name"):
            place.sink(name, look=False)


class TestBadRowsAreNamed:
    CASES: tuple[tuple[str, str, Any, set[int], str], ...] = (
        ("not a number", "x DOUBLE", pa.array([1.0, float("nan"), float("inf")]), {1, 2}, "finite"),
        ("null", "x INT NOT NULL", pa.array([1, None, 3]), {1}, "NOT NULL"),
        ("too long", "x VARCHAR(3)", pa.array(["abc", "äöü", "abcd"]), {2}, "longer than 3"),
        ("bytes", "x VARBINARY(2)", pa.array([b"ab", b"abc"]), {1}, "longer than 2"),
        ("filled up", "x BINARY(2)", pa.array([b"ab", b"a", None, b"abc"]), {1, 3}, "fill up"),
        ("blank", "x CHAR(3)", pa.array(["a", "a ", "", None, " a"]), {1}, "blank"),
        ("out of range", "x TINYINT", pa.array([1, 300, 2, -129]), {1, 3}, "range"),
        ("unsigned", "x INT UNSIGNED", pa.array([0, -1]), {1}, "range"),
        ("enum", "x ENUM('a')", pa.array(["a", "b", None, "1", "A", ""]), {1, 3, 4, 5}, "members"),
        ("set", "x SET('a','b')", pa.array(["b,a", "3", None, "a,c", "", "a"]), {1, 3}, "members"),
        ("characters", "x TEXT CHARACTER SET utf8mb3", pa.array(["é", "𝄞"]), {1}, "characters"),
        (
            "year", "x DATE", pa.array([0, 10**7], pa.int32()).cast(pa.date32()), {1},
            "years 1 to 9999",
        ),
        (
            "fraction", "x DATETIME(3)",
            pa.array([1_000, 1_001], pa.int64()).cast(pa.timestamp("us")), {1}, "fraction",
        ),
        (
            "epoch", "x TIMESTAMP(6) NULL",
            pa.array([5_000_000, 2**55], pa.int64()).cast(pa.timestamp("us", "UTC")), {1}, "range",
        ),
        (
            "decimal", "x DECIMAL(3,1)",
            pa.array([decimal.Decimal("1.5"), decimal.Decimal("100.5")]), {1}, "range",
        ),
    )  # fmt: skip

    @BOTH
    @pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
    def test_by_row_and_column(self, place: Place, mode: str, case: Any) -> None:
        _, column, values, bad, words = case
        place.ask(f"CREATE TABLE t (n INT, {column})")
        sink = place.sink(mode=mode)
        rows = pa.RecordBatch.from_pydict({"n": list(range(len(values))), "x": values})
        error = refused(sink, rows)
        assert isinstance(error, BadRow)
        assert words in str(error) and "column x" in str(error)
        assert set(error.rows) == bad
        assert place.rows() == []

    @BOTH
    @WAYS
    def test_a_tolerant_branch_keeps_the_good_ones(self, place: Place, mode: str, way: str) -> None:
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
    def test_a_tolerant_branch_keeps_nothing_of_a_refused_write_in_pieces(
        self, place: Place, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pieces before the bad one were taken already, and the lane writes all rows again."""
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

    def test_warnings_that_the_server_does_not_tell(self, place: Place) -> None:
        """A load has changed the value then, and says no more of it than that."""
        place.ask("CREATE TABLE t (n INT)")
        sink = place.sink()
        send_by(sink, "load")
        writer: Any = begin(sink)
        run(writer._link, "SET SESSION max_error_count = 0")
        writer.write(batch_of({"n": [1, 2**40]}))
        with pytest.raises(BadRow, match="max_error_count"):
            writer.prepare()
        writer.abort()
        assert place.rows() == []

    @BOTH
    def test_what_data_say_of_rows_and_columns_is_not_believed(
        self, place: Place, mode: str
    ) -> None:
        place.ask(f"CREATE TABLE t (n INT, x {'UUID' if IS_MARIADB else 'JSON'})")
        rows = {"n": [1, 2, 3], "x": [None, "column geheim at row 7", None]}
        error = refused(place.sink(mode=mode), rows)
        assert isinstance(error, BadRow) and set(error.rows) == ({1} if IS_MARIADB else set())
        assert "column x" in str(error) and "geheim" not in str(error)

    @WAYS
    def test_a_column_added_meanwhile_is_no_rows_fault(self, place: Place, way: str) -> None:
        """Or a tolerant branch would leave every row out."""
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
    def test_a_column_dropped_meanwhile_is_no_rows_fault(self, place: Place, mode: str) -> None:
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
            error = refused(sink, rows)
            told = str(error) + repr(error.__cause__) + repr(getattr(error, "rows", ""))
            assert "geheim" not in told and "424242" not in told
        send_by(sink, "insert")
        told = str(refused(sink, {"x": ["geheim"], "y": [1]}))
        assert "geheim" not in told and "column x" in told


class TestOnTheWay:
    """Rows are sent by a thread while the task makes the next."""

    def test_an_error_is_told_again_and_again(self, place: Place) -> None:
        """What is prepared after it would lack rows."""
        place.ask("CREATE TABLE t (n TINYINT)")
        writer = begin(place.sink())
        writer.write(batch_of({"n": [300]}))
        for _ in range(2):
            with pytest.raises(BadRow, match="range"):
                writer.prepare()
        with pytest.raises(BadRow, match="range"):
            writer.write(batch_of({"n": [1]}))
        writer.abort()
        assert place.rows() == []

    def test_what_is_ahead_is_bounded(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        from poundlock.sinks.mysql import sender

        monkeypatch.setattr(sender, "_AHEAD", 1000)
        place.ask("CREATE TABLE t (x TEXT)")
        sink = place.sink()
        writer: Any = begin(sink)
        with place.client() as other:
            other.execute(f"SELECT GET_LOCK('{writer._turns(sink.target)}', 0)")  # it has its turn
            for _ in range(4):
                writer.write(batch_of({"x": ["y" * 400]}))
                assert sum(piece.size for piece in writer._sender._waiting) <= 1000
            made = writer.prepare()  # after a while it goes on without
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(4, 0), made.handle)
        assert sink.commit([receipt]) == [DONE]
        assert place.ask("SELECT COUNT(*) FROM t") == [(4,)]

    def test_turns_are_taken_only_where_rows_meet_nothing(self, place: Place) -> None:
        """The lock of a turn and one of a row could wait for each other, unseen by the server."""
        place.ask("CREATE TABLE t (x INT)")
        place.ask("CREATE TABLE numbered (n INT AUTO_INCREMENT PRIMARY KEY, x INT)")
        place.ask("CREATE TABLE checked (x INT CHECK (x > 0))")
        place.ask("CREATE TABLE keyed (x INT PRIMARY KEY)")
        taken = {}
        for table in ("t", "numbered", "checked", "keyed"):
            sink = place.sink(table, look=False, semantic="at_least_once")
            sink.project({"x": Column("x", "int")})
            sink.preflight()
            writer: Any = begin(sink)
            taken[table] = writer._turns(sink.target) is not None
            writer.abort()
        assert taken == {"t": True, "numbered": True, "checked": False, "keyed": False}

    def test_a_server_without_such_locks(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from poundlock.sinks.mysql import sender

        def run(link: Any, statement: str) -> Any:
            if "GET_LOCK" in statement:
                raise pymysql.err.NotSupportedError(1235, "not here")
            return links.run(link, statement)

        monkeypatch.setattr(sender, "run", run)
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink()
        assert sink.commit([prepare(sink, {"x": [1, 2]})]) == [DONE]
        assert place.rows() == [(1,), (2,)]

    def test_a_trigger_that_inserts(self, place: Place) -> None:
        """Its INSERT must not take the rows of ours for its own."""
        place.ask("CREATE TABLE t (x INT)")
        place.ask("CREATE TABLE seen (x INT)")
        place.ask(
            "CREATE TRIGGER r BEFORE INSERT ON t FOR EACH ROW INSERT INTO seen VALUES (NEW.x)"
        )
        sink = place.sink(mode="xa")
        assert sink.commit([prepare(sink, {"x": [1, 2, 3]})]) == [DONE]
        assert place.rows() == place.rows("seen") == [(1,), (2,), (3,)]

    @pytest.mark.parametrize(
        ("version", "flags", "extended", "offers"),
        [
            (b"5.5.5-10.11.19-MariaDB", b"\xfe\xf7", b"\x1d\0\0\0", True),
            (b"5.5.5-10.1.48-MariaDB", b"\xfe\xf7", bytes(4), False),
            (b"8.0.36", b"\xff\xff", bytes(4), False),  # MySQL
            (b"8.0.36", b"\xff\xff", b"\xff\xff\xff\xff", False),
            (b"old", b"\xfe\xf7", b"", False),
        ],
    )
    def test_bulks_are_sent_only_to_servers_that_offer_them(
        self, version: bytes, flags: bytes, extended: bytes, offers: bool
    ) -> None:
        greeting = b"\n" + version + b"\0" + bytes(13) + flags + bytes(12) + extended
        assert links._offers_bulks(greeting) is offers


class TestTheTableIsLookedOver:
    def test_each_difference_is_named(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE t (id INT NOT NULL, price DECIMAL(10,2), at DATETIME, note VARCHAR(9), "
            "twice INT GENERATED ALWAYS AS (id * 2) STORED, must INT NOT NULL, old TEXT)"
        )
        frame = {"id": "string", "price": "decimal(20,4)", "at": "timestamp", "twice": "int",
                 "more": "int", "old": "string"}  # fmt: skip
        sink = place.sink(look=False)
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        with pytest.raises(UsageError) as caught:
            sink.preflight()
        for words in ("'id' is int", "'price' is decimal(10,2), which would round", "'more'",
                      "'twice' is computed", "'must' (int", "is NOT NULL without"):  # fmt: skip
            assert words in str(caught.value)
        assert "'note'" not in str(caught.value) and "'at'" not in str(caught.value)

    def test_columns_that_would_change_values(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE t (a FLOAT(7,2), b DOUBLE(10,2), c TIME(3), d JSON, e JSON, f DOUBLE)"
        )
        frame = {"a": "float", "b": "double", "c": "string", "d": "struct<a:decimal(38,18)>",
                 "e": "string", "f": "float"}  # fmt: skip
        sink = place.sink(look=False)
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        with pytest.raises(UsageError) as caught:
            sink.preflight()
        for words in ("'a' is float(7,2), which would round", "'b' is double(10,2), which would",
                      "'c' is time(3), which does not hold string"):  # fmt: skip
            assert words in str(caught.value)
        assert ("round the decimals" in str(caught.value)) == (not IS_MARIADB)
        assert "'e'" not in str(caught.value) and "'f'" not in str(caught.value)
        place.ask("CREATE TABLE u (e JSON)")
        sink = place.sink("u", look=False, mode="staged")
        sink.project({"e": Column("e", "string")})
        assert len(sink.preflight()) == (not IS_MARIADB)

    def test_what_may_go_wrong_is_said(self, place: Place) -> None:
        place.ask("CREATE TABLE t (at DATETIME, old TEXT CHARACTER SET latin1)")
        sink = place.sink(look=False)
        sink.project({"at": Column("at", "timestamp"), "old": Column("old", "string")})
        warnings = " ".join(sink.preflight())
        assert "would round microseconds" in warnings and "latin1" in warnings

    def test_types_without_a_place_and_missing_columns(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink(key="id", delete="gone", order_by="at", look=False)
        with pytest.raises(UsageError) as caught:
            sink.project({"x": Column("x", "interval day to second")})
        for words in ("'id' for key=", "'gone' for delete=", "'at' for order_by=", "interval"):
            assert words in str(caught.value)

    @pytest.mark.parametrize(
        ("made", "words"),
        [
            ("CREATE TABLE u (x INT)", "there is no table"),
            ("CREATE TABLE t (x INT) ENGINE=MyISAM", "no transactions"),
            ("CREATE VIEW t AS SELECT 1 AS x", "no transactions"),
        ],
    )
    def test_a_table_that_will_not_do(self, place: Place, made: str, words: str) -> None:
        place.ask(made)
        with pytest.raises(UsageError, match=words):
            place.sink()

    def test_an_upsert_needs_a_unique_key(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT, b INT, UNIQUE (a, b))")
        with pytest.raises(UsageError, match=r"no unique key over a.*It has: a, b"):
            place.sink(key="a")

    def test_the_mode_is_chosen(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT, b INT)")
        place.ask("CREATE TABLE k (a INT PRIMARY KEY, b INT)")
        place.ask("CREATE TABLE s (i BIGINT AUTO_INCREMENT PRIMARY KEY, a INT, b INT)")
        frame = {"a": Column("a", "int"), "b": Column("b", "int")}

        def chosen(table: str, **options: Any) -> str:
            sink = place.sink(table, look=False, **options)
            sink.project(frame)
            sink.preflight()
            staged = sink.commitment is Commitment.STAGED
            assert staged == (sink.chosen == "staged")
            for mode in ("xa", "staged"):  # as it was when the branch was written
                receipt = Receipt("t", "any", 0, Fingerprint(1, 0), {"mode": mode})
                assert sink.commit_together([receipt]) == (mode == "staged")
            return sink.chosen

        place.ask("CREATE TABLE r (a INT, b INT)")
        place.ask("CREATE TRIGGER r BEFORE INSERT ON r FOR EACH ROW SET NEW.a = NEW.b")
        assert chosen("t") == "xa" and chosen("s") == "xa"
        assert chosen("r") == "staged" and chosen("r", mode="xa") == "xa"
        assert chosen("k") == "staged" and chosen("k", key="a") == "staged"
        assert chosen("k", key="a", key_partitioned=True) == "staged"
        if IS_MARIADB:
            assert chosen("k", key="a", key_partitioned=True, mode="xa") == "xa"
        else:
            with pytest.raises(UsageError, match="xa_detach_on_prepare"):
                chosen("k", key="a", key_partitioned=True, mode="xa")
        assert chosen("k", key_partitioned=True) == "xa"
        assert chosen("t", mode="staged") == "staged"
        for options in ({"key": "a"}, {}):
            with pytest.raises(UsageError, match=r"\(a\) would wait for each other"):
                place.sink("k", mode="xa", **options)
        with pytest.raises(UsageError, match="9999 connections"):
            place.sink("t", connections=9999)
        few = place.sink("t", look=False, connections=5)
        few._tasks = 8
        assert "connections=5, but 12 may be opened" in " ".join(few.preflight())
        url = account(place, "ALL PRIVILEGES")
        name = f"poor_{place.database}@'127.0.0.1'"
        place.ask(f"ALTER USER {name} WITH MAX_USER_CONNECTIONS 7")
        with pytest.raises(UsageError, match=r"8 connections .* max_user_connections allows 7"):
            place.sink("t", url=url, connections=8)
        with pytest.raises(UsageError, match="needs key="):
            place.sink("t", order_by="a")
        with pytest.raises(UsageError, match="mode='both'"):
            place.sink("t", mode="both")

    def test_unsafe_settings_are_told(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT)")
        place.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        place.ask("SET GLOBAL local_infile = 0")
        try:
            sink = place.sink(look=False)
            warnings = " ".join(sink.preflight())
            assert "innodb_flush_log_at_trx_commit" in warnings
            assert ("local_infile" in warnings) == (not IS_MARIADB)  # a bulk needs no such leave
            receipt = prepare(sink, {"a": [1]})
            assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,)]
        finally:
            place.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            place.ask("SET GLOBAL local_infile = 1")

    def test_servers_that_cannot(self, place: Place) -> None:
        sink = place.sink(look=False)
        for version, variables, words in (
            ("10.4.32-MariaDB", {}, "10.5"),
            ("5.7.44-log", {}, "8.0"),
            ("10.11.1-MariaDB", {"wsrep_on": "ON"}, "Galera"),
            ("10.11.1-MariaDB", {"read_only": "ON"}, "read-only"),
        ):
            with pytest.raises(UsageError, match=words):
                sink._check_server(version, variables)
        with pytest.raises(UsageError, match="Use mode='staged'"):
            place.sink(key="a", look=False, **PARTITIONED[True])._check_upserts(
                {"xa_detach_on_prepare": "ON"}
            )
        sink._check_server("8.4.3", {})
        sink._check_server("11.4.5-MariaDB-log", {})
        logged = {"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "1"}
        for version, words in (
            ("11.4.5-MariaDB", "in MariaDB"),
            ("9.7.0", "another format than 1"),
        ):
            assert words in " ".join(sink._cautions(version, logged))


class TestUpsert:
    @pytest.fixture
    def keyed(self, place: Place) -> Place:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, word VARCHAR(9) NOT NULL, n INT)")
        place.ask("INSERT INTO t VALUES (1, 'old', 1), (2, 'old', 2), (3, 'old', 3)")
        return place

    @UPSERTS
    def test_replaces_and_inserts(self, keyed: Place, mode: str) -> None:
        sink = keyed.sink(key="id", **PARTITIONED[mode == "xa"])
        receipts = [
            prepare(sink, {"id": [1, 4], "word": ["new", "new"]}, task=0),
            prepare(sink, {"id": [2], "word": ["new"]}, task=1),
        ]
        assert sink.check(receipts) == [None, None]
        assert keyed.rows(what="word") == [("old",)] * 3
        assert sink.commit(receipts) == [DONE, DONE]
        # A column that the frame does not have keeps its value.
        assert keyed.rows() == [(1, "new", 1), (2, "new", 2), (3, "old", 3), (4, "new", None)]

    @UPSERTS
    def test_deletes_by_a_flag(self, keyed: Place, mode: str) -> None:
        sink = keyed.sink(key="id", delete="gone", **PARTITIONED[mode == "xa"])
        sink.known = None
        assert sink.project(
            {"id": Column("id", "int"), "word": Column("word", "string"),
             "gone": Column("gone", "boolean")}
        ) == {"id": "id", "word": "word", DELETE: "gone"}  # fmt: skip
        sink.preflight()
        rows = {"id": [1, 2, 9], "word": [None, "new", None], DELETE: [True, None, True]}
        receipt = prepare(sink, rows)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert keyed.rows() == [(2, "new", 2), (3, "old", 3)]
        error = refused(sink, {"id": [1, 5], "word": ["x", None], DELETE: [True, False]})
        assert isinstance(error, BadRow) and set(error.rows) == {1}

    def test_the_last_by_order_counts_over_all_tasks(self, keyed: Place) -> None:
        sink = keyed.sink(key="id", order_by="at", delete="gone")
        first = {"id": [1, 1, 2], "word": ["b", "a", "x"], ORDER: [2, 1, 5], "at": [2, 1, 5],
                 DELETE: [False, False, False]}  # fmt: skip
        second = {"id": [1, 2], "word": ["c", None], ORDER: [3, 6], "at": [3, 6],
                  DELETE: [False, True]}  # fmt: skip
        receipts = [prepare(sink, first, task=0), prepare(sink, second, task=1)]
        assert sink.check(receipts) == [None, None]
        assert sink.commit(receipts) == [DONE, DONE]
        assert keyed.rows() == [(1, "c", 1), (3, "old", 3)]

    def test_a_batch_that_lost_a_part_is_replayed_whole(self, keyed: Place) -> None:
        """Only among all of its rows can be told which is the last of a key."""
        sink = keyed.sink(key="id", order_by="n", delete="gone")
        older = {"id": [1, 2], "word": ["a", "a"], "n": [0, 1], DELETE: [False, False]}
        newer = {"id": [1, 3], "word": [None, "c"], "n": [1, 2], DELETE: [True, False]}
        tasks = [rows | {ORDER: rows["n"]} for rows in (older, newer)]

        def attempt(number: int) -> list[Receipt]:
            return [prepare(sink, tasks[task], task, task_attempt=10 * number + task,
                            attempt=number) for task in range(2)]  # fmt: skip

        first = attempt(1)
        assert sink.check(first) == [None, None]
        keyed.ask(f"DROP TABLE {stage_of(first[0])}")
        assert sink.commit(first) == sink.commit(first) == [LOST, LOST]
        assert keyed.rows(what="word") == [("old",)] * 3 and keyed.leftovers() == []
        second = attempt(2)
        with sink._borrowed() as link:  # one was proven aborted, and the driver died there
            assert sink.witness.settle(link, name_in(second[1])) is LOST
        assert keyed.sink(key="id", order_by="n", delete="gone").commit(second) == [LOST, LOST]
        third = attempt(3)
        assert sink.commit(third) == [DONE, DONE]
        # Rows of earlier batches give way, whatever their order was.
        assert keyed.rows() == [(2, "a", 1), (3, "c", 2)]

    def test_a_batch_is_not_given_up_while_another_driver_is_about_it(self, keyed: Place) -> None:
        sink = keyed.sink(key="id")
        receipts = [prepare(sink, {"id": [n], "word": ["new"]}, task=n) for n in range(2)]
        keyed.ask(f"DROP TABLE {stage_of(receipts[0])}")
        with closing(sink.connect()) as other:
            run(other, "START TRANSACTION")
            sink.witness.testify(other, [name_in(receipts[1])])
            assert sink.commit(receipts) == [OPEN, OPEN]
        assert sink.commit(receipts) == [LOST, LOST]

    def test_a_part_is_not_moved_after_the_rest(self, keyed: Place) -> None:
        sink = keyed.sink(key="id", order_by="n")
        rows = {"id": [1], "word": ["new"], "n": [9], ORDER: [9]}
        first, rest = (prepare(sink, rows, task=task) for task in range(2))
        assert sink.commit([first]) == [DONE]
        with pytest.raises(InDoubt, match="moved before it"):
            sink.commit([first, rest])
        assert keyed.rows()[0] == (1, "new", 9)
        assert sink.abort(sink.find(OURS)) == [LOST]
        after = prepare(sink, rows | {"word": ["next"], "n": [0], ORDER: [0]}, batch=1)
        assert sink.commit([after]) == [DONE] and keyed.rows()[0] == (1, "next", 0)

    def test_contradictions_are_refused_before_the_decision(self, keyed: Place) -> None:
        sink = keyed.sink(key="id")
        receipts = [
            prepare(sink, {"id": [1], "word": ["a"]}, task=0),
            prepare(sink, {"id": [1], "word": ["b"]}, task=1),
        ]
        assert all("order_by=" in str(reason) for reason in sink.check(receipts))
        assert sink.abort(sink.find(OURS)) == [LOST, LOST]
        ordered = keyed.sink(key="id", order_by="n")
        rows = {"id": [1, 1], "word": ["a", "b"], "n": [7, 7], ORDER: [7, 7]}
        receipt = prepare(ordered, rows, batch=1)
        assert "does not tell" in str(ordered.check([receipt])[0])
        assert ordered.abort(ordered.find(OURS)) == [LOST]
        # The same row twice contradicts nobody.
        rows |= {"word": ["a", "a"]}
        receipt = prepare(ordered, rows, batch=2)
        assert ordered.check([receipt]) == [None] and ordered.commit([receipt]) == [DONE]
        assert keyed.rows()[0] == (1, "a", 7)
        if IS_MARIADB:
            partitioned = keyed.sink(key="id", **PARTITIONED[True])
            refused(partitioned, {"id": [1, 1], "word": ["a", "b"]})

    def test_rows_that_only_the_collation_calls_equal_contradict(self, place: Place) -> None:
        """Which of them counts must not hang on the number of a task."""
        place.ask(
            "CREATE TABLE t (id INT PRIMARY KEY, ts INT, v VARCHAR(9), j JSON) "
            "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        )
        sink = place.sink(key="id", order_by="ts")
        for batch, (left, right) in enumerate((("abc", "ABC"), ("abc", "abc "), ("é", "e"))):
            receipts = [
                prepare(sink, {"id": [1], "ts": [5], ORDER: [5], "v": [word], "j": ["{}"]},
                        task=task, batch=batch)
                for task, word in enumerate((left, right))
            ]  # fmt: skip
            assert all("does not tell" in str(reason) for reason in sink.check(receipts))
            assert sink.abort(sink.find(OURS)) == [LOST, LOST]
        same = {"id": [1], "ts": [5], ORDER: [5], "v": ["é"], "j": ['{"a": 1}']}
        receipts = [prepare(sink, same, task=task, batch=9) for task in range(2)]
        assert sink.check(receipts) == [None, None] and sink.commit(receipts) == [DONE, DONE]

    @pytest.mark.parametrize("own", [True, False])
    def test_long_strings_are_put_in_order_by_all_of_them(self, place: Place, own: bool) -> None:
        place.ask(f"CREATE TABLE t (id INT PRIMARY KEY, v INT{', o TEXT' if own else ''})")
        sink = place.sink(key="id", order_by="O", look=False)  # in other letters than the frame's
        frame = {"id": "int", "v": "int", "o": "string"}
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        sink.preflight()
        long = ["\U0001d11e" * 999 + end for end in "213"]
        rows = {"id": [1, 1, 1], "v": [2, 1, 3], "o": long, ORDER: long}
        receipt = prepare(sink, rows)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows(what="id, v") == [(1, 3)]
        rows |= {ORDER: [f"{long[0]}x", *long[1:]], "o": [f"{long[0]}x", *long[1:]]}
        error = refused(sink, rows)
        assert isinstance(error, BadRow) and set(error.rows) == {0}
        assert "column O is longer than 1000" in str(error)

    def test_bytes_have_an_order_and_structs_have_none(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
        sink = place.sink(key="id", order_by="o")
        receipt = prepare(sink, {"id": [1, 1], "v": [2, 1], ORDER: [b"\xff", b"\x7f"]})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, 2)]
        with pytest.raises(UsageError, match=r"'o' for order_by= is struct.* no order"):
            sink.project({"id": Column("id", "int"), "o": Column("o", "struct<a:int>")})

    def test_another_unique_key_is_never_mistaken_for_the_key(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, mail VARCHAR(9) UNIQUE, n INT)")
        place.ask("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)")
        sink = place.sink(key="id")
        receipt = prepare(sink, {"id": [3], "mail": ["b"], "n": [9]})
        assert "unique key" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]
        receipt = prepare(sink, {"id": [1, 3], "mail": ["z", "c"], "n": [8, 9]}, batch=1)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, "z", 8), (2, "b", 2), (3, "c", 9)]

    def test_a_null_in_the_key_is_a_bad_row(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT, b INT, UNIQUE (a))")
        error = refused(place.sink(key="a"), {"a": [1, None], "b": [1, 2]})
        assert isinstance(error, BadRow) and set(error.rows) == {1}


class TestWhatTheTargetRefuses:
    def test_a_duplicate_key_is_found_before_the_decision(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        place.ask("INSERT INTO t VALUES (1)")
        sink = place.sink()
        assert sink.chosen == "staged"
        for batch, rows in enumerate(([1, 2], [5, 5])):
            receipt = prepare(sink, {"id": rows}, batch=batch)
            assert "unique key" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST, LOST]
        assert place.rows() == [(1,)]

    def test_foreign_keys_checks_and_triggers(self, place: Place) -> None:
        place.ask("CREATE TABLE parent (id INT PRIMARY KEY)")
        place.ask(
            "CREATE TABLE t (p INT, n INT CHECK (n < 9), FOREIGN KEY (p) REFERENCES parent (id))"
        )
        place.ask("CREATE TRIGGER guard BEFORE INSERT ON t FOR EACH ROW IF NEW.n = 5 THEN "
                  "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END IF")  # fmt: skip
        place.ask("INSERT INTO parent VALUES (1)")
        staged, direct = place.sink(mode="staged"), place.sink(mode="xa")
        for number, (p, n, words) in enumerate(
            ((2, 1, "foreign key"), (1, 9, "CHECK"), (1, 5, "trigger"))
        ):
            receipt = prepare(staged, {"p": [1, p], "n": [1, n]}, batch=number)
            assert words in str(staged.check([receipt])[0])
            assert words in str(refused(direct, {"p": [1, p], "n": [1, n]}))
        assert staged.abort(staged.find(OURS)) == [LOST] * 3
        receipt = prepare(staged, {"p": [1], "n": [1]}, batch=9)
        assert staged.check([receipt]) == [None] and staged.commit([receipt]) == [DONE]
        assert place.rows() == [(1, 1)]

    # The table, the sink's options, rows before, rows, what is said.
    REFUSALS: tuple[tuple[str, str, dict[str, Any], str, dict[str, list[Any]], str], ...] = (
        ("partition", "(id INT PRIMARY KEY, v INT) PARTITION BY RANGE (id) "
         "(PARTITION a VALUES LESS THAN (10))", {"key": "id"}, "", {"id": [50], "v": [1]}, "partition"),
        ("generated", "(id INT PRIMARY KEY, v INT, g TINYINT AS (v * 100) STORED)", {"key": "id"}, "",
         {"id": [1], "v": [50]}, "range"),
        ("default", "(id INT PRIMARY KEY, v INT, d TINYINT DEFAULT (v * 100))", {"key": "id"}, "",
         {"id": [1], "v": [50]}, "range"),
        ("deleted", "(id INT PRIMARY KEY, v INT)", {"key": "id", "delete": "gone"},
         "CREATE TABLE child (id INT, FOREIGN KEY (id) REFERENCES t (id))",
         {"id": [1], "v": [None], DELETE: [True]}, "referred to"),
        ("updated", "(id INT PRIMARY KEY, v INT, UNIQUE (id, v))", {"key": "id"},
         "CREATE TABLE child (id INT, v INT, FOREIGN KEY (id, v) REFERENCES t (id, v))",
         {"id": [1], "v": [2]}, "referred to"),
    )  # fmt: skip

    @pytest.mark.parametrize("case", REFUSALS, ids=[case[0] for case in REFUSALS])
    def test_whatever_it_is_is_found_before_the_decision(self, place: Place, case: Any) -> None:
        name, table, options, child, rows, words = case
        place.ask(f"CREATE TABLE t {table}")
        if child:
            place.ask("INSERT INTO t VALUES (1, 1)")
            place.ask(child)
            place.ask(f"INSERT INTO child VALUES (1{', 1' if name == 'updated' else ''})")
        sink = place.sink(**options)
        receipt = prepare(sink, rows)
        assert words in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]

    def test_a_trigger_that_the_account_may_not_see(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, n INT)")
        place.ask("CREATE TRIGGER guard BEFORE INSERT ON t FOR EACH ROW IF NEW.n = 5 THEN "
                  "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END IF")  # fmt: skip
        url = account(place, "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP")
        sink = place.sink(key="id", url=url)
        receipt = prepare(sink, {"id": [1], "n": [5]})
        assert "trigger" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]

    def test_only_a_plain_table_is_not_tried(self, place: Place) -> None:
        """A trial costs as much as the move."""
        place.ask(
            "CREATE TABLE t (id INT PRIMARY KEY, v INT DEFAULT 3, w VARCHAR(9) DEFAULT 'it''s', "
            "x DATETIME DEFAULT CURRENT_TIMESTAMP, y DECIMAL(5,2) DEFAULT -1.5, z TEXT)"
        )
        place.ask("CREATE TABLE u (v INT)")
        for table, options in (("t", {"key": "id"}), ("u", {"mode": "staged"})):
            target = place.sink(table, **options).target
            assert not target.may_refuse(["id", "v"], ["id"] if table == "t" else [])
        assert place.sink("t").target.may_refuse(["id"], [])  # appended under a key
        url = account(place, "SELECT, INSERT, UPDATE, CREATE, TRIGGER")
        assert not place.sink("t", url=url, key="id").target.may_refuse(["id"], ["id"])
        name = url.split("/")[2].split(":")[0]
        place.ask(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {name}@'127.0.0.1'")
        place.ask(
            f"GRANT SELECT, INSERT, UPDATE, TRIGGER ON {place.database}.t TO {name}@'127.0.0.1'"
        )
        if not IS_MARIADB:  # a right over the whole server that shows no table
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO {name}@'127.0.0.1'")
        target = place.sink("t", url=url, key="id").target  # whose children it could not see
        assert target.may_refuse(["id"], ["id"])

    def test_what_was_not_tried_is_not_said_to_have_been_taken(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT)")
        sink = place.sink(mode="staged")
        receipt = prepare(sink, {"id": [1, 1]})
        assert sink.check([receipt]) == [None]
        place.ask("ALTER TABLE t ADD UNIQUE (id)")
        with pytest.raises(InDoubt, match=r"unique key.*make the table take them"):
            sink.commit([receipt])
        place.ask("ALTER TABLE t DROP KEY id")
        assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,), (1,)]

    def test_two_timestamps_that_are_not_null(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, a TIMESTAMP NOT NULL DEFAULT '2001-01-01', "
                  "b TIMESTAMP(6) NOT NULL DEFAULT '2001-01-01')")  # fmt: skip
        at = datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
        with settings(place, explicit_defaults_for_timestamp=0):
            sink = place.sink(key="id")
            receipt = prepare(sink, {"id": [1], "a": [at], "b": [at]})
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, at.replace(tzinfo=None), at.replace(tzinfo=None))]

    def test_a_unique_key_over_an_expression(self, place: Place) -> None:
        """MariaDB has such keys over a column of its own alone."""
        made = (
            "g VARCHAR(9) AS (LOWER(v)) VIRTUAL, UNIQUE (g)"
            if IS_MARIADB
            else "UNIQUE ((LOWER(v)))"
        )
        place.ask(f"CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(9), {made})")
        place.ask("INSERT INTO t (id, v) VALUES (1, 'a')")
        sink = place.sink(key="id")
        receipt = prepare(sink, {"id": [2], "v": ["A"]})
        assert "unique key" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]

    def test_a_target_changed_after_the_decision_stops_and_loses_nothing(
        self, place: Place
    ) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink()
        receipt = prepare(sink, {"id": [1, 2]})
        assert sink.check([receipt]) == [None]
        place.ask("INSERT INTO t VALUES (2)")
        with pytest.raises(InDoubt, match="unique key"):
            sink.commit([receipt])
        assert place.rows() == [(2,)]
        place.ask("DELETE FROM t")
        assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,), (2,)]

    def test_a_duplicate_within_an_xa_branch(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink(**PARTITIONED[True])
        assert "unique key" in str(refused(sink, {"id": [1, 1]}))
        assert place.rows() == []

    def test_the_same_key_in_two_tasks_does_not_wait_for_ever(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink(**PARTITIONED[True])
        first = prepare(sink, {"id": [1]}, task=0)
        error = refused(sink, {"id": [1]}, Rejected, task=1)
        assert "locked by another" in str(error)
        assert sink.commit([first]) == [DONE] and place.rows() == [(1,)]

    def test_a_retry_rolls_back_the_attempt_before(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, n INT)")
        sink = place.sink(**PARTITIONED[True])
        prepare(sink, {"id": [1], "n": [1]}, task=3, task_attempt=10)
        other = prepare(sink, {"id": [2], "n": [2]}, task=4, task_attempt=11)
        again = prepare(sink, {"id": [1], "n": [1]}, task=3, task_attempt=12, retry=1)
        assert {stray.id for stray in sink.find(OURS)} == {other.id, again.id}
        assert sink.commit([other, again]) == [DONE, DONE]

    def test_a_retry_leaves_alone_what_it_need_not_wait_for(self, place: Place) -> None:
        """The driver may yet choose it: two attempts of a task can run at a time."""
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        place.ask("CREATE TABLE u (i BIGINT AUTO_INCREMENT PRIMARY KEY, id INT)")
        keyed, plain = place.sink(**PARTITIONED[True]), place.sink("u", mode="xa")
        later = prepare(keyed, {"id": [1]}, task=3, task_attempt=12)
        begin(keyed, 3, task_attempt=10, retry=1).abort()
        assert keyed.commit([later]) == [DONE]
        first = prepare(plain, {"id": [1]}, task=3, task_attempt=13)
        begin(plain, 3, task_attempt=14, retry=1).abort()
        assert plain.commit([first]) == [DONE]

    def test_speculation_is_refused_where_attempts_would_meet(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        place.ask("CREATE TABLE u (id INT)")
        keyed: dict[str, Any] = {"key_partitioned": True, "mode": "xa"}
        keyed |= {"key": "id"} if IS_MARIADB else {}
        for speculates, table, options, fits in (
            ("true", "t", keyed, False),
            ("true", "t", {"key_partitioned": True}, False),
            ("false", "t", keyed, True),
            ("true", "t", {"key": "id"}, True),
            ("true", "u", {"mode": "xa"}, True),
        ):
            sink = place.sink(table, look=False, **options)
            settings = {"spark.speculation": speculates}
            context = SimpleNamespace(defaultParallelism=2, getConf=lambda held=settings: held)
            site: Any = SimpleNamespace(spark=SimpleNamespace(sparkContext=context))
            sink.attach(site)
            if fits:
                sink.preflight()
            else:
                with pytest.raises(UsageError, match="mode='staged', or set"):
                    sink.preflight()


class TestOptionsAndTablesThatChange:
    def test_what_was_decided_is_done_as_it_was_meant(self, place: Place) -> None:
        """The options are others when the pipeline comes back after a crash."""
        for table in ("t", "u"):
            place.ask(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT UNIQUE)")
            place.ask(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
        before = place.sink(key="id", delete="gone", order_by="o")
        rows = {"id": [1, 3, 3], "v": [None, 3, 4], DELETE: [True, False, False], ORDER: [1, 1, 2]}
        receipt = prepare(before, rows)
        assert before.check([receipt]) == [None]
        for now in (place.sink("u"), place.sink("u", key="v"), place.sink(key="v")):
            assert now.name == before.name
        assert place.sink("u").commit([receipt]) == [DONE]
        assert place.rows() == [(2, 2), (3, 4)] and place.rows("u") == [(1, 1), (2, 2)]

    def test_the_table_that_was_meant_is_gone(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT)")
        place.ask("CREATE TABLE u (id INT)")
        receipt = prepare(place.sink(mode="staged"), {"id": [1]})
        place.ask("RENAME TABLE t TO old")
        now = place.sink("u", mode="staged")
        with pytest.raises(LogMismatch, match=r"table \S+\.t, which is gone"):
            now.commit([receipt])
        place.ask("RENAME TABLE old TO t")
        assert now.commit([receipt]) == [DONE] and place.rows() == [(1,)]

    @BOTH
    @pytest.mark.parametrize(
        ("before", "now"),
        [("DOUBLE", "INT"), ("DECIMAL(9,3)", "DECIMAL(9,1)"), ("DATETIME(6)", "DATETIME"),
         ("VARCHAR(9)", "CHAR(9)"), ("VARBINARY(9)", "BINARY(9)"), ("FLOAT", "DOUBLE")],
    )  # fmt: skip
    def test_a_column_that_would_change_values_now(
        self, place: Place, mode: str, before: str, now: str
    ) -> None:
        values: dict[str, Any] = {
            "DOUBLE": 1.25, "DECIMAL(9,3)": decimal.Decimal("1.255"), "FLOAT": 0.1,
            "DATETIME(6)": datetime.datetime(2024, 1, 1, 0, 0, 0, 600_000), "VARCHAR(9)": "a ",
            "VARBINARY(9)": b"a",
        }  # fmt: skip
        place.ask(f"CREATE TABLE t (x {before})")
        sink = place.sink(mode=mode)
        rows = {"x": [values[before]]}
        if mode == "xa":
            place.ask(f"ALTER TABLE t MODIFY x {now}")
            refused(sink, rows, Rejected)
            assert place.rows() == []
            return
        receipt = prepare(sink, rows)
        assert sink.check([receipt]) == [None]
        place.ask(f"ALTER TABLE t MODIFY x {now}")
        assert "columns of table t were changed: x is" in str(sink.check([receipt])[0])
        with pytest.raises(InDoubt, match="x is"):
            sink.commit([receipt])
        place.ask(f"ALTER TABLE t MODIFY x {before}")
        assert sink.commit([receipt]) == [DONE] and len(place.rows()) == 1

    @BOTH
    def test_columns_that_hold_more_than_before(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (a INT, b VARCHAR(9), c DATETIME, d DECIMAL(5,1), e TEXT)")
        sink = place.sink(mode=mode)
        at, rows = (
            datetime.datetime(2024, 1, 1),
            {"a": [1], "b": ["b"], "d": [decimal.Decimal("1.5")]},
        )
        wider = (
            "a BIGINT, MODIFY b LONGTEXT, MODIFY c DATETIME(6), MODIFY d DECIMAL(9,3), ADD f INT"
        )
        receipt = prepare(sink, rows | {"c": [at], "e": ["e"]}) if mode == "staged" else None
        place.ask(f"ALTER TABLE t MODIFY {wider}")
        receipt = receipt or prepare(sink, rows | {"c": [at], "e": ["e"]})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, "b", at, decimal.Decimal("1.500"), "e", None)]


class TestEndings:
    @pytest.fixture
    def plain(self, place: Place) -> Place:
        place.ask("CREATE TABLE t (x INT)")
        return place

    def test_a_branch_whose_connection_still_lives_is_open(self, plain: Place) -> None:
        """MariaDB denies it to others then, with the error of a branch that is over."""
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        close, writer._close = writer._close, lambda: None
        made = writer.prepare()
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(1, 0), made.handle)
        if IS_MARIADB:
            assert sink.commit([receipt]) == [OPEN]
            assert sink.abort(sink.find(OURS)) == [OPEN]
            close()
        assert sink.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_a_task_that_vanished_does_not_keep_its_branch(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A machine that goes away does not close its connections: the server does, soon."""
        from poundlock.sinks.mysql import writer as module

        monkeypatch.setattr(module, "_DETACH_S", 1)
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        writer._close = lambda: None
        made = writer.prepare()
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(1, 0), made.handle)
        states = [sink.commit([receipt]) for _ in range(3)]
        assert states[-1] == [DONE] and plain.rows() == [(1,)]

    def test_a_crash_leaves_the_witness_locked(self, plain: Place, server: mariadb.MariaDB) -> None:
        """Or a tombstone would prove a prepared branch aborted."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        sink.close()
        server.kill()
        server.start()
        with sink._borrowed() as link:
            assert sink._proven(link, receipt) is OPEN
        assert sink.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_a_crash_after_other_tasks_loses_nothing(
        self, plain: Place, server: mariadb.MariaDB
    ) -> None:
        """With XIDs of several formats MySQL rolls prepared branches back when it starts again."""
        sink = plain.sink(mode="xa")
        for batch, tasks in enumerate((1, 1, 3)):
            done = [prepare(sink, {"x": [batch]}, task, batch=batch) for task in range(tasks)]
            assert sink.commit(done) == [DONE] * tasks
        last = [prepare(sink, {"x": [9]}, task, batch=9) for task in range(4)]
        assert [row[0] for row in plain.ask("XA RECOVER")] == [1] * 4
        sink.close()
        server.kill()
        server.start()
        assert sink.check(last) == [None] * 4
        assert sink.commit(last) == [DONE] * 4 and len(plain.rows()) == 9

    def test_a_branch_that_was_never_prepared_is_open_until_it_is_gone(self, plain: Place) -> None:
        """A tombstone must not be mistaken for proof while the witness is only locked."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        assert sink.abort(sink.find(OURS)) == [LOST]
        writer: Any = begin(sink, 1)
        writer.write(batch_of({"x": [1]}))
        writer._sender.arrive()
        sink.witness.testify(writer._link, [writer._name])
        handle = {**receipt.handle, "task": 1}
        other = Receipt(sink.name, str(writer._name), 1, Fingerprint(1, 0), handle)
        assert sink.commit([other]) == [OPEN]
        writer.abort()
        assert sink.commit([other]) == [LOST]

    def test_a_task_that_was_given_up_meanwhile(self, plain: Place) -> None:
        """Its rows are not to blame."""
        sink = plain.sink(mode="xa")
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        with sink._borrowed() as link:
            assert sink._settled(link, writer._name) is LOST
        with pytest.raises(Rejected, match="has a tombstone") as caught:
            writer.prepare()
        assert not isinstance(caught.value, BadRow)
        writer.abort()

    def test_a_rollback_that_the_server_forgets_is_not_believed(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It says OK, and InnoDB holds the branch: so it is here, by a statement that does nothing."""
        from poundlock.sinks.mysql import driver

        sink = plain.sink(mode="xa")
        prepare(sink, {"x": [1]})
        strays = sink.find(OURS)

        def ask(link: Any, statement: str, arguments: Sequence[Any] = ()) -> Any:
            return run(link, "DO 0" if "ROLLBACK" in statement else statement, arguments)

        with monkeypatch.context() as patched:
            patched.setattr(driver, "run", ask)
            assert sink.abort(strays) == [OPEN]
        assert sink.abort(strays) == [LOST]

    def test_a_commit_that_the_server_forgets_is_not_believed(
        self, place: Place, server: mariadb.MariaDB, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """MariaDB says OK and commits nothing while the branch's connection is being closed."""
        place.ask("CREATE TABLE t (b LONGBLOB)")
        sink = place.sink(mode="xa")
        send_by(sink, "load")
        monkeypatch.setattr(MySQL, "_let_go", lambda sink, receipts: None)
        for batch in range(8):  # large rows take a while to be freed
            receipt = prepare(sink, {"b": [b"x" * (30 << 20)]}, batch=batch)
            try:
                state = sink.commit([receipt])
            except InDoubt:
                server.kill()
                server.start()
                state = sink.commit([receipt])
            assert state == [DONE]
            assert place.ask("SELECT COUNT(*) FROM t") == [(batch + 1,)]

    def test_an_ok_without_a_witness_is_no_proof(
        self, plain: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        monkeypatch.setattr(Witness, "states", lambda *_: {})
        with pytest.raises(InDoubt, match="restart the server"):
            sink.commit([receipt])

    @BOTH
    def test_without_its_witness_nothing_is_known(self, plain: Place, mode: str) -> None:
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        plain.ask("DROP TABLE poundlock_witness")
        assert plain.sink(mode=mode).commit([receipt]) == [BranchState.NO_WITNESS]

    @BOTH
    @pytest.mark.parametrize(
        "emptied",
        [
            ["DELETE FROM poundlock_witness"],
            ["TRUNCATE poundlock_witness"],
            [
                "CREATE TABLE w LIKE poundlock_witness",
                "DROP TABLE poundlock_witness",
                "RENAME TABLE w TO poundlock_witness",
            ],
        ],
        ids=["delete", "truncate", "like"],
    )
    def test_an_emptied_witness_proves_nothing(
        self, plain: Place, mode: str, emptied: list[str]
    ) -> None:
        """A tombstone enters there, for a batch that was committed."""
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        for statement in emptied:
            plain.ask(statement)
        assert sink.commit([receipt]) == sink.commit([receipt]) == [BranchState.NO_WITNESS]
        assert plain.ask("SELECT * FROM poundlock_witness") == []
        after = prepare(sink, {"x": [2]}, task=1)  # and so does the row that it gets now
        with pytest.raises(LogMismatch, match="emptied"):
            sink.commit([receipt])
        assert sink.check([after]) == [None] and sink.commit([after]) == [DONE]
        assert plain.rows() == [(1,), (2,)]

    @BOTH
    def test_a_witness_emptied_before_the_decision_is_told_by_the_check(
        self, plain: Place, mode: str
    ) -> None:
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        plain.ask("DELETE FROM poundlock_witness WHERE branch = 'witness'")
        assert sink.check([receipt]) == [
            "its witness table was emptied or made anew since it was written"
        ]
        assert sink.abort(sink.find(OURS)) == [LOST]

    @BOTH
    def test_pruning_keeps_what_the_witness_is(self, plain: Place, mode: str) -> None:
        sink = plain.sink(mode=mode)
        for batch in range(3):
            assert sink.commit([prepare(sink, {"x": [batch]}, batch=batch)]) == [DONE]
        before = plain.ask("SELECT identity FROM poundlock_witness WHERE branch = 'witness'")
        sink.prune(OURS, 9)
        assert plain.ask("SELECT COUNT(*) FROM poundlock_witness") == [(2,)]
        receipt = prepare(sink, {"x": [9]}, batch=9)
        assert receipt.handle["witness"] == [plain.database, before[0][0]]
        assert sink.commit([receipt]) == [DONE]

    def test_a_server_without_the_witness_table_is_not_believed(self, plain: Place) -> None:
        """Its OK to a commit is no proof, and there is no other."""
        sink = plain.sink(mode="xa")
        receipt = prepare(sink, {"x": [1]})
        plain.ask(f"CREATE DATABASE {plain.database}_empty")
        _, known = receipt.handle["witness"]  # type: ignore[misc]
        handle = {**receipt.handle, "witness": [f"{plain.database}_empty", known]}
        elsewhere = Receipt(sink.name, receipt.id, 0, receipt.fingerprint, handle)
        assert sink.commit([elsewhere]) == [BranchState.NO_WITNESS]
        assert sink.commit([receipt]) == [DONE]

    @BOTH
    def test_another_witness_proves_nothing(self, plain: Place, mode: str) -> None:
        """A server that never had the branch must not say that it is lost."""
        sink = plain.sink(mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        plain.ask("DROP TABLE poundlock_witness")
        other = prepare(sink, {"x": [2]}, task=1)
        with pytest.raises(LogMismatch, match="another server"):
            sink.commit([receipt])
        assert sink.commit([other]) == [DONE] and plain.rows() == [(1,), (2,)]

    def test_a_branch_is_ended_where_it_was_staged(self, plain: Place) -> None:
        """Its witness and its rows are where its receipt says, wherever new ones go now."""
        other = f"{plain.database}_aside"
        plain.ask(f"CREATE DATABASE {other}")
        before = plain.sink(mode="staged", witness_database=other)
        receipts = [prepare(before, {"x": [task]}, task=task) for task in range(2)]
        now = plain.sink(mode="staged")
        assert now.check(receipts) == [None, None]
        mixed = [*receipts, prepare(now, {"x": [2]}, task=2)]
        assert now.commit(mixed) == [DONE] * 3
        assert before.commit(mixed) == [DONE] * 3
        assert plain.rows() == [(0,), (1,), (2,)]
        assert plain.ask(f"SHOW TABLES IN {other}") == [("poundlock_witness",)]
        assert plain.ask(f"SELECT COUNT(*) FROM {other}.poundlock_witness") == [(3,)]

    def test_a_stage_left_behind_is_not_open_and_is_pruned(self, plain: Place) -> None:
        """A crash between the move and the end of its staging tables."""
        sink = plain.sink(mode="staged")
        receipt = prepare(sink, {"x": [1]})
        sink._drop_stage = lambda link, database, name: None  # type: ignore[method-assign]
        assert sink.commit([receipt]) == [DONE]
        assert plain.leftovers()
        later = plain.sink(mode="staged")
        assert later.find(OURS) == []
        later.prune(OURS, 0)
        assert plain.leftovers() == []
        assert later.commit([receipt]) == [DONE] and plain.rows() == [(1,)]

    def test_two_drivers_move_once(self, plain: Place) -> None:
        one, two = plain.sink(mode="staged"), plain.sink(mode="staged")
        receipts = [prepare(one, {"x": list(range(500))}, task=task) for task in range(4)]
        ends: list[list[BranchState]] = []

        def commit(sink: MySQL) -> None:
            states = sink.commit(receipts)
            while OPEN in states:
                states = sink.commit(receipts)
            ends.append(states)

        threads = [threading.Thread(target=commit, args=(sink,)) for sink in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends == [[DONE] * 4] * 2
        assert plain.ask("SELECT COUNT(*) FROM t") == [(2000,)]

    def test_a_batch_that_lost_a_stage_is_lost_whole(self, plain: Place) -> None:
        sink = plain.sink(mode="staged")
        receipts = [prepare(sink, {"x": [task]}, task=task) for task in range(2)]
        plain.ask(f"DROP TABLE {stage_of(receipts[0])}")
        assert sink.check(receipts) == ["its staging table is gone", None]
        assert sink.commit(receipts) == [LOST, LOST]
        assert plain.rows() == []
        again = [prepare(sink, {"x": [task]}, task=task, attempt=2) for task in range(2)]
        assert sink.commit(again) == [DONE, DONE]
        assert plain.rows() == [(0,), (1,)]

    @pytest.mark.parametrize("key", [None, "x"])
    def test_a_stage_that_others_have_changed_is_lost(self, place: Place, key: str | None) -> None:
        place.ask("CREATE TABLE t (x INT PRIMARY KEY)")
        sink = place.sink(mode="staged", key=key)
        receipt = prepare(sink, {"x": [1, 2, 3]})
        assert sink.check([receipt]) == [None]
        place.ask(f"DELETE FROM {stage_of(receipt)} WHERE x = 2")
        assert sink.commit([receipt]) == sink.commit([receipt]) == [LOST]
        assert place.rows() == [] and place.leftovers() == []
        again = prepare(sink, {"x": [1, 2, 3]}, attempt=2)
        assert sink.commit([again]) == [DONE] and place.rows() == [(1,), (2,), (3,)]

    def test_both_modes_are_finished_whatever_the_mode_is_now(self, plain: Place) -> None:
        xa, staged = plain.sink(mode="xa"), plain.sink(mode="staged")
        receipts = [prepare(xa, {"x": [1]}, task=0), prepare(staged, {"x": [2]}, task=1)]
        assert len(xa.find(OURS)) == len(staged.find(OURS)) == 2
        assert xa.check(receipts) == [None, None]
        assert staged.commit(receipts) == [DONE, DONE]
        assert plain.rows() == [(1,), (2,)]

    def test_the_generation_outlives_pruning(self, plain: Place) -> None:
        sink = plain.sink()
        receipt = prepare(sink, {"x": [1]})
        assert sink.commit([receipt]) == [DONE]
        sink.prune(OURS, 100)
        assert sink.newest_generation(OURS) == 1

    def test_an_xid_has_room(self) -> None:
        branch = Branch(Transaction(OURS, 9999, 10**8, 99), "s" * 63, 10**5, 10**8)
        name = xid(name_of(branch), 10**5)
        assert len(name.gtrid) <= 64 and len(name.bqual) <= 64


@contextmanager
def settings(place: Place, **variables: Any) -> Iterator[None]:
    """Have the server set otherwise, for all who connect now."""
    if not (names := list(variables)):
        yield
        return
    before = place.ask(f"SELECT {', '.join(f'@@GLOBAL.{name}' for name in names)}")[0]

    def change(values: Mapping[str, Any]) -> None:
        changes = ", ".join(f"GLOBAL {name} = {value!r}" for name, value in values.items())
        place.ask(f"SET {changes}")

    change(variables)
    try:
        yield
    finally:
        change(dict(zip(names, before, strict=True)))


class TestWhateverTheServerHasSet:
    def test_unique_keys_are_kept(self, place: Place) -> None:
        """MariaDB would lose the whole batch, and say that it is committed."""
        place.ask("CREATE TABLE t (u INT UNIQUE)")
        place.ask("CREATE TABLE parent (id INT PRIMARY KEY)")
        place.ask("CREATE TABLE child (p INT, FOREIGN KEY (p) REFERENCES parent (id))")
        with settings(place, unique_checks=0, foreign_key_checks=0):
            sink = place.sink(mode="staged")
            receipt = prepare(sink, {"u": [7, 7]})
            assert "unique key" in str(sink.check([receipt])[0])
            assert sink.abort(sink.find(OURS)) == [LOST]
            child = place.sink("child", mode="staged")
            receipt = prepare(child, {"p": [7]}, batch=1)
            assert "foreign key" in str(child.check([receipt])[0])
            assert child.abort(child.find(OURS)) == [LOST]

    def test_checks_are_kept(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT CHECK (x > 0))")
        with settings(place, **({"check_constraint_checks": 0} if IS_MARIADB else {})):
            assert "CHECK" in str(refused(place.sink(mode="xa"), {"x": [-1]}))

    @UPSERTS
    def test_nothing_of_it_shows(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, u INT UNIQUE)")
        place.ask("INSERT INTO t VALUES (9, 9)")
        odd: dict[str, Any] = {"sql_safe_updates": 1, "sql_auto_is_null": 1, "sql_select_limit": 1,
                               "completion_type": 1}  # fmt: skip
        if IS_MARIADB:
            odd |= {"idle_write_transaction_timeout": 1, "max_statement_time": 0.001}
        with settings(place, **odd):
            sink = place.sink(key="id", delete="gone", **PARTITIONED[mode == "xa"])
            rows = {"id": [1, 2, 9], "u": [1, 2, None], DELETE: [False, False, True]}
            receipt = prepare(sink, rows)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
            again = prepare(sink, rows | {"id": [1, 3, 2]}, batch=1)
            assert sink.check([again]) == [None] and sink.commit([again]) == [DONE]
        assert place.rows() == [(1, 1), (3, 2)]

    def test_a_task_may_take_its_time(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        with settings(place, wait_timeout=2), closing(place.sink(mode="xa").connect()) as link:
            assert run(link, "SELECT @@wait_timeout")[0][0] > 3600


class TestTheConnection:
    @BOTH
    def test_lost_while_writing(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink(mode=mode)
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        place.ask(f"KILL {writer._link.thread_id()}")
        writer.write(batch_of({"x": [2]}))  # which is on its way, and not yet heard of
        with pytest.raises(Unavailable):
            writer.prepare()
        writer.abort()
        strays = sink.find(OURS)
        assert sink.abort(strays) == [LOST] * len(strays)
        assert place.rows() == []

    def test_a_wrong_password_is_told_without_it(self, place: Place) -> None:
        url = place.server.url.replace("@", ":Geheim-123@", 1)
        with pytest.raises(NotAuthorised) as caught:
            place.sink(url=url)
        assert "Geheim" not in str(caught.value) and "Geheim" not in repr(place.sink(look=False))

    @pytest.mark.parametrize(
        ("number", "text", "says"),
        [
            (
                1005,
                'Can\'t create table `a`.`b` (errno: 28 "No space left on device")',
                "disk is full",
            ),
            (1030, 'Got error 28 "No space left on device" from storage engine', "disk is full"),
            (
                1226,
                "User 'u' has exceeded the 'max_user_connections' resource",
                "no connection left",
            ),
        ],
    )
    def test_what_there_is_no_room_for(self, number: int, text: str, says: str) -> None:
        with pytest.raises(Unavailable, match=says), links.said("out"):
            raise pymysql.err.OperationalError(number, text)

    @pytest.mark.parametrize(
        "url", ["postgres://x", "mysql://", "mysql://h:port/db", "mysql://h/db?ssl=on", "nonsense"]
    )
    def test_an_address_that_cannot_be_read(self, url: str) -> None:
        with pytest.raises(UsageError):
            MySQL("t", url=url)

    def test_addresses_come_from_the_environment(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.ask("CREATE TABLE t (x INT)")
        monkeypatch.setenv("PLACE_URL", place.server.address)
        sink = place.sink(url="env:PLACE_URL")
        password = place.server.connect_arguments()["password"]
        assert password.encode() not in pickle.dumps(sink)
        assert MySQL("t", url="env:PLACE_URL").database == "poundlock"

    def test_an_account_without_rights(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        url = account(place, "SELECT")
        with pytest.raises(NotAuthorised, match="CREATE TABLE IF NOT EXISTS"):
            begin(place.sink(url=url, mode="staged"))
        if not IS_MARIADB:
            with pytest.raises(NotAuthorised, match="GRANT XA_RECOVER_ADMIN"):
                place.sink(url=url)

    def test_branches_of_others_that_are_no_text(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        with place.client() as cursor:
            for statement in ("XA START X'ff',X'fe',7", "INSERT INTO t VALUES (1)",
                              "XA END X'ff',X'fe',7", "XA PREPARE X'ff',X'fe',7"):  # fmt: skip
                cursor.execute(statement)
        sink = place.sink(mode="xa")
        try:
            assert sink.find(OURS) == []
        finally:
            place.ask("XA ROLLBACK X'ff',X'fe',7")

    @BOTH
    def test_an_account_with_the_rights_it_needs(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (x INT)")
        url = account(place, "SELECT, INSERT, DELETE, CREATE, DROP")
        if not IS_MARIADB and mode == "xa":
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO poor_{place.database}@'127.0.0.1'")
        sink = place.sink(url=url, mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        prepare(sink, {"x": [2]}, batch=1)
        assert sink.abort(sink.find(OURS)) == [LOST]
        assert place.rows() == [(1,)]

    def test_a_witness_that_somebody_made_for_us_is_begun(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        place.ask(place.sink(look=False, mode="xa").witness.statement)
        url = account(place, "SELECT, INSERT, DELETE")
        if not IS_MARIADB:
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO poor_{place.database}@'127.0.0.1'")
        sink = place.sink(url=url, mode="xa")
        receipt = prepare(sink, {"x": [1]})
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]

    def test_a_staging_table_that_cannot_be_dropped_holds_up_nothing(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink(url=account(place, "SELECT, INSERT, DELETE, CREATE"), mode="staged")
        receipt = prepare(sink, {"x": [1]})
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]
        assert place.rows() == [(1,)]
        assert sink.find(OURS) == []
        place.sink(mode="staged").prune(OURS, 0)  # which may; and the fixture sees that all is gone

    def test_a_connection_is_asked_with_the_patience_of_who_takes_it(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = place.sink(look=False)
        with sink._borrowed(3600):
            pass
        waits: list[float] = []
        monkeypatch.setattr(
            links.Link, "ping", lambda link, reconnect: waits.append(link._read_timeout)
        )
        with sink._borrowed(7):
            assert waits == [7]

    def test_no_file_is_sent_to_a_server_that_asks(self, place: Place, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("1\n")
        place.ask("CREATE TABLE t (x INT)")
        link = place.sink().connect()
        with closing(link), pytest.raises(Rejected, match="asked for a file"):
            run(link, f"LOAD DATA LOCAL INFILE '{secret}' INTO TABLE {place.database}.t")
        assert place.rows() == []

    def test_a_silent_server_is_unreachable(
        self, place: Place, server: mariadb.MariaDB, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from poundlock.sinks.mysql import connected

        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink()
        receipt = prepare(sink, {"x": [1]})
        sink.close()
        sink.url += "?connect_timeout=1"
        monkeypatch.setattr(connected, "_ANSWER_S", 1)
        server.pause()
        try:
            assert sink.commit([receipt]) == [BranchState.UNREACHABLE]
        finally:
            server.resume()
        assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,)]


class TestLessThanExactlyOnce:
    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_written_straight_through(self, place: Place, semantic: str) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, x INT)")
        for options in ({}, {"key": "id"}):
            sink = place.sink(semantic=semantic, **options)
            writer = begin(sink)
            writer.write(batch_of({"id": [1, 2], "x": [1, len(options)]}))
            assert place.rows() == ([(1, 1), (2, 0)] if options else [])
            assert writer.prepare() is None
        assert place.rows() == [(1, 1), (2, 1)]
        assert not place.ask("SHOW TABLES LIKE 'poundlock%'")


class TestTheServer:
    def test_its_secret_is_for_its_owner_alone(self, server: mariadb.MariaDB) -> None:
        file = server.directory / "password"
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text() not in server.url and file.read_text() in server.address
        for entry in ("data", "private"):
            assert (server.directory / entry).stat().st_mode & 0o077 == 0

    def test_it_is_not_root(self, server: mariadb.MariaDB) -> None:
        owner = (server.directory / "data" / "ibdata1").stat().st_uid
        assert owner != 0 and (os.geteuid() == 0 or owner == os.geteuid())

    def test_it_listens_here_only_and_knows_one_account(self, place: Place) -> None:
        assert place.ask("SELECT @@bind_address") == [("127.0.0.1",)]
        users = {row[0] for row in place.ask("SELECT User FROM mysql.user")}
        assert not users & {"", "root"} or not IS_MARIADB
