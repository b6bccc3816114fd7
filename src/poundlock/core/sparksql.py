"""Spark SQL expressions that several parts share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from poundlock.core.participant import Column

# Options for text. By default, Spark writes timestamps in milliseconds and loses the microseconds. Five
# X write the seconds of an offset that has some, as those of all zones had before they had a standard
# time. Spark's readers understand both.
_TIME_OF_DAY = "HH:mm:ss.SSSSSS"
_MOMENT = rf"yyyy-MM-dd\'T\'{_TIME_OF_DAY}"
TIMES = f"'timestampFormat', '{_MOMENT}XXXXX', 'timestampNTZFormat', '{_MOMENT}'"

# Begins a text that stands for a value which cannot be written. The reason follows, then another byte
# FF, then the value in words. No text begins so by chance.
MARK = b"\xffpoundlock cannot write this: "
_END = "CAST(X'FF' AS STRING)"


def to_json(name: str, column: Column, *, nulls: bool = True) -> str:
    """Return the expression of a column as JSON text, with microseconds.

    Fields that are null are written as null. `nulls=False` leaves them out, as Spark does by default.
    A value with a text that is not UTF-8 is marked: see `marked`.
    """
    legible = _legible(column.sql, column.type)
    return _json({name: column}, column.sql, legible, nulls=nulls)


def _json(columns: Mapping[str, Column], sql: str, legible: str, *, nulls: bool = False) -> str:
    options = TIMES + (", 'ignoreNullFields', 'false'" if nulls else "")
    text, other = (f"to_json({it}, map({options}))" for it in (sql, legible))
    return checked_text(columns, text, other, "JSON")


def moment_text(sql: str, kind: str) -> str:
    """Return the expression of a timestamp of either type as text, as it is in JSON."""
    if kind == "timestamp":
        return f"date_format({sql}, '{_MOMENT}XXXXX')"
    # `date_format` would read the time in the session's zone, which may leave that hour out.
    return f"CASE WHEN {sql} IS NOT NULL THEN to_csv(named_struct('t', {sql}), map({TIMES})) END"


def checked_text(columns: Mapping[str, Column], text: str, legible: str, into: str) -> str:
    """Return `text`, but marked if one of `columns` has a text that is not UTF-8.

    Spark puts U+FFFD in the place of such bytes. `legible` is what stands behind the mark, and `into`
    names what cannot hold the bytes.
    """
    found = {name: broken_text(column.sql, column.type) for name, column in columns.items()}
    broken = {name: condition for name, condition in found.items() if condition}
    if not broken:
        return text
    reasons = " ".join(
        f"WHEN {condition} THEN "
        + literal(f"column {name} is not UTF-8, and {into} holds no other text")
        for name, condition in broken.items()
    )
    return marked(" OR ".join(broken.values()), f"CASE {reasons} END", text, legible)


def marked(condition: str, reason: str, text: str, legible: str) -> str:
    """Return the expression of a text that no sink gets where the condition holds: it is a bad row.

    `reason` is an expression, and `legible` that of the text for a dead letter.
    """
    mark = f"CAST(X'{MARK.hex()}' AS STRING)"
    other = f"concat({mark}, {reason}, {_END}, {legible})"
    return f"CASE WHEN coalesce({condition}, false) THEN {other} ELSE {text} END"


def literal(text: str) -> str:
    """Return a text as a SQL literal, with any special characters escaped."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def row_struct(columns: Mapping[str, Column]) -> str:
    """Return the expression of a struct that has these columns as its fields."""
    return _struct({name: column.sql for name, column in columns.items()})


def legible_struct(columns: Mapping[str, Column]) -> str:
    """Return the same with texts that are not UTF-8 in Base64."""
    return _struct({name: _legible(column.sql, column.type) for name, column in columns.items()})


def _struct(fields: Mapping[str, str]) -> str:
    return f"named_struct({', '.join(f'{literal(name)}, {sql}' for name, sql in fields.items())})"


def row_json(columns: Mapping[str, Column]) -> str:
    """Return the expression of a row as one JSON object. Fields that are null are left out.

    A row with a text that is not UTF-8 is marked: see `marked`.
    """
    return _json(columns, row_struct(columns), legible_struct(columns))


