"""Says which offsets of Kafka a batch has, for the error that a row has caused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poundlock.errors import UsageError
from poundlock.spark.storage import source_offsets

_SHOWN = 5  # partitions, in one error

Offsets = Mapping[str, Mapping[str, int]]  # by topic and partition, as Spark writes them


def describe_offsets(
    plan: bytes, before: bytes | None, kafka: Sequence[bool], first: Callable[[int], bytes | None]
) -> str:
    """Return the partitions of a batch with the offsets that it has read, empty if none is known.

    `plan` is Spark's, `before` is that of the batch before. `kafka` says which sources are Kafka's, in
    the plan's order. `first` returns what Spark has noted of where a source began.
    """
    found: list[str] = []
    with contextlib.suppress(UsageError, ValueError):
        ends = source_offsets(plan, len(kafka))
        starts = source_offsets(before, len(kafka)) if before else [None] * len(kafka)
        for index in range(len(kafka)):
            if kafka[index] and ends[index]:
                start = starts[index] or _noted(first(index))
                found += _ranges(start, ends[index])
    more = f" and {len(found) - _SHOWN} more partitions" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _noted(text: bytes | None) -> Offsets:
    """Return the offsets at which a source began. Spark writes a version before them."""
    if text is None or b"{" not in text:
        return {}
    offsets: Any = json.loads(text[text.index(b"{") :])
    return offsets


def _ranges(starts: Offsets, ends: Offsets) -> list[str]:
    found: list[str] = []
    for topic, partitions in sorted(ends.items()):
        for partition, end in sorted(partitions.items(), key=lambda item: int(item[0])):
            start = starts.get(topic, {}).get(partition, 0)  # a new partition begins at 0
            if start < end:
                found.append(f"{topic}, partition {partition}, offsets {start} to {end - 1}")
    return found
