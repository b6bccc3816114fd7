"""What a row becomes in a document, and whether that fits an index's mapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from poundlock.core.participant import Column
from poundlock.core.sparksql import anywhere
from poundlock.sinks.opensearch.fields import crossed, find, paths_of, type_of

Verdict = Literal["fits", "doubtful", "wrong"]

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_AS_ID = (*_INTEGERS, "boolean", "date", "string")
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
    return anywhere(_is_not_finite, sql, kind)


def bad_key(sql: str, kind: str) -> str | None:
    """Return the condition that a map in a value has a key that cannot be the name of a field.

    None if its type has no such maps.
    """
    return anywhere(_has_bad_key, sql, kind)


def _is_not_finite(sql: str, kind: str) -> str | None:
    is_float = kind in ("float", "double")
    return f"(isnan({sql}) OR abs({sql}) = double('Infinity'))" if is_float else None


def _has_bad_key(sql: str, kind: str) -> str | None:
    if not kind.startswith("map<string,"):
        return None
    return f"exists(map_keys({sql}), key -> key RLIKE '{_NO_FIELD}')"


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
    wrong = crossed(mapping, columns)
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
        for path, inner in paths_of(name, kind):
            problem, sure = _compare_field(mapping, path, inner, is_id=name == id)
            if problem:
                (wrong if sure else doubtful).append(problem)
    return wrong, doubtful


def _compare_field(
    mapping: Mapping[str, Any], path: str, kind: str, *, is_id: bool
) -> tuple[str | None, bool]:
    """Return what may be wrong with a field, and whether it surely is."""
    field, dynamic, blocked = find(mapping, path)
    if blocked:
        return (
            f"column {path!r} needs an object {blocked!r}, and that field holds only values",
            True,
        )
    if field is None:
        if dynamic.startswith("strict") and not kind.startswith("void"):
            return f"column {path!r} is not in the mapping, which is strict", True
        if kind == "variant" and dynamic != "false":
            return (
                f"column {path!r} is a variant without a field: its first value decides whether the "
                "field takes objects or values, and the other ones stop the pipeline. Map it",
                False,
            )
        return None, False
    target = type_of(field)
    verdict = _compare_type(kind, target, field)
    if verdict == "wrong":
        return f"column {path!r} has type {kind}, but the field is of type {target}", True
    if verdict == "doubtful" and not field.get("ignore_malformed"):
        return (
            f"column {path!r} has type {kind}, but the field is of type {target}{_format(field)}: "
            "a value that does not fit stops the pipeline. Cast it, or set ignore_malformed",
            False,
        )
    if target == "keyword" and "ignore_above" not in field and kind in _TEXTS and not is_id:
        return (
            f"column {path!r} goes into a keyword field without ignore_above: a value of more than "
            "32766 bytes stops the pipeline. Set ignore_above to 8191 or less",
            False,
        )
    return None, False


def shape_of(sql: str) -> str:
    """Return the expression of what a variant holds: "object", "value", or null for nothing.

    An array counts as what is in it, and as an object if one of its items is.
    """
    schema, items = f"schema_of_variant({sql})", f"try_variant_get({sql}, '$', 'array<variant>')"
    found = f"exists({items}, item -> schema_of_variant(item) LIKE 'OBJECT<%')"
    return (
        f"CASE WHEN {schema} LIKE 'OBJECT<%' OR coalesce({found}, false) THEN 'object' "
        f"WHEN {schema} <> 'VOID' THEN 'value' END"
    )


def refused_shape(mapping: Mapping[str, Any], name: str) -> str | None:
    """Return what a field refuses in a variant, "object" or "value"; None if neither or unknown."""
    field, _, _ = find(mapping, name.rstrip("."))
    target = type_of(field) if field is not None else ""
    if target in _SCALAR:
        return "object"
    opaque = field is not None and field.get("enabled") is False
    return "value" if target in ("object", "nested") and not opaque else None


def _compare_type(kind: str, target: str, field: Mapping[str, Any]) -> Verdict:
    if field.get("enabled") is False:
        return "fits"
    if kind.startswith(("struct<", "map<")):
        return "wrong" if target in _SCALAR else "fits"
    if target in ("object", "nested") and kind == "variant":
        return "fits"  # if it holds an object, which is checked row by row
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