def anywhere(
    test: Callable[[str, str], str | None], sql: str, kind: str, depth: int = 0
) -> str | None:
    """Return the condition that `test` holds for a value or for anything in it, to any depth.

    `test` takes an expression and its type, and returns a condition, or None if no value of the type
    can meet it. So does this function.
    """
    outer, inner = _outer(kind), f"item{depth}"
    found = [test(sql, kind)]
    if outer == "array":
        within = anywhere(test, inner, inside(kind)[0][1], depth + 1)
        found.append(within and f"exists({sql}, {inner} -> {within})")
    elif outer == "map":
        for (_, part), parts in zip(inside(kind), ("map_keys", "map_values"), strict=True):
            within = anywhere(test, inner, part, depth + 1)
            found.append(within and f"exists({parts}({sql}), {inner} -> {within})")
    elif outer == "struct":
        found += [anywhere(test, f"{sql}.{quoted(name)}", it, depth) for name, it in inside(kind)]
    conditions = list(filter(None, found))
    return f"({' OR '.join(conditions)})" if conditions else None


def broken_text(sql: str, kind: str) -> str | None:
    """Return the condition that a text in a value is not UTF-8. None if its type has no texts."""
    return anywhere(lambda it, of: f"NOT is_valid_utf8({it})" if _is_text(of) else None, sql, kind)


def _legible(sql: str, kind: str, depth: int = 0) -> str:
    """Return a value with its texts that are not UTF-8 in Base64. Keys of maps stay as they are."""
    if _is_text(kind):
        return (
            f"CASE WHEN is_valid_utf8({sql}) THEN {sql} "
            f"ELSE concat('base64:', base64(CAST({sql} AS BINARY))) END"
        )
    outer, item = _outer(kind), f"item{depth}"
    if broken_text(sql, kind) is None or outer not in ("array", "map", "struct"):
        return sql
    if outer == "struct":
        fields = {name: _legible(f"{sql}.{quoted(name)}", it, depth) for name, it in inside(kind)}
        return f"CASE WHEN {sql} IS NOT NULL THEN {_struct(fields)} END"
    within = _legible(item, inside(kind)[-1][1], depth + 1)
    if outer == "array":
        return f"transform({sql}, {item} -> {within})"
    return f"transform_values({sql}, (key{depth}, {item}) -> {within})"


def _is_text(kind: str) -> bool:
    return re.match(r"(string|varchar|char)\b", kind) is not None


def _outer(kind: str) -> str:
    return kind.partition("<")[0]


def inside(kind: str) -> list[tuple[str, str]]:
    """Return the parts of a nested type: of a struct the fields, else the item, or key and value.

    Each has its name, which is empty where it has none, and its type.
    """
    parts = list(_split(kind.partition("<")[2][:-1]))
    return (
        [_field(part) for part in parts] if _outer(kind) == "struct" else [("", it) for it in parts]
    )


def _field(text: str) -> tuple[str, str]:
    quotes = re.match(r"`((?:[^`]|``)*)`:", text)
    if quotes:
        return quotes[1].replace("``", "`"), text[quotes.end() :]
    name, _, kind = text.partition(":")
    return name, kind


def _split(types: str) -> Iterator[str]:
    """Split at the commas outside of brackets and of quoted names."""
    depth = start = 0
    for found in re.finditer(r"`(?:[^`]|``)*`|[<(>),]", types):
        depth += (found[0] in "<(") - (found[0] in ">)")
        if found[0] == "," and depth == 0:
            yield types[start : found.start()]
            start = found.end()
    yield types[start:]


def quoted(name: str) -> str:
    """Return a column's name in backquotes."""
    return "`" + name.replace("`", "``") + "`"


def holds(type: str, kinds: str) -> bool:
    """Return whether a type is, or contains, a type whose name begins with `kinds`.

    `type` is a `Column`'s, and `kinds` a regular expression. The names of fields, each before a colon,
    are not matched.
    """
    unquoted = re.sub(r"`(?:[^`]|``)*`", "x", type)
    return re.search(rf"(^|[<,:])(?![^<>,:]*:)({kinds})", unquoted) is not None
