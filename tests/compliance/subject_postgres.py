"""PostgreSQL with branches held by the server: a separate server, a database for each sink."""

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
from psycopg.conninfo import make_conninfo

from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.errors import BadRow, NotAuthorised, Unavailable, UsageError
from poundlock.servers import demote, postgres
from poundlock.sinks import Postgres
from poundlock.sinks.postgres.target import staging_name

NOT_APPLICABLE: Mapping[str, str] = {}

FRAME = {"number": Column("number", "int"), "word": Column("word", "string")}


class PostgresSubject(Subject):
    """The suite uses the same branch names in every test, and PostgreSQL's are global to the server."""

    has_place = True

    def __init__(self, node: postgres.Postgres, options: Mapping[str, Any]):
        self._node = node
        self._options = dict(options)
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        if name == "out":
            self.roll_back_all()
            self._database = f"trial_{next(self._numbers)}"
            self.execute(f"CREATE DATABASE {self._database}", "postgres")
        table = name.replace("-", "_")
        self.execute(f"CREATE TABLE {table} (number int {self.key}, word varchar(40) NOT NULL)")
        return self._make_sink(table, name, self._node.dsn(self._database))

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Postgres)
        return self._make_sink(sink.target.table, sink.name, sink.target.dsn)

    @property
    def key(self) -> str:
        return "PRIMARY KEY" if "key" in self._options else ""

    def _make_sink(
        self, table: str, name: str, dsn: str, frame: Mapping[str, Column] = FRAME, **more: Any
    ) -> Participant:
        made = Postgres(table, dsn=dsn, name=name, lock_timeout=2, **self._options | more)
        made.project(frame)
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

    # Faults.

    def _refused(self, sink: Participant, **frame: str) -> Participant:
        columns = {name: Column(name, kind) for name, kind in frame.items()}
        dsn = self._node.dsn(self._database)
        return self._make_sink(self.table(sink), sink.name, dsn, columns)

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"number": "int", "wort": "string"}
        says = "wort: the table has no such column; word: the table requires it"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, **frame))

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"number": "string", "word": "string"}
        says = "number.* string.* integer"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, **frame))

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        dsn = make_conninfo(self._node.dsn(self._database), password="nonsense")
        says = "password authentication failed.*pg_hba.conf"
        yield FaultCase(
            says,
            NotAuthorised,
            hides="nonsense",
            make=lambda: self._make_sink(self.table(sink), sink.name, dsn),
        )

    def _words(self, numbers: Sequence[int], words: Sequence[str | None]) -> pa.RecordBatch:
        return self.rows(numbers).set_column(1, "word", pa.array(words))

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self._words([5, 6], ["fine", None])
        yield FaultCase("word is null", BadRow, tasks=[[self.rows(range(5)), bad]])

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self._words([5, 6], ["fine", "much too long" * 5])
        says = "longer than 40"
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]], hides="much too")

    def _unique(self, sink: Participant) -> Participant:
        """The same sink with a table of unique numbers."""
        if self.key:
            return sink
        self.execute(f"CREATE TABLE single (LIKE {self.table(sink)}, UNIQUE (number))")
        promise: dict[str, Any] = (
            {"key_partitioned": True} if self._options.get("mode") == "prepared" else {}
        )
        return self._make_sink("single", sink.name, self._node.dsn(self._database), **promise)

    @contextmanager
    def duplicate_key(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2]), self.rows([2, 3])]]
        says = "two rows of a batch have the same key" if self.key else "duplicate key"
        yield FaultCase(says, sink=self._unique(sink), tasks=tasks)

    @contextmanager
    def key_in_two_tasks(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2])], [self.rows([2, 3])]]
        says = "two rows of a batch have the same key|two tasks write the same key|duplicate key"
        yield FaultCase(says, sink=self._unique(sink), tasks=tasks)

    @contextmanager
    def no_room(self, sink: Participant) -> Iterator[FaultCase]:
        """Foreign branches fill the server, except for the one that the test has."""
        others = range(postgres.PostgresServer().max_prepared_transactions - 1)
        for number in others:
            self.execute(f"BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'other {number}'")
        says = "maximum number of prepared transactions.*max_prepared_transactions"
        yield FaultCase(
            says,
            over=lambda: [self.execute(f"ROLLBACK PREPARED 'other {number}'") for number in others],
        )

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """The tablespace of the target and of new tables is full."""
        table, database = self.table(sink), self._database
        with small_disk(8) as disk:
            demote.hand_over(disk / "space")
            self.execute(f"CREATE TABLESPACE {database} LOCATION '{disk / 'space'}'")
            self.execute(f"CREATE TABLE small (LIKE {table} INCLUDING ALL) TABLESPACE {database}")
            self.execute(f"ALTER DATABASE {database} SET default_tablespace = {database}")
            using = self._make_sink("small", sink.name, self._node.dsn(database))
            fill(disk)
            many = self._words(range(100), ["x" * 40] * 100)
            try:
                yield FaultCase(
                    "disk is full",
                    Unavailable,
                    sink=using,
                    tasks=[[many] * 100],
                    over=lambda: empty(disk),
                )
            finally:  # the server itself works without this disk
                using.close()
                self.roll_back_all()
                self.execute(f"ALTER DATABASE {database} RESET default_tablespace")
                self.execute("DROP TABLE small; DROP SCHEMA IF EXISTS poundlock CASCADE")
                self.execute(f"DROP TABLESPACE {database}")

    @contextmanager
    def lost_connection(self, sink: Participant) -> Iterator[FaultCase]:
        def cut() -> None:
            self.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                f"WHERE datname = '{self._database}' AND pid <> pg_backend_pid()"
            )

        yield FaultCase("terminat|closed|did not answer", Unavailable, during=cut)

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
    directory: Path, options: Mapping[str, Any] = {"mode": "prepared"}
) -> Iterator[Subject]:
    # Otherwise the server would sync every file of every database after a kill.
    quick = {"recovery_init_sync_method": "syncfs"}
    with postgres.running(settings=quick) as node:
        yield PostgresSubject(node, options)
