"""Any two-phase driver: psycopg, and by another subject psycopg2, upon a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.servers import postgres
from poundlock.sinks import TwoPhase

from .subject import Subject
from .subject_postgres import PostgresSubject

EXCUSED: Mapping[str, str] = {}


class TwoPhaseSubject(PostgresSubject):
    def __init__(self, node: postgres.Node, connect: Callable[..., Any]):
        super().__init__(node, {})
        self._connect = connect

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, TwoPhase)
        return self._looked_over(sink.table, sink.name, str(sink._dsn))

    def _looked_over(self, table: str, name: str, dsn: str) -> Participant:
        limit = ["SET lock_timeout = '2s'"]
        made = TwoPhase(self._connect, table, dsn=dsn, name=name, setup=limit)
        made.project({"number": Column("number", "int"), "word": Column("word", "string")})
        made.preflight()
        return made

    def table(self, sink: Participant) -> str:
        assert isinstance(sink, TwoPhase)
        return sink.table

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        [(gid,)] = self.execute(
            f"SELECT gid FROM pg_prepared_xacts WHERE database = '{self._database}'"
        )
        with psycopg.connect(self._node.dsn(self._database), autocommit=True) as connection:
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


@contextmanager
def started(directory: Path, connect: Callable[..., Any] = psycopg.connect) -> Iterator[Subject]:
    with postgres.running(settings={"recovery_init_sync_method": "syncfs"}) as node:
        yield TwoPhaseSubject(node, connect)
