"""PostgreSQL, branches held by the server: a server of its own, a database for each sink."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.postgres.target import staging_name
from poundlock.servers import postgres
from poundlock.sinks import Postgres

from .subject import Subject


class PostgresSubject(Subject):
    """The suite names its branches alike in every test, and PostgreSQL's names are the server's."""

    def __init__(self, node: postgres.Node, options: Mapping[str, Any]):
        self._node = node
        self._options = dict(options)
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        if name == "out":
            self.roll_back_all()
            self._database = f"trial_{next(self._numbers)}"
            self.execute(f"CREATE DATABASE {self._database}", "postgres")
        table = name.replace("-", "_")
        self.execute(f"CREATE TABLE {table} (number int PRIMARY KEY, word text NOT NULL)"
                     if "key" in self._options else
                     f"CREATE TABLE {table} (number int, word text NOT NULL)")  # fmt: skip
        return self._looked_over(table, name, self._node.dsn(self._database))

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Postgres)
        return self._looked_over(sink.target.table, sink.name, sink.target.dsn)

    def _looked_over(self, table: str, name: str, dsn: str) -> Participant:
        made = Postgres(table, dsn=dsn, name=name, lock_timeout=2, **self._options)
        made.project({"number": Column("number", "int"), "word": Column("word", "string")})
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(
            {
                "number": pa.array(list(numbers), pa.int32()),
                "word": pa.array([f"number {number}" for number in numbers]),
            }
        )

    def visible(self, sink: Participant) -> Counter[int]:
        return Counter(row[0] for row in self.execute(f"SELECT number FROM {self.table(sink)}"))

    def table(self, sink: Participant) -> str:
        assert isinstance(sink, Postgres)
        return sink.target.table

    def open(self, sink: Participant) -> set[str]:
        database = self._database
        held = self.execute(f"SELECT gid FROM pg_prepared_xacts WHERE database = '{database}'")
        staged = self.execute("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'")
        return {row[0] for row in held + staged}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._node.kill()
        yield
        self._node.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        if self._options.get("mode") == "prepared":
            self.execute(f"ROLLBACK PREPARED '{receipt.id}'")
        else:
            self.execute(f"DROP TABLE poundlock.{staging_name(receipt.id)}")

    def execute(self, statement: str, database: str | None = None) -> list[Any]:
        dsn = self._node.dsn(database or self._database)
        with psycopg.connect(dsn, autocommit=True) as connection:
            done = connection.execute(statement)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def roll_back_all(self) -> None:
        listed = self.execute("SELECT database, gid FROM pg_prepared_xacts", "postgres")
        for database, gid in listed:
            with psycopg.connect(self._node.dsn(database), autocommit=True) as connection:
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


@contextmanager
def started(
    directory: Path,
    options: Mapping[str, Any] = {"mode": "prepared"},
) -> Iterator[Subject]:
    # After a kill the server would sync every file of every database, one by one.
    quick = {"recovery_init_sync_method": "syncfs"}
    with postgres.running(settings=quick) as node:
        yield PostgresSubject(node, options)
