"""Errors of stream operators, which fail their tasks, as the driver finds them in Spark's error."""

from __future__ import annotations

from poundlock.core.taskerrors import Seal
from poundlock.errors import OperatorFailed, PoundlockError, StateExpired, UsageError

# Of this process. The functions of operators take it to their tasks, where this module has another.
OPERATORS = Seal()


def operator_error(error: BaseException) -> PoundlockError | None:
    """Return the error that an operator raised, None if there is none."""
    return OPERATORS.find(str(error), OperatorFailed, StateExpired, UsageError)
