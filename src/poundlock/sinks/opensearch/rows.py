"""Rows as documents: what Spark computes for each, and which of them no server would take.

Rules of this file: no Python call per row, but for bad rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.participant import Column
from poundlock.core.sparksql import to_json

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

NOT_FINITE = "not_finite"  # a column that says so

_LONGEST_ID = 512  # bytes; the server's own limit
# http.max_content_length, unless somebody changed it, less the line before the document: that has the
# id, of which each byte may be spelled as six.
_LONGEST_DOCUMENT = (100 << 20) - (8 << 10)
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_AS_ID = (*_INTEGERS, "boolean", "date", "string")
_PLAIN_NAME = re.compile(r"[\w-]+")
_METADATA = (
    "_id", "_index", "_routing", "_source", "_version", "_seq_no", "_field_names", "_ignored",
    "_nested_path", "_data_stream_timestamp",
)  # fmt: skip


def bad_names(columns: Iterable[str]) -> list[str]:
    """Say which columns no document can have, whatever the mapping."""
    problems: list[str] = []
    for name in columns:
        parts = name.rstrip(".").split(".")
        if parts[0] in _METADATA:
            problems.append(f"column {name!r} has the name of a field of the server's own")
        elif not parts[0] or (len(parts) > 1 and not all(part.strip() for part in parts)):
            problems.append(
                f"column {name!r} has an empty name, as a whole or before or after a dot"
            )
    return problems


def not_finite(sql: str, kind: str, depth: int = 0) -> str | None:
    """Return the condition that a value is, or holds, a float which is NaN or infinite.

    None if its type has no floats. Spark writes such a float as text, which no number field takes.
    """
    if kind in ("float", "double"):
        return f"(isnan({sql}) OR abs({sql}) = double('Infinity'))"
    outer, _, inner = kind.partition("<")
    inner, item = inner[:-1], f"item{depth}"
    if outer == "array":
        found = not_finite(item, inner, depth + 1)
        return found and f"exists({sql}, {item} -> {found})"
    if outer == "map":
        found = not_finite(item, list(_split(inner))[-1], depth + 1)
        return found and f"exists(map_values({sql}), {item} -> {found})"
    if outer == "struct":
        fields = [part.partition(":") for part in _split(inner)]
        if not all(_PLAIN_NAME.fullmatch(name) for name, _, _ in fields):
            return None  # such names cannot be told from types
        found = [not_finite(f"{sql}.`{name}`", type_, depth) for name, _, type_ in fields]
        return f"({' OR '.join(filter(None, found))})" if any(found) else None
    return None


def _split(types: str) -> Iterator[str]:
    """Cut at the commas that stand in no brackets."""
    depth = start = 0
    for place, dead_letter in enumerate(types):
        depth += (dead_letter in "<(") - (dead_letter in ">)")
        if dead_letter == "," and depth == 0:
            yield types[start:place]
            start = place + 1
    yield types[start:]


def bad_rows(rows: pa.RecordBatch) -> dict[int, str]:
    """Return the rows that the server is sure to refuse, and why."""
    return bad_documents(rows) | (bad_ids(rows) if "id" in rows.schema.names else {})


def bad_ids(rows: pa.RecordBatch) -> dict[int, str]:
    """Return the rows whose ids the server does not take."""
    ids = rows.column("id")
    lengths = pc.binary_length(ids.cast(pa.large_string()).cast(pa.large_binary()))
    sizes = np.asarray(pc.fill_null(lengths, -1))
    reasons = {-1: "the id is null", 0: "the id is empty"}
    return {
        int(row): reasons.get(int(sizes[row]), f"the id is longer than {_LONGEST_ID} bytes")
        for row in np.flatnonzero((sizes <= 0) | (sizes > _LONGEST_ID))
    }


def bad_documents(rows: pa.RecordBatch) -> dict[int, str]:
    """Return the rows that cannot become a document."""
    sizes = np.asarray(pc.fill_null(pc.binary_length(rows.column("document")), 0))
    bad = {
        int(row): "the document is larger than 100 MiB, less some room for its id"
        for row in np.flatnonzero(sizes > _LONGEST_DOCUMENT)
    }
    if NOT_FINITE in rows.schema.names:
        reason = "a number in it is NaN or infinite, for which JSON has no word"
        bad |= {int(row): reason for row in np.flatnonzero(np.asarray(rows.column(NOT_FINITE)))}
    if "version" in rows.schema.names:
        versions = np.asarray(pc.fill_null(rows.column("version"), -1))
        bad |= {int(row): "the version is null or negative" for row in np.flatnonzero(versions < 0)}
    return bad


def repeated(rows: pa.RecordBatch, seen: pa.Table) -> dict[int, str]:
    """Return the rows whose id another row of the branch has had before; by hash first."""
    hashes = np.asarray(rows.column("hash"))
    if (
        len(np.unique(hashes)) == len(hashes)
        and not np.isin(hashes, np.asarray(seen["hash"])).any()
    ):
        return {}
    before = set(seen["id"].to_pylist())
    reason = (
        "another row of the batch has the same id, and which of them wins would be chance: name a "
        "version= column, or keep one row of each id (dropDuplicates, or an aggregate)"
    )
    bad: dict[int, str] = {}
    for row, text in enumerate(rows.column("id").to_pylist()):
        if text in before:
            bad[row] = reason
        before.add(text)
    return bad


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


EXPRESSIONS = {
    "id": _as_id,
    "version": _as_version,
    "delete": lambda column: column.sql if column.type == "boolean" else None,
}


def document(columns: Mapping[str, Column]) -> str:
    def quoted(name: str) -> str:
        escaped = name.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    fields = ", ".join(f"{quoted(name)}, {column.sql}" for name, column in columns.items())
    return to_json(f"named_struct({fields})", nulls=False)
