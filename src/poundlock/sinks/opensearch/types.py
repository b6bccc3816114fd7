"""What a row becomes in a document, and whether that fits an index's mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from poundlock.core.participant import Column

Verdict = Literal["fits", "doubtful", "wrong"]

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_AS_ID = (*_INTEGERS, "boolean", "date", "string")
_PLAIN_NAME = re.compile(r"[\w-]+")
_BLANK = "[\x01- ]*"  # the characters that Java trims
# A name is split at its dots, except those at its end, and no part may be blank.
_NO_FIELD = f"^{_BLANK}[.]*$|(^|[.]){_BLANK}[.]+[^.]|[.]{_BLANK}[\x01- ]$"
_METADATA = re.compile(
    "_(id|index|routing|source|version|seq_no|field_names|ignored|nested_path|data_stream_timestamp)"
)
_SIZES = {"byte": 1, "short": 2, "integer": 4, "long": 8}
_NUMBERS = (*_SIZES, "double", "float", "half_float", "scaled_float", "unsigned_long")
_SCALAR = (*_NUMBERS, "boolean", "date", "date_nanos", "keyword", "text", "ip", "binary")
_SPARK_NUMBERS = (*_INTEGERS, "float", "double")
_TEXTS = ("string", "binary")
_SPARK_TIMES = ("date", "timestamp", "timestamp_ntz")
_WIDTHS = {"tinyint": 1, "smallint": 2, "int": 4, "bigint": 8}
_DIGITS = {"byte": 2, "short": 4, "integer": 9, "long": 18}  # that surely fit


def _as_id(column: Column) -> str | None:
    if column.type == "string":
        return column.sql
    return f"CAST({column.sql} AS STRING)" if column.type in _AS_ID else None


def _as_version(column: Column) -> str | None:
    if column.type in _INTEGERS:
        return f"CAST({column.sql} AS BIGINT)"
    if column.type in ("timestamp", "timestamp_ntz"):
        return f"unix_micros(CAST({column.sql} AS TIMESTAMP))"
    return None


def _as_delete(column: Column) -> str | None:
    return column.sql if column.type == "boolean" else None


# For each role: the expression of a column, None if its type does not fit, and the types that do.
ROLES = {
    "id": (_as_id, "text, an integer, a boolean or a date"),
    "version": (_as_version, "bigint or timestamp"),
    "delete": (_as_delete, "boolean"),
}


def bad_names(columns: Iterable[str]) -> list[str]:
    """Return the problem with each column that no document can have, whatever the mapping."""
    problems: list[str] = []
    for name in columns:
        parts = name.rstrip(".").split(".")
        if _METADATA.fullmatch(parts[0]):
            problems.append(f"column {name!r} has the name of one of the server's own fields")
        elif not parts[0] or (len(parts) > 1 and not all(part.strip() for part in parts)):
            problems.append(
                f"column {name!r} has an empty name, as a whole or before or after a dot"
            )
    return problems


def not_finite(sql: str, kind: str) -> str | None:
    """Return the condition that a value is or contains a float that is NaN or infinite.

    None if its type has no floats. Spark writes such a float as text, which no number field accepts.
    """
    return _anywhere(_is_not_finite, sql, kind)


def bad_key(sql: str, kind: str) -> str | None:
    """Return the condition that a map in a value has a key that cannot be the name of a field.

    None if its type has no such maps.
    """
    return _anywhere(_has_bad_key, sql, kind)


def _is_not_finite(sql: str, kind: str) -> str | None:
    is_float = kind in ("float", "double")
    return f"(isnan({sql}) OR abs({sql}) = double('Infinity'))" if is_float else None


def _has_bad_key(sql: str, kind: str) -> str | None:
    if not kind.startswith("map<string,"):
        return None
    return f"exists(map_keys({sql}), key -> NOT is_valid_utf8(key) OR key RLIKE '{_NO_FIELD}')"


def _anywhere(
    test: Callable[[str, str], str | None], sql: str, kind: str, depth: int = 0
) -> str | None:
    """Return the condition that `test` holds for a value or for anything in it, to any depth."""
    outer, _, inner = kind.partition("<")
    inner, item = inner[:-1], f"item{depth}"
    found = [test(sql, kind)]
    if outer == "array":
        within = _anywhere(test, item, inner, depth + 1)
        found.append(within and f"exists({sql}, {item} -> {within})")
    elif outer == "map":
        within = _anywhere(test, item, list(_split(inner))[-1], depth + 1)
        found.append(within and f"exists(map_values({sql}), {item} -> {within})")
    elif outer == "struct":
        fields = [part.partition(":") for part in _split(inner)]
        if all(_PLAIN_NAME.fullmatch(name) for name, _, _ in fields):
            # Other names cannot be distinguished from types.
            found += [_anywhere(test, f"{sql}.`{name}`", it, depth) for name, _, it in fields]
    conditions = list(filter(None, found))
    return f"({' OR '.join(conditions)})" if conditions else None


def _split(types: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth = start = 0
    for place, character in enumerate(types):
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            yield types[start:place]
            start = place + 1
    yield types[start:]


def takes_any_key(mapping: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether no map among the columns makes fields of its keys.

    `columns` are names and Spark's types.
    """
    return not any(_makes_fields(mapping, name) for name, kind in columns.items() if "map<" in kind)


