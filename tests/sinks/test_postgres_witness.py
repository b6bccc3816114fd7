"""PostgreSQL: the witness, and inconclusive answers."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import psycopg
import pytest
from fix_postgres import DONE, LOST, OPEN, Database, keyed

from poundlock.core.model import Fingerprint, Receipt, Stray
from poundlock.core.protocol import BranchState
from poundlock.errors import LogMismatch, Rejected
from poundlock.servers import postgres
from poundlock.sinks.postgres.link import connect

UNKNOWN = BranchState.NO_WITNESS


class TestTheWitness:
    def test_a_zombie_cannot_prepare_an_aborted_branch(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        zombie = sink.begin(db.branch())
        zombie.write(keyed((1, "a")))
        receipt = Receipt("t", zombie._id, 0, Fingerprint(1, 0))
        assert sink.commit([receipt]) == [LOST]
        with pytest.raises(Rejected, match="aborted by the driver"):
            zombie.prepare()
        assert db.open() == [] and db("SELECT * FROM t") == []

    def test_an_uncommitted_witness_proves_nothing(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        receipt = db.prepare(sink, keyed((1, "a")))
        foreign = sink.begin(db.branch(1))
        foreign.write(keyed((2, "b")))
        foreign._finish_copy()
        # A task can get this far before its machine stops.
        foreign._target.witness.insert_own(foreign._connection, foreign._id)
        unknown = Receipt("t", foreign._id, 1, Fingerprint(1, 0))
        assert sink.commit([receipt, unknown]) == [DONE, OPEN]
        foreign.abort()
        assert sink.commit([unknown]) == [LOST]

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_another_witness_table_proves_nothing(self, db: Database, mode: str) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.commit([receipt]) == [DONE]
        elsewhere = db.sink(mode=mode, witness_schema="elsewhere")
        db.prepare(elsewhere, keyed((2, "b")), 1)  # this creates a witness there
        assert elsewhere.commit([receipt]) == [UNKNOWN]
        db("DROP SCHEMA poundlock CASCADE")
        again = db.sink(mode=mode)
        assert again.commit([receipt]) == [UNKNOWN]
        assert not db("SELECT to_regclass('poundlock.witness')")[0][0]
        assert again.abort([Stray("t", receipt.id, 1, mode)]) == [LOST]  # no decision names it
        assert again.commit([receipt]) == [UNKNOWN]
        assert again.check([receipt]) == ["its witness table has since been dropped or emptied"]
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
        assert db("SELECT * FROM poundlock.witness") == []  # it has no tombstone
        later = db.prepare(sink, keyed((2, "b")), 1)  # new branches still work
        assert sink.check([later]) == [None]
        assert sink.commit([later]) == [DONE]
        assert sink.commit([receipt]) == [UNKNOWN]
        assert db("SELECT k FROM t ORDER BY k") == [(1,), (2,)]

    def test_the_witness_cannot_be_emptied_while_it_is_read(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        db.prepare(sink, keyed((1, "a")))
        with connect(db.dsn) as reader, reader.transaction():
            sink.target.witness.require(reader, [None])
            db("SET lock_timeout = '200ms'")
            for how in ("DELETE FROM", "TRUNCATE"):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    db(f"{how} poundlock.witness")

    def test_another_cluster_is_reported(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        receipt = db.prepare(sink, keyed((1, "a")))
        assert receipt.handle["system"]
        moved = Receipt("t", receipt.id, 0, receipt.fingerprint, {"system": "123"})
        with pytest.raises(LogMismatch, match="another PostgreSQL cluster"):
            sink.commit([moved])

    @pytest.mark.parametrize("mode", ["prepared", "staged"])
    def test_another_database_is_reported(
        self, db: Database, postgres_node: postgres.Node, mode: str
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink(mode=mode)
        receipt = db.prepare(sink, keyed((1, "a")))
        other = Database(postgres_node)
        other("CREATE TABLE t (k int, v text)")
        with pytest.raises(LogMismatch, match="another database"):
            other.sink().commit([receipt])
        assert sink.commit([receipt]) == [DONE]
        with pytest.raises(LogMismatch, match="another database"):
            other.sink().commit([receipt])
        other.connection.close()


class TestInconclusiveAnswers:
    def test_a_branch_that_another_driver_is_finishing_is_open(self, db: Database) -> None:
        """The other driver waits for a missing standby, so no row is visible yet."""
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int)")
        sink = db.sink(mode="prepared")
        receipt = db.prepare(sink, keyed((1, "a")))

        def stand_by(name: str) -> None:
            db(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
            db("SELECT pg_reload_conf()")

        def waits(session: psycopg.Connection[Any]) -> bool:
            query = (
                f"SELECT wait_event FROM pg_stat_activity WHERE pid = {session.info.backend_pid}"
            )
            return db(query) == [("SyncRep",)]

        def waits_for_it() -> bool:
            """Return whether commits wait. The server applies the setting with a delay."""
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

    def test_a_failed_transaction_is_not_mistaken_for_a_prepared_branch(self, db: Database) -> None:
        """The server answers PREPARE with ROLLBACK and without an error."""
        db("CREATE TABLE t (k int, v text)")
        writer: Any = db.sink(mode="prepared").begin(db.branch())
        with pytest.raises(psycopg.errors.DivisionByZero):
            writer._connection.execute("SELECT 1 / 0")
        with pytest.raises(Rejected, match="the server answered PREPARE TRANSACTION with ROLLBACK"):
            writer._end("PREPARE TRANSACTION 'poundlock'", "PREPARE TRANSACTION")
        writer.abort()
        assert db.open() == []

    def test_an_acknowledged_commit_is_durable_under_any_setting_of_the_role(
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


def test_a_receipt_is_plain_json_without_rows_or_secrets(db: Database) -> None:
    db("CREATE TABLE t (k int, v text)")
    receipt = db.prepare(db.sink(), keyed((1, "a secret row")))
    text = json.dumps(receipt.to_json())
    assert "secret" not in text and db.dsn not in text
