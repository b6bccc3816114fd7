"""Translates the errors of Spark and Delta."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from poundlock.core.taskerrors import Seal
from poundlock.errors import BadRow, InDoubt, NotAuthorised, PoundlockError, Unavailable


@contextmanager
def translate_errors(
    what: str, sink: str, *, decided: bool, seal: Seal | None = None
) -> Generator[None]:
    """Translate Spark's errors, without the values of rows that they may contain."""
    problem: PoundlockError | None = None
    try:
        yield
    except PoundlockError:
        raise
    except Exception as error:  # noqa: BLE001 (Spark's and py4j's are of many kinds)
        problem = _translate(error, what, sink, decided, seal)
    if problem is not None:
        raise problem


def _translate(error: Exception, what: str, sink: str, decided: bool, seal: Any) -> PoundlockError:
    kind, message = _root_cause(error)
    if seal is not None and (ours := seal.find(message, InDoubt, NotAuthorised)):
        return type(ours)(f"{what}: {ours.args[0]}", sink=sink)  # a task could not read
    refused = ""
    if type(error).__name__ == "AnalysisException":
        refused = f"Delta refuses the batch: {str(error).splitlines()[0]}"
    elif kind.endswith("InvariantViolationException"):
        refused = "a row breaks a constraint that the table did not have, or did not show, before"
    elif kind.startswith("org.apache.spark.Spark") and not decided:
        refused = f"a row makes an expression of the table fail ({kind.rpartition('.')[2]})"
    if refused and decided:
        return InDoubt(
            f"{what}: {refused}. The batch is decided and its rows are stored: correct the table and "
            "start the pipeline again",
            sink=sink,
        )
    if refused:
        return BadRow(f"{what}: {refused}. Correct the query", sink=sink)
    # The message of a disk contains no row.
    text = f": {message}" if kind.startswith(("java.io.", "java.nio.")) else ""
    return Unavailable(f"{what} ({kind}{text}). Nothing is lost: it is tried again", sink=sink)


def _root_cause(error: Exception) -> tuple[str, str]:
    """Return the class and the message of an error's first cause, in the JVM if it comes from there."""
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if cause is None:
        return type(error).__name__, str(error)
    while cause.getCause() is not None:
        cause = cause.getCause()
    return cause.getClass().getName(), str(cause.getMessage())
