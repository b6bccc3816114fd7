"""Checks of an index's name, aliases and settings, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_IMPOSSIBLE = re.compile(r'[ "*\\<|,>/?#:]|^[-_+]|^\.{0,2}$')
_SECONDS = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def name_problem(index: str, *, may_change: bool) -> str | None:
    """Say why nothing can be written to an index of this name. None if it can.

    `may_change`: the name may mean another index each day.
    """
    if index.startswith("<") and index.endswith(">"):
        problem = (
            f"{index} is another index each day, and a document that is sent again on the next day "
            "would be in both: name one index, or use semantic='at_least_once'"
        )
        return None if may_change else problem
    if _IMPOSSIBLE.search(index) or len(index.encode()) > 255:
        return (
            f"{index!r}: no index can have that name. A name has at most 255 bytes, none of them a "
            'blank or one of "*\\<|,>/?#: and does not begin with _, - or +. Rows go into one index, '
            "or one alias"
        )
    return None


def alias_problem(
    alias: str, entries: Sequence[Mapping[str, Any]], *, may_change: bool
) -> str | None:
    """Say why an alias cannot be written to. None if it can.

    `entries` are what each of its indices says of it. `may_change`: it may mean another index later.
    """
    if any("is_write_index" in entry for entry in entries) and not may_change:
        return (
            f"alias {alias} has a write index, which a rollover changes: a document that is sent again "
            "after one would be in two indices. Write to the index itself, or to an alias of one index "
            "without is_write_index, or use semantic='at_least_once'"
        )
    single = len(entries) == 1 and entries[0].get("is_write_index", True)
    if entries and not single and not any(entry.get("is_write_index") for entry in entries):
        return f"none of the {len(entries)} indices of alias {alias} is its write index"
    return None


def loss_warnings(index: str, settings: Mapping[str, Any]) -> list[str]:
    """Return warnings of settings with which the server may lose what it acknowledged."""
    warnings: list[str] = []
    if str(settings.get("translog", {}).get("durability", "")).lower() == "async":
        warnings.append(
            f"index {index} has index.translog.durability async: a server that crashes loses the last "
            'seconds of acknowledged writes. Set it: {"index.translog.durability": "request"}'
        )
    warnings += [
        f"index {index} has index.{name} {settings[name]}: a document that it drops or fails on stops "
        "the pipeline after the decision, and a document whose id or index it changes is not found "
        "again. Remove it, or make sure that it does neither"
        for name in ("default_pipeline", "final_pipeline")
        if settings.get(name, "_none") != "_none"
    ]
    return warnings


def deletion_warning(index: str, settings: Mapping[str, Any]) -> str | None:
    """Return a warning if the index remembers the versions of deleted documents for less than a day."""
    gc_deletes = str(settings.get("gc_deletes", "60s"))  # a default, which the server does not list
    match = re.fullmatch(r"(\d+)([a-z]+)", gc_deletes)
    if match and int(match[1]) * _SECONDS.get(match[2], 0) >= _SECONDS["d"]:
        return None
    return (
        f"index {index} forgets deleted documents after index.gc_deletes, {gc_deletes}: a row with a "
        "lower version that comes later, or is sent again, brings the document back. Set it longer "
        "than rows may be late or the pipeline may be down: "
        f'PUT {index}/_settings {{"index.gc_deletes": "1d"}}. A node that restarts forgets them all '
        "the same: if that matters, keep the document, with a field that says that it is deleted, in "
        "place of delete="
    )
