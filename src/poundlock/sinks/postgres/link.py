"""Connections to PostgreSQL. No message carries a secret."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import Connection, Cursor, conninfo, errors, sql

from poundlock.core.model import Json
from poundlock.errors import NotAuthorised, PoundlockError, Unavailable, UsageError
from poundlock.secret import resolve
from poundlock.sinks.postgres.errors import POSTGRES
from poundlock.sinks.sql.dialect import Dialect

_WAIT_S = 30.0  # for a connection, while other tasks hold them all
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry")
_MISTAKEN = (
    *("does not exist", "invalid sslmode", "certificate", "could not translate host name"),
    *("does not support SSL", "does not match host name"),
)
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": "10",
    "application_name": "poundlock",
    # A lost machine is noticed within about half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    # Longer, because it also ends a connection to a server that is alive but busy.
    "tcp_user_timeout": "120000",
}
# The driver sends one statement after the other. A driver that was stopped in between is rolled back.
IDLE = "60s"
# As above, for the server, whose own default is two hours. Also through a pooler: see `execute`.
_NOTICE = {
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 4,
    "tcp_user_timeout": 120_000,
}
_NOTICE_WHILE_BUSY = (  # other systems refuse it
    "SELECT set_config('client_connection_check_interval', '10s', true) "
    "WHERE version() LIKE '%linux%'"
)
_OWN_PATH = "SET LOCAL search_path = pg_catalog, pg_temp"
_USERS_PATH = "SET LOCAL search_path TO DEFAULT"
_FULL = ("too many clients", "remaining connection slots", "too many connections")


class Link(Connection[Any]):
    """One connection, in autocommit."""

    dialect: Dialect = POSTGRES
    lock_wait: str = "10s"  # for a lock, in a brief transaction

    # Other users of the database may own schemas in the role's search path, and a function or operator
    # of theirs can match better than the server's own. So all statements run with `_OWN_PATH`, except
    # inside `users_path`. The path is set in each transaction and never for the session: a pooler may
    # give each transaction another session, and each session to other programs.

    def execute(self, query: Any, params: Any = None, **options: Any) -> Cursor[Any]:
        """Execute a statement: in the open transaction, or in one of its own."""
        if self._is_idle:
            with self.transaction():
                return super().execute(query, params, **options)
        return super().execute(query, params, **options)

    def run(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        cursor = self.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []

    run_alone = run

    def run_bare(self, command: sql.SQL | sql.Composed) -> Cursor[Any]:
        """Run a command that no transaction may contain. It must name no function or operator."""
        return super().execute(command)

    @property
    def _is_idle(self) -> bool:
        return self.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    @contextlib.contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Generator[psycopg.Transaction]:
        begins = self._is_idle
        with super().transaction(savepoint_name, force_rollback) as made:
            if begins:
                self._set_up(IDLE)
            yield made

    def begin(self) -> None:
        """Begin a transaction that the caller ends. It may be idle: Spark computes the next rows."""
        super().execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        self._set_up("0")

    def _set_up(self, idle: str) -> None:
        """Set the path, and what ends the transaction if this machine vanishes: it holds locks."""
        commands = [_OWN_PATH, f"SET LOCAL idle_in_transaction_session_timeout = '{idle}'"]
        commands += [f"SET LOCAL {name} = {value}" for name, value in _NOTICE.items()]
        if self.info.server_version >= 140_000:
            commands.append(_NOTICE_WHILE_BUSY)
        given: Any = "; ".join(commands)
        super().execute(given)

    def enter_users_path(self) -> None:
        """Take the role's search path for what follows: the user's triggers and checks expect it.

        Then a statement must qualify every function and operator, until `leave_users_path`.
        """
        super().execute(_USERS_PATH)

    def leave_users_path(self) -> None:
        super().execute(_OWN_PATH)

    @contextlib.contextmanager
    def users_path(self) -> Generator[None]:
        """Take the role's search path in the open transaction. After an error it is rolled back."""
        self.enter_users_path()
        yield
        self.leave_users_path()

    @contextlib.contextmanager
    def brief_transaction(self) -> Generator[None]:
        with self.transaction():
            self.override_timeouts(self.lock_wait)
            yield

    def override_timeouts(self, wait: str) -> None:
        """Set how long the open transaction waits for locks, and turn off limits to its own time.

        The role's own time-outs are meant for interactive queries. They would cancel every move.
        """
        names = ["statement_timeout"]
        if self.info.server_version >= 170_000:
            names.append("transaction_timeout")
        others = "".join(f", set_config('{name}', '0', true)" for name in names)
        self.run(f"SELECT set_config('lock_timeout', %s, true){others}", [wait])


