"""The files in which Spark's sources keep what an offset means, `sources/S/K` in the checkpoint.

Spark writes them before the plan that needs them (`offsets/N`), and syncs none of them. A source of
files writes the list K for its offset `{"logOffset": K}`, and now and then all lists so far as
`K.compact`. A source that reads a position once, as Kafka's reads where the query begins, has only 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

_NO_OFFSET = b"-"  # Spark's word for a source without one


def ends_of(plan: bytes) -> Mapping[str, bytes]:
    """Return the end offsets in Spark's plan by the names that sources have in the checkpoint."""
    version, _, *lines = plan.split(b"\n")
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
    value = _parsed(end)
    last = value.get("logOffset") if isinstance(value, dict) and len(value) == 1 else None
    return last if type(last) is int else None


def _is_kafka(end: bytes) -> bool:
    """Return whether this is an offset of Kafka: positions by topic and partition."""
    topics = _parsed(end)
    return (
        isinstance(topics, dict)
        and bool(topics)
        and all(isinstance(it, dict) and all(map(str.isdecimal, it)) for it in topics.values())
    )


def _parsed(end: bytes) -> Any:
    return json.loads(end) if is_json(end) else None
