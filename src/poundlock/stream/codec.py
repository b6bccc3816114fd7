"""State as bytes: plain values only, by MessagePack, with a few types of our own. Never pickle."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np

from poundlock.errors import UsageError

_TUPLE, _DECIMAL, _DATETIME, _DATE, _TIME, _DELTA, _SET, _INT, _MAP, _FROZEN = range(1, 11)


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises `UsageError` for one that is not plain data."""
    # strict_types hands every subclass and every tuple to us: a tuple must come back as one.
    data = msgpack.packb(value, default=_pack_ext, strict_types=True, use_bin_type=True)
    assert data is not None
    return data


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given, of the same types."""
    return msgpack.unpackb(data, ext_hook=_unpack_ext, strict_map_key=False, use_list=True)


def _pack_ext(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if kind is datetime:
        return msgpack.ExtType(_DATETIME, value.isoformat().encode())
    if kind is Decimal:
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if kind is date:
        return msgpack.ExtType(_DATE, value.isoformat().encode())
    if kind is time:
        return msgpack.ExtType(_TIME, value.isoformat().encode())
    if kind is timedelta:
        whole = (value.days, value.seconds, value.microseconds)
        return msgpack.ExtType(_DELTA, encode(list(whole)))
    if kind in (set, frozenset):
        code = _SET if kind is set else _FROZEN
        return msgpack.ExtType(code, encode(sorted(map(encode, value))))
    if kind is int:  # beyond 64 bits
        return msgpack.ExtType(_INT, str(value).encode())
    if isinstance(value, dict):
        return msgpack.ExtType(_MAP, encode([[key, item] for key, item in value.items()]))
    if isinstance(value, np.number | np.bool_):
        return value.item()
    raise UsageError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept as state: keep numbers, "
        "texts, bytes, times, decimals, and lists, tuples, sets and dictionaries of them"
    )


def _unpack_ext(code: int, data: bytes) -> Any:
    text = data.decode() if code in (_DECIMAL, _DATETIME, _DATE, _TIME, _INT) else ""
    match code:
        case 1:
            return tuple(decode(data))
        case 2:
            return Decimal(text)
        case 3:
            return datetime.fromisoformat(text)
        case 4:
            return date.fromisoformat(text)
        case 5:
            return time.fromisoformat(text)
        case 6:
            days, seconds, micros = decode(data)
            return timedelta(days, seconds, micros)
        case 7:
            return {decode(item) for item in decode(data)}
        case 8:
            return int(text)
        case 9:
            return dict(decode(data))
        case 10:
            return frozenset(decode(item) for item in decode(data))
        case _:
            raise UsageError(
                f"state holds a value of an unknown kind ({code}): a newer version wrote it"
            )
