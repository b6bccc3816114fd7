"""Recovers errors of operators from the text of Spark's errors."""

from __future__ import annotations

import re

from poundlock.errors import OperatorFailed, PoundlockError, StateExpired, UsageError

_KINDS = {kind.__name__: kind for kind in (OperatorFailed, StateExpired, UsageError)}
_RAISED = re.compile(rf"(?:^|\] )poundlock\.errors\.({'|'.join(_KINDS)}): (.*)$", re.MULTILINE)


def operator_error(error: BaseException) -> PoundlockError | None:
    """Return the error that an operator raised, None if there is none. The last match is complete."""
    found = _RAISED.findall(str(error))
    return _KINDS[found[-1][0]](found[-1][1]) if found else None
