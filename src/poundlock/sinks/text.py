"""Texts in Arrow columns. Spark does not check that a string is UTF-8, and neither does Arrow."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def not_utf8(column: pa.Array) -> np.ndarray:
    """Return which texts are not UTF-8. A call per row only if there are any."""
    values = column.cast(pa.large_binary())
    wrong = np.zeros(len(values), bool)
    try:
        values.cast(pa.large_string())
    except pa.ArrowInvalid:
        for row, value in enumerate(values.to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError:
                wrong[row] = True
    return wrong
