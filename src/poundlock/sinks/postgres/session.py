"""Connections to PostgreSQL, and its errors in our words.

Rules of this file: no message carries a secret or row data. PostgreSQL puts values into the details of
its messages, and of some into the message itself: what could hold one is left out, and the driver's
own error is not chained.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import Connection, conninfo, errors

from poundlock.core.model import Json
from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.secret import resolve

_WAIT_S = 30.0  # for a connection, where other tasks hold them all
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry")
_MISTAKEN = ("does not exist", "invalid sslmode", "certificate", "could not translate host name")
_FULL = ("too many clients", "remaining connection slots", "too many connections")


def connect(dsn: str, *, sink: str | None = None) -> Connection[Any]:
    """Open a connection in autocommit, waiting a while where the server has none left."""
    settings = _settings(dsn)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            # A pooler may give each transaction another server, which knows nothing prepared before.
            connection = psycopg.connect(**settings, autocommit=True, prepare_threshold=None)
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            break
        except psycopg.Error as error:
            problem = _refusal(error, sink)
        # Outside of the handler, so that the driver's error, with the address in it, is not chained.
        if not isinstance(problem, _Full):
            raise problem
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server has had no connection left for {_WAIT_S:.0f} s. Raise its "
                "max_connections, or let fewer tasks run at once",
                sink=sink,
            )
        time.sleep(0.2)
    with translated(sink):
        # What is acknowledged must be durable, whatever the role's own setting.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
    return connection


class _Full(Unavailable):
    pass


def _settings(dsn: str) -> dict[str, Any]:
    plain = resolve("dsn", dsn)
    with contextlib.suppress(psycopg.Error):
        settings = dict(conninfo.conninfo_to_dict(plain))
        settings.setdefault("connect_timeout", "10")
        settings.setdefault("application_name", "poundlock")
        # A machine that is gone is noticed within half a minute or so.
        settings.setdefault("keepalives_idle", "10")
        settings.setdefault("keepalives_interval", "5")
        settings.setdefault("keepalives_count", "4")
        # Longer, for it also ends a connection to a server that is alive, but busy.
        settings.setdefault("tcp_user_timeout", "120000")
        settings["client_encoding"] = "UTF8"
        _refuse_torn(plain, settings)
        return settings
    raise UsageError(
        "dsn is not understood: give postgresql://user:password@host:port/database, or "
        "'host=... dbname=...', or env:NAME or file:PATH of one"
    )


def _refuse_torn(plain: str, settings: dict[str, Any]) -> None:
    """A password with @ or / in it ends where the other parts begin, and would be told with them."""
    parts = [str(settings.get(word) or "") for word in ("host", "hostaddr")]
    if "://" in plain:
        parts.append(str(settings.get("dbname") or ""))
    ports = str(settings.get("port") or "").split(",")
    if any("@" in part for part in parts) or not all(p.isdecimal() or not p for p in ports):
        raise UsageError(
            "dsn is not understood: percent-encode what is special in user and password (@ is %40, "
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
        return UsageError(f"PostgreSQL cannot be connected to: {text}", sink=sink)
    return Unavailable(f"PostgreSQL cannot be reached: {text}", sink=sink)


class Driver:
    """The driver's one connection: opened when needed, dropped when it breaks. Never pickled."""

    def __init__(self, dsn: str, sink: str):
        self._dsn, self._sink = dsn, sink
        self._connection: Connection[Any] | None = None
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection[Any]]:
        """Lend the connection, with the driver's errors in our words. In autocommit."""
        with self._lock:
            connection = self._answering()
            try:
                with translated(self._sink):
                    yield connection
            except Unavailable:
                self.close()
                raise
            finally:
                self._leave_clean()

    def _answering(self) -> Connection[Any]:
        """The connection, or a new one where it was cut while nobody used it."""
        if self._connection is not None and not self._connection.closed:
            try:
                self._connection.execute("")
                return self._connection
            except psycopg.Error:
                self.close()
        self._connection = connect(self._dsn, sink=self._sink)
        return self._connection

    def _leave_clean(self) -> None:
        """A transaction that an error left open must not be the next question's."""
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


