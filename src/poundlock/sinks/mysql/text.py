"""Arrow columns as text that MySQL reads: for LOAD DATA, or as the values of an INSERT.

Rules of this file: whole columns at a time, no Python call per row; values that text cannot
express, or that the column would change, are found here and reported by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.sinks.mysql.target import TargetColumn, quoted
from poundlock.sinks.text import not_utf8

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\0", "\\0"))
_SPECIAL = "[\\\\\t\n\\x00']"
# What DATE and DATETIME hold, in days and microseconds since 1970.
_DAYS = (-719_162, 2_932_896)
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


@dataclass(frozen=True)
class Rows:
    """Some rows as text, and how a statement must read each column."""

    count: int
    names: tuple[str, ...]
    texts: tuple[Any, ...]  # an Arrow string column each, escaped, null where the value is null
    binary: frozenset[str]  # the columns in hexadecimal

    def load(self, table: str) -> tuple[str, memoryview]:
        """Return a LOAD DATA statement and its data."""
        places = [f"@b{i}" if n in self.binary else quoted(n) for i, n in enumerate(self.names)]
        sets = [f"{quoted(n)} = UNHEX(@b{i})" for i, n in enumerate(self.names) if n in self.binary]
        statement = (
            f"LOAD DATA LOCAL INFILE 'poundlock' INTO TABLE {table} CHARACTER SET utf8mb4 "
            "FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n' "
            f"({', '.join(places)})" + (f" SET {', '.join(sets)}" if sets else "")
        )
        joined = pc.binary_join_element_wise(
            *self.texts, "\t", null_handling="replace", null_replacement="\\N"
        )
        return statement, _bytes(pc.binary_join_element_wise(joined, "", "\n"))

    def insert(self, table: str) -> tuple[str, memoryview, Any]:
        """Return the head of an INSERT, its values, and where in them each row begins.

        For servers that do not allow LOAD DATA LOCAL. Each row ends with a comma.
        """
        values = [
            pc.binary_join_element_wise(
                "UNHEX('" if name in self.binary else "'",
                text,
                "')" if name in self.binary else "'",
                "",
            )
            for name, text in zip(self.names, self.texts, strict=True)
        ]
        joined = pc.binary_join_element_wise(
            *values, ",", null_handling="replace", null_replacement="NULL"
        )
        closed = pc.binary_join_element_wise("(", joined, "),", "")
        head = f"INSERT INTO {table} ({', '.join(map(quoted, self.names))}) VALUES "
        ends = np.concatenate(
            ([0], np.cumsum(np.asarray(pc.binary_length(closed)), dtype=np.int64))
        )
        return head, _bytes(closed), ends


def cut(ends: Any, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of at most `most` bytes, or of one row. Yield each run's start and end."""
    start, last = 0, len(ends) - 1
    while start < last:
        room = int(ends[start]) + most
        end = max(int(np.searchsorted(ends, room, side="right")) - 1, start + 1)
        yield start, end
        start = end


def spell(rows: pa.RecordBatch, columns: Mapping[str, TargetColumn]) -> Rows:
    """Turn rows into text. They must have been checked with `faults`."""
    texts, binary = [], set[str]()
    for name in rows.schema.names:
        values = rows.column(name)
        if is_binary(values.type):
            binary.add(name)
        texts.append(_escaped(values.cast(pa.string())) if is_text(values.type) else plain(values))
    return Rows(
        len(rows),
        tuple(columns[n].name for n in rows.schema.names),
        tuple(texts),
        frozenset(columns[name].name for name in binary),
    )


def exact(rows: pa.RecordBatch, columns: Mapping[str, TargetColumn]) -> pa.RecordBatch:
    """Widen floats: the short text of one is inexact in DOUBLE, and may be out of range in FLOAT."""
    for index, name in enumerate(rows.schema.names):
        if columns[name].type in ("float", "double") and pa.types.is_float32(
            rows.schema.field(index).type
        ):
            rows = rows.set_column(index, name, rows.column(index).cast(pa.float64()))
    return rows


def faults(rows: pa.RecordBatch, columns: Mapping[str, TargetColumn]) -> dict[int, str]:
    """Return what is wrong with each bad row that can be recognised here."""
    found: dict[int, str] = {}
    for name in rows.schema.names:
        values, column = rows.column(name), columns[name]
        for mask, reason in _suspicions(values, column):
            if pc.any(mask).as_py():
                for index in np.flatnonzero(np.asarray(pc.fill_null(mask, False))):
                    found.setdefault(int(index), f"column {column.name} {reason}")
    return found


