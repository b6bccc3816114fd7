"""Rows for user code: immutable tuples with named fields."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from poundlock.errors import UsageError


class NoColumn(AttributeError, KeyError):
    """A row does not have the column."""

    __str__ = AttributeError.__str__  # KeyError would print the text in quotes


class Row(tuple):
    """A row: `row.celsius`, `row["celsius"]` or `row[2]`. `row.replace(celsius=1)` copies it."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _places: Mapping[str, int] = {}

    def __getitem__(self, at: Any) -> Any:
        return tuple.__getitem__(self, self._place(at) if isinstance(at, str) else at)

    def __getattr__(self, name: str) -> Any:
        # For columns whose name is not an identifier, and for missing columns.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return tuple.__getitem__(self, self._places[name])
        except KeyError:
            raise NoColumn(self._unknown(name)) from None

    def _place(self, name: str) -> int:
        try:
            return self._places[name]
        except KeyError:
            raise NoColumn(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        return f"the row has no column {name!r}, it has {', '.join(self._fields)}"

    def as_dict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def replace(self, **values: Any) -> Row:
        changed = list(self)
        for name, value in values.items():
            changed[self._place(name)] = value
        return type(self)(changed)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{n}={v!r}' for n, v in zip(self._fields, self, strict=True))})"


@cache
def row_type(fields: tuple[str, ...]) -> type[Row]:
    """Return the class of rows with these fields. Fields named like identifiers are attributes."""
    places = {name: place for place, name in enumerate(fields)}
    if len(places) != len(fields):
        raise UsageError(f"two columns have the same name: {', '.join(fields)}. Rename one of them")
    names: dict[str, Any] = {"__slots__": (), "_fields": fields, "_places": places}
    for name, place in places.items():
        # A column may hide `count` or `index` of a tuple, but no attribute of `Row`.
        if name.isidentifier() and not keyword.iskeyword(name) and name not in Row.__dict__:
            names[name] = property(lambda self, at=place: tuple.__getitem__(self, at))
    return type("Row", (Row,), names)


def shaped(value: Any, fields: Sequence[str]) -> tuple[Any, ...]:
    """Return a row that a user's function emitted, as a tuple of these fields.

    A tuple or list is read by position, a dictionary or row by name. A single value is a row of one
    column.
    """
    if isinstance(value, Row) and value._fields != tuple(fields):
        value = value.as_dict()
    if isinstance(value, Mapping):
        missing = [name for name in fields if name not in value]
        unknown = [name for name in value if name not in fields]
        if missing or unknown:
            raise UsageError(
                f"emitted a row with {_listed(value)}, but the output has {_listed(fields)}: emit these"
            )
        return tuple(value[name] for name in fields)
    if isinstance(value, tuple | list):
        if len(value) != len(fields):
            raise UsageError(
                f"emitted {len(value)} values for the {len(fields)} columns {_listed(fields)}: emit "
                "one value for each"
            )
        return tuple(value)
    if len(fields) == 1:
        return (value,)
    raise UsageError(
        f"emitted a {type(value).__name__}: emit a row, a tuple or a dictionary with {_listed(fields)}"
    )


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "no columns"
