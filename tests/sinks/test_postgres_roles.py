"""PostgreSQL: roles, rights and time-outs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_postgres import DONE, Database, keyed, keywords

from poundlock.errors import NotAuthorised, UsageError
from poundlock.sinks import Postgres


class TestRoleTimeouts:
    @pytest.mark.parametrize("options", [{"mode": "staged"}, {"key": "k"}], ids=str)
    def test_a_slow_move_is_not_cancelled(self, db: Database, options: dict[str, Any]) -> None:
        db("CREATE TABLE t (k int PRIMARY KEY, v text)")
        db(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END'"
        )
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()")
        sink = db.sink(dsn=f"options='-c statement_timeout=250ms' {keywords(db.dsn)}", **options)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.check([receipt]) == [None]
        assert sink.commit([receipt]) == [DONE]
        sink.close()

    @pytest.mark.parametrize("tolerant", [False, True])
    def test_a_slow_task_keeps_its_connection(self, db: Database, tolerant: bool) -> None:
        db("CREATE TABLE t (k int, v text)")
        limits = "-c statement_timeout=100ms -c idle_in_transaction_session_timeout=100ms"
        sink = db.sink(dsn=f"options='{limits}' {keywords(db.dsn)}")
        writer = sink.begin(db.branch(tolerant=tolerant))
        writer.write(keyed((1, "a")))
        db("SELECT pg_sleep(0.3)")
        writer.write(keyed((2, "b")))
        assert writer.prepare() is not None
        sink.close()


class TestRoles:
    @pytest.fixture
    def role(self, db: Database) -> Iterator[Callable[[], str]]:
        name = f"role_{db.name}"
        db(f"CREATE ROLE {name} LOGIN PASSWORD 'hidden'")
        db("CREATE TABLE t (k int, v text)")
        yield (
            lambda: (
                f"host=127.0.0.1 port={db.connection.info.port} dbname={db.name} user={name} "
                "password=hidden"
            )
        )
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

    def test_a_missing_right_to_a_sequence_is_named(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("ALTER TABLE t ADD id bigserial")
        db(f"GRANT INSERT ON t TO {name}; GRANT CREATE ON DATABASE {db.name} TO {name}")
        frame = {"k": "int", "v": "string"}
        with pytest.raises(NotAuthorised, match=r"GRANT USAGE ON SEQUENCE public\.t_id_seq TO"):
            db.sink(dsn=role(), mode="staged", frame=frame)
        db(f"GRANT USAGE ON SEQUENCE t_id_seq TO {name}")
        sink = db.sink(dsn=role(), mode="staged", frame=frame)
        assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
        sink.close()

    def test_another_role_cannot_finish_a_branch(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        receipt = db.prepare(db.sink(), keyed((1, "a")))
        db(
            f"GRANT INSERT ON t TO {name}; GRANT ALL ON SCHEMA poundlock TO {name}; "
            f"GRANT ALL ON poundlock.witness TO {name}"
        )
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
        db(
            f"CREATE SCHEMA poundlock; GRANT {granted} ON SCHEMA poundlock TO {name}; "
            f"GRANT INSERT ON public.t TO {name}"
        )
        for mode in ("prepared", "staged"):
            with pytest.raises(NotAuthorised, match="GRANT CREATE, USAGE ON SCHEMA"):
                db.sink(dsn=role(), mode=mode)

    def test_an_existing_witness_needs_no_right_to_create(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db.prepare(db.sink(), keyed((1, "a")), 9)
        db(
            f"GRANT INSERT ON t TO {name}; GRANT USAGE ON SCHEMA poundlock TO {name}; "
            f"GRANT ALL ON poundlock.witness TO {name}"
        )
        sink = db.sink(dsn=role())
        assert sink.commit([db.prepare(sink, keyed((1, "a")))]) == [DONE]
        sink.close()
        with pytest.raises(NotAuthorised, match="GRANT CREATE, USAGE ON SCHEMA"):
            db.sink(dsn=role(), mode="staged")

    def test_a_witness_table_that_an_administrator_made_is_used(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("CREATE SCHEMA poundlock")
        db(Postgres("t", dsn=db.dsn).target.witness.create[-1])
        db(
            f"GRANT INSERT ON t TO {name}; GRANT USAGE ON SCHEMA poundlock TO {name}; "
            f"GRANT ALL ON poundlock.witness TO {name}"
        )
        sink = db.sink(dsn=role())
        receipt = db.prepare(sink, keyed((1, "a")))
        assert [sink.commit([receipt]) for _ in range(2)] == [[DONE], [DONE]]
        sink.close()

    def test_rights_to_the_columns_are_enough(self, db: Database, role: Callable[[], str]) -> None:
        name, frame = f"role_{db.name}", {"k": "int", "v": "string"}
        db(
            f"ALTER TABLE t ADD x int, ADD PRIMARY KEY (k); GRANT INSERT (k, v) ON t TO {name}; "
            f"GRANT CREATE ON DATABASE {db.name} TO {name}"
        )
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

    def test_the_connection_limit_of_the_role_is_respected(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db(f"GRANT INSERT ON t TO {name}; GRANT CREATE ON DATABASE {db.name} TO {name}")
        db(f"ALTER ROLE {name} CONNECTION LIMIT 3")
        with pytest.raises(UsageError, match="the role's CONNECTION LIMIT allows 3"):
            db.sink(dsn=role(), connections=4)

    def test_row_level_security_cannot_hide_rows(
        self, db: Database, role: Callable[[], str]
    ) -> None:
        name = f"role_{db.name}"
        db("ALTER TABLE t ADD PRIMARY KEY (k), ENABLE ROW LEVEL SECURITY")
        db(
            f"CREATE POLICY p ON t USING (k < 10); GRANT ALL ON t TO {name}; "
            f"GRANT CREATE ON DATABASE {db.name} TO {name}"
        )
        with pytest.raises(UsageError, match="hidden rows are not deleted"):
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
    def test_an_unencoded_password_is_not_shown(self, dsn: str) -> None:
        with pytest.raises(UsageError, match="percent-encode") as caught:
            Postgres("t", dsn=dsn).preflight()
        assert "cretTail" not in str(caught.value)

    def test_a_wrong_password_is_reported_but_not_shown(
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
