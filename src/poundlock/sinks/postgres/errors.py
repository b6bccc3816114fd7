"""PostgreSQL's errors, translated.

PostgreSQL puts values of rows into the details of its messages, and into some of the messages. Every
part that could hold one is left out, and the driver's own error is not chained.
"""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.sql.dialect import Dialect, Failure

_ROWS = ("22", "23", "P0")  # classes of errors, by the first two characters of their codes
_PASSING = ("25", "40", "54")
_IDLE = "25P03"  # the transaction was rolled back, and the connection is closed
_MISTAKES = ("0A", "28", "3D", "3F", "42")


def translate_error(
    error: Exception, sink: str | None = None, branch: str | None = None
) -> PoundlockError:
    """Translate a driver's error into one that says what the server refused, and what to do."""
    assert isinstance(error, psycopg.Error)
    made, text = _translate(error, error.sqlstate or "", _safe(error))
    return made(f"branch {branch}: {text}" if branch else text, sink=sink)


def _translate(error: psycopg.Error, state: str, text: str) -> tuple[type[PoundlockError], str]:
    kind = state[:2]
    if kind in _ROWS or state == "54000":
        return BadRow, f"PostgreSQL refuses a row: {text}"
    if state == "55P03":
        return Rejected, (
            "waited for a lock longer than lock_timeout: two tasks write the same key, or another "
            "program holds the lock. Use mode='staged', or partition the frame by the key"
        )
    if state == _IDLE:
        return Unavailable, "the session was idle in a transaction, and was ended by the server"
    if kind in _PASSING or state in ("53200", "57014"):
        return Rejected, text + _cure(state, text)
    if state == "53100":
        return Unavailable, (
            f"the server's disk is full: {text}. Nothing is lost: make room there, and the batch can "
            "be run again"
        )
    if state == "42501":
        return NotAuthorised, text
    if kind in _MISTAKES or state == "55000":
        unsupported = state == "0A000" and any(word in text for word in ("PREPARE", "COPY"))
        return UsageError, f"{text}: use mode='staged'" if unsupported else text
    if not state and isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
        return UsageError, text
    if _raised_by_function(error):
        return BadRow, f"PostgreSQL refuses a row: {text}"
    return Unavailable, f"PostgreSQL did not answer as expected: {text}"


def _cure(state: str, text: str) -> str:
    if "prepared transactions" in text:
        return (
            ". Raise max_prepared_transactions above the number of tasks in a batch and restart the "
            "server, or use mode='staged'"
        )
    if state == "53200":
        return (
            ". If the lock table is full, raise max_locks_per_transaction and restart the server, "
            "or write with fewer tasks"
        )
    return ""


def _raised_by_function(error: psycopg.Error) -> bool:
    """Whether a function in the database raised the error, with a text of its own."""
    return (error.sqlstate or "")[:2] == "P0" or bool(
        re.match(r"pl(_|perl|py_|tcl|v8)", error.diag.source_file or "")
    )


def _safe(error: psycopg.Error) -> str:
    """Return the server's message without any part that could be a value of a row."""
    text = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
    if _raised_by_function(error):
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
            ("column", error.diag.column_name or _copied_column(error)),
            ("constraint", error.diag.constraint_name),
        )
        if name and f'"{name}"' not in text
    ]
    place = f" ({', '.join(where)})" if where else ""
    return f"{text}{place} [{error.sqlstate}]" if error.sqlstate else text


def _copied_column(error: psycopg.Error) -> str | None:
    """Return the column at which a COPY failed. The line of COPY is the last of the context."""
    lines = (error.diag.context or "").splitlines()
    found = re.fullmatch(r"COPY .+, line \d+, column (\w+)", lines[-1]) if lines else None
    return found[1] if found else None


def _failure_of(error: Exception) -> Failure | None:
    if isinstance(error, errors.UniqueViolation):
        return Failure.DUPLICATE
    if isinstance(error, errors.LockNotAvailable | errors.DeadlockDetected):
        return Failure.LOCKED
    missing = isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName)
    return Failure.NO_TABLE if missing else None


POSTGRES = Dialect(
    "%s",
    (psycopg.Error,),
    _failure_of,
    translate_error,
    # A table that replaces this one has another oid, even with a copy of its rows.
    identity="tableoid::text || ':' || identity",
    hold=" FOR KEY SHARE",
)
