"""The database for the tests of the PostgreSQL sink, and its fixtures."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState
from poundlock.servers import postgres
from poundlock.sinks import Postgres

DONE, LOST, OPEN = BranchState.COMMITTED, BranchState.ABORTED, BranchState.PREPARED
NOISE = random.Random(1).randbytes(4000).hex()  # too long for an index, even compressed
_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_node() -> Iterator[postgres.Postgres]:
    with postgres.running() as running:
        yield running


class Database:
    """A database for one test, with a connection that is not the sink's."""

    def __init__(self, node: postgres.Postgres):
        self.node, self.name = node, f"db_{next(_numbers)}"
        self.renew()
        self._create()

    def renew(self) -> None:
        """Use another pipeline, so that its branches get new names."""
        self.namespace = Namespace.new("trial", 1_700_000_000, next(_numbers))

    def _create(self) -> None:
        with psycopg.connect(self.node.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self.name}")  # type: ignore[arg-type]
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    @property
    def dsn(self) -> str:
        return self.node.dsn(self.name)

    def __call__(self, statement: str) -> list[Any]:
        done = self.connection.execute(statement)  # type: ignore[arg-type]
        return done.fetchall() if done.description else []

    def open(self) -> list[Any]:
        held = f"SELECT gid FROM pg_prepared_xacts WHERE database = '{self.name}'"
        return self(held) + self("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'")

    def sink(
        self, table: str = "t", *, frame: dict[str, str] | None = None, **options: Any
    ) -> Postgres:
        made = Postgres(table, dsn=options.pop("dsn", self.dsn), **{"lock_timeout": 0.5, **options})
        if frame:
            made.project({name: Column(name, kind) for name, kind in frame.items()})
        made.preflight()
        return made

    def branch(self, task: int = 0, **options: Any) -> Branch:
        transaction = Transaction(
            self.namespace, 1, options.pop("batch", 0), options.pop("attempt", 1)
        )
        attempt = options.pop("task_attempt", task)
        return Branch(transaction, "t", task, attempt, **options)

    def prepare(
        self, sink: Postgres, rows: pa.RecordBatch, task: int = 0, **options: Any
    ) -> Receipt:
        writer = pickle.loads(pickle.dumps(sink)).begin(self.branch(task, **options))
        try:
            writer.write(rows)
            done = writer.prepare()
        except BaseException:
            writer.abort()
            raise
        assert done is not None
        fingerprint = Fingerprint(len(rows), 0)
        return Receipt("t", done.id, task, fingerprint, done.handle, done.began_at)


@pytest.fixture(scope="session")
def shared(postgres_node: postgres.Postgres) -> Iterator[Database]:
    database = Database(postgres_node)
    yield database
    database.connection.close()


@pytest.fixture
def db(shared: Database) -> Iterator[Database]:
    """An empty database. The tests share it, because creating one each would be slow."""
    shared.renew()
    yield shared
    for (gid,) in shared(f"SELECT gid FROM pg_prepared_xacts WHERE database = '{shared.name}'"):
        shared(f"ROLLBACK PREPARED '{gid}'")
    ours = "nspname !~ '^pg_' AND nspname <> 'information_schema'"
    for (schema,) in shared(f"SELECT quote_ident(nspname) FROM pg_namespace WHERE {ours}"):
        shared(f"DROP SCHEMA {schema} CASCADE")
    shared("CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC")


def keywords(dsn: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    return " ".join(f"{name}={value}" for name, value in parts.items())


def keyed(*rows: tuple[Any, ...], names: str = "k v") -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    arrays = [
        pa.array(c, pa.int32() if isinstance(c[0], int) and not isinstance(c[0], bool) else None)
        for c in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names.split())
