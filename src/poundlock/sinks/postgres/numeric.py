"""Decimals in PostgreSQL's base, ten thousand, for a whole column at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_BASE = np.uint64(10_000)
_LIMB = np.uint64(32)
_MASK = np.uint64(0xFFFFFFFF)

Array = np.ndarray[Any, Any]


def digits_of(values: pa.Array) -> tuple[Array, int, int, Array]:
    """Return the digits in base ten thousand, the weight of the first, the scale, and the signs.

    Every row gets as many digits as the type could need: PostgreSQL drops zeros at either end.
    """
    low, high, precision, scale = _halves(values)
    padding = -scale % 4  # so that the point falls between two digits
    fraction = (scale + padding) // 4
    count = max(1, -(-(precision - scale) // 4)) + fraction
    negative = high < 0
    if precision + padding <= 18:
        digits = _short(low, negative, padding, count)
    else:
        digits = _long(low, high.view(np.uint64), negative, padding, count)
    return digits, count - fraction - 1, max(scale, 0), negative


def _halves(values: pa.Array) -> tuple[Array, Array, int, int]:
    """Return the low and the high half of each value, precision and scale."""
    if pa.types.is_decimal128(values.type):
        data = np.frombuffer(values.buffers()[1], np.uint64).reshape(-1, 2)
        data = data[values.offset : values.offset + len(values)]
        high = np.ascontiguousarray(data[:, 1]).view(np.int64)
        return data[:, 0], high, values.type.precision, values.type.scale
    whole = values.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return whole.view(np.uint64), whole >> 63, 19, 0


def _short(low: Array, negative: Array, padding: int, count: int) -> Array:
    left = np.where(negative, ~low + np.uint64(1), low) * np.uint64(10**padding)
    digits = np.empty((len(low), count), np.int16)
    for place in reversed(range(count)):
        rest = left // _BASE
        digits[:, place] = left - rest * _BASE
        left = rest
    return digits


def _long(low: Array, high: Array, negative: Array, padding: int, count: int) -> Array:
    """Divide by hand in limbs of 32 bits, because numpy has no integers of 128 bits."""
    plus, minus = low, ~low + np.uint64(1)
    carried = (minus == 0).astype(np.uint64)
    low = np.where(negative, minus, plus)
    high = np.where(negative, ~high + carried, high)
    limbs = [low & _MASK, low >> _LIMB, high & _MASK, high >> _LIMB, np.zeros_like(low)]
    carry = np.zeros_like(low)
    for place, limb in enumerate(limbs):
        product = limb * np.uint64(10**padding) + carry
        limbs[place], carry = product & _MASK, product >> _LIMB
    digits = np.empty((len(low), count), np.int16)
    for place in reversed(range(count)):
        rest = np.zeros_like(low)
        for number in reversed(range(len(limbs))):
            dividend = rest << _LIMB | limbs[number]
            limbs[number] = dividend // _BASE
            rest = dividend - limbs[number] * _BASE
        digits[:, place] = rest
    return digits
