"""What a row becomes in Redis, and which columns that takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.naming import PREFIX
from poundlock.core.participant import Column
from poundlock.core.projection import Projection
from poundlock.core.sparksql import moment_text, row_json, to_json
from poundlock.errors import UsageError

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

# The sinks' own keys are {TAG}:poundlock.REST. A tag may contain anything.
_RESERVED_BEGIN, _RESERVED = "{", f"}}:{PREFIX}."
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_NESTED = ("struct", "array", "map")
_DIGITS = 15  # of a decimal: floating point keeps as many
_FIELDS = 3900  # of one row: a script can give a command fewer than 8000 arguments
_EXPIRE_MIN, _EXPIRE_MAX = 0.001, 1e10  # seconds: what the server can add to the current time
_AMOUNT = (
    f"a number, or a decimal of at most {_DIGITS} digits: the server adds them in floating "
    "point, which would round a longer one. Cast it to bigint, of a smaller unit, or to double"
)


@dataclass(frozen=True)
class Shape:
    """How the rows of a branch are moved. Each receipt carries it, so later options do not matter."""

    kind: str  # a name in MOVES of move.lua
    target: str = ""  # the one key; "" where each row names its own
    prefix: str = ""  # of the keys that rows name
    order: bool = False  # the last column says which of several rows for one key wins
    expire_ms: int | None = None
    fields: tuple[str, ...] = ()  # names of the columns after the key
    float: bool = False

    @property
    def adds(self) -> bool:
        return self.kind in ("hash_add", "key_add", "counter")

    @property
    def keyed(self) -> bool:
        return self.kind in ("hash_set", "hash_add", "key_set", "key_add", "key_hash")

    @property
    def many(self) -> bool:
        """Whether each row names a key of its own."""
        return self.kind.startswith("key_")

    @property
    def tag(self) -> str:
        """The part of the key that selects the slot in a cluster. The sink's own keys share it."""
        found = re.search(r"\{([^}]+)\}", self.prefix if self.many else self.target)
        return found[1] if found else self.target or "poundlock"

    @property
    def width(self) -> int:
        values = len(self.fields) if self.kind in ("key_hash", "stream") else 1
        return int(self.keyed) + values + int(self.order)

    def to_json(self) -> str:
        """Return the shape as the script and the receipt take it, without what is not set."""
        content = asdict(self) | {"width": self.width}
        return json.dumps({name: value for name, value in content.items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Shape:
        content: dict[str, Any] = json.loads(text)
        content.pop("width")
        content["fields"] = tuple(content["fields"])
        return cls(**content)

    def complete(self, names: Sequence[str], *, floats: bool) -> Shape:
        """Add what the first rows show: the names of fields, and whether amounts are floats."""
        fields = tuple(name[1:] for name in names if name.startswith("."))
        return replace(self, fields=fields, float=floats)


def is_reserved(key: str) -> bool:
    """Whether a key is in the namespace of witnesses and staged rows, of this sink or of any other."""
    return key.startswith(_RESERVED_BEGIN) and _RESERVED in key


def reserved_keys(keys: pa.Array, prefix: str) -> np.ndarray:
    """Return which keys, given as bytes, are reserved once they follow the prefix."""
    if prefix and not prefix.startswith(_RESERVED_BEGIN):
        return np.zeros(len(keys), bool)
    nothing, before = (pa.scalar(text.encode(), pa.large_binary()) for text in ("", prefix))
    whole = pc.binary_join_element_wise(before, keys, nothing)
    found = pc.and_(
        pc.starts_with(whole, _RESERVED_BEGIN.encode()),
        pc.match_substring(whole, _RESERVED.encode()),
    )
    return np.asarray(pc.fill_null(found, False))


@dataclass(frozen=True)
class ColumnRoles:
    """Which column of the DataFrame has which role."""

    key: str | None = None  # of the hash's field, or of the key
    value: str | None = None
    order: str | None = None


def parse_options(
    targets: Mapping[str, str | None], options: Mapping[str, Any], operation: str
) -> tuple[Shape, ColumnRoles]:
    """Return the shape that a sink's options select, and the columns that it takes.

    `targets` are `hash`, `key`, `list`, `stream` and `counter`. Exactly one may be set.
    """
    option, target = _parse_target(targets)
    if operation not in ("set", "increment"):
        raise UsageError(f"operation={operation!r}: use 'set' or 'increment'")
    if operation == "increment" and option not in ("hash", "key", "counter"):
        raise UsageError(f"operation='increment' has no meaning with {option}=")
    adds = operation == "increment" or option == "counter"
    _check_options(option, adds, options)
    value, order_by, expire = options["value"], options["order_by"], options["expire"]
    order = order_by is not None
    if is_reserved(options["prefix"] if option == "key" else target):
        raise UsageError(
            f"{'prefix' if option == 'key' else option}= names keys of Poundlock's own, "
            f"'{{...}}:{PREFIX}.': there the sinks keep staged rows and witnesses. Choose other keys"
        )
    if option == "hash":
        shape = Shape("hash_add" if adds else "hash_set", target, order=order)
        return shape, ColumnRoles(options["field"], value, order_by)
    if option == "key":
        kind = "key_add" if adds else "key_hash" if value is None else "key_set"
        expire_ms = None if expire is None else round(expire * 1000)
        shape = Shape(kind, prefix=options["prefix"], order=order, expire_ms=expire_ms)
        return shape, ColumnRoles(target, value, order_by)
    return Shape(option, target), ColumnRoles(value=value)


def _parse_target(targets: Mapping[str, str | None]) -> tuple[str, str]:
    """Return the one option that names where rows go, and its value."""
    given = [(option, target) for option, target in targets.items() if target is not None]
    if len(given) != 1:
        raise UsageError(
            "Redis takes exactly one of hash=, key=, list=, stream= and counter=, but has "
            + (" and ".join(option for option, _ in given) or "none")
        )
    ((option, target),) = given
    if option != "key" and not target:
        raise UsageError(f"{option}= is empty: name the key to write to")
    return option, target


def _check_options(option: str, adds: bool, given: Mapping[str, Any]) -> None:
    """Reject options that the shape does not use, and require those that it needs."""
    needs = {"hash": ("field", "value"), "list": ("value",), "counter": ("value",)}.get(option, ())
    if option == "key" and adds:
        needs = ("value",)
    takes = {*needs, *{"key": ("value", "prefix", "expire"), "stream": ("value",)}.get(option, ())}
    if option in ("hash", "key") and not adds:
        takes.add("order_by")
    if adds:
        takes.discard("expire")
    problems = [f"{option}= needs {name}=" for name in needs if given[name] is None]
    problems += [
        f"{name}= has no meaning with {option}={' and increments' if adds else ''}"
        for name, value in given.items()
        if value not in (None, "") and name not in takes
    ]
    expire = given["expire"]
    if expire is not None and not _EXPIRE_MIN <= expire <= _EXPIRE_MAX:
        problems.append(f"expire= is a number of seconds, from {_EXPIRE_MIN} to {_EXPIRE_MAX:.0f}")
    if problems:
        raise UsageError("; ".join(problems))


def project(shape: Shape, roles: ColumnRoles, columns: Mapping[str, Column]) -> Projection:
    """Select the columns that the writer takes.

    They are named `key`, `value` and `order`. Where a row becomes several fields, each column has the
    field's name after a dot, so that no name of the DataFrame can be mistaken for one of these.
    """
    projection = Projection(columns)
    option = "field" if shape.kind.startswith("hash") else "key"
    projection.add("key", roles.key, partial(text, roles.key or ""), option=option)
    if shape.adds:
        projection.add("value", roles.value, _amount, _AMOUNT)
    elif roles.value == "json" and "json" not in columns:
        projection.expressions["value"] = f"CAST({row_json(columns)} AS BINARY)"
    elif roles.value is not None and shape.kind != "stream":
        projection.add("value", roles.value, partial(text, roles.value))
    else:
        _add_fields(projection, roles)
    projection.add("order", roles.order, _order, "an integer, a date or a timestamp")
    return projection


def _add_fields(projection: Projection, roles: ColumnRoles) -> None:
    columns, problems = projection.columns, projection.problems
    names = list(columns) if roles.value is None else [roles.value]
    fields: dict[str, str] = {}
    for name in names:
        if name not in columns:
            problems.append(f"there is no column {name!r} for the value")
        elif name != roles.key:
            fields[f".{name}"] = text(name, columns[name])
    projection.expressions |= fields
    if not problems and not fields:
        problems.append(f"there is no column besides {roles.key!r} to write")
    if len(names) > _FIELDS:
        problems.append(
            f"{len(names)} columns are more than the {_FIELDS} that one row can have as fields: "
            "select fewer, or use value='json'"
        )


def text(name: str, column: Column) -> str:
    """Return the expression of a column as it is stored in Redis: bytes."""
    sql, kind = column.sql, column.type
    if kind == "binary":
        return sql
    if kind.startswith(_NESTED):
        sql = to_json(name, column, nulls=False)
    elif kind in ("timestamp", "timestamp_ntz"):
        sql = moment_text(sql, kind)
    elif kind != "string":
        sql = f"CAST({sql} AS STRING)"
    return f"CAST({sql} AS BINARY)"


def _amount(column: Column) -> str | None:
    if column.type in _INTEGERS:
        return f"CAST({column.sql} AS BIGINT)"
    if column.type in ("float", "double"):
        return f"CAST({column.sql} AS DOUBLE)"
    decimal = re.fullmatch(r"decimal\((\d+),\s*-?\d+\)", column.type)
    return column.sql if decimal and int(decimal[1]) <= _DIGITS else None


def _order(column: Column) -> str | None:
    """Return a number as text that compares as the number does: the script compares texts."""
    if column.type in _INTEGERS:
        number = column.sql
    elif column.type == "date":
        number = f"unix_date({column.sql})"
    elif column.type in ("timestamp", "timestamp_ntz"):
        number = f"unix_micros(CAST({column.sql} AS TIMESTAMP))"
    else:
        return None
    moved = f"CAST({number} AS DECIMAL(20, 0)) + 9223372036854775808BD"
    return f"lpad(CAST({moved} AS STRING), 20, '0')"
