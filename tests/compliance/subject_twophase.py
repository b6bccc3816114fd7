"""Any two-phase driver: psycopg here, and psycopg2 in another subject, with a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from poundlock.compliance import FaultCase, Subject
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.errors import BadRow
from poundlock.servers import postgres
from poundlock.sinks import TwoPhase

from .subject_postgres import FRAME, PostgresSubject

NOT_APPLICABLE: Mapping[str, str] = {}


class TwoPhaseSubject(PostgresSubject):
    def __init__(self, node: postgres.Node, connect: Callable[..., Any]):
        super().__init__(node, {})
        self._connect = connect

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, TwoPhase)
        return self._make_sink(sink.table, sink.name, str(sink._dsn))

    def _make_sink(
        self, table: str, name: str, dsn: str, frame: Mapping[str, Column] = FRAME, **more: Any
    ) -> Participant:
        limit = ["SET lock_timeout = '2s'"]
        made = TwoPhase(self._connect, table, dsn=dsn, name=name, setup=limit, **more)
        made.project(frame)
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

    # Faults of PostgreSQL, which its drivers report by name and number.

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        with super().wrong_columns(sink) as tried:
            yield replace(tried, says="has no column wort; it has number, word")

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        """PEP 249 gives no column types, so the database refuses the rows."""
        words = pa.array(["geheim", "geheim"])
        bad = self.rows([5, 6]).set_column(0, "number", words)
        says = r"branch .* refuses a row: InvalidTextRepresentation \[22P02\].*on_bad_row="
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]], hides="geheim")

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        with super().wrong_password(sink) as tried:
            yield replace(tried, says="authentication failed.*Check user and password in dsn=")

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        with super().null(sink) as tried:
            yield replace(tried, says=r"NotNullViolation \[23502\], column word")

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        with super().too_long(sink) as tried:
            yield replace(tried, says=r"StringDataRightTruncation \[22001\]")

    @contextmanager
    def duplicate_key(self, sink: Participant) -> Iterator[FaultCase]:
        with super().duplicate_key(sink) as tried:
            yield replace(tried, says=r"UniqueViolation \[23505\], constraint single", kind=BadRow)

    @contextmanager
    def key_in_two_tasks(self, sink: Participant) -> Iterator[FaultCase]:
        with super().key_in_two_tasks(sink) as tried:
            yield replace(tried, says="two tasks write the same key.*Partition the frame")

    @contextmanager
    def no_room(self, sink: Participant) -> Iterator[FaultCase]:
        with super().no_room(sink) as tried:
            yield replace(tried, says="none for another branch.*max_prepared_transactions")

    @contextmanager
    def lost_connection(self, sink: Participant) -> Iterator[FaultCase]:
        with super().lost_connection(sink) as tried:
            yield replace(tried, says="the connection was lost")


@contextmanager
def started(directory: Path, connect: Callable[..., Any] = psycopg.connect) -> Iterator[Subject]:
    with postgres.running(settings={"recovery_init_sync_method": "syncfs"}) as node:
        yield TwoPhaseSubject(node, connect)