def _suspicions(values: Any, column: TargetColumn) -> list[tuple[Any, str]]:
    """Return pairs of a mask of bad values and the reason."""
    kind, found = values.type, list[tuple[Any, str]]()
    if not column.nullable and values.null_count:
        found.append((values.is_null(), "is null, but the column is NOT NULL"))
    if pa.types.is_floating(kind):
        finite = pc.fill_null(pc.is_finite(values), True)
        found.append(
            (pc.invert(finite), "is not a finite number: MySQL has no NaN and no infinity")
        )
    elif pa.types.is_date(kind):
        found.append((_outside(values.cast(pa.int32()), _DAYS), "is not in the years 1 to 9999"))
    elif pa.types.is_timestamp(kind):
        instants = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
        found.append((_outside(instants, _MICROSECONDS), "is not in the years 1 to 9999"))
        if column.fraction is not None and column.fraction < 6:
            step = 10 ** (6 - column.fraction)
            rest = pc.subtract(instants, pc.multiply(pc.divide(instants, step), step))
            reason = f"has a fraction of a second that the column would cut off: {column.full_type}"
            found.append((pc.not_equal(rest, 0), reason))
    elif is_text(kind):
        broken = not_utf8(values)
        if broken.any():
            # The other checks would fail on them.
            found.append((pa.array(broken), "is not UTF-8"))
            values = pc.if_else(pa.array(broken), pa.scalar(None, kind), values)
        found += _text_suspicions(values, column)
    elif is_binary(kind) and column.type == "binary":
        other = pc.not_equal(pc.binary_length(values), column.length)
        reason = f"is not {column.length} bytes, to which BINARY would pad it: make it VARBINARY"
        found.append((other, reason))
    elif is_binary(kind) and column.length is not None:
        long = pc.greater(pc.binary_length(values), column.length)
        found.append((long, f"is longer than {column.length} bytes"))
    return found


def _text_suspicions(values: Any, column: TargetColumn) -> list[tuple[Any, str]]:
    if column.type in ("enum", "set"):
        return [(_strange(values, column), f"is not among the members of {column.type.upper()}")]
    if column.length is None:
        return []
    found: list[tuple[Any, str]] = []
    if column.type == "char":
        blank = pc.ends_with(values, " ")
        found.append((blank, "ends in a blank, which CHAR would drop: make it VARCHAR"))
    # Only if the number of bytes, which is cheap to find, allows for a value that is too long.
    if len(values) and (pc.max(pc.binary_length(values)).as_py() or 0) > column.length:
        long = pc.greater(pc.utf8_length(values), column.length)
        found.append((long, f"is longer than {column.length} characters"))
    return found


def _outside(values: Any, span: tuple[int, int]) -> Any:
    return pc.or_(pc.less(values, span[0]), pc.greater(values, span[1]))


def _strange(values: Any, column: TargetColumn) -> Any:
    """Mask what is not a member: the server would read a number as a position, or as bits."""
    members = pa.array(column.members, values.type)
    if column.type == "enum":
        return pc.and_(values.is_valid(), pc.invert(pc.is_in(values, members)))
    parts = pc.split_pattern(values, ",")
    wrong = np.asarray(pc.invert(pc.is_in(pc.list_flatten(parts), members)))
    mask = np.zeros(len(values), dtype=bool)
    mask[np.asarray(pc.list_parent_indices(parts))[wrong]] = True
    return pc.and_(pa.array(mask), pc.not_equal(values, ""))  # an empty set has no members


def plain(values: Any) -> Any:
    """Turn values other than text into text. None of them needs escaping."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.cast(pa.int8()).cast(pa.string())
    if pa.types.is_timestamp(kind):
        # In UTC: the number is unchanged, and the zone, which matters only for display, is dropped.
        instants = values.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        return instants.cast(pa.timestamp("us")).cast(pa.string())
    if is_binary(kind):
        return _hexadecimal(values)
    return values.cast(pa.string())


def _escaped(values: Any) -> Any:
    if not pc.any(pc.match_substring_regex(values, _SPECIAL)).as_py():
        return values
    for plain, spelled in (*_ESCAPES, ("'", "\\'")):
        values = pc.replace_substring(values, plain, spelled)
    return values


def _hexadecimal(values: Any) -> Any:
    """Write bytes in hexadecimal, by one look-up over the whole buffer."""
    values = values.cast(pa.large_binary())
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[values.offset : values.offset + len(values) + 1]
    plain = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
    spelled = _HEX[plain[starts[0] : starts[-1]]]
    moved = ((starts - starts[0]) * 2).astype(np.int64)
    valid = None
    if values.null_count:
        valid = pa.array(np.asarray(values.is_valid())).buffers()[1]
    return pa.LargeStringArray.from_buffers(
        len(values), pa.py_buffer(moved), pa.py_buffer(spelled.tobytes()), valid
    ).cast(pa.string())


def _bytes(texts: Any) -> memoryview:
    """Return the text of all rows, one after the other, without a copy if it is one piece."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
        if isinstance(texts, pa.ChunkedArray):
            return memoryview(b"".join(bytes(_bytes(chunk)) for chunk in texts.chunks))
    _, offsets, data = texts.buffers()
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    ends = np.frombuffer(offsets, dtype=kind)[texts.offset : texts.offset + len(texts) + 1]
    return memoryview(data)[int(ends[0]) : int(ends[-1])]


def is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_binary(kind: Any) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
