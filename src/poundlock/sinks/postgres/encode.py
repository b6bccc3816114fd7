"""Arrow columns as the body of a binary COPY, without a Python call per row.

On the wire a row is its number of fields, then the length and the bytes of each field. Adjacent fields
of fixed width, with the length of the field after them, are packed into one numpy array. Strings are
used unchanged. Arrow joins these pieces row by row, and the buffer of the result is the message.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.errors import UsageError
from poundlock.sinks.postgres.catalog import TableColumn
from poundlock.sinks.postgres.numeric import digits_of
from poundlock.sinks.text import not_utf8

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"

_AT_ONCE = 64 << 20  # bytes of a piece: far below what Arrow's offsets can count
_DAYS = 10_957  # from 1970 to 2000, PostgreSQL's epoch
_MICROS = _DAYS * 86_400_000_000
_DATES = (-2_451_545, 2_145_031_948)  # 4713 BC to 5874897 AD, in days since 2000
_TIMES = (-211_813_488_000_000_000, 9_223_371_331_200_000_000 - 1)  # 4713 BC to 294276 AD
_DECLARATION = r"""^<\?xml\s[^>]*?\sencoding\s*=\s*(["'])([A-Za-z][-.\w]*)"""
_HEX = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(16)

Parts = list[tuple[Any, Any]]  # dtype and values of each part of a field of fixed width


class Field:
    """How the values of one column are encoded."""

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        """Return a mask of the values that PostgreSQL cannot hold, and why; None if there are none."""
        return None


class Fixed(Field, ABC):
    """A field that takes the same number of bytes in every row."""

    @abstractmethod
    def parts(self, values: pa.Array) -> Parts:
        """Return the field's parts. The placeholder of a null is never sent."""


class Varying(Field, ABC):
    """A field of text or bytes."""

    @abstractmethod
    def bytes(self, values: pa.Array) -> pa.Array:
        """Return the bytes of each value as `binary`. A null stays null."""


@dataclass(frozen=True)
class Number(Fixed):
    dtype: str

    def parts(self, values: pa.Array) -> Parts:
        zero = pa.scalar(0, values.type) if not pa.types.is_boolean(values.type) else False
        return [(self.dtype, values.fill_null(zero).to_numpy(zero_copy_only=False))]


class Numeric(Fixed):
    def parts(self, values: pa.Array) -> Parts:
        digits, weight, scale, negative = digits_of(values)
        count = digits.shape[1]
        return [
            (">i2", count),
            (">i2", weight),
            (">u2", np.where(negative, 0x4000, 0)),
            (">i2", scale),
            ((">i2", (count,)), digits),
        ]


@dataclass(frozen=True)
class Moment(Fixed):
    """Dates and timestamps: counted from 2000 instead of 1970."""

    arrow: pa.DataType
    dtype: str
    shift: int
    limits: tuple[int, int]
    step: int = 1  # the column's precision in microseconds

    def _counts(self, values: pa.Array) -> np.ndarray[Any, Any]:
        if isinstance(values.type, pa.TimestampType) and values.type.unit != "us":
            values = values.cast(pa.timestamp("us", values.type.tz))
        return values.cast(self.arrow).fill_null(0).to_numpy(zero_copy_only=False)

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        counts = self._counts(values)
        low, high = (max(limit, -(1 << 63) + abs(self.shift)) for limit in self.limits)
        outside = (counts < low + self.shift) | (counts > min(high + self.shift, (1 << 63) - 1))
        if outside.any():
            return outside, "is outside PostgreSQL's range of dates"
        return _rounded(counts, self.step)

    def parts(self, values: pa.Array) -> Parts:
        return [(self.dtype, self._counts(values) - self.shift)]


class Interval(Fixed):
    def parts(self, values: pa.Array) -> Parts:
        micros = values.cast(pa.duration("us")).cast(pa.int64()).fill_null(0)
        return [(">i8", micros.to_numpy()), (">i4", 0), (">i4", 0)]


@dataclass(frozen=True)
class Clock(Fixed):
    step: int = 1

    def _micros(self, values: pa.Array) -> np.ndarray[Any, Any]:
        nanos = values.cast(pa.time64("ns")).cast(pa.int64()).fill_null(0)
        return nanos.to_numpy() // 1000

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        return _rounded(self._micros(values), self.step)

    def parts(self, values: pa.Array) -> Parts:
        return [(">i8", self._micros(values))]


def _rounded(micros: np.ndarray[Any, Any], step: int) -> tuple[Any, str] | None:
    if step == 1:
        return None
    lost = micros % step != 0
    return (lost, "has more fractional digits than its type keeps") if lost.any() else None


def _step(column: TableColumn) -> int:
    return 10 ** (6 - column.typmod) if 0 <= column.typmod < 6 else 1


class Uuid(Fixed):
    def _spelled(self, values: pa.Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return 32 half bytes for each value, and whether it is well-formed."""
        plain = pc.replace_substring(_text(values).fill_null("0" * 32), "-", "")
        right = pc.equal(pc.binary_length(plain), 32)
        plain = pc.if_else(right, plain, "0" * 32)
        halves = _HEX[_data(plain.cast(pa.binary()))].reshape(len(values), 32)
        right = right.to_numpy(zero_copy_only=False) & (halves < 16).all(axis=1)
        return halves, right

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        _, right = self._spelled(values)
        return None if right.all() else (~right, "is not a UUID")

    def parts(self, values: pa.Array) -> Parts:
        halves, _ = self._spelled(values)
        return [(("u1", (16,)), halves[:, ::2] << 4 | halves[:, 1::2] & 15)]


@dataclass(frozen=True)
class Text(Varying):
    longest: int | None = None

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        texts = _text(values)
        if (_data(texts) == 0).any():
            zero = pc.match_substring(texts.cast(pa.binary()), b"\0").fill_null(False)
            zero = zero.to_numpy(zero_copy_only=False)
            if zero.any():
                return zero, "has a character of code zero, which PostgreSQL cannot store"
        if self.longest is None:
            return None
        # PostgreSQL would silently cut off blanks.
        long = pc.greater(pc.utf8_length(texts), self.longest)
        if not pc.any(long).as_py():
            return None
        long = long.fill_null(False).to_numpy(zero_copy_only=False)
        return long, f"is longer than {self.longest} characters"

    def bytes(self, values: pa.Array) -> pa.Array:
        return _text(values).cast(pa.binary())


class Jsonb(Text):
    def bytes(self, values: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(b"\x01", super().bytes(values), b"")


class Xml(Text):
    """XML, which a binary COPY reads in the encoding that it declares, and a plain INSERT does not.

    So such a text is sent in that encoding. The server stores it as an INSERT of the text would.
    """

    def bad(self, values: pa.Array) -> tuple[Any, str] | None:
        found = super().bad(values)
        if found is not None:
            return found
        wrong = np.zeros(len(values), bool)
        for row, text in _declared(values):
            wrong[row] = _recoded(text) is None
        reason = "declares an encoding that cannot express it, or that is unknown: declare UTF-8"
        return (wrong, reason) if wrong.any() else None

    def bytes(self, values: pa.Array) -> pa.Array:
        data = super().bytes(values)
        declared = list(_declared(values))
        if not declared:
            return data
        rows = np.zeros(len(values), bool)
        rows[[row for row, _ in declared]] = True
        recoded = pa.array([_recoded(text) for _, text in declared], pa.binary())
        return pc.replace_with_mask(data, pa.array(rows), recoded)


def _declared(values: pa.Array) -> Iterator[tuple[int, str]]:
    """Yield the place and the text of each XML value that declares its encoding. They are few."""
    texts = _text(values)
    found = pc.match_substring_regex(texts, _DECLARATION).fill_null(False)
    for row in np.flatnonzero(found.to_numpy(zero_copy_only=False)):
        yield int(row), texts[int(row)].as_py()


def _recoded(text: str) -> bytes | None:
    """Return an XML text in the encoding that it declares; None if that cannot be."""
    match = re.match(_DECLARATION, text)
    assert match is not None
    try:
        return text.encode(match[2])
    except (LookupError, UnicodeEncodeError):
        return None


class Bytes(Varying):
    def bytes(self, values: pa.Array) -> pa.Array:
        return values if values.type == pa.binary() else values.cast(pa.binary())


def field_for(column: TableColumn, arrow: pa.DataType) -> Field:
    """Choose how Arrow values are encoded for a column. Raises `UsageError` if they do not fit."""
    found = _choose(column, arrow)
    if found is None:
        raise UsageError(f"column {column.name}: {arrow} does not fit {column.declared}")
    return found


def _choose(column: TableColumn, arrow: pa.DataType) -> Field | None:
    kind, is_ = column.type, pa.types
    if kind in _INTEGER_BITS or kind in ("float4", "float8", "numeric"):
        return _number(kind, arrow)
    if kind in ("text", "varchar", "bpchar", "citext", "enum", "json"):
        limited = kind in ("varchar", "bpchar") and column.typmod >= 4
        return Text(column.typmod - 4 if limited else None) if _is_text(arrow) else None
    if kind == "timestamptz" or kind == "timestamp":
        fits = is_.is_timestamp(arrow) and (arrow.tz is not None) == (kind == "timestamptz")
        return Moment(pa.int64(), ">i8", _MICROS, _TIMES, _step(column)) if fits else None
    simple: dict[str, tuple[bool, Field]] = {
        "bool": (is_.is_boolean(arrow), Number("u1")),
        "jsonb": (_is_text(arrow), Jsonb()),
        "xml": (_is_text(arrow), Xml()),
        "uuid": (_is_text(arrow), Uuid()),
        "bytea": (is_.is_binary(arrow) or is_.is_large_binary(arrow), Bytes()),
        "date": (is_.is_date32(arrow), Moment(pa.int32(), ">i4", _DAYS, _DATES)),
        "interval": (is_.is_duration(arrow), Interval()),
        "time": (is_.is_time64(arrow), Clock(_step(column))),
    }
    fits, field = simple.get(kind, (False, None))
    return field if fits else None


_INTEGER_BITS = {"int2": 16, "int4": 32, "int8": 64}


def _number(kind: str, arrow: pa.DataType) -> Field | None:
    is_ = pa.types
    if kind in _INTEGER_BITS:
        bits = _INTEGER_BITS[kind]
        fits = is_.is_signed_integer(arrow) and arrow.bit_width <= bits
        return Number(f">i{bits // 8}") if fits else None
    if kind == "numeric":
        return Numeric() if is_.is_decimal128(arrow) or is_.is_signed_integer(arrow) else None
    fits = is_.is_float32(arrow) or (is_.is_float64(arrow) and kind == "float8")
    return Number(">f4" if kind == "float4" else ">f8") if fits else None


class Encoder:
    """Encodes record batches of one schema. `columns` are the table's, in the batch's order."""

    def __init__(self, columns: Sequence[TableColumn], schema: pa.Schema):
        self._columns = columns
        self._fields = [field_for(column, schema.field(column.name).type) for column in columns]

    def problems(self, rows: pa.RecordBatch, required: frozenset[str]) -> dict[int, str]:
        """Return why PostgreSQL would refuse each bad row that can be recognised here."""
        found: dict[int, str] = {}
        for column, field in zip(self._columns, self._fields, strict=True):
            values = rows.column(column.name)
            if column.name in required and values.null_count:
                for index in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)):
                    found.setdefault(int(index), f"column {column.name} is null")
            if _is_text(values.type):
                broken = not_utf8(values)
                if broken.any():
                    _note(found, broken, f"column {column.name} is not UTF-8")
                    values = pc.if_else(pa.array(broken), pa.scalar(None, values.type), values)
            bad = field.bad(values)
            if bad is not None:
                _note(found, bad[0], f"column {column.name} {bad[1]}")
        return found

    def encode(self, rows: pa.RecordBatch) -> Iterator[memoryview]:
        """Encode the rows in pieces of bounded size."""
        portions = max(1, -(-rows.nbytes // _AT_ONCE))
        step = -(-len(rows) // portions)
        for start in range(0, len(rows), step or 1):
            yield self._encode(rows.slice(start, step))

    def _encode(self, rows: pa.RecordBatch) -> memoryview:
        count = len(rows)
        pieces: list[pa.Array] = []
        run: Parts = [(">i2", len(self._columns))]
        for column, field in zip(self._columns, self._fields, strict=True):
            values = rows.column(column.name)
            if isinstance(field, Varying):
                data = field.bytes(values)
                lengths = pc.binary_length(data).fill_null(-1).to_numpy(zero_copy_only=False)
                run.append((">i4", lengths))
                pieces += [_packed(run, count), data.fill_null(b"") if data.null_count else data]
                run = []
            elif isinstance(field, Fixed):
                parts = field.parts(values)
                width = sum(np.dtype(dtype).itemsize for dtype, _ in parts)
                if values.null_count:
                    if run:
                        pieces.append(_packed(run, count))
                        run = []
                    pieces.append(_with_nulls(width, parts, values))
                else:
                    run += [(">i4", width), *parts]
        if run:
            pieces.append(_packed(run, count))
        joined = pieces[0] if len(pieces) == 1 else pc.binary_join_element_wise(*pieces, b"")
        return _data(joined).data


def _note(found: dict[int, str], marked: np.ndarray[Any, Any], reason: str) -> None:
    for index in np.flatnonzero(marked):
        found.setdefault(int(index), reason)


def _pack(parts: Parts, count: int) -> np.ndarray[Any, Any]:
    """Lay the parts side by side, one record for each row."""
    dtype = np.dtype(
        [
            (f"f{place}", *kind) if isinstance(kind, tuple) else (f"f{place}", kind)
            for place, (kind, _) in enumerate(parts)
        ]
    )
    packed = np.empty(count, dtype)
    for place, (_, values) in enumerate(parts):
        packed[f"f{place}"] = values
    return packed


def _packed(parts: Parts, count: int) -> pa.Array:
    packed = _pack(parts, count)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(packed.dtype.itemsize)
    return _binary(offsets, packed.view(np.uint8))


def _with_nulls(width: int, parts: Parts, values: pa.Array) -> pa.Array:
    """Encode a field of fixed width. A null has the length -1 and no bytes."""
    count = len(values)
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    packed = _pack([(">i4", np.where(valid, width, -1)), *parts], count)
    sent = np.ones((count, 4 + width), bool)
    sent[:, 4:] = valid[:, None]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.where(valid, 4 + width, 4), out=offsets[1:])
    return _binary(offsets, packed.view(np.uint8).reshape(count, 4 + width)[sent])


def _binary(offsets: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _data(values: pa.Array) -> np.ndarray[Any, Any]:
    """Return the bytes of all values of a string or binary array, one after the other."""
    _, offsets, data = values.buffers()
    if len(values) == 0 or data is None or offsets is None:
        return np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _is_text(arrow: pa.DataType) -> bool:
    return pa.types.is_string(arrow) or pa.types.is_large_string(arrow)


def _text(values: pa.Array) -> pa.Array:
    return values if values.type == pa.string() else values.cast(pa.string())
