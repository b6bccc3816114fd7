"""Carries errors from tasks to the driver: as data in a vote, or in the text of Spark's own error.

It also decides how much of an error is shown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from poundlock import errors
from poundlock.errors import OperatorFailed, PoundlockError, StateExpired, Unavailable, UsageError

logger = logging.getLogger("poundlock")

E = TypeVar("E", bound=BaseException)

_KINDS = {kind.__name__: kind for kind in (OperatorFailed, StateExpired, UsageError)}
_RAISED = re.compile(rf"(?:^|\] )poundlock\.errors\.({'|'.join(_KINDS)}): (.*)$", re.MULTILINE)
_MARK = "poundlock-error: "  # before an error as JSON, on a line of its own
_MARKED = re.compile(rf"^{_MARK}(\{{.*\}})$", re.MULTILINE)


def debugging() -> bool:
    """Return whether a failure is shown with all that led to it: Spark's plan, py4j's frames."""
    return logger.isEnabledFor(logging.DEBUG)


def bare(error: E) -> E:
    """Return an error without its traceback. Raised `from None`, it shows its message alone."""
    return error.with_traceback(None)


class TaskFailed(Exception):
    """Ends a task that could not reach a system, so that Spark runs it again, elsewhere if it can.

    The text has the error for the reader of Spark's log, and once more for `failed_task_error`.
    """

    def __init__(self, error: Unavailable):
        super().__init__(f"{error}\n{_MARK}{json.dumps(error_to_json(error))}\n")


def error_to_json(error: PoundlockError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error.args[0]),
        "transaction": error.transaction,
        "sink": error.sink,
    }


def error_from_json(body: Mapping[str, Any]) -> PoundlockError:
    kind = getattr(errors, body["kind"], errors.Rejected)
    return kind(body["message"], transaction=body["transaction"], sink=body["sink"])


def failed_task_error(error: BaseException) -> PoundlockError | None:
    """Return the error with which a task failed too often (`TaskFailed`), None if there is none.

    Spark's text may quote a row, and a row may look like one of our errors. So nothing but an
    `Unavailable` is taken from it.
    """
    for found in reversed(_MARKED.findall(str(error))):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            failed = error_from_json(json.loads(found))
            if isinstance(failed, Unavailable):
                return failed
    return None


def operator_error(error: BaseException) -> PoundlockError | None:
    """Return the error that an operator raised, None if there is none. The last match is complete."""
    found = _RAISED.findall(str(error))
    return _KINDS[found[-1][0]](found[-1][1]) if found else None
