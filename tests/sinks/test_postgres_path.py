"""PostgreSQL: functions and operators that another user of the database has planted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import DONE, Database, keyed, keywords
from psycopg import sql

from poundlock.errors import BadRow
from poundlock.sinks.postgres.inspector import PostgresInspector

FRAME = {"k": "string", "v": "int", "gone": "boolean", "n": "int"}
# Each is a better match than the server's own for an argument that the sink's statements have.
FUNCTIONS = {
    "quote_ident(name)": "text",
    "obj_description(oid, text)": "text",
    "pg_column_size(varchar)": "int",
    "to_regclass(varchar)": "regclass",
    "count(bool)": "bigint",
    "pg_get_expr(pg_node_tree, int)": "text",
    "has_table_privilege(oid, varchar)": "bool",
    "format_type(oid, bigint)": "text",
    "lower(name)": "text",
    "lower(varchar)": "text",
    "set_config(varchar, varchar, bool)": "text",
}
OPERATORS = (
    "varchar = varchar",
    "name = varchar",
    "text || name",
    "smallint = bigint",
    "name ~~ name",
)


class Planted:
    """Another user, whose schema is in everybody's search path."""

    def __init__(self, db: Database):
        self.db, self.name = db, f"other_{db.name}"
        db(f"CREATE ROLE {self.name} LOGIN PASSWORD 'hidden'")
        db(f"GRANT CREATE, USAGE ON SCHEMA public TO {self.name}")
        db("CREATE SCHEMA app; CREATE TABLE seen (ran_as text, what text)")
        db("GRANT ALL ON seen TO PUBLIC")
        with psycopg.connect(self.dsn(self.name), autocommit=True) as other:
            for head, kind in FUNCTIONS.items():
                other.execute(self._function(head, kind))  # type: ignore[arg-type]
            for number, text in enumerate(OPERATORS):
                left, sign, right = text.split()
                kind = "text" if sign == "||" else "bool"
                head = f"op{number}({left}, {right})"
                other.execute(self._function(head, kind))  # type: ignore[arg-type]
                other.execute(
                    f"CREATE OPERATOR public.{sign} (LEFTARG = {left}, RIGHTARG = {right}, "  # type: ignore[arg-type]
                    f"FUNCTION = public.op{number})"
                )

    def _function(self, head: str, kind: str) -> str:
        return (
            f"CREATE FUNCTION public.{head} RETURNS {kind} LANGUAGE plpgsql AS $$ BEGIN INSERT INTO "
            f"public.seen VALUES (current_user, '{head}'); RETURN NULL; END $$"
        )

    def dsn(self, user: str) -> str:
        return f"{keywords(self.db.dsn)} user={user} password=hidden"

    def calls(self) -> list[Any]:
        return self.db("SELECT DISTINCT what FROM seen ORDER BY 1")


@pytest.fixture
def planted(db: Database) -> Iterator[Planted]:
    made = Planted(db)
    yield made
    db(f"DROP OWNED BY {made.name}; DROP ROLE {made.name}")


class TestPlantedFunctions:
    @pytest.mark.parametrize(
        "options",
        [
            {"key": "k"},
            {"key": "k", "order_by": "n", "delete": "gone"},
            {"key": "k", "mode": "prepared", "key_partitioned": True},
            {"mode": "staged"},
        ],
        ids=str,
    )
    def test_they_never_run_with_the_role_of_the_sink(self, planted: Planted, options: Any) -> None:
        db = planted.db
        unique = "PRIMARY KEY" if "key" in options else "NOT NULL DEFAULT 'x'"
        db(f"CREATE TABLE app.t (k varchar {unique}, v int CHECK (v > 0), gone bool, n int)")
        db("CREATE INDEX ON app.t (pg_catalog.lower(k))")
        sink = db.sink("app.t", name="t", frame=FRAME, **options)
        flag = "poundlock_delete" if "delete" in options else "gone"
        made = keyed(("a", 1, False, 1), ("b", 2, False, 1), names=f"k v {flag} n")
        receipt = db.prepare(sink, made)
        assert sink.check([receipt]) == [None]
        assert len(sink.find(db.namespace)) == 1
        assert sink.commit([receipt]) == [DONE]
        if "delete" in options:
            receipt = db.prepare(sink, keyed(("b", 1, True, 2), names=f"k v {flag} n"), batch=1)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        assert sink.newest_batch(db.namespace) is not None
        sink.prune(db.namespace, 5)
        inspector = PostgresInspector(db.dsn)
        assert inspector.open() == [] and inspector.holds(receipt)
        inspector.close()
        sink.close()
        expected = [("a", 1)] if "delete" in options else [("a", 1), ("b", 2)]
        assert db("SELECT k, v FROM app.t ORDER BY 1") == expected
        assert planted.calls() == []

    def test_the_users_triggers_see_the_search_path_of_the_role(self, db: Database) -> None:
        """Also those that wait for the transaction's end."""
        db("CREATE TABLE t (k int PRIMARY KEY, v text); CREATE TABLE log (k int)")
        db("CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        db("CREATE FUNCTION positive(int) RETURNS bool LANGUAGE sql AS 'SELECT one() <= $1'")
        db("ALTER TABLE t ADD CHECK (positive(k))")
        db(
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN INSERT INTO log VALUES (NEW.k); RETURN NEW; END'"
        )
        db("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        late = "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION f()"
        db(f"CREATE CONSTRAINT TRIGGER h AFTER INSERT ON t {late}")
        choices: list[Any] = [{"key_partitioned": True}, {"mode": "staged"}, {"key": "k"}]
        for key, options in enumerate(choices, start=1):
            sink = db.sink(**options)
            receipt = db.prepare(sink, keyed((key, "a")), batch=key)
            assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
            sink.close()
        tolerant = db.sink(key_partitioned=True)
        receipt = db.prepare(tolerant, keyed((4, "a")), batch=4, tolerant=True)
        assert tolerant.commit([receipt]) == [DONE]
        assert db("SELECT k, count(*) FROM log GROUP BY k ORDER BY k") == [
            (key, 2) for key in (1, 2, 3, 4)
        ]

    def test_a_table_is_found_by_the_search_path_of_the_role(self, db: Database) -> None:
        db("CREATE SCHEMA app; CREATE TABLE app.t (k int, v text)")
        dsn = f"options='-c search_path=app' {keywords(db.dsn)}"
        sink = db.sink(dsn=dsn)
        receipt = db.prepare(sink, keyed((1, "a")))
        assert sink.commit([receipt]) == [DONE]
        with sink.connections.lend() as link:  # a pooler may give it to another program next
            assert link.run_bare(sql.SQL("SHOW search_path")).fetchone() == ("app",)
        assert db("SELECT * FROM app.t") == [(1, "a")]
        sink.close()


def test_every_deletion_is_of_the_key_that_the_index_compares(db: Database) -> None:
    """The equality of citext is not that of text."""
    db("CREATE EXTENSION citext; CREATE TABLE t (k citext PRIMARY KEY, v int, n int)")
    sink = db.sink(key="k", delete="gone", order_by="n", frame=FRAME)
    names = "k v poundlock_delete n"
    for batch, row in enumerate([("Key", 1, False, 1), ("kEY", 1, True, 2)]):
        receipt = db.prepare(sink, keyed(row, names=names), batch=batch)
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
    assert db("SELECT * FROM t") == []
    twice = keyed(("a", 1, False, 1), ("A", 2, False, 1), names=names)
    with pytest.raises(BadRow, match="same key"):
        sink.check([db.prepare(sink, twice, batch=2)])
    sink.close()
