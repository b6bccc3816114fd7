"""The errors of MySQL and MariaDB, translated. The server's texts quote rows; these do not."""

from __future__ import annotations

import re

import pymysql

from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.sql.dialect import Dialect, Failure

NO_SUCH_TABLE, DUPLICATE, LOCK_TIMEOUT, DEADLOCK = 1146, 1062, 1205, 1213
XA_UNKNOWN, XA_ROLLED_BACK = 1397, 1402
NO_RIGHT = 1227
NO_DEFAULT = 1364

_REFUSED = {1044, 1045, 1095, 1142, 1143, NO_RIGHT, 1370, 1401, 1410, 1698}
_AWAY = {1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1317, 1927, 1969}
_AWAY |= {3024, 3169, 2000, 2002, 2003, 2006, 2013, 2014, 2027, 2055}
_LOGIN = {1045, 1698}  # those of _REFUSED that concern user or password
_CROWDED = {1040, 1203, 1226}  # a limit on connections, of the server or the account, is reached
GONE = {1049, NO_SUCH_TABLE}  # the table, or its database
_UNKNOWN_NAME = {1046, *GONE}
_CONTENDED = {LOCK_TIMEOUT, DEADLOCK, 1020}

# What the server finds wrong with a row, in words that do not quote the row.
_WRONG = {
    1048: "is null, but the column is NOT NULL",
    1062: "has a value that already exists under a unique key",
    1153: "is larger than the server's max_allowed_packet",
    1216: "refers to a row that does not exist (foreign key)",
    1263: "is null, but the column is NOT NULL",
    1264: "is out of the column's range",
    1265: "does not fit the column's type",
    1292: "is not a value of the column's type",
    1301: "is larger than the server's max_allowed_packet",
    1366: "has characters that the column cannot hold",
    1406: "is too long",
    1451: "is still referred to by rows of another table (foreign key)",
    1452: "refers to a row that does not exist (foreign key)",
    1526: "belongs to no partition of the table",
    1644: "was refused by a trigger",
    1690: "is out of the column's range",
    3140: "is not valid JSON",
    3819: "violates a CHECK constraint",
    4025: "violates a CHECK constraint",
    4161: "is not a value of the column's type",
}
# Only at the end of a message: the text before it may be data.
_COLUMN = re.compile(r"column (?:`[^`]*`\.)*[`']?(?:\w+\.)*([^`'\s]+)[`']?(?: at row \d+)?\.?\s*$")
ROW_NUMBER = re.compile(r"at row (\d+)\s*$")
# Some messages also have the system's own number, because any system call may find a full disk.
_DISK_FULL = {1021, 1114, 3675}
_NO_SPACE = re.compile(r"(?:errno|errcode|error):? 28\b", re.IGNORECASE)


def translate_error(
    error: Exception, sink: str | None = None, branch: str | None = None
) -> PoundlockError:
    """Translate a driver's error into one that says what happened, and what to do."""
    made, text = _translate(error, code_of(error))
    return made(f"branch {branch}: {text}" if branch else text, sink=sink)


def _translate(error: Exception, code: int) -> tuple[type[PoundlockError], str]:
    text = _text(error)
    message = str(error.args[-1]) if error.args else ""
    if code in _LOGIN:
        return NotAuthorised, (
            f"the server refuses the connection ({text}). Check user and password in url="
        )
    if code in _REFUSED:
        return NotAuthorised, f"a right is missing ({text}). Grant it, or use another account"
    if code in _UNKNOWN_NAME:
        return UsageError, f"the server answers: {text}"
    if code in _CONTENDED:
        return Rejected, (
            f"rows or tables are locked by another transaction (error {code}): another writer of the "
            "same keys holds them, or a branch of an earlier attempt. The batch is tried again. If two "
            "tasks write the same key, it will fail again: use mode='staged', or partition the frame "
            "by the key"
        )
    if code == NO_DEFAULT:
        return Rejected, _missing_column(message)
    if reason := fault(error):
        return BadRow, reason
    if code in _DISK_FULL or _NO_SPACE.search(message):
        return Unavailable, (
            f"the server's disk is full, or the tablespace is at its limit (error {code}). Nothing "
            "is lost: make room there, and the batch can be run again"
        )
    if code in _CROWDED:
        return Unavailable, (
            f"the server has no connection left, or the account has reached a limit ({text}). Raise "
            "max_connections, or that limit, or run fewer tasks at once"
        )
    if code in _AWAY or not code:
        return Unavailable, f"the server cannot be reached ({text})"
    return Rejected, f"the server answers: error {code}, {_without_quotes(message)}"


def code_of(error: Exception) -> int:
    """Return the server's number of an error, 0 if it has none."""
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


def ends_all(error: Exception) -> bool:
    """Whether an error ends the connection or the transaction."""
    code = code_of(error)
    return not code or code in _AWAY or code in _CONTENDED


def fault(error: Exception) -> str | None:
    """Return what an error says is wrong with a row; None if it is about something else."""
    code = code_of(error)
    return reason_of(code, str(error.args[-1])) if code in _WRONG else None


def reason_of(code: int, message: str) -> str:
    column = _COLUMN.search(message)
    words = _WRONG.get(code, f"was refused (error {code})")
    return f"column {column[1]} {words}" if column else f"a row {words}"


def _missing_column(message: str) -> str:
    column = re.search(r"'([^']*)'", message)
    return (
        f"column {column[1] if column else '?'} of the table is NOT NULL without a default, and the "
        "frame has no such column. Was it added since the pipeline started? Give it a default, or add "
        "it to the frame"
    )


def _text(error: Exception) -> str:
    """Return the error's own text. Only for connections and rights: their texts quote no rows."""
    return f"error {code_of(error)}: {error.args[-1]}" if error.args else type(error).__name__


def _without_quotes(message: str) -> str:
    """Hide the quoted parts: they may be data."""
    return re.sub(r"'[^']*'", "'...'", message)


def _failure_of(error: Exception) -> Failure | None:
    code = code_of(error)
    if code == DUPLICATE:
        return Failure.DUPLICATE
    if code in (LOCK_TIMEOUT, DEADLOCK):
        return Failure.LOCKED
    return Failure.NO_TABLE if code in GONE else None


MYSQL = Dialect(
    "%s", (pymysql.err.Error, OSError, EOFError, RuntimeError), _failure_of, translate_error
)
