"""MySQL and MariaDB: how rows are sent, and rows that the target refuses."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any, cast

import pymysql
import pytest
from fix_mysql import (
    DONE,
    LOST,
    OURS,
    PARTITIONED,
    Place,
    batch_of,
    begin,
    changed_settings,
    create_account,
    get_refusal,
    prepare,
)

from mysqld import IS_MARIADB
from poundlock.core.model import Fingerprint, Receipt
from poundlock.core.participant import Column
from poundlock.errors import BadRow, InDoubt, Rejected, UsageError
from poundlock.sinks.mysql import link as links
from poundlock.sinks.mysql.move import DELETE
from poundlock.spark.pipeline.site import SparkSite


class TestSending:
    """A thread sends rows while the task makes the next ones."""

    def test_an_error_is_raised_again_by_every_later_call(self, place: Place) -> None:
        """A branch prepared after the error would lack rows."""
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

    def test_the_queue_of_unsent_rows_is_bounded(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from poundlock.sinks.mysql import sender

        monkeypatch.setattr(sender, "_AHEAD", 1000)
        place.ask("CREATE TABLE t (x TEXT)")
        sink = place.sink()
        writer: Any = begin(sink)
        with place.client() as other:
            # The other one holds the lock.
            other.execute(f"SELECT GET_LOCK('{writer._turns(sink.target)}', 0)")
            for _ in range(4):
                writer.write(batch_of({"x": ["y" * 400]}))
                assert sum(piece.size for piece in writer._sender._waiting) <= 1000
            made = writer.prepare()  # after a while it goes on without the lock
        receipt = Receipt(sink.name, made.id, 0, Fingerprint(4, 0), made.handle)
        assert sink.commit([receipt]) == [DONE]
        assert place.ask("SELECT COUNT(*) FROM t") == [(4,)]

    def test_tasks_write_in_turn_only_where_no_row_lock_can_wait(self, place: Place) -> None:
        """The lock for a turn and a row lock could deadlock, and the server would not notice."""
        place.ask("CREATE TABLE t (x INT)")
        place.ask("CREATE TABLE numbered (n INT AUTO_INCREMENT PRIMARY KEY, x INT)")
        place.ask("CREATE TABLE checked (x INT CHECK (x > 0))")
        place.ask("CREATE TABLE keyed (x INT PRIMARY KEY)")
        uses_turns = {}
        for table in ("t", "numbered", "checked", "keyed"):
            sink = place.sink(table, look=False, semantic="at_least_once")
            sink.project({"x": Column("x", "int")})
            sink.preflight()
            writer: Any = begin(sink)
            uses_turns[table] = writer._turns(sink.target) is not None
            writer.abort()
        assert uses_turns == {"t": True, "numbered": True, "checked": False, "keyed": False}

    def test_a_server_without_named_locks_is_enough(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = links.Link.run

        def refuse(link: Any, statement: str, values: Any = ()) -> Any:
            if "GET_LOCK" in statement:
                raise pymysql.err.NotSupportedError(1235, "not here")
            return run(link, statement, values)

        monkeypatch.setattr(links.Link, "run", refuse)
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink()
        assert sink.commit([prepare(sink, {"x": [1, 2]})]) == [DONE]
        assert place.rows() == [(1,), (2,)]

    def test_a_trigger_that_inserts_does_not_disturb_the_row_count(self, place: Place) -> None:
        """The trigger's INSERT must not count as ours."""
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


