"""The audit: who did what with `poundlock txn`, chained so that a later change shows.

Each act leaves two entries beside the log: its intent, durable before the act begins, and its outcome.
An entry has a number, created only if absent, and the hash of the entry before it. So an entry that was
changed, removed or inserted breaks the chain. Removing the newest entries does not: compare the hash of
the last entry with one that was noted elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pwd
import re
import socket
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from poundlock.core.log import NOTE, NumberTaken, TransactionLog
from poundlock.core.model import Json
from poundlock.errors import Fenced, PoundlockError, Unavailable, UsageError

logger = logging.getLogger("poundlock")

INTENT, OUTCOME = "intent", "outcome"
_NAME = re.compile(rf"{NOTE}(\d{{20}})\.json")
_TRIES = 5
_YEAR_10000 = 253_402_300_800  # no date beyond it can be shown
# What the environment says of who acted. Anyone can set it.
_CLAIMS = ("SUDO_USER",)


def whoami() -> dict[str, Json]:
    """Return who acts: what the kernel knows, and apart from it what the environment claims."""
    real, effective = os.getuid(), os.geteuid()
    known: dict[str, Json] = {
        "user": _name_of(real),
        "uid": real,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    if effective != real:
        known["effective_uid"] = effective
    claims: dict[str, Json] = {name: os.environ[name] for name in _CLAIMS if name in os.environ}
    if claims:
        known["claims"] = claims
    return known


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container may run as a user without a name
        return str(uid)


def signature() -> str:
    """Name the user, machine and process that write a record of the log."""
    it = whoami()
    return f"{it['user']}@{it['host']}:{it['pid']}"


def description(by: dict[str, Any]) -> str:
    """Describe who acted in a few words, with claims marked as such."""
    known = f"{by.get('user')} (uid {by.get('uid')}) on {by.get('host')}, process {by.get('pid')}"
    if "effective_uid" in by:
        known += f", with the rights of uid {by['effective_uid']}"
    claimed: dict[str, str] = by.get("claims") or {}
    claims = [f"{name} claims {value}" for name, value in claimed.items()]
    return ", ".join([known, *claims])


@dataclass(slots=True)
class Act:
    """An act that has begun. Whoever performs it sets the outcome."""

    id: str
    outcome: str = "done"
    touched: bool = False  # set before the first step that may change anything but the log


@dataclass(frozen=True, slots=True)
class Chain:
    """The entries, and why they cannot be trusted, if so."""

    entries: list[dict[str, Any]]
    problems: list[str]
    head: str | None  # the hash of the last entry

    def acts(self) -> list[dict[str, Any]]:
        """Return each act with its outcome, None if none was recorded: then it is not known."""
        ends = {entry["act"]: entry for entry in self.entries if entry["step"] == OUTCOME}
        found = list[dict[str, Any]]()
        for entry in self.entries:
            if entry["step"] == INTENT:
                facts = {k: v for k, v in entry.items() if k not in ("before", "act", "step")}
                end = ends.get(entry["act"], {})
                found.append(facts | {"outcome": end.get("outcome"), "ended_at": end.get("at")})
        return found


class Trail:
    """The audit beside one log."""

    def __init__(self, log: TransactionLog):
        self._log = log

    @contextlib.contextmanager
    def act(self, action: str, id: str, **facts: Json) -> Generator[Act]:
        """Record the intent before the act, and the outcome after it, whatever happens in between."""
        if problems := self.read().problems:
            logger.warning(
                "the audit beside the log at %s is broken: %s. 'poundlock txn audit' shows it",
                self._log.uri,
                "; ".join(problems),
            )
        act = Act(uuid.uuid4().hex)
        intent: dict[str, Json] = {"step": INTENT, "action": action, "id": id, "by": whoami()}
        self._append(act, intent | facts, f"{action} of {id} was not begun: its intent")
        try:
            yield act
        except BaseException as error:
            # These say of a record that it was not written. What a system has done is not known.
            refused = isinstance(error, UsageError | Fenced) and not act.touched
            fate = "refused" if refused else "unknown"
            act.outcome = f"{fate}: {type(error).__name__}"
            with contextlib.suppress(Exception):  # without an outcome, the act shows as unknown too
                self._append(act, {"step": OUTCOME, "outcome": act.outcome}, "")
            raise
        done = f"{action} of {id} has ended, {act.outcome}: only this outcome"
        self._append(act, {"step": OUTCOME, "outcome": act.outcome}, done)

    def _append(self, act: Act, facts: dict[str, Json], what: str) -> None:
        """Add an entry, durably. Raises `Unavailable` if that is not certain."""
        body: dict[str, Json] = facts | {"act": act.id, "at": time.time()}
        error, name, data = None, "", b""
        for _ in range(_TRIES):
            try:
                notes = self._log.notes()
                if notes.get(name) != data:  # not this entry from an earlier try
                    name, data = _next(notes, body)
                with contextlib.suppress(NumberTaken):
                    self._log.put_note(name, data)
                if self._log.notes().get(name) == data:
                    return
            except (OSError, PoundlockError) as problem:
                error = problem
                if isinstance(problem, UsageError) and facts["step"] == INTENT:
                    raise  # it names what to do, and nothing was begun
        raise Unavailable(
            f"{what} could not be recorded beside the log at {self._log.uri} ({error}). Make its "
            "directory writable for you and repeat the command"
        ) from error

    def read(self) -> Chain:
        """Read all entries, and check that each follows the one before."""
        try:
            notes = self._log.notes()
        except OSError as error:
            raise Unavailable(f"the audit at {self._log.uri} cannot be read: {error}") from error
        found, problems = _numbered(notes)
        problems = [f"{name} is not an entry" for name in sorted(problems)]
        entries, before, expected = list[dict[str, Any]](), None, 0
        for number, name in sorted(found.items()):
            data = notes[name]
            if number != expected:
                last = number - 1
                one, many = f"entry {last} is", f"entries {expected} to {last} are"
                problems.append(f"{one if last == expected else many} missing")
            entry = _read(number, data)
            if entry is None:
                problems.append(f"entry {number} cannot be read")
            elif number == expected and entry["before"] != before:
                problems.append(f"entry {number} does not follow what is before it")
            if entry is not None:
                entries.append(entry)
            before, expected = _hash(data), number + 1
        return Chain(entries, problems, before)


def _next(notes: dict[str, bytes], body: dict[str, Json]) -> tuple[str, bytes]:
    """Return the name and content of the entry that follows all others."""
    numbers, _ = _numbered(notes)
    last = max(numbers, default=-1)
    before = _hash(notes[numbers[last]]) if numbers else None
    whole = body | {"number": last + 1, "before": before}
    return f"{NOTE}{last + 1:020}.json", json.dumps(whole, sort_keys=True).encode() + b"\n"


def _numbered(notes: dict[str, bytes]) -> tuple[dict[int, str], list[str]]:
    """Return the names of entries by number, and the names that are not of entries."""
    matches = {name: _NAME.fullmatch(name) for name in notes}
    numbers = {int(match[1]): name for name, match in matches.items() if match}
    return numbers, [name for name, match in matches.items() if not match]


def _read(number: int, data: bytes) -> dict[str, Any] | None:
    """Return an entry, None if it does not have the shape of one: then it was changed."""
    try:
        entry = json.loads(data)
        whole = entry["number"] == number and _is_entry(entry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return entry if whole else None


def _is_entry(entry: dict[str, Any]) -> bool:
    texts = {INTENT: ("action", "id"), OUTCOME: ("outcome",)}[entry["step"]]
    at, before, by = entry["at"], entry["before"], entry.get("by", {})
    return (
        all(isinstance(entry[name], str) for name in ("act", *texts))
        and (before is None or isinstance(before, str))
        and isinstance(at, int | float)
        and 0 <= at < _YEAR_10000
        and (entry["step"] != INTENT or "by" in entry)
        and isinstance(by, dict)
        and isinstance(entry.get("by", {}).get("claims", {}), dict)
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
