"""What rows become in Redis: one shape of each sink, and the columns that it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poundlock.core.participant import Column
from poundlock.core.sparksql import to_json
from poundlock.errors import UsageError

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_NESTED = ("struct", "array", "map")
_DIGITS = 15  # of a decimal, which floating point keeps
_FIELDS = 3900  # of one row: a script gives a command less than 8000 arguments
_LIVES = (
    0.001,
    1e10,
)  # seconds: a millisecond at least, and no more than the server can add to now
_AMOUNT = (
    f"a number, and of decimals one of at most {_DIGITS} digits: the server adds them in floating "
    "point, which would round a longer one. Cast it to bigint, of a smaller unit, or to double"
)


@dataclass(frozen=True)
class Shape:
    """How the rows of a branch are moved. A receipt carries it, so that it is moved as it was meant."""

    kind: str  # a name in MOVES of move.lua
    target: str = ""  # the one key; "" where each row names its own
    prefix: str = ""  # of keys that rows name
    order: bool = False  # the last column says which of several rows for one key wins
    expire_ms: int | None = None
    fields: tuple[str, ...] = ()  # names of the columns that follow the key
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
        """The part of the key that chooses the slot in a cluster: our own keys take the same."""
        found = re.search(r"\{([^}]+)\}", self.prefix if self.many else self.target)
        return found[1] if found else self.target or "poundlock"

    @property
    def width(self) -> int:
        values = len(self.fields) if self.kind in ("key_hash", "stream") else 1
        return int(self.keyed) + values + int(self.order)

    def to_json(self) -> str:
        """Spell it as the script and the receipt want it: what is not set is left out."""
        content = {
            "kind": self.kind,
            "width": self.width,
            "target": self.target,
            "prefix": self.prefix,
            "order": self.order,
            "float": self.float,
            "fields": list(self.fields),
            "expire_ms": self.expire_ms,
        }
        return json.dumps({name: value for name, value in content.items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Shape:
        content: dict[str, Any] = json.loads(text)
        content.pop("width")
        content["fields"] = tuple(content["fields"])
        return cls(**content)

    def of(self, names: Sequence[str], *, floats: bool) -> Shape:
        """Complete it by what the first rows show: the names of fields, and integers or not."""
        fields = tuple(name[1:] for name in names if name.startswith("."))
        return replace(self, fields=fields, float=floats)


@dataclass(frozen=True)
class Wanted:
    """Which columns of the frame a shape takes."""

    key: str | None = None  # of the hash's field, or of the key
    value: str | None = None  # None: all others
    order: str | None = None


def chosen(
    *,
    hash: str | None,
    field: str | None,
    key: str | None,
    value: str | None,
    list: str | None,
    stream: str | None,
    counter: str | None,
    prefix: str,
    operation: str,
    order_by: str | None,
    expire: float | None,
) -> tuple[Shape, Wanted]:
    """Return the one shape that these arguments of a sink mean."""
    given = [
        name
        for name, it in (
            ("hash", hash), ("key", key), ("list", list), ("stream", stream), ("counter", counter),
        )
        if it is not None
    ]  # fmt: skip
    if len(given) != 1:
        raise UsageError(
            "Redis takes exactly one of hash=, key=, list=, stream= and counter=, but has "
            + (" and ".join(given) or "none")
        )
    if given != ["key"] and not (hash or list or stream or counter):
        raise UsageError(f"{given[0]}= is empty: name the key to write to")
    if operation not in ("set", "increment"):
        raise UsageError(f"operation={operation!r}: there are 'set' and 'increment'")
    shape = given[0]
    adds = operation == "increment" or counter is not None
    _fits(shape, adds, field=field, value=value, prefix=prefix, order_by=order_by, expire=expire)
    if operation == "increment" and shape not in ("hash", "key", "counter"):
        raise UsageError(f"operation='increment' has no meaning with {shape}=")
    if hash is not None:
        return (
            Shape("hash_add" if adds else "hash_set", hash, order=order_by is not None),
            Wanted(field, value, order_by),
        )
    if key is not None:
        kind = "key_add" if adds else "key_hash" if value is None else "key_set"
        life = None if expire is None else round(expire * 1000)
        return (
            Shape(kind, prefix=prefix, order=order_by is not None, expire_ms=life),
            Wanted(key, value, order_by),
        )
    target = list or stream or counter
    assert target is not None
    return Shape("counter" if counter else shape, target), Wanted(value=value)


def _fits(shape: str, adds: bool, **given: Any) -> None:
    """Refuse what the shape has no use for, and ask for what it lacks."""
    needs = {"hash": ("field", "value"), "list": ("value",), "counter": ("value",)}.get(shape, ())
    if shape == "key" and adds:
        needs = ("value",)
    takes = {*needs, *{"key": ("value", "prefix", "expire"), "stream": ("value",)}.get(shape, ())}
    if shape in ("hash", "key") and not adds:
        takes.add("order_by")
    if adds:
        takes.discard("expire")
    problems = [f"{shape}= needs {name}=" for name in needs if given[name] is None]
    problems += [
        f"{name}= has no meaning with {shape}={' and increments' if adds else ''}"
        for name, it in given.items()
        if it not in (None, "") and name not in takes
    ]
    least, most = _LIVES
    if given["expire"] is not None and not least <= given["expire"] <= most:
        problems.append(f"expire= is a number of seconds, from {least} to {most:.0f}")
    if problems:
        raise UsageError("; ".join(problems))


def project(
    shape: Shape, wanted: Wanted, columns: Mapping[str, Column]
) -> tuple[dict[str, str], list[str]]:
    """Return the columns that the writer takes, as Spark SQL, and what is wrong with the frame.

    They are called `key`, `value` and `order`; or, where a row becomes several fields, each by the
    field's name after a dot, so that no name of the frame can be taken for one of ours.
    """
    problems: list[str] = []
    found: dict[str, str] = {}

    def take(role: str, name: str | None, spell: Any, accepted: str = "") -> None:
        if name is None:
            return
        if name not in columns:
            problems.append(f"there is no column {name!r} for the {role}")
            return
        expression = spell(columns[name])
        if expression is None:
            problems.append(
                f"column {name!r} has type {columns[name].type}, but the {role} needs {accepted}"
            )
        else:
            found[role] = expression

    take("key", wanted.key, text)
    if shape.adds:
        take("value", wanted.value, _amount, _AMOUNT)
    elif wanted.value == "json" and "json" not in columns:
        found["value"] = f"CAST({_whole_row(columns)} AS BINARY)"
    elif wanted.value is not None and shape.kind != "stream":
        take("value", wanted.value, text)
    else:
        names = [wanted.value] if wanted.value is not None else list(columns)
        for name in names:
            if name not in columns:
                problems.append(f"there is no column {name!r} for the value")
            elif name != wanted.key:
                found[f".{name}"] = text(columns[name])
        if not problems and not any(name.startswith(".") for name in found):
            problems.append(f"there is no column besides {wanted.key!r} to write")
        if len(names) > _FIELDS:
            problems.append(
                f"{len(names)} columns are more than the {_FIELDS} that one row can have as fields: "
                "select fewer, or take value='json'"
            )
    take("order", wanted.order, _order, "an integer, a date or a timestamp")
    return found, problems


def text(column: Column) -> str:
    """Spell a column as it stands in Redis: bytes."""
    sql, kind = column.sql, column.type
    if kind == "binary":
        return sql
    if kind.startswith(_NESTED):
        sql = to_json(sql, nulls=False)
    elif kind == "timestamp":
        # Two formats, for a letter inside of one would need quotes within quotes.
        time = f"date_format({sql}, 'HH:mm:ss.SSSSSSXXX')"
        sql = f"concat(date_format({sql}, 'yyyy-MM-dd'), 'T', {time})"
    elif kind == "timestamp_ntz":
        sql = f"replace(CAST({sql} AS STRING), ' ', 'T')"
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
    """Spell a number so that texts compare as the numbers do: the script compares texts."""
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


def _whole_row(columns: Mapping[str, Column]) -> str:
    def quoted(name: str) -> str:
        escaped = name.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    fields = ", ".join(f"{quoted(name)}, {column.sql}" for name, column in columns.items())
    return to_json(f"named_struct({fields})", nulls=False)
