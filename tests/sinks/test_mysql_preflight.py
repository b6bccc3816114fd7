"""MySQL and MariaDB: checks at the start, and tables and options that change later."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest
from fix_mysql import BOTH, DONE, PARTITIONED, Place, create_account, get_refusal, prepare

from mysqld import IS_MARIADB
from poundlock.core.model import Fingerprint, Receipt
from poundlock.core.participant import Column, Commitment
from poundlock.errors import InDoubt, LogMismatch, Rejected, UsageError
from poundlock.sinks.mysql.move import DELETE, ORDER


class TestTargetTable:
    def test_names_that_differ_only_in_case_are_refused(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT)")
        sink = place.sink(look=False)
        with pytest.raises(UsageError, match=r"columns 'ID' and 'Id' have the same name in MySQL"):
            sink.project({"Id": Column("a", "int"), "ID": Column("b", "int")})

    def test_each_difference_is_named(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE t (id INT NOT NULL, price DECIMAL(10,2), at DATETIME, note VARCHAR(9), "
            "twice INT GENERATED ALWAYS AS (id * 2) STORED, must INT NOT NULL, old TEXT)"
        )
        frame = {
            "id": "string",
            "price": "decimal(20,4)",
            "at": "timestamp",
            "twice": "int",
            "more": "int",
            "old": "string",
        }
        sink = place.sink(look=False)
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        with pytest.raises(UsageError) as caught:
            sink.preflight()
        for words in (
            "'id' is int",
            "'price' is decimal(10,2), which would round",
            "'more'",
            "'twice' is computed",
            "'must' (int",
            "is NOT NULL without",
        ):
            assert words in str(caught.value)
        assert "'note'" not in str(caught.value) and "'at'" not in str(caught.value)

    def test_columns_that_would_change_values_are_named(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE t (a FLOAT(7,2), b DOUBLE(10,2), c TIME(3), d JSON, e JSON, f DOUBLE)"
        )
        frame = {
            "a": "float",
            "b": "double",
            "c": "string",
            "d": "struct<a:decimal(38,18)>",
            "e": "string",
            "f": "float",
        }
        sink = place.sink(look=False)
        sink.project({name: Column(name, kind) for name, kind in frame.items()})
        with pytest.raises(UsageError) as caught:
            sink.preflight()
        for words in (
            "'a' is float(7,2), which would round",
            "'b' is double(10,2), which would",
            "'c' is time(3), which cannot store string",
        ):
            assert words in str(caught.value)
        assert ("round the decimals" in str(caught.value)) == (not IS_MARIADB)
        assert "'e'" not in str(caught.value) and "'f'" not in str(caught.value)
        place.ask("CREATE TABLE u (e JSON)")
        sink = place.sink("u", look=False, mode="staged")
        sink.project({"e": Column("e", "string")})
        assert len(sink.preflight()) == (not IS_MARIADB)

    def test_possible_losses_of_precision_are_warned_of(self, place: Place) -> None:
        place.ask("CREATE TABLE t (at DATETIME, old TEXT CHARACTER SET latin1)")
        sink = place.sink(look=False)
        sink.project({"at": Column("at", "timestamp"), "old": Column("old", "string")})
        warnings = " ".join(sink.preflight())
        assert "would round microseconds" in warnings and "latin1" in warnings

    def test_unsupported_types_and_missing_columns_are_named(self, place: Place) -> None:
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
    def test_an_unsuitable_table_is_get_refusal(self, place: Place, made: str, words: str) -> None:
        place.ask(made)
        with pytest.raises(UsageError, match=words):
            place.sink()

    def test_an_upsert_needs_a_unique_key(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT, b INT, UNIQUE (a, b))")
        with pytest.raises(UsageError, match=r"no unique key over a.*It has: a, b"):
            place.sink(key="a")

    def test_the_mode_follows_from_the_table_and_the_options(self, place: Place) -> None:
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
            for mode in ("xa", "staged"):  # the mode in which the branch was written
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
        url = create_account(place, "ALL PRIVILEGES")
        name = f"poor_{place.database}@'127.0.0.1'"
        place.ask(f"ALTER USER {name} WITH MAX_USER_CONNECTIONS 7")
        with pytest.raises(UsageError, match=r"8 connections .* max_user_connections allows 7"):
            place.sink("t", url=url, connections=8)
        with pytest.raises(UsageError, match="needs key="):
            place.sink("t", order_by="a")
        with pytest.raises(UsageError, match="mode='both'"):
            place.sink("t", mode="both")

    def test_unsafe_settings_are_warned_of(self, place: Place) -> None:
        place.ask("CREATE TABLE t (a INT)")
        place.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        place.ask("SET GLOBAL local_infile = 0")
        try:
            sink = place.sink(look=False)
            warnings = " ".join(sink.preflight())
            assert "innodb_flush_log_at_trx_commit" in warnings
            assert ("local_infile" in warnings) == (not IS_MARIADB)  # a bulk does not need it
            receipt = prepare(sink, {"a": [1]})
            assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,)]
        finally:
            place.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            place.ask("SET GLOBAL local_infile = 1")

    def test_unsuitable_servers_are_get_refusal(self, place: Place) -> None:
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
            ("9.7.0", "an XID format other than 1"),
        ):
            assert words in " ".join(sink._cautions(version, logged))


class TestChangedOptionsAndTables:
    def test_a_decided_batch_keeps_the_options_it_was_written_with(self, place: Place) -> None:
        """The options change before the pipeline starts again after a crash."""
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

    def test_a_renamed_target_is_reported(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT)")
        place.ask("CREATE TABLE u (id INT)")
        receipt = prepare(place.sink(mode="staged"), {"id": [1]})
        place.ask("RENAME TABLE t TO old")
        now = place.sink("u", mode="staged")
        with pytest.raises(LogMismatch, match=r"table \S+\.t, which no longer exists"):
            now.commit([receipt])
        place.ask("RENAME TABLE old TO t")
        assert now.commit([receipt]) == [DONE] and place.rows() == [(1,)]

    @BOTH
    @pytest.mark.parametrize(
        ("before", "now"),
        [
            ("DOUBLE", "INT"),
            ("DECIMAL(9,3)", "DECIMAL(9,1)"),
            ("DATETIME(6)", "DATETIME"),
            ("VARCHAR(9)", "CHAR(9)"),
            ("VARBINARY(9)", "BINARY(9)"),
            ("FLOAT", "DOUBLE"),
        ],
    )
    def test_a_column_changed_after_staging_is_reported(
        self, place: Place, mode: str, before: str, now: str
    ) -> None:
        values: dict[str, Any] = {
            "DOUBLE": 1.25,
            "DECIMAL(9,3)": decimal.Decimal("1.255"),
            "FLOAT": 0.1,
            "DATETIME(6)": datetime.datetime(2024, 1, 1, 0, 0, 0, 600_000),
            "VARCHAR(9)": "a ",
            "VARBINARY(9)": b"a",
        }
        place.ask(f"CREATE TABLE t (x {before})")
        sink = place.sink(mode=mode)
        rows = {"x": [values[before]]}
        if mode == "xa":
            place.ask(f"ALTER TABLE t MODIFY x {now}")
            get_refusal(sink, rows, Rejected)
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
    def test_wider_columns_take_the_staged_rows(self, place: Place, mode: str) -> None:
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
