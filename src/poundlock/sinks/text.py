"""Texts in Arrow columns. Spark does not check that a string is UTF-8, and neither does Arrow."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def not_utf8(column: pa.Array) -> np.ndarray:
    """Return which texts are not UTF-8. A call per row only if there are any."""
    values = column.cast(pa.large_binary())
    wrong = np.zeros(len(values), bool)
    if _is_ascii(values):
        return wrong
    try:
        values.cast(pa.large_string())
    except pa.ArrowInvalid:
        for row, value in enumerate(values.to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError:
                wrong[row] = True
    return wrong


def _is_ascii(values: pa.Array) -> bool:
    """Whether no byte is above 127, which is found much faster than whether all are UTF-8."""
    _, offsets, data = values.buffers()
    if len(values) == 0 or data is None or offsets is None:
        return True
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    return int(np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].max(initial=0)) < 0x80
