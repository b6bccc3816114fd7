"""A stand-in for python-oracledb, with a real PostgreSQL behind it. There is no Oracle to test against.

It follows the driver's source (26.1) and its tests of two-phase commit: named
parameters, branch names that come back as bytes in a named tuple, errors with an object inside and
hardly any classes, `is_healthy` and no `closed`, False for a branch that wrote nothing. It refuses the
statements that Oracle 19 does not know. It cannot show what Oracle itself does.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

paramstyle = "named"
Xid = namedtuple("Xid", ["format_id", "global_transaction_id", "branch_qualifier"])


class Error(Exception): ...


class InterfaceError(Error): ...


class DatabaseError(Error): ...


class DataError(DatabaseError): ...


class IntegrityError(DatabaseError): ...


class OperationalError(DatabaseError): ...


class ProgrammingError(DatabaseError): ...


class NotSupportedError(DatabaseError): ...


class _Error:
    def __init__(self, full_code: str, message: str):
        self.message = f"{full_code}: {message}"
        self.full_code = full_code
        self.code = int(full_code[4:]) if full_code.startswith("ORA-") else 0
        self.isrecoverable = full_code == "DPY-4011"

    def __str__(self) -> str:
        return self.message


_UNKNOWN = {
    r"(?s)SELECT(?!.*\bFROM\b)": "ORA-00923",
    r"(?s).*\b(BIGINT|TEXT)\b": "ORA-00902",
    r"RELEASE SAVEPOINT": "ORA-00900",
    r"(?s).*\bLIMIT\b": "ORA-00933",
    r"(?s).*\bIF (NOT )?EXISTS\b": "ORA-00922",
}
_ERRORS = {
    "42P01": (DatabaseError, "ORA-00942"),
    "42P07": (DatabaseError, "ORA-00955"),
    "42501": (DatabaseError, "ORA-01031"),
    "23505": (IntegrityError, "ORA-00001"),
    "23502": (IntegrityError, "ORA-01400"),
    "22001": (DatabaseError, "ORA-12899"),
    "55P03": (DatabaseError, "ORA-02049"),
}


def _raise(kind: type[Error], code: str, message: str) -> None:
    raise kind(_Error(code, message))


class Cursor:
    def __init__(self, connection: psycopg.Connection[Any]):
        self._cursor = connection.cursor()

    @property
    def description(self) -> Any:
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    def execute(self, statement: str, values: Any = None) -> None:
        with _errors(self._cursor.connection):
            self._cursor.execute(_spelled(statement), values)

    def executemany(self, statement: str, values: Sequence[Any]) -> None:
        with _errors(self._cursor.connection):
            self._cursor.executemany(_spelled(statement), values)

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    def close(self) -> None:
        self._cursor.close()


class Connection:
    def __init__(self, dsn: str):
        with _errors():
            self._connection = psycopg.connect(dsn)

    def cursor(self) -> Cursor:
        return Cursor(self._connection)

    def commit(self) -> None:
        with _errors(self._connection):
            self._connection.commit()

    def rollback(self) -> None:
        with _errors(self._connection):
            self._connection.rollback()

    def is_healthy(self) -> bool:
        return not self._connection.closed

    def close(self) -> None:
        self._connection.close()

    def xid(self, format_id: int, gtrid: str, bqual: str) -> Xid:
        return Xid(format_id, gtrid, bqual)

    def tpc_begin(self, xid: Xid) -> None:
        with _errors(self._connection):
            self._connection.tpc_begin(_xid(xid))

    def tpc_prepare(self) -> bool:
        with _errors(self._connection):
            found = self._connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone()
            if found == (None,):
                self._connection.tpc_rollback()
                return False
            self._connection.tpc_prepare()
            return True

    def tpc_commit(self, xid: Xid) -> None:
        with _errors(self._connection):
            self._connection.tpc_commit(_xid(xid))

    def tpc_rollback(self, xid: Xid | None = None) -> None:
        with _errors(self._connection):
            self._connection.tpc_rollback(None if xid is None else _xid(xid))

    def tpc_recover(self) -> list[Xid]:
        with _errors(self._connection):
            return [
                Xid(it.format_id, it.gtrid.encode(), (it.bqual or "").encode())
                for it in self._connection.tpc_recover()
            ]


def connect(dsn: str) -> Connection:
    return Connection(dsn)


def _spelled(statement: str) -> Any:
    for unknown, code in _UNKNOWN.items():
        if re.match(unknown, statement):
            _raise(DatabaseError, code, "not known to Oracle")
    return re.sub(r":(v\d+)", r"%(\1)s", statement)


def _xid(xid: Xid) -> psycopg.Xid:
    return psycopg.Xid.from_parts(*xid)


@contextmanager
def _errors(connection: psycopg.Connection[Any] | None = None) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if connection is None:
            wrong = "password authentication failed" in str(error)
            raised = (DatabaseError, "ORA-01017") if wrong else (OperationalError, "DPY-6005")
        elif connection.closed:
            raised = DatabaseError, "DPY-4011"
        else:
            raised = _ERRORS.get(error.sqlstate or "", (DatabaseError, "ORA-03001"))
        text = str(error)
    else:
        return
    kind, code = raised
    _raise(kind, code, text)
