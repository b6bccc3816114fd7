"""Whether a frame fits an index, as far as its mapping and settings tell before the first document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBERS = (
    "long", "integer", "short", "byte", "double", "float", "half_float", "scaled_float",
    "unsigned_long",
)  # fmt: skip
_SCALAR = (*_NUMBERS, "boolean", "date", "date_nanos", "keyword", "text", "ip", "binary")
_SPARK_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double")
_SPARK_TIMES = ("date", "timestamp", "timestamp_ntz")
_SECONDS = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def compare(mapping: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return what the index is sure to refuse, and what it refuses unless each value happens to fit.

    `columns` are names and Spark's types.
    """
    fields: Mapping[str, Any] = mapping.get("properties", {})
    strict = str(mapping.get("dynamic", "true")).startswith("strict")
    wrong: list[str] = []
    doubtful: list[str] = []
    for name, kind in columns.items():
        if name not in fields:
            if strict and not kind.startswith("void"):
                wrong.append(f"column {name!r} is not in the mapping, which is strict")
            continue
        field = fields[name]
        target = field.get("type", "object" if "properties" in field else "")
        while kind.startswith("array<"):  # a field holds one value or many
            kind = kind[len("array<") : -1]
        verdict = _verdict(kind, target)
        if verdict == "wrong":
            wrong.append(f"column {name!r} has type {kind}, but the field is of type {target}")
        elif verdict == "doubtful" and not field.get("ignore_malformed"):
            doubtful.append(
                f"column {name!r} has type {kind}, but the field is of type {target}: a value that "
                "does not fit stops the pipeline. Cast it, or set ignore_malformed"
            )
    return wrong, doubtful


def _verdict(kind: str, target: str) -> str:
    nested = kind.startswith(("struct<", "map<"))
    if nested:
        return "wrong" if target in _SCALAR else "fits"
    if target in ("object", "nested"):
        return "wrong"
    number = kind in _SPARK_NUMBERS or kind.startswith("decimal")
    if target in _NUMBERS:
        if kind == "boolean" or kind in _SPARK_TIMES or kind == "binary":
            return "wrong"
        return "fits" if number and not _narrower(kind, target) else "doubtful"
    if target == "boolean":
        return "fits" if kind == "boolean" else "doubtful" if kind == "string" else "wrong"
    if target in ("date", "date_nanos"):
        return "fits" if kind in _SPARK_TIMES else "wrong" if kind == "boolean" else "doubtful"
    if target == "ip":
        return "doubtful" if kind == "string" else "wrong"
    return "fits"


def _narrower(kind: str, target: str) -> bool:
    """Whether the field is an integer smaller than the column."""
    sizes = {"byte": 1, "short": 2, "integer": 4, "long": 8, "unsigned_long": 8}
    widths = {"tinyint": 1, "smallint": 2, "int": 4, "bigint": 8}
    return target in sizes and kind in widths and widths[kind] > sizes[target]


def forgets_deletes(index: str, settings: Mapping[str, Any]) -> str | None:
    """Return a warning if the index remembers the versions of what was deleted for less than a day."""
    told = str(settings.get("gc_deletes", "60s"))  # the server's default, which it does not list
    found = re.fullmatch(r"(\d+)([a-z]+)", told)
    if found and int(found[1]) * _SECONDS.get(found[2], 0) >= _SECONDS["d"]:
        return None
    return (
        f"index {index} forgets what was deleted after index.gc_deletes, {told}: a row with a lower "
        "version that comes later, or is sent again, brings the document back. Set it longer than "
        f'rows may be late or the pipeline down: PUT {index}/_settings {{"index.gc_deletes": "1d"}}. '
        "A node that restarts forgets all the same: where that matters, keep the document, with a "
        "field that says it is deleted, in place of delete="
    )