class TestRefusals:
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

    def test_foreign_keys_checks_and_triggers_refuse_rows(self, place: Place) -> None:
        place.ask("CREATE TABLE parent (id INT PRIMARY KEY)")
        place.ask(
            "CREATE TABLE t (p INT, n INT CHECK (n < 9), FOREIGN KEY (p) REFERENCES parent (id))"
        )
        place.ask(
            "CREATE TRIGGER guard BEFORE INSERT ON t FOR EACH ROW IF NEW.n = 5 THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END IF"
        )
        place.ask("INSERT INTO parent VALUES (1)")
        staged, direct = place.sink(mode="staged"), place.sink(mode="xa")
        for number, (p, n, words) in enumerate(
            ((2, 1, "foreign key"), (1, 9, "CHECK"), (1, 5, "trigger"))
        ):
            receipt = prepare(staged, {"p": [1, p], "n": [1, n]}, batch=number)
            assert words in str(staged.check([receipt])[0])
            assert words in str(get_refusal(direct, {"p": [1, p], "n": [1, n]}))
        assert staged.abort(staged.find(OURS)) == [LOST] * 3
        receipt = prepare(staged, {"p": [1], "n": [1]}, batch=9)
        assert staged.check([receipt]) == [None] and staged.commit([receipt]) == [DONE]
        assert place.rows() == [(1, 1)]

    # The name, the table, the sink's options, a child table, the rows, and words of the error.
    REFUSALS: tuple[tuple[str, str, dict[str, Any], str, dict[str, list[Any]], str], ...] = (
        (
            "partition",
            "(id INT PRIMARY KEY, v INT) PARTITION BY RANGE (id) "
            "(PARTITION a VALUES LESS THAN (10))",
            {"key": "id"},
            "",
            {"id": [50], "v": [1]},
            "partition",
        ),
        (
            "generated",
            "(id INT PRIMARY KEY, v INT, g TINYINT AS (v * 100) STORED)",
            {"key": "id"},
            "",
            {"id": [1], "v": [50]},
            "range",
        ),
        (
            "default",
            "(id INT PRIMARY KEY, v INT, d TINYINT DEFAULT (v * 100))",
            {"key": "id"},
            "",
            {"id": [1], "v": [50]},
            "range",
        ),
        (
            "deleted",
            "(id INT PRIMARY KEY, v INT)",
            {"key": "id", "delete": "gone"},
            "CREATE TABLE child (id INT, FOREIGN KEY (id) REFERENCES t (id))",
            {"id": [1], "v": [None], DELETE: [True]},
            "referred to",
        ),
        (
            "updated",
            "(id INT PRIMARY KEY, v INT, UNIQUE (id, v))",
            {"key": "id"},
            "CREATE TABLE child (id INT, v INT, FOREIGN KEY (id, v) REFERENCES t (id, v))",
            {"id": [1], "v": [2]},
            "referred to",
        ),
    )

    @pytest.mark.parametrize("case", REFUSALS, ids=[case[0] for case in REFUSALS])
    def test_every_refusal_is_found_before_the_decision(self, place: Place, case: Any) -> None:
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

    def test_a_trigger_hidden_from_the_account_is_found(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, n INT)")
        place.ask(
            "CREATE TRIGGER guard BEFORE INSERT ON t FOR EACH ROW IF NEW.n = 5 THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END IF"
        )
        url = create_account(place, "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP")
        sink = place.sink(key="id", url=url)
        receipt = prepare(sink, {"id": [1], "n": [5]})
        assert "trigger" in str(sink.check([receipt])[0])
        assert sink.abort(sink.find(OURS)) == [LOST]

    def test_only_a_plain_table_needs_no_trial(self, place: Place) -> None:
        """A trial costs as much as the move itself."""
        place.ask(
            "CREATE TABLE t (id INT PRIMARY KEY, v INT DEFAULT 3, w VARCHAR(9) DEFAULT 'it''s', "
            "x DATETIME DEFAULT CURRENT_TIMESTAMP, y DECIMAL(5,2) DEFAULT -1.5, z TEXT)"
        )
        place.ask("CREATE TABLE u (v INT)")
        for table, options in (("t", {"key": "id"}), ("u", {"mode": "staged"})):
            target = place.sink(table, **options).target
            assert not target.may_refuse(["id", "v"], ["id"] if table == "t" else [])
        assert place.sink("t").target.may_refuse(["id"], [])  # appended under a key
        url = create_account(place, "SELECT, INSERT, UPDATE, CREATE, TRIGGER")
        assert not place.sink("t", url=url, key="id").target.may_refuse(["id"], ["id"])
        name = url.split("/")[2].split(":")[0]
        place.ask(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {name}@'127.0.0.1'")
        place.ask(
            f"GRANT SELECT, INSERT, UPDATE, TRIGGER ON {place.database}.t TO {name}@'127.0.0.1'"
        )
        if not IS_MARIADB:  # a global right that shows no table
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO {name}@'127.0.0.1'")
        target = place.sink("t", url=url, key="id").target  # it could not see child tables
        assert target.may_refuse(["id"], ["id"])

    def test_the_error_does_not_claim_a_trial_that_did_not_happen(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT)")
        sink = place.sink(mode="staged")
        receipt = prepare(sink, {"id": [1, 1]})
        assert sink.check([receipt]) == [None]
        place.ask("ALTER TABLE t ADD UNIQUE (id)")
        with pytest.raises(InDoubt, match=r"unique key.*change the table so that it accepts them"):
            sink.commit([receipt])
        place.ask("ALTER TABLE t DROP KEY id")
        assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,), (1,)]

    def test_two_timestamps_that_are_not_null_can_be_staged(self, place: Place) -> None:
        place.ask(
            "CREATE TABLE t (id INT PRIMARY KEY, a TIMESTAMP NOT NULL DEFAULT '2001-01-01', "
            "b TIMESTAMP(6) NOT NULL DEFAULT '2001-01-01')"
        )
        at = datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
        with changed_settings(place, explicit_defaults_for_timestamp=0):
            sink = place.sink(key="id")
            receipt = prepare(sink, {"id": [1], "a": [at], "b": [at]})
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert place.rows() == [(1, at.replace(tzinfo=None), at.replace(tzinfo=None))]

    def test_a_unique_key_over_an_expression_is_found(self, place: Place) -> None:
        """MariaDB has such keys only over a generated column."""
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

    def test_a_target_changed_after_the_decision_loses_nothing(self, place: Place) -> None:
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

    def test_a_duplicate_within_an_xa_branch_is_get_refusal(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink(**PARTITIONED[True])
        assert "unique key" in str(get_refusal(sink, {"id": [1, 1]}))
        assert place.rows() == []

    def test_the_same_key_in_two_tasks_does_not_wait_for_ever(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        sink = place.sink(**PARTITIONED[True])
        first = prepare(sink, {"id": [1]}, task=0)
        error = get_refusal(sink, {"id": [1]}, Rejected, task=1)
        assert "locked by another" in str(error)
        assert sink.commit([first]) == [DONE] and place.rows() == [(1,)]

    def test_a_retry_rolls_back_the_previous_attempt(self, place: Place) -> None:
        place.ask("CREATE TABLE t (id INT PRIMARY KEY, n INT)")
        sink = place.sink(**PARTITIONED[True])
        prepare(sink, {"id": [1], "n": [1]}, task=3, task_attempt=10)
        other = prepare(sink, {"id": [2], "n": [2]}, task=4, task_attempt=11)
        again = prepare(sink, {"id": [1], "n": [1]}, task=3, task_attempt=12, retry=1)
        assert {stray.id for stray in sink.find(OURS)} == {other.id, again.id}
        assert sink.commit([other, again]) == [DONE, DONE]

    def test_a_retry_does_not_roll_back_branches_it_need_not_wait_for(self, place: Place) -> None:
        """The driver may still choose the other attempt: two can run at the same time."""
        place.ask("CREATE TABLE t (id INT PRIMARY KEY)")
        place.ask("CREATE TABLE u (i BIGINT AUTO_INCREMENT PRIMARY KEY, id INT)")
        keyed, plain = place.sink(**PARTITIONED[True]), place.sink("u", mode="xa")
        later = prepare(keyed, {"id": [1]}, task=3, task_attempt=12)
        begin(keyed, 3, task_attempt=10, retry=1).abort()
        assert keyed.commit([later]) == [DONE]
        first = prepare(plain, {"id": [1]}, task=3, task_attempt=13)
        begin(plain, 3, task_attempt=14, retry=1).abort()
        assert plain.commit([first]) == [DONE]

    def test_speculation_is_refused_where_attempts_would_wait_for_each_other(
        self, place: Place
    ) -> None:
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
            sink.attach(SparkSite(cast(Any, SimpleNamespace(sparkContext=context)), ""))
            if fits:
                sink.preflight()
            else:
                with pytest.raises(UsageError, match="mode='staged', or set"):
                    sink.preflight()
