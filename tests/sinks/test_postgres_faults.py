"""PostgreSQL: faults of the server and of connections, and the server itself."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import DONE, LOST, OPEN, Database, keyed, keywords

from poundlock.core.protocol import BranchState
from poundlock.errors import GuaranteeBroken, Rejected, Unavailable, UsageError
from poundlock.servers import postgres
from poundlock.sinks import Postgres
from poundlock.sinks.postgres import link as postgres_link
from poundlock.sinks.postgres import staged as postgres_staged
from poundlock.spark.pipeline.site import SparkSite


class TestFaults:
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
            receipt = db.prepare(sink, keyed((1, "a")), 5)  # the sink itself still works
            assert sink.connections._connection is not None
            pid = sink.connections._connection.info.backend_pid
            db(f"SELECT pg_terminate_backend({pid}, 5000)")
            assert sink.check([receipt]) == [None]  # an idle connection that was cut is replaced
            assert sink.commit([receipt]) == [DONE]
            db("DELETE FROM t; DROP SCHEMA poundlock CASCADE")

    def test_a_trigger_that_omits_rows_is_noticed(self, db: Database) -> None:
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
    def test_a_trigger_that_omits_rows_of_an_upsert_is_noticed(
        self, db: Database, columns: str
    ) -> None:
        db(f"CREATE TABLE t ({columns})")
        db("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        key = ["k", "v"] if "(k, v)" in columns else "k"
        staged = db.sink(key=key)
        receipt = db.prepare(staged, keyed((1, "a")))
        with pytest.raises(Rejected, match=r"did not accept 1 rows.*leaves rows out"):
            staged.check([receipt])
        with pytest.raises(GuaranteeBroken, match="leaves rows out"):
            staged.commit([receipt])
        with pytest.raises(Rejected, match="leaves rows out"):
            db.prepare(db.sink(key=key, mode="prepared", key_partitioned=True), keyed((1, "a")), 1)
        db("DROP TRIGGER g ON t; INSERT INTO t VALUES (1, 'a')")
        assert staged.commit([receipt]) == [DONE]  # an existing row is not omitted

    def test_a_read_only_server_is_waited_for(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        role = f"options='-c default_transaction_read_only=on' {keywords(db.dsn)}"
        for mode in ("prepared", "staged"):
            sink = db.sink(mode=mode)
            receipt = db.prepare(sink, keyed((1, "a")), batch=len(mode))
            blocked = Postgres("t", dsn=role, mode=mode)
            if mode == "staged":
                assert blocked.commit([receipt]) == [OPEN]
            assert sink.commit([receipt]) == [DONE]
            blocked.close()

    def test_a_read_only_role_is_refused_at_the_start(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        reading = f"options='-c default_transaction_read_only=on' {keywords(db.dsn)}"
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

    def test_a_transaction_that_cannot_be_prepared_is_reported_with_a_remedy(
        self, db: Database
    ) -> None:
        db("CREATE TABLE t (k int, v text)")
        db(
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NOTIFY x; RETURN NEW; END'"
        )
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        with pytest.raises(UsageError, match=r"NOTIFY.*use mode='staged'"):
            db.prepare(db.sink(), keyed((1, "a")))

    def test_rules_that_copy_ignores_are_refused(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text); CREATE TABLE u (k int, v text)")
        db("CREATE RULE r AS ON INSERT TO t DO INSTEAD INSERT INTO u VALUES (NEW.k, NEW.v)")
        with pytest.raises(UsageError, match=r"has rule r.*use mode='staged'"):
            db.sink()
        staged = db.sink(mode="staged")
        receipt = db.prepare(staged, keyed((1, "a")))
        assert staged.check([receipt]) == [None] and staged.commit([receipt]) == [DONE]
        # The rule redirects it.
        assert db("SELECT k FROM t") == [] and db("SELECT k FROM u") == [(1,)]

    def test_a_connection_to_a_dead_machine_times_out(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        with db.sink().connections.lend() as connection:
            found = connection.info.get_parameters()
        assert (found["tcp_user_timeout"], found["keepalives_idle"]) == ("120000", "10")

    def test_the_server_notices_a_machine_that_vanished(self, db: Database) -> None:
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        names += ("tcp_user_timeout", "client_connection_check_interval")
        names += ("idle_in_transaction_session_timeout",)
        shown = ["10", "5", "4", "120000", "10s"]
        writer: Any = sink.begin(db.branch())
        assert [writer._connection.run(f"SHOW {it}")[0][0] for it in names] == [*shown, "0"]
        writer.abort()
        with sink.connections.lend() as link, link.brief_transaction():
            assert [link.run(f"SHOW {it}")[0][0] for it in names] == [*shown, "1min"]

    def test_a_driver_that_is_stopped_in_a_transaction_releases_its_locks(
        self, db: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its machine may be suspended, and go on later."""
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        sink = db.sink(key="k")
        receipt = db.prepare(sink, keyed((1, "a")))
        held, released = threading.Event(), threading.Event()

        def stop(*_: Any) -> None:
            held.set()
            assert released.wait(60)

        monkeypatch.setattr(postgres_link, "IDLE", "300ms")
        monkeypatch.setattr(postgres_staged, "_run_deferred", stop)
        refused: list[BaseException] = []

        def commit() -> None:
            try:
                sink.commit([receipt])
            except Unavailable as error:
                refused.append(error)

        stopped = threading.Thread(target=commit)
        stopped.start()
        assert held.wait(60)
        db("SET lock_timeout = '60s'; INSERT INTO t VALUES (1, 'b'); DELETE FROM t")
        released.set()
        stopped.join()
        assert len(refused) == 1
        monkeypatch.undo()
        assert sink.commit([receipt]) == [DONE]
        assert db("SELECT * FROM t") == [(1, "a")]
        sink.close()

    def test_no_statement_is_prepared_in_a_session(self, db: Database) -> None:
        """A pooler may give each transaction another session."""
        db("CREATE TABLE t (k int, v text)")
        sink = db.sink()
        for batch in range(7):
            receipt = db.prepare(sink, keyed((1, "a")), batch=batch)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        with sink.connections.lend() as connection:
            assert connection.execute("SELECT * FROM pg_prepared_statements").fetchall() == []

    def test_weaker_semantics_write_without_a_branch(self, db: Database) -> None:
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
        site = SparkSite(cast(Any, SimpleNamespace(sparkContext=context)), "")
        for connections, warnings in (
            (5, ["connections=5, but 6 may be opened"]),
            (6, []),
            (None, []),
        ):
            sink = Postgres("t", dsn=db.dsn, connections=connections)
            sink.attach(site)
            assert [it.split(" (")[0] for it in sink.preflight() if "opened" in it] == warnings
            sink.close()
        context.defaultParallelism = 10_000
        sink = Postgres("t", dsn=db.dsn)
        sink.attach(site)
        with pytest.raises(UsageError, match="10001 connections are needed"):
            sink.preflight()
        sink.close()

    def test_a_server_without_prepared_transactions_is_refused(self) -> None:
        with postgres.running(max_prepared_transactions=0) as plain:
            db = Database(plain)
            db("CREATE TABLE t (k int, v text)")
            with pytest.raises(UsageError, match=r"max_prepared_transactions is 0.*mode='staged'"):
                db.sink()
            sink = db.sink(mode="staged")
            assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
            db.connection.close()

    def test_a_batch_that_the_lock_table_cannot_hold_is_refused_before_the_decision(self) -> None:
        few = {"max_locks_per_transaction": "10", "max_connections": "20"}
        with postgres.running(max_prepared_transactions=0, settings=few) as narrow:
            db = Database(narrow)
            db("CREATE TABLE t (k int, v text)")
            sink = db.sink(mode="staged")
            receipts = [db.prepare(sink, keyed((task, "a")), task) for task in range(210)]
            with pytest.raises(UsageError, match=r"210 staging tables.*made to hold 200\b.*raise"):
                sink.check(receipts)
            fit = receipts[:120]
            assert sink.check(fit) == [None] * 120
            with psycopg.connect(db.dsn) as other:  # others use the same table of locks
                taken = 0
                with contextlib.suppress(psycopg.errors.OutOfMemory):
                    for taken in range(100_000):
                        with other.transaction():
                            other.execute("SELECT pg_advisory_lock(%s)", [taken])
                # Enough is left for anything but the batch.
                for key in range(taken - 60, taken):
                    other.execute("SELECT pg_advisory_unlock(%s)", [key])
                with pytest.raises(UsageError, match="cannot hold now"):
                    sink.check(fit)
                # Once it is decided, it waits for them.
                assert set(sink.commit(fit)) == {OPEN}
            assert sink.commit(fit) == [DONE] * 120
            assert sorted(row[0] for row in db("SELECT k FROM t")) == list(range(120))
            sink.close()
            db.connection.close()

    @pytest.mark.parametrize("isolation", ["read\\\\ committed", "serializable"])
    def test_concurrent_tasks_can_create_the_witness(self, db: Database, isolation: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        db("CREATE TABLE t (k int, v text)")
        as_given = f"options='-c default_transaction_isolation={isolation}' {keywords(db.dsn)}"
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
def test_randomly_cut_connections_lose_and_repeat_nothing(
    db: Database, options: dict[str, Any]
) -> None:
    """No row is lost or repeated, at whichever step of a branch its connection ends."""
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

    def retry(step: Callable[[], Any]) -> Any:
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
                        db.prepare(
                            sink,
                            keyed((batch * 2 + task, "x")),
                            task,
                            batch=batch,
                            attempt=attempt,
                            task_attempt=attempt * 2 + task,
                        )
                        for task in (0, 1)
                    ]
                    assert sink.check(receipts) == [None, None]
                    break
                except (Unavailable, Rejected):
                    retry(lambda: sink.abort(sink.find(db.namespace)))
            states: list[BranchState] = []
            while states != [DONE, DONE]:
                states = retry(lambda found=receipts: sink.commit(found))
                assert LOST not in states
    finally:
        ended.set()
        cutter.join()
    retry(lambda: sink.abort(sink.find(db.namespace)))
    assert sorted(row[0] for row in db("SELECT k FROM t")) == list(range(12))
    assert db.open() == []


class TestTheServer:
    def test_data_and_address_survive_a_kill_and_a_stop(self, tmp_path: Path) -> None:
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

    def test_tables_are_created_in_the_public_schema(self, db: Database) -> None:
        db("CREATE SCHEMA poundlock; CREATE TABLE t (n int)")  # both are named poundlock
        assert db("SELECT schemaname FROM pg_tables WHERE tablename = 't'") == [("public",)]

    def test_a_directory_without_binaries_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("POUNDLOCK_POSTGRES_BIN", str(tmp_path))
        with pytest.raises(UsageError, match="no initdb"):
            postgres.binaries()
