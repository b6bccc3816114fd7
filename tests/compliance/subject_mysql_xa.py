"""MariaDB or MySQL, by XA: a separate server, which the suite may kill; a database for each sink."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pymysql

import mysqld
from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.errors import BadRow, NotAuthorised, Unavailable, UsageError
from poundlock.servers import demote, mariadb
from poundlock.sinks import MySQL
from poundlock.sinks.mysql.witness import witness_in

NOT_APPLICABLE: Mapping[str, str] = {}

FRAME = {"number": "bigint", "text": "string"}


class MySQLSubject(Subject):
    has_place = True
    mode = "xa"
    table = "CREATE TABLE numbers (number BIGINT NOT NULL, text VARCHAR(20))"

    def __init__(self, server: mariadb.MariaDB):
        self._server = server
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        database = f"trial_{next(self._numbers)}"
        self.ask(f"CREATE DATABASE {database}")
        self.ask(f"USE {database}; {self.table}")
        # XA branches belong to the whole server, so end those that an earlier test left open.
        for gtrid, bqual, number in self._prepared():
            if bqual == name:
                self.ask(f"XA ROLLBACK '{gtrid}','{bqual}',{number}")
        return self._make_sink(f"{database}.numbers", name)

    def again(self, sink: Participant) -> Participant:
        return self._make_sink(self._place(sink), sink.name)

    def _make_sink(
        self, table: str, name: str, frame: Mapping[str, str] = FRAME, **more: Any
    ) -> Participant:
        usual = {"url": self._server.address, "mode": self.mode, "lock_timeout": 5}
        made = MySQL(table, name=name, **usual | more)
        made.project({column: Column(column, kind) for column, kind in frame.items()})
        made.preflight()
        return made

    def _place(self, sink: Participant) -> str:
        assert isinstance(sink, MySQL)
        return f"{sink.database}.{sink.table}"

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(
            {"number": list(numbers), "text": [f"row\t{number}" for number in numbers]}
        )

    def visible(self, sink: Participant) -> Counter[int]:
        return Counter(row[0] for row in self.ask(f"SELECT number FROM {self._place(sink)}"))

    def open(self, sink: Participant) -> set[str]:
        return {gtrid for gtrid, bqual, _ in self._prepared() if bqual == sink.name}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        for gtrid, bqual, number in self._prepared():
            self.ask(f"XA ROLLBACK '{gtrid}','{bqual}',{number}")

    # Faults.

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"nummer": "bigint", "text": "string"}
        says = "no column 'nummer'.*'number' .* is NOT NULL without a default"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame=frame))

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        says = "'number' is bigint.* cannot store string"
        frame = FRAME | {"number": "string"}
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame=frame))

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        address = self._server.address
        url = address.replace(self._server.connect_arguments()["password"], "nonsense")
        assert url != address
        says = "Access denied.*user and password in url="
        make = lambda: self._refused(sink, url=url)  # noqa: E731 (two words in one place)
        yield FaultCase(says, NotAuthorised, make=make, hides="nonsense")

    def _refused(self, sink: Participant, **more: Any) -> Participant:
        return self._make_sink(self._place(sink), sink.name, **more)

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self.rows([5, 6]).set_column(0, "number", pa.array([5, None]))
        yield FaultCase("column number is null", BadRow, tasks=[[self.rows(range(5)), bad]])

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self._texts([5, 6], ["fine", "much too long" * 4])
        says = "column text is longer than 20"
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]], hides="much too")

    def _texts(self, numbers: Sequence[int], texts: Sequence[str]) -> pa.RecordBatch:
        return self.rows(numbers).set_column(1, "text", pa.array(texts))

    @contextmanager
    def duplicate_key(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2]), self.rows([2, 3])]]
        says = "a value that already exists under a unique key"
        yield FaultCase(says, sink=self._unique(sink), tasks=tasks)

    @contextmanager
    def key_in_two_tasks(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2])], [self.rows([2, 3])]]
        says = "locked by another transaction.*If two tasks write the same key"
        yield FaultCase(says, sink=self._unique(sink), tasks=tasks)

    def _unique(self, sink: Participant) -> Participant:
        """The same sink with a table of unique numbers and a promise that the rows break."""
        table = f"{self._place(sink)}_once"
        self.ask(f"CREATE TABLE {table} LIKE {self._place(sink)}")
        self.ask(f"ALTER TABLE {table} ADD UNIQUE (number)")
        return self._make_sink(table, sink.name, key_partitioned=True, lock_timeout=1)

    @contextmanager
    def no_room(self, sink: Participant) -> Iterator[FaultCase]:
        """InnoDB holds a hundred thousand branches. Connections run out first."""
        arguments = self._server.connect_arguments()
        [[most]] = self.ask("SELECT @@GLOBAL.max_connections")
        with ExitStack() as held:
            first = held.enter_context(closing(pymysql.connect(**arguments)))
            first.cursor().execute("SET GLOBAL max_connections = 10")
            with suppress(pymysql.err.OperationalError):
                while True:
                    held.enter_context(closing(pymysql.connect(**arguments)))

            def over() -> None:
                first.cursor().execute(f"SET GLOBAL max_connections = {most}")
                held.close()

            yield FaultCase("no connection left.*max_connections", Unavailable, over=over)

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """The disk of the target's database is full. Rows are staged there too."""
        database = f"small_{next(self._numbers)}"
        with small_disk(8) as disk:
            self.ask(f"CREATE DATABASE {database}")
            there = self._server.directory / "data" / database
            shutil.move(there, disk / database)
            demote.hand_over(disk / database)
            there.symlink_to(disk / database)
            self.ask(f"USE {database}; {self.table}")
            self.ask(witness_in(database, sink.name).create[0])
            using = self._make_sink(f"{database}.numbers", sink.name)
            fill(disk)
            tasks = [
                [
                    self._texts(range(n, n + 1000), ["x" * 20] * 1000)
                    for n in range(0, 100_000, 1000)
                ]
            ]
            says = "disk is full.*make room"
            yield FaultCase(says, Unavailable, sink=using, tasks=tasks, over=lambda: empty(disk))
            self.ask(f"DROP DATABASE {database}")

    @contextmanager
    def lost_connection(self, sink: Participant) -> Iterator[FaultCase]:
        def others() -> list[int]:
            listed = "SELECT ID FROM information_schema.PROCESSLIST"
            mine = "USER = SUBSTRING_INDEX(USER(), '@', 1) AND ID <> CONNECTION_ID()"
            return [row[0] for row in self.ask(f"{listed} WHERE {mine}")]

        def cut() -> None:
            while there := others():
                for number in there:
                    with suppress(pymysql.err.Error):  # it has ended meanwhile
                        self.ask(f"KILL {number}")
                time.sleep(0.05)

        yield FaultCase("Lost connection|gone away|was killed", Unavailable, during=cut)

    def _prepared(self) -> list[tuple[str, str, int]]:
        listed = self.ask("XA RECOVER")  # MySQL returns text, MariaDB bytes
        return [
            (str(data[:first], "ascii"), str(data[first : first + second], "ascii"), number)
            for number, first, second, text in listed
            for data in [text.encode() if isinstance(text, str) else text]
        ]

    def ask(self, statements: str) -> Any:
        """Run statements with a plain client."""
        arguments = self._server.connect_arguments()
        client = pymysql.connect(**arguments, autocommit=True)
        with closing(client), client.cursor() as cursor:
            for statement in statements.split("; "):
                cursor.execute(statement)
            return cursor.fetchall()


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with mysqld.running(directory) as server:
        yield MySQLSubject(server)
