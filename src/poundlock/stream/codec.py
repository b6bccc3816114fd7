"""Encodes state as bytes: plain values in MessagePack, with some extension types. Never pickle."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np

from poundlock.errors import UsageError

_TUPLE, _DECIMAL, _DATETIME, _DATE, _TIME, _DELTA, _SET, _INT, _MAP, _FROZEN = range(1, 11)
_ISO = {datetime: _DATETIME, date: _DATE, time: _TIME}
_FROM_TEXT = {
    _DECIMAL: Decimal,
    _DATETIME: datetime.fromisoformat,
    _DATE: date.fromisoformat,
    _TIME: time.fromisoformat,
    _INT: int,
}


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises `UsageError` if it is not plain data."""
    # With strict_types, tuples and subclasses go to `_pack_ext`, so that they keep their type.
    data = msgpack.packb(value, default=_pack_ext, strict_types=True, use_bin_type=True)
    assert data is not None
    return data


def decode(data: bytes) -> Any:
    """Return the value that was encoded, with its types."""
    return msgpack.unpackb(data, ext_hook=_unpack_ext, strict_map_key=False, use_list=True)


def _pack_ext(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if kind in _ISO:
        return msgpack.ExtType(_ISO[kind], value.isoformat().encode())
    if kind is Decimal:
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if kind is timedelta:
        whole = (value.days, value.seconds, value.microseconds)
        return msgpack.ExtType(_DELTA, encode(list(whole)))
    if kind in (set, frozenset):
        code = _SET if kind is set else _FROZEN
        return msgpack.ExtType(code, encode(sorted(map(encode, value))))
    if kind is int:  # more than 64 bits
        return msgpack.ExtType(_INT, str(value).encode())
    if isinstance(value, dict):
        return msgpack.ExtType(_MAP, encode([[key, item] for key, item in value.items()]))
    if isinstance(value, np.number | np.bool_):
        return value.item()
    raise UsageError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept as state: use numbers, "
        "text, bytes, times, decimals, and lists, tuples, sets and dictionaries of them"
    )


def _unpack_ext(code: int, data: bytes) -> Any:
    if code in _FROM_TEXT:
        return _FROM_TEXT[code](data.decode())
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _DELTA:
        return timedelta(*decode(data))
    if code == _SET:
        return set(map(decode, decode(data)))
    if code == _MAP:
        return dict(decode(data))
    if code == _FROZEN:
        return frozenset(map(decode, decode(data)))
    raise UsageError(
        f"the state has a value of unknown kind {code}, from a newer version: run that version again"
    )
