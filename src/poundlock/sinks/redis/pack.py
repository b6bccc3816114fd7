"""Arrow rows packed into chunks that a script in the server can unpack: MessagePack.

A chunk is one MessagePack array with the values of its rows, row after row, each a string or nil.
Arrow joins headers and values, column by column, so that no Python call is made per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

HEADER_BYTES = 5  # before each value of a chunk, and before the chunk
_NIL = b"\xc0"
_STRING, _ARRAY = 0xDB, 0xDD  # each followed by four bytes of length, the most significant first


def as_bytes(column: pa.Array) -> pa.Array:
    """Return the column as bytes: text in UTF-8, numbers and booleans as text, binary unchanged."""
    kind = column.type
    if pa.types.is_large_binary(kind):
        return column
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    return column.cast(pa.large_string()).cast(pa.large_binary())


def chunks(columns: Sequence[pa.Array], limit: int) -> Iterator[tuple[int, bytes]]:
    """Pack rows, given as columns of bytes, into chunks of about `limit` bytes.

    Yield each chunk's number of rows, and the chunk.
    """
    parts = [part for column in columns for part in _with_headers(column)]
    rows = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    if isinstance(rows, pa.ChunkedArray):
        rows = rows.combine_chunks()
    ends = np.frombuffer(rows.buffers()[1], np.int64)[rows.offset : rows.offset + len(rows) + 1]
    body = memoryview(rows.buffers()[2])
    first = 0
    while first < len(rows):
        # As many rows as fit, and at least one.
        last = int(np.searchsorted(ends, ends[first] + limit, side="right")) - 1
        last = min(max(last, first + 1), len(rows))
        head = bytes([_ARRAY]) + ((last - first) * len(columns)).to_bytes(4, "big")
        yield last - first, head + bytes(body[ends[first] : ends[last]])
        first = last


def _with_headers(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the header of each value, and the value. A null is only a header."""
    lengths = pc.fill_null(pc.binary_length(column), 0)
    heads = np.empty((len(column), HEADER_BYTES), np.uint8)
    heads[:, 0] = _STRING
    heads[:, 1:] = np.asarray(lengths).astype(">u4").view(np.uint8).reshape(-1, 4)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(HEADER_BYTES), len(column), [None, pa.py_buffer(heads.tobytes())]
    )
    headers = fixed.cast(pa.large_binary())
    if column.null_count:
        headers = pc.if_else(column.is_valid(), headers, pa.scalar(_NIL, pa.large_binary()))
        column = pc.fill_null(column, pa.scalar(b"", pa.large_binary()))
    return headers, column
