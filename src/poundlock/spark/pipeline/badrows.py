"""Bad rows in a task: those that Spark has marked, and what a dead letter says of a row.

Rule of this file: a Python call per row only for bad rows, which should be few.
"""

from __future__ import annotations

import base64
from collections.abc import Set
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.sparksql import MARK

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

# What Arrow can spell: times in these years.
_FIRST_YEAR, _LAST_YEAR = -32_767, 32_767


def marked_rows(rows: pa.RecordBatch, names: Set[str]) -> dict[int, str]:
    """Return the rows that an expression of `core.sparksql` has marked, and why.

    `names` are the columns that it can mark. In any other, what looks like a mark is a row's own value.
    """
    found: dict[int, str] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if name not in names or not _is_bytes(column.type):
            continue
        values = column.cast(pa.large_binary() if _is_large(column.type) else pa.binary())
        marked = pc.starts_with(values, pattern=MARK)
        if not pc.any(marked).as_py():
            continue
        for row in np.flatnonzero(np.asarray(pc.fill_null(marked, False))):
            found.setdefault(int(row), _unpack(values[int(row)].as_py())[0])
    return found


def plain_rows(rows: pa.RecordBatch, names: Set[str]) -> list[dict[str, Any]]:
    """Return rows as values that JSON has, except that some numbers are not finite.

    Times and decimals are text. Bytes are too: in Base64 if they are not UTF-8. `names` are the columns
    whose values may be marked.
    """
    columns = [
        _plain_column(column, marked=name in names)
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    ]
    return [dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_column(column: pa.Array, *, marked: bool) -> list[Any]:
    # Python has neither texts that are not UTF-8 nor times after the year 9999.
    raw = column.cast(_raw(column.type)).to_pylist()
    if marked and _is_bytes(column.type):
        raw = [_unpack(it)[1] if it is not None and it.startswith(MARK) else it for it in raw]
    return [_plain(value, column.type) for value in raw]


def _raw(kind: pa.DataType) -> pa.DataType:
    """Return the type whose values Python has, whatever they are."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_binary() if _is_large(kind) else pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_temporal(kind):
        return pa.string()
    if isinstance(kind, pa.StructType):
        return pa.struct([_raw_field(it) for it in kind])
    if isinstance(kind, pa.MapType):
        return pa.map_(_raw(kind.key_type), _raw(kind.item_type))
    if isinstance(kind, pa.ListType):
        return pa.list_(_raw_field(kind.value_field))
    return kind


def _raw_field(field: pa.Field) -> pa.Field:
    """Return a field that may be null: in a null struct it is, whatever the struct's type says."""
    return field.with_type(_raw(field.type)).with_nullable(True)


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.StructType):
        return {it.name: _plain(value[it.name], it.type) for it in kind}
    if isinstance(kind, pa.MapType):
        return [[_plain(k, kind.key_type), _plain(v, kind.item_type)] for k, v in value]
    if isinstance(kind, pa.ListType):
        return [_plain(it, kind.value_type) for it in value]
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return _spell(value, kind)
    if isinstance(value, bytes):
        return _text(value)
    return str(value) if pa.types.is_decimal(kind) else value


def _spell(count: int, kind: pa.DataType) -> str:
    """Return a timestamp or a date as Arrow does, or in UTC if Arrow cannot spell it.

    That is so if its year is out of reach, or if the offset of its zone has seconds.
    """
    is_zoned = isinstance(kind, pa.TimestampType) and kind.tz is not None
    moment = np.datetime64(count, kind.unit if isinstance(kind, pa.TimestampType) else "D")
    year = int(moment.astype("M8[Y]").astype(int)) + 1970
    if _FIRST_YEAR < year < _LAST_YEAR:
        integer = pa.int64() if isinstance(kind, pa.TimestampType) else pa.int32()
        value = pa.array([count], integer).cast(kind)
        if not (is_zoned and _has_seconds(value)):
            return value.cast(pa.string())[0].as_py()
    return str(moment).replace("T", " ") + ("Z" if is_zoned else "")


def _has_seconds(moment: pa.Array) -> bool:
    """Return whether the offset of a zone has seconds at a moment: most had some before 1900."""
    plain = pa.timestamp("s")
    local, utc = (
        it.cast(plain, safe=False).cast(pa.int64())[0].as_py()
        for it in (pc.local_timestamp(moment), moment.cast(pa.timestamp(moment.type.unit)))
    )
    return (local - utc) % 60 != 0


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()


def _unpack(value: bytes) -> tuple[str, bytes]:
    """Return the reason in a marked text, and the value behind it."""
    reason, _, rest = value.removeprefix(MARK).partition(b"\xff")
    return reason.decode(errors="replace"), rest


def _is_bytes(kind: pa.DataType) -> bool:
    is_ = pa.types
    return any(
        test(kind)
        for test in (is_.is_string, is_.is_binary, is_.is_large_string, is_.is_large_binary)
    )


def _is_large(kind: pa.DataType) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