def _makes_fields(mapping: Mapping[str, Any], name: str) -> bool:
    """Whether the index makes fields of what is inside a column."""
    field = mapping.get("properties", {}).get(name, {})
    return not (
        field.get("type") == "flat_object"
        or field.get("enabled") is False
        or str(field.get("dynamic", mapping.get("dynamic"))).lower() == "false"
    )


def compare(
    mapping: Mapping[str, Any], columns: Mapping[str, str], *, id: str | None = None
) -> tuple[list[str], list[str]]:
    """Return what the index surely refuses, and what it refuses if a value does not fit.

    `columns` are names and Spark's types. The length of the `id` is checked elsewhere.
    """
    fields: Mapping[str, Any] = mapping.get("properties", {})
    strict = str(mapping.get("dynamic", "true")).startswith("strict")
    wrong: list[str] = []
    doubtful: list[str] = []
    if mapping.get("_routing", {}).get("required"):
        wrong.append("its mapping requires a routing value with each document, and none is sent")
    doubtful += [
        f"column {name!r} has maps, and each key becomes a field: a key that begins with another one "
        "and a dot, a value of another type, or too many keys stop the pipeline. Map the column as "
        "flat_object, or with enabled: false"
        for name, kind in columns.items()
        if "map<" in kind and _makes_fields(mapping, name)
    ]
    for name, kind in columns.items():
        if name not in fields:
            if strict and not kind.startswith("void"):
                wrong.append(f"column {name!r} is not in the mapping, which is strict")
            continue
        field = fields[name]
        target = field.get("type", "object" if "properties" in field else "")
        while kind.startswith("array<"):  # a field holds one value or several
            kind = kind[len("array<") : -1]
        verdict = _compare_type(kind, target, field)
        if verdict == "wrong":
            wrong.append(f"column {name!r} has type {kind}, but the field is of type {target}")
        elif verdict == "doubtful" and not field.get("ignore_malformed"):
            doubtful.append(
                f"column {name!r} has type {kind}, but the field is of type {target}{_format(field)}: "
                "a value that does not fit stops the pipeline. Cast it, or set ignore_malformed"
            )
        elif target == "keyword" and "ignore_above" not in field and kind in _TEXTS and name != id:
            doubtful.append(
                f"column {name!r} goes into a keyword field without ignore_above: a value of more than "
                "32766 bytes stops the pipeline. Set ignore_above to 8191 or less"
            )
    return wrong, doubtful


def _compare_type(kind: str, target: str, field: Mapping[str, Any]) -> Verdict:
    if kind.startswith(("struct<", "map<")):
        return "wrong" if target in _SCALAR else "fits"
    if target in ("object", "nested"):
        return "wrong"
    if target in _NUMBERS:
        return _compare_number(kind, target, field)
    if target in ("date", "date_nanos"):
        return _compare_date(kind, target, field)
    if target == "boolean":
        return "fits" if kind == "boolean" else "doubtful" if kind == "string" else "wrong"
    if target == "ip":
        return "doubtful" if kind == "string" else "wrong"
    return "fits"


def _compare_number(kind: str, target: str, field: Mapping[str, Any]) -> Verdict:
    if kind in ("boolean", "binary", *_SPARK_TIMES):
        return "wrong"
    is_number = kind in _SPARK_NUMBERS or kind.startswith("decimal")
    return "fits" if is_number and _holds(target, kind, field) else "doubtful"


def _compare_date(kind: str, target: str, field: Mapping[str, Any]) -> Verdict:
    if kind == "boolean":
        return "wrong"
    formats = field.get("format", "strict_date_optional_time").split("||")
    takes_iso = any(it.startswith("strict_date_optional_time") for it in formats)
    # date_nanos holds only 1970 to 2262.
    fits = kind in _SPARK_TIMES and target == "date" and takes_iso
    return "fits" if fits else "doubtful"


def _holds(target: str, kind: str, field: Mapping[str, Any]) -> bool:
    """Whether a field can hold every number of a Spark type."""
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
    whole = scale == 0 or field.get("coerce", True)  # otherwise a fraction is refused
    return whole and precision - scale <= _DIGITS[target]


def _format(field: Mapping[str, Any]) -> str:
    return f" and format {field['format']}" if "format" in field else ""