def connect(dsn: str, *, sink: str | None = None, wait: str = "10s") -> Link:
    """Open a connection. If the server has none left, wait for one, up to `_WAIT_S`."""
    settings = _settings(dsn)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            # Through a pooler, a prepared statement may be missing in the next transaction.
            link = Link.connect(**settings, autocommit=True, prepare_threshold=None)
            link.isolation_level, link.lock_wait = psycopg.IsolationLevel.READ_COMMITTED, wait
            break
        except psycopg.Error as error:
            problem = _refusal(error, sink)
        # Outside of the handler, so that the driver's error, with the address in it, is not chained.
        if not isinstance(problem, _Full):
            raise problem
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server has had no connection left for {_WAIT_S:.0f} s. Raise its "
                "max_connections, or run fewer tasks at once",
                sink=sink,
            )
        time.sleep(0.2)
    with POSTGRES.translated_errors(sink):
        # An acknowledged commit must be durable, whatever the role's own setting.
        link.run(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
    return link


class _Full(Unavailable):
    pass


def _settings(dsn: str) -> dict[str, Any]:
    plain = resolve("dsn", dsn)
    with contextlib.suppress(psycopg.Error):
        settings = _DEFAULTS | conninfo.conninfo_to_dict(plain) | {"client_encoding": "UTF8"}
        _refuse_split_password(plain, settings)
        return settings
    raise UsageError(
        "dsn cannot be read: give postgresql://user:password@host:port/database, or "
        "'host=... dbname=...', or env:NAME or file:PATH that holds one"
    )


def _refuse_split_password(plain: str, settings: dict[str, Any]) -> None:
    """Refuse a bare @ or / in a password: a part of it would be read as the host and shown."""
    parts = [str(settings.get(word) or "") for word in ("host", "hostaddr")]
    if "://" in plain:
        parts.append(str(settings.get("dbname") or ""))
    ports = str(settings.get("port") or "").split(",")
    if any("@" in part for part in parts) or not all(p.isdecimal() or not p for p in ports):
        raise UsageError(
            "dsn cannot be read: percent-encode special characters in user and password (@ is %40, "
            "/ is %2F, : is %3A), and give a number as the port"
        )


def _refusal(error: psycopg.Error, sink: str | None) -> PoundlockError:
    text = " ".join(str(error).split())
    if any(words in text for words in _FULL):
        return _Full("the server has no connection left", sink=sink)
    if any(words in text for words in _REFUSED):
        return NotAuthorised(
            f"PostgreSQL refuses the connection: {text}. Check user and password in dsn, and the "
            "server's pg_hba.conf",
            sink=sink,
        )
    if any(words in text for words in _MISTAKEN):
        return UsageError(f"cannot connect to PostgreSQL: {text}. Check dsn", sink=sink)
    return Unavailable(f"PostgreSQL cannot be reached: {text}", sink=sink)


class Connections:
    """The driver's one connection: opened when needed, dropped when it breaks."""

    def __init__(self, dsn: str, sink: str, wait: str = "10s"):
        self._dsn, self._sink, self._wait = dsn, sink, wait
        self._connection: Link | None = None
        self._lock = threading.RLock()
        self._lent = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, (self._dsn, self._sink, self._wait)

    @contextlib.contextmanager
    def lend(self) -> Generator[Link]:
        """Lend the connection, and translate the driver's errors. May be nested."""
        with self._lock:
            if self._lent and self._connection is not None:
                yield self._connection
                return
            link = self._answering()
            self._lent = True
            try:
                with POSTGRES.translated_errors(self._sink):
                    yield link
            except Unavailable:
                self.close()
                raise
            finally:
                self._lent = False
                self._leave_clean()

    def _answering(self) -> Link:
        """Return the connection, or a new one if it broke while it was unused."""
        if self._connection is not None and not self._connection.closed:
            try:
                self._connection.run_bare(sql.SQL(""))
                return self._connection
            except psycopg.Error:
                self.close()
        self._connection = connect(self._dsn, sink=self._sink, wait=self._wait)
        return self._connection

    def _leave_clean(self) -> None:
        """Roll back a transaction that an error left open."""
        connection = self._connection
        if connection is not None and not connection.closed:
            idle = psycopg.pq.TransactionStatus.IDLE
            if connection.info.transaction_status != idle:
                try:
                    connection.rollback()
                except psycopg.Error:
                    self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(psycopg.Error):
                    self._connection.close()
                self._connection = None


def system_of(link: Link) -> Json:
    """Return the identifier of this database cluster; None if the role may not read it."""
    try:
        found = link.run("SELECT system_identifier::text FROM pg_control_system()")
    except errors.InsufficientPrivilege:
        return None
    return found[0][0]


def database_of(link: Link) -> Json:
    """Return the identifier of this database in its cluster. Renaming does not change it."""
    return link.run("SELECT oid::text FROM pg_database WHERE datname = current_database()")[0][0]
