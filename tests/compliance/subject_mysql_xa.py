"""MariaDB or MySQL, by XA: a server of its own, which the suite may kill; a database for each sink."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pymysql

import mysqld
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.servers import mariadb
from poundlock.sinks import MySQL

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


class MySQLSubject(Subject):
    mode = "xa"
    table = "CREATE TABLE numbers (number BIGINT NOT NULL, text VARCHAR(20))"

    def __init__(self, server: mariadb.MariaDB):
        self._server = server
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        database = f"trial_{next(self._numbers)}"
        self.ask(f"CREATE DATABASE {database}")
        self.ask(f"USE {database}; {self.table}")
        # XA branches belong to the whole server: what an earlier test left open must not be found.
        for gtrid, bqual, number in self._prepared():
            if bqual == name:
                self.ask(f"XA ROLLBACK '{gtrid}','{bqual}',{number}")
        return self._looked_over(database, name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, MySQL)
        return self._looked_over(sink.database, sink.name)

    def _looked_over(self, database: str, name: str) -> Participant:
        made = MySQL(
            f"{database}.numbers", url=self._server.address, name=name, mode=self.mode,
            lock_timeout=5,
        )  # fmt: skip
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(
            {"number": list(numbers), "text": [f"row\t{number}" for number in numbers]}
        )

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, MySQL)
        return Counter(row[0] for row in self.ask(f"SELECT number FROM {sink.database}.numbers"))

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

    def _prepared(self) -> list[tuple[str, str, int]]:
        listed = self.ask("XA RECOVER")  # MySQL's as text, MariaDB's as bytes
        return [
            (str(data[:first], "ascii"), str(data[first : first + second], "ascii"), number)
            for number, first, second, text in listed
            for data in [text.encode() if isinstance(text, str) else text]
        ]

    def ask(self, statements: str) -> Any:
        """By a plain client, none of ours."""
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
