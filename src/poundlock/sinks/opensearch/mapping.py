"""Whether a frame fits an index, as far as its mapping and settings tell before the first document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBERS = (
    "long", "integer", "short", "byte", "double", "float", "half_float", "scaled_float",
    "unsigned_long",
)  # fmt: skip
_SCALAR = (*_NUMBERS, "boolean", "date", "date_nanos", "keyword", "text", "ip", "binary")
_SPARK_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double")
_SPARK_TIMES = ("date", "timestamp", "timestamp_ntz")
_WIDTHS = {"tinyint": 1, "smallint": 2, "int": 4, "bigint": 8}
_SIZES = {"byte": 1, "short": 2, "integer": 4, "long": 8}
_DIGITS = {"byte": 2, "short": 4, "integer": 9, "long": 18}  # that surely fit
_IMPOSSIBLE = re.compile(r'[ "*\\<|,>/?#:]|^[-_+]|^\.{0,2}$')
_SECONDS = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def compare(
    mapping: Mapping[str, Any], columns: Mapping[str, str], *, id: str | None = None
) -> tuple[list[str], list[str]]:
    """Return what the index is sure to refuse, and what it refuses unless each value happens to fit.

    `columns` are names and Spark's types. The one of the `id` has been looked at for its length.
    """
    fields: Mapping[str, Any] = mapping.get("properties", {})
    strict = str(mapping.get("dynamic", "true")).startswith("strict")
    wrong: list[str] = []
    doubtful: list[str] = []
    if mapping.get("_routing", {}).get("required"):
        wrong.append("its mapping requires a routing value with each document, and none is sent")
    for name, kind in columns.items():
        if name not in fields:
            if strict and not kind.startswith("void"):
                wrong.append(f"column {name!r} is not in the mapping, which is strict")
            continue
        field = fields[name]
        target = field.get("type", "object" if "properties" in field else "")
        while kind.startswith("array<"):  # a field holds one value or many
            kind = kind[len("array<") : -1]
        verdict = _verdict(kind, target, field)
        if verdict == "wrong":
            wrong.append(f"column {name!r} has type {kind}, but the field is of type {target}")
        elif verdict == "doubtful" and not field.get("ignore_malformed"):
            doubtful.append(
                f"column {name!r} has type {kind}, but the field is of type {target}{_format(field)}: "
                "a value that does not fit stops the pipeline. Cast it, or set ignore_malformed"
            )
        elif target == "keyword" and _endless(kind, field) and name != id:
            doubtful.append(
                f"column {name!r} goes into a keyword field without ignore_above: a value of more than "
                "32766 bytes stops the pipeline. Set it, to 8191 or less"
            )
    return wrong, doubtful


def _verdict(kind: str, target: str, field: Mapping[str, Any]) -> str:
    nested = kind.startswith(("struct<", "map<"))
    if nested:
        return "wrong" if target in _SCALAR else "fits"
    if target in ("object", "nested"):
        return "wrong"
    number = kind in _SPARK_NUMBERS or kind.startswith("decimal")
    if target in _NUMBERS:
        if kind == "boolean" or kind in _SPARK_TIMES or kind == "binary":
            return "wrong"
        return "fits" if number and _holds(target, kind, field) else "doubtful"
    if target == "boolean":
        return "fits" if kind == "boolean" else "doubtful" if kind == "string" else "wrong"
    if target in ("date", "date_nanos"):
        if kind == "boolean":
            return "wrong"
        # Nanoseconds go from 1970 to 2262.
        fits = kind in _SPARK_TIMES and target == "date" and _takes_iso(field)
        return "fits" if fits else "doubtful"
    if target == "ip":
        return "doubtful" if kind == "string" else "wrong"
    return "fits"


def _holds(target: str, kind: str, field: Mapping[str, Any]) -> bool:
    """Whether a field can hold every number of the type."""
    if target in ("double", "scaled_float"):
        return True
    if target == "float":
        return kind != "double"
    if target == "half_float":  # up to 65504
        return kind in ("tinyint", "smallint")
    if target == "unsigned_long" or kind in ("float", "double"):
        return False
    if kind in _WIDTHS:
        return _WIDTHS[kind] <= _SIZES[target]
    precision, scale = (int(part) for part in re.findall(r"\d+", kind))
    whole = scale == 0 or field.get("coerce", True)  # else a fraction is refused, not cut off
    return whole and precision - scale <= _DIGITS[target]


def _endless(kind: str, field: Mapping[str, Any]) -> bool:
    return kind in ("string", "binary") and "ignore_above" not in field


def _takes_iso(field: Mapping[str, Any]) -> bool:
    formats = field.get("format", "strict_date_optional_time").split("||")
    return any(it.startswith("strict_date_optional_time") for it in formats)


def _format(field: Mapping[str, Any]) -> str:
    return f" and format {field['format']}" if "format" in field else ""


def impossible_name(index: str, *, moving: bool) -> str | None:
    """Say why nothing can be written to an index of this name. `moving`: it may be another each day."""
    if index.startswith("<") and index.endswith(">"):
        told = (
            f"{index} is another index each day, and what is sent again on the next would be in both: "
            "name one index, or ask for semantic='at_least_once'"
        )
        return None if moving else told
    if _IMPOSSIBLE.search(index) or len(index.encode()) > 255:
        return (
            f"index {index!r} cannot be: a name has at most 255 bytes, none of them a blank or one of "
            '"*\\<|,>/?#: and does not begin with _, - or +. Rows go into one index, or one alias'
        )
    return None


def unfit_alias(alias: str, found: Sequence[Mapping[str, Any]], *, moving: bool) -> str | None:
    """Say why an alias cannot be written to, given what it says of itself in each of its indices.

    `moving`: it may come to stand for another index.
    """
    if any("is_write_index" in it for it in found) and not moving:
        return (
            f"alias {alias} has a write index, which a rollover changes: what is sent again after one "
            "would be in two indices. Write to the index itself, or to an alias of one index without "
            "is_write_index, or ask for semantic='at_least_once'"
        )
    written = len(found) == 1 and found[0].get("is_write_index", True)
    if found and not written and not any(it.get("is_write_index") for it in found):
        return f"alias {alias} stands for {len(found)} indices, of which none is its write index"
    return None


def careless(index: str, settings: Mapping[str, Any]) -> list[str]:
    """Return warnings of settings under which the server does not keep what it acknowledged."""
    warnings: list[str] = []
    if str(settings.get("translog", {}).get("durability", "")).lower() == "async":
        warnings.append(
            f"index {index} has index.translog.durability async: a server that crashes loses the last "
            'seconds of what it acknowledged. Set it: {"index.translog.durability": "request"}'
        )
    warnings += [
        f"index {index} has index.{name} {settings[name]}: a document that it drops or fails on stops "
        "the pipeline after the decision, and one whose id or index it changes is not found again. "
        "Remove it, or be sure that it does neither"
        for name in ("default_pipeline", "final_pipeline")
        if settings.get(name, "_none") != "_none"
    ]
    return warnings


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
