"""The database for the tests of the MySQL sink, its fixtures, and the steps of a branch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from mysqld import IS_MARIADB, running
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import BadRow, PoundlockError
from poundlock.servers import mariadb
from poundlock.sinks import MySQL
from poundlock.sinks.mysql.witness import STAGE_PREFIX
from poundlock.sinks.sql.staging import staging_name

OURS = Namespace.new("trial", 1_700_000_000, 1)
DONE, LOST, OPEN = BranchState.COMMITTED, BranchState.ABORTED, BranchState.PREPARED
_numbers = itertools.count()


class Place:
    """A separate database, read by a plain client."""

    def __init__(self, server: mariadb.MariaDB):
        self.server, self.database = server, f"place_{next(_numbers)}"
        self.ask(f"CREATE DATABASE {self.database} CHARACTER SET utf8mb4", database=None)

    @contextmanager
    def client(self, database: str | None = "") -> Iterator[Any]:
        arguments = self.server.connect_arguments() | {
            "database": self.database if database == "" else database
        }
        client = pymysql.connect(
            **arguments, autocommit=True, init_command="SET time_zone='+00:00'"
        )
        with closing(client), client.cursor() as cursor:
            yield cursor

    def ask(self, statement: str, database: str | None = "") -> list[tuple[Any, ...]]:
        with self.client(database) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def sink(self, table: str = "t", *, look: bool = True, **options: Any) -> MySQL:
        options = {"url": self.server.address, "name": "out", "lock_timeout": 1} | options
        made = MySQL(f"{self.database}.{table}", **options)
        if look:
            made.preflight()
        return made

    def address(self, login: str) -> str:
        """Return the address of this database for an account, with the TLS that the server needs."""
        _, question, options = self.server.address.partition("?")
        port = self.server.connect_arguments()["port"]
        return f"mysql://{login}@127.0.0.1:{port}/{self.database}{question}{options}"

    def rows(self, table: str = "t", what: str = "*") -> list[tuple[Any, ...]]:
        return sorted(self.ask(f"SELECT {what} FROM {table}"), key=repr)

    def leftovers(self) -> list[Any]:
        """Staging tables, and XA branches of any database. No test may leave one."""
        return [*self.ask("SHOW TABLES LIKE 'poundlock\\_stage%'"), *self.ask("XA RECOVER")]


@pytest.fixture(scope="session")
def mysql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mariadb.MariaDB]:
    with running(tmp_path_factory.mktemp("mysql")) as started:
        yield started


@pytest.fixture
def place(mysql_server: mariadb.MariaDB) -> Iterator[Place]:
    made = Place(mysql_server)
    yield made
    left = made.leftovers()
    # Otherwise the next test would find it too.
    for number, first, _, data in made.ask("XA RECOVER"):
        name = data if isinstance(data, str) else data.decode()
        made.ask(f"XA ROLLBACK '{name[:first]}','{name[first:]}',{number}")
    assert left == []


def begin(sink: MySQL, task: int = 0, *, batch: int = 0, attempt: int = 1, **where: Any) -> Writer:
    transaction = Transaction(OURS, 1, batch, attempt)
    where = {"task_attempt": task} | where
    copy: MySQL = pickle.loads(pickle.dumps(sink))
    return copy.begin(Branch(transaction, sink.name, task, **where))


def batch_of(rows: Mapping[str, Sequence[Any]] | pa.RecordBatch) -> pa.RecordBatch:
    return rows if isinstance(rows, pa.RecordBatch) else pa.RecordBatch.from_pydict(dict(rows))


def prepare(sink: MySQL, rows: Any, task: int = 0, **where: Any) -> Receipt:
    writer, written = begin(sink, task, **where), batch_of(rows)
    writer.write(written)
    made = writer.prepare()
    assert made is not None
    receipt = Receipt(sink.name, made.id, task, Fingerprint(len(written), 0), made.handle)
    return Receipt.from_json(receipt.to_json())  # type: ignore[arg-type]


def stage_of(receipt: Receipt) -> str:
    return staging_name(STAGE_PREFIX, receipt.id)


def get_refusal(
    sink: MySQL, rows: Any, kind: type[PoundlockError] = BadRow, task: int = 0
) -> PoundlockError:
    """Write rows that the sink must refuse, then abort as a task does."""
    with pytest.raises(kind) as caught:
        write_and_prepare(begin(sink, task), rows)
    return caught.value


def write_and_prepare(writer: Writer, rows: Any) -> None:
    try:
        writer.write(batch_of(rows))
        writer.prepare()
    finally:
        writer.abort()


def create_account(place: Place, rights: str) -> str:
    """Create an account with rights on the database. Return its address."""
    name = f"poor_{place.database}"
    place.ask(f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'p'")
    place.ask(f"GRANT {rights} ON {place.database}.* TO {name}@'127.0.0.1'")
    return place.address(f"{name}:p")


PARTITIONED: tuple[dict[str, Any], ...] = ({}, {"mode": "xa", "key_partitioned": True})
WAYS = pytest.mark.parametrize("way", [*(["bulk"] if IS_MARIADB else []), "load", "insert"])
BOTH = pytest.mark.parametrize("mode", ["xa", "staged"])
UPSERTS = pytest.mark.parametrize("mode", [*(["xa"] if IS_MARIADB else []), "staged"])


def send_by(sink: MySQL, way: str) -> None:
    """Send rows in one of the ways, as if the server had no better one."""
    assert sink.bulks == IS_MARIADB and sink.loads
    sink.bulks, sink.loads = way == "bulk", way != "insert"


@contextmanager
def changed_settings(place: Place, **variables: Any) -> Iterator[None]:
    """Change server settings for all new connections."""
    if not (names := list(variables)):
        yield
        return
    before = place.ask(f"SELECT {', '.join(f'@@GLOBAL.{name}' for name in names)}")[0]

    def change(values: Mapping[str, Any]) -> None:
        changes = ", ".join(f"GLOBAL {name} = {value!r}" for name, value in values.items())
        place.ask(f"SET {changes}")

    change(variables)
    try:
        yield
    finally:
        change(dict(zip(names, before, strict=True)))
