"""MariaDB, by staging tables: appends under a unique key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mysqld
from poundlock.compliance import FaultCase, Subject
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.sinks import MySQL

from .subject_mysql_xa import MySQLSubject

NOT_APPLICABLE: Mapping[str, str] = {}


class MySQLStagedSubject(MySQLSubject):
    mode = "staged"
    table = "CREATE TABLE numbers (number BIGINT NOT NULL PRIMARY KEY, text VARCHAR(20))"

    def _unique(self, sink: Participant) -> Participant:
        return sink

    @contextmanager
    def key_in_two_tasks(self, sink: Participant) -> Iterator[FaultCase]:
        """Two tasks stage it, and the check against the target finds it before the decision."""
        with self.duplicate_key(sink) as tried:
            yield replace(tried, tasks=[[self.rows([1, 2])], [self.rows([2, 3])]])

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
