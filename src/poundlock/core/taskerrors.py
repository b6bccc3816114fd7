"""Carries errors from tasks to the driver: as data, or sealed in the text of Spark's own error.

Spark's text may quote a row, and a row may look like one of our errors. So an error in a text counts
only with the token of its `Seal`, which is in the function that the driver sends to its tasks.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import poundlock.errors
from poundlock.errors import PoundlockError, Rejected

_MARK = "poundlock-error"
_JSON = json.JSONDecoder()


class TaskFailed(Exception):
    """Ends a task. The text has the error for the reader of Spark's log, and once more sealed."""


@dataclass(frozen=True)
class Seal:
    """A secret of a driver and its tasks."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def text(self, error: PoundlockError) -> str:
        return f"{error}\n{_MARK} {self.token} {json.dumps(error_to_json(error))}\n"

    @contextlib.contextmanager
    def on(self, *kinds: type[PoundlockError]) -> Generator[None]:
        """Raise `TaskFailed` instead of an error of these kinds."""
        try:
            yield
        except kinds as error:
            raise TaskFailed(self.text(error)) from error

    def find(self, text: str, *kinds: type[PoundlockError]) -> PoundlockError | None:
        """Return the last error of these kinds that has this seal, None if there is none."""
        _, *sealed = text.split(f"{_MARK} {self.token} ")
        for part in reversed(sealed):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                error = error_from_json(_JSON.raw_decode(part)[0])
                if isinstance(error, kinds):
                    return error
        return None


def error_to_json(error: PoundlockError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error.args[0]),
        "transaction": error.transaction,
        "sink": error.sink,
    }


def error_from_json(body: Mapping[str, Any]) -> PoundlockError:
    kind = getattr(poundlock.errors, body["kind"], Rejected)
    return kind(body["message"], transaction=body["transaction"], sink=body["sink"])
