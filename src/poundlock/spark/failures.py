"""Errors of stream operators, which fail their tasks, as the driver finds them in Spark's error.

It also decides how much of an error is shown.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from poundlock.core.taskerrors import Seal
from poundlock.errors import OperatorFailed, PoundlockError, StateExpired, UsageError

logger = logging.getLogger("poundlock")

E = TypeVar("E", bound=BaseException)

# Of this process. The functions of operators take it to their tasks, where this module has another.
OPERATORS = Seal()


def debugging() -> bool:
    """Return whether a failure is shown with all that led to it: Spark's plan, py4j's frames."""
    return logger.isEnabledFor(logging.DEBUG)


def bare(error: E) -> E:
    """Return an error without its traceback. Raised `from None`, it shows its message alone."""
    return error.with_traceback(None)


def operator_error(error: BaseException) -> PoundlockError | None:
    """Return the error that an operator raised, None if there is none."""
    return OPERATORS.find(str(error), OperatorFailed, StateExpired, UsageError)
