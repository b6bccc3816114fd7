"""MariaDB, by staging tables: appends under a unique key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mysqld
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.sinks import MySQL

from .subject import Subject
from .subject_mysql_xa import MySQLSubject

EXCUSED: Mapping[str, str] = {}


class MySQLStagedSubject(MySQLSubject):
    mode = "staged"
    table = "CREATE TABLE numbers (number BIGINT NOT NULL PRIMARY KEY, text VARCHAR(20))"

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, MySQL)
        return {row[0] for row in self.ask(f"SHOW TABLES IN {sink.database} LIKE '%stage%'")}

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, MySQL)
        for table in self.open(sink):
            self.ask(f"DROP TABLE {sink.database}.{table}")


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with mysqld.running(directory) as server:
        yield MySQLStagedSubject(server)