def unhurried(connection: Connection[Any], wait: str) -> None:
    """Have the open transaction wait for locks so long, and be cut short by no other time-out.

    Those of the role are made for the queries of people; a move would be cut at each try.
    """
    names = ["statement_timeout", "idle_in_transaction_session_timeout"]
    if connection.info.server_version >= 170_000:
        names.append("transaction_timeout")
    connection.execute(
        "SELECT set_config('lock_timeout', %s, true)"
        + "".join(f", set_config('{name}', '0', true)" for name in names),  # type: ignore[arg-type]
        [wait],
    )


@contextlib.contextmanager
def translated(sink: str | None, branch: str | None = None) -> Iterator[None]:
    """Raise the driver's errors as ours."""
    problem: PoundlockError | None = None
    try:
        yield
    except psycopg.Error as error:
        problem = told(error, sink, branch)
    if problem is not None:
        raise problem


def told(
    error: psycopg.Error, sink: str | None = None, branch: str | None = None
) -> PoundlockError:
    """Say in our words what the server refused, and what to do."""
    state, text = error.sqlstate or "", _safe(error)
    which = f"branch {branch}: " if branch else ""
    if state[:2] in ("22", "23", "P0") or state == "54000":
        return BadRow(f"{which}PostgreSQL does not take a row: {text}", sink=sink)
    if state == "55P03":
        return Rejected(
            f"{which}waited for a lock longer than lock_timeout: two tasks touch one key, or "
            "somebody else holds it. Use mode='staged', or partition the frame by the key",
            sink=sink,
        )
    if state == "53200" or state[:2] in ("40", "25", "54") or state == "57014":
        cure = ""
        if "prepared transactions" in text:
            cure = (
                ". Raise max_prepared_transactions above the tasks of a batch and restart the "
                "server, or use mode='staged'"
            )
        elif state == "53200":
            cure = (
                ". If it is the table of locks that is full, raise max_locks_per_transaction and "
                "restart the server, or write with fewer tasks"
            )
        return Rejected(f"{which}{text}{cure}", sink=sink)
    if state == "53100":
        return Unavailable(
            f"{which}the server's disk is full: {text}. Nothing is lost: make room there, and the "
            "batch can be run again",
            sink=sink,
        )
    if state == "42501":
        return NotAuthorised(f"{which}{text}", sink=sink)
    if state[:2] in ("42", "0A", "3D", "3F", "28") or state == "55000":
        beside = state == "0A000" and any(word in text for word in ("PREPARE", "COPY"))
        cure = ": use mode='staged'" if beside else ""
        return UsageError(f"{which}{text}{cure}", sink=sink)
    if state == "" and isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
        return UsageError(f"{which}{text}", sink=sink)
    if _raised(error):
        return BadRow(f"{which}PostgreSQL does not take a row: {text}", sink=sink)
    return Unavailable(f"{which}PostgreSQL did not answer as it should: {text}", sink=sink)


def _raised(error: psycopg.Error) -> bool:
    """Whether it is a function of the database's owner that raised the error, in its own words."""
    return (error.sqlstate or "")[:2] == "P0" or bool(
        re.match(r"pl(_|perl|py_|tcl|v8)", error.diag.source_file or "")
    )


def _safe(error: psycopg.Error) -> str:
    """The server's message without what could be a value of a row."""
    text = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
    if _raised(error):
        made = re.search(r"PL/\w+ function ([\w.\"]+)\(", error.diag.context or "")
        text = (
            f"function {made[1]} raises an error"
            if made
            else "a trigger or function raises an error"
        )
    elif (error.sqlstate or "").startswith("22"):
        text = re.sub(r'"[^"]*"', '"..."', text.split(": ")[0])
    where = [
        f"{word} {name}"
        for word, name in (
            ("column", error.diag.column_name),
            ("constraint", error.diag.constraint_name),
        )
        if name and name not in text
    ]
    place = f" ({', '.join(where)})" if where else ""
    return f"{text}{place} [{error.sqlstate}]" if error.sqlstate else text


def system_of(connection: Connection[Any]) -> Json:
    """Return what tells this database cluster from any other; None where we may not know."""
    try:
        found = connection.execute(
            "SELECT system_identifier::text FROM pg_control_system()"
        ).fetchone()
    except errors.InsufficientPrivilege:
        return None
    return found[0] if found else None


def database_of(connection: Connection[Any]) -> Json:
    """Return what tells this database from the others of its cluster, whatever they are called."""
    found = connection.execute(
        "SELECT oid::text FROM pg_database WHERE datname = current_database()"
    ).fetchone()
    return found[0] if found else None
