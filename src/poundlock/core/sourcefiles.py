"""The files in which Spark's sources keep what an offset means, `sources/S/K` in the checkpoint.

Spark writes them before the plan that needs them (`offsets/N`), and syncs none of them. A source of
files writes the list K for its offset `{"logOffset": K}`, and now and then all lists so far as
`K.compact`. A source that reads a position once, as Kafka's reads where the query begins, has only 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any, cast

_NO_OFFSET = b"-"  # Spark's word for a source without one


def ends_of(plan: bytes) -> Mapping[str, bytes]:
    """Return the end offsets in Spark's plan by the names that sources have in the checkpoint."""
    version, *rest = plan.split(b"\n")
    lines = rest[1:]
    pairs = (
        (line.partition(b":")[::2] for line in lines)
        if version == b"v2"
        else ((str(index).encode(), line) for index, line in enumerate(lines))
    )
    return {source.decode(): end for source, end in pairs if end != _NO_OFFSET}


def next_file(end: bytes | None) -> int | None:
    """Return the first file that a batch up to this offset does not need.

    None if it may need all. A source without an offset has not begun.
    """
    if end is None:
        return 0
    last = _list_of_files(end)
    return None if last is None else last + 1


def needed_files(end: bytes | None, first: int) -> Set[int]:
    """Return the files from `first` on that a batch up to this offset needs."""
    if end is None:
        return frozenset()
    last = _list_of_files(end)
    if last is not None:
        return frozenset(range(first, last + 1))
    return frozenset({0}) if first == 0 and _is_kafka(end) else frozenset()


def is_whole_source(text: bytes) -> bool:
    """Return whether a file was written to its end: a version, then lines.

    Kafka's begins with a zero. A file in a form of its own counts as whole.
    """
    text = text.removeprefix(b"\0")
    if not text.strip(b"\0"):
        return False
    version, *lines = text.split(b"\n")
    return version[:1] != b"v" or (bool(lines) and b"\0" not in text and all(map(is_value, lines)))


def is_value(text: bytes) -> bool:
    """Return whether a line is whole: it is JSON, or in a form of its own."""
    return is_json(text) or text[:1] not in (b"", b"{", b"[", b'"')


def is_json(text: bytes) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _list_of_files(end: bytes) -> int | None:
    """Return the newest list of a source of files, None for any other source."""
    offset = _object(end)
    last = offset.get("logOffset")
    return last if offset.keys() == {"logOffset"} and type(last) is int else None


def _is_kafka(end: bytes) -> bool:
    """Return whether this is an offset of Kafka: positions by topic and partition."""
    topics = _object(end)
    parts = [cast("dict[str, Any]", it) for it in topics.values() if isinstance(it, dict)]
    return 0 < len(topics) == len(parts) and all(name.isdecimal() for it in parts for name in it)


def _object(end: bytes) -> dict[str, Any]:
    value = json.loads(end) if is_json(end) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
