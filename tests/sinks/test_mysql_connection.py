"""MySQL and MariaDB: connections, the settings of the server, and the server itself."""

from __future__ import annotations

import os
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pymysql
import pytest
from fix_mysql import (
    BOTH,
    DONE,
    LOST,
    OURS,
    PARTITIONED,
    UPSERTS,
    Place,
    batch_of,
    begin,
    changed_settings,
    create_account,
    get_refusal,
    prepare,
)

from mysqld import IS_MARIADB
from poundlock.core.protocol import BranchState
from poundlock.errors import NotAuthorised, Rejected, Unavailable, UsageError
from poundlock.servers import mariadb
from poundlock.sinks import MySQL
from poundlock.sinks.mysql import link as links
from poundlock.sinks.mysql.errors import MYSQL
from poundlock.sinks.mysql.move import DELETE


class TestServerSettings:
    def test_unique_and_foreign_keys_are_checked(self, place: Place) -> None:
        """Otherwise MariaDB would lose the whole batch and report it as committed."""
        place.ask("CREATE TABLE t (u INT UNIQUE)")
        place.ask("CREATE TABLE parent (id INT PRIMARY KEY)")
        place.ask("CREATE TABLE child (p INT, FOREIGN KEY (p) REFERENCES parent (id))")
        with changed_settings(place, unique_checks=0, foreign_key_checks=0):
            sink = place.sink(mode="staged")
            receipt = prepare(sink, {"u": [7, 7]})
            assert "unique key" in str(sink.check([receipt])[0])
            assert sink.abort(sink.find(OURS)) == [LOST]
            child = place.sink("child", mode="staged")
            receipt = prepare(child, {"p": [7]}, batch=1)
            assert "foreign key" in str(child.check([receipt])[0])
            assert child.abort(child.find(OURS)) == [LOST]

    def test_check_constraints_are_checked(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT CHECK (x > 0))")
        with changed_settings(place, **({"check_constraint_checks": 0} if IS_MARIADB else {})):
            assert "CHECK" in str(get_refusal(place.sink(mode="xa"), {"x": [-1]}))

    @UPSERTS
    def test_unusual_server_settings_change_no_result(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, u INT UNIQUE)")
        place.ask("INSERT INTO t VALUES (9, 9)")
        odd: dict[str, Any] = {
            "sql_safe_updates": 1,
            "sql_auto_is_null": 1,
            "sql_select_limit": 1,
            "completion_type": 1,
        }
        if IS_MARIADB:
            odd |= {"idle_write_transaction_timeout": 1, "max_statement_time": 0.001}
        with changed_settings(place, **odd):
            sink = place.sink(key="id", delete="gone", **PARTITIONED[mode == "xa"])
            rows = {"id": [1, 2, 9], "u": [1, 2, None], DELETE: [False, False, True]}
            receipt = prepare(sink, rows)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
            again = prepare(sink, rows | {"id": [1, 3, 2]}, batch=1)
            assert sink.check([again]) == [None] and sink.commit([again]) == [DONE]
        assert place.rows() == [(1, 1), (3, 2)]

    def test_a_slow_task_keeps_its_connection(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        with (
            changed_settings(place, wait_timeout=2),
            closing(place.sink(mode="xa").connect()) as link,
        ):
            assert link.run("SELECT @@wait_timeout")[0][0] > 3600

    def test_a_driver_that_is_stopped_in_a_transaction_releases_its_locks(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its machine may have vanished: the server's own limit is eight hours."""
        place.ask("CREATE TABLE t (x INT PRIMARY KEY)")
        sink = place.sink(mode="staged")
        sink.close()
        with sink.lend() as link:
            assert link.run("SELECT @@wait_timeout") == [(60,)]
        sink.close()
        monkeypatch.setattr("poundlock.sinks.mysql.link.IDLE_S", 1)

        def stop_in_a_transaction() -> None:
            with sink.lend() as link, link.transaction():
                link.run(f"INSERT INTO {sink.into} VALUES (1)")
                place.ask("INSERT INTO t VALUES (1)")  # waits for the lock
                link.run("SELECT 1")

        with pytest.raises(Unavailable):
            stop_in_a_transaction()
        monkeypatch.undo()
        with sink.lend() as link:
            assert link.run("SELECT 1") == [(1,)]
        sink.close()


class TestTheConnection:
    @BOTH
    def test_a_connection_lost_while_writing_is_reported(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink(mode=mode)
        writer: Any = begin(sink)
        writer.write(batch_of({"x": [1]}))
        place.ask(f"KILL {writer._link.thread_id()}")
        writer.write(batch_of({"x": [2]}))  # it is sent, and not yet acknowledged
        with pytest.raises(Unavailable):
            writer.prepare()
        writer.abort()
        strays = sink.find(OURS)
        assert sink.abort(strays) == [LOST] * len(strays)
        assert place.rows() == []

    def test_a_wrong_password_is_reported_but_not_shown(self, place: Place) -> None:
        url = place.address(f"{mariadb.USER}:Geheim-123")
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
    def test_a_lack_of_room_is_reported(self, number: int, text: str, says: str) -> None:
        with pytest.raises(Unavailable, match=says), MYSQL.translated_errors("out"):
            raise pymysql.err.OperationalError(number, text)

    @pytest.mark.parametrize(
        "url", ["postgres://x", "mysql://", "mysql://h:port/db", "mysql://h/db?ssl=on", "nonsense"]
    )
    def test_an_unreadable_address_is_get_refusal(self, url: str) -> None:
        with pytest.raises(UsageError):
            MySQL("t", url=url)

    def test_an_address_can_come_from_the_environment(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.ask("CREATE TABLE t (x INT)")
        monkeypatch.setenv("PLACE_URL", place.server.address)
        sink = place.sink(url="env:PLACE_URL")
        password = place.server.connect_arguments()["password"]
        assert password.encode() not in pickle.dumps(sink)
        assert MySQL("t", url="env:PLACE_URL").database == "poundlock"

    def test_missing_rights_are_named(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        url = create_account(place, "SELECT")
        with pytest.raises(NotAuthorised, match="CREATE TABLE IF NOT EXISTS"):
            begin(place.sink(url=url, mode="staged"))
        if not IS_MARIADB:
            with pytest.raises(NotAuthorised, match="GRANT XA_RECOVER_ADMIN"):
                place.sink(url=url)

    def test_foreign_branches_with_binary_names_are_ignored(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        with place.client() as cursor:
            for statement in (
                "XA START X'ff',X'fe',7",
                "INSERT INTO t VALUES (1)",
                "XA END X'ff',X'fe',7",
                "XA PREPARE X'ff',X'fe',7",
            ):
                cursor.execute(statement)
        sink = place.sink(mode="xa")
        try:
            assert sink.find(OURS) == []
        finally:
            place.ask("XA ROLLBACK X'ff',X'fe',7")

    @BOTH
    def test_the_documented_rights_are_enough(self, place: Place, mode: str) -> None:
        place.ask("CREATE TABLE t (x INT)")
        url = create_account(place, "SELECT, INSERT, DELETE, CREATE, DROP")
        if not IS_MARIADB and mode == "xa":
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO poor_{place.database}@'127.0.0.1'")
        sink = place.sink(url=url, mode=mode)
        receipt = prepare(sink, {"x": [1]})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        prepare(sink, {"x": [2]}, batch=1)
        assert sink.abort(sink.find(OURS)) == [LOST]
        assert place.rows() == [(1,)]

    def test_a_witness_table_that_an_administrator_made_is_used(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        place.ask(place.sink(look=False, mode="xa").witness.create[0])
        url = create_account(place, "SELECT, INSERT, DELETE")
        if not IS_MARIADB:
            place.ask(f"GRANT XA_RECOVER_ADMIN ON *.* TO poor_{place.database}@'127.0.0.1'")
        sink = place.sink(url=url, mode="xa")
        receipt = prepare(sink, {"x": [1]})
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]

    def test_a_staging_table_that_cannot_be_dropped_blocks_nothing(self, place: Place) -> None:
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink(
            url=create_account(place, "SELECT, INSERT, DELETE, CREATE"), mode="staged"
        )
        receipt = prepare(sink, {"x": [1]})
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]
        assert place.rows() == [(1,)]
        assert sink.find(OURS) == []
        # This account may drop it; the fixture checks that.
        place.sink(mode="staged").prune(OURS, 0)

    def test_a_reused_connection_has_the_timeout_of_its_borrower(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = place.sink(look=False)
        with sink.connections.lend(3600):
            pass
        waits: list[float] = []
        monkeypatch.setattr(
            links.Link, "ping", lambda link, reconnect: waits.append(link._read_timeout)
        )
        with sink.connections.lend(7):
            assert waits == [7]

    def test_no_file_is_sent_to_a_server_that_requests_one(
        self, place: Place, tmp_path: Path
    ) -> None:
        secret = tmp_path / "secret"
        secret.write_text("1\n")
        place.ask("CREATE TABLE t (x INT)")
        link = place.sink().connect()
        with closing(link), pytest.raises(Rejected, match="asked for a file"):
            link.run(f"LOAD DATA LOCAL INFILE '{secret}' INTO TABLE {place.database}.t")
        assert place.rows() == []

    def test_a_silent_server_is_unreachable(
        self, place: Place, mysql_server: mariadb.MariaDB, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.ask("CREATE TABLE t (x INT)")
        sink = place.sink()
        receipt = prepare(sink, {"x": [1]})
        sink.close()
        sink.url += f"{'&' if '?' in sink.url else '?'}connect_timeout=1"
        monkeypatch.setattr(links.Connections, "answer_s", 1)
        mysql_server.pause()
        try:
            assert sink.commit([receipt]) == [BranchState.UNREACHABLE]
        finally:
            mysql_server.resume()
        assert sink.commit([receipt]) == [DONE] and place.rows() == [(1,)]


class TestWeakerSemantics:
    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_weaker_semantics_write_without_a_branch(self, place: Place, semantic: str) -> None:
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
    def test_only_its_owner_can_read_its_password(self, mysql_server: mariadb.MariaDB) -> None:
        file = mysql_server.directory / "password"
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text() not in mysql_server.url and file.read_text() in mysql_server.address
        for entry in ("data", "private"):
            assert (mysql_server.directory / entry).stat().st_mode & 0o077 == 0

    def test_it_does_not_run_as_root(self, mysql_server: mariadb.MariaDB) -> None:
        owner = (mysql_server.directory / "data" / "ibdata1").stat().st_uid
        assert owner != 0 and (os.geteuid() == 0 or owner == os.geteuid())

    def test_it_listens_on_the_loopback_and_has_one_account(self, place: Place) -> None:
        assert place.ask("SELECT @@bind_address") == [("127.0.0.1",)]
        users = {row[0] for row in place.ask("SELECT User FROM mysql.user")}
        assert not users & {"", "root"} or not IS_MARIADB
