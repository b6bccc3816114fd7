"""The Redis sink, read by redis-py."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import KINDS, is_utf8, read_json
from poundlock.sinks import Redis

from .shapes_files import JSON, read
from .shapes_kafka import of_bytes
from .shapes_sql import columns_of

_NUMBERS = ("tinyint", "smallint", "int", "bigint")
_NESTED = ("array", "times", "map", "numbers", "struct", "strict", "stricts", "deep")


def _no_text(value: Any) -> bool:
    return not is_utf8(value)


def _columns(*kinds: str, **options: Any) -> tuple[Column, ...]:
    return tuple(Column(kind, **options) for kind in kinds)


VALUES = [
    Line(
        "string, binary",
        "bytes",
        "exact; bytes that are not UTF-8 too",
        columns=_columns("string", "binary"),
    ),
    Line(
        "boolean, integers, float, double, decimal",
        "text",
        "exact",
        columns=_columns(
            "boolean", *_NUMBERS, "float", "double", "decimal10", "decimal38", "fraction38"
        ),
    ),
    Line(
        "date, timestamp, timestamp_ntz, interval",
        "text; a timestamp has an offset",
        "exact, of any year",
        columns=_columns("date", "timestamp", "timestamp_ntz", "daytime", "yearmonth"),
    ),
    Line(
        "array, map, struct",
        "JSON, without null fields",
        "exact",
        "texts inside that are not UTF-8",
        columns=_columns(*_NESTED, refuses=_no_text),
    ),
]
ROWS = [line for line in JSON if line.system != "none"]
AMOUNTS = [
    Line(
        "tinyint, smallint, int, bigint",
        "a 64-bit integer",
        "exact",
        "null",
        columns=_columns(*_NUMBERS),
    ),
    Line(
        "float, double, decimal of at most 15 digits",
        "a number",
        "added by the server in floating point",
        "null; NaN and infinities",
    ),
    Line("any other", "none", "refused at start"),
]


class RedisShape(Shape):
    """Keys below a name that no other run has."""

    def __init__(self, url: str, name: str, columns: Sequence[Column]):
        self.url, self.name, self.columns = url, name, columns
        self.place = ""

    @property
    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def sink(self) -> Redis:
        self.place = f"{self.name}-{uuid.uuid4().hex[:6]}"
        return Redis(url=self.url, name=self.name, **self.target())

    def target(self) -> dict[str, Any]:
        raise NotImplementedError

    def number_of(self, key: bytes) -> int:
        return int(key.rpartition(b":")[2])

    def only(self, found: bytes | None) -> Mapping[str, Any]:
        (column,) = self.columns
        return {column.name: of_bytes(column, found)}


class KeyHashes(RedisShape):
    """A hash for each row."""

    def target(self) -> dict[str, Any]:
        return {"key": NUMBER, "prefix": f"{self.place}:"}

    def expects(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return (
            super().expects(row)
            if any(row.get(it.kind) is not None for it in self.columns)
            else None
        )

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        client = self.client
        found = {self.number_of(key): client.hgetall(key) for key in client.keys(f"{self.place}:*")}
        return {
            number: {it.name: of_bytes(it, values.get(it.name.encode())) for it in self.columns}
            for number, values in found.items()
        }


class Hash(RedisShape):
    """A field of one hash for each row; with `adds`, an increment."""

    def __init__(self, url: str, name: str, column: Column, *, adds: bool = False):
        super().__init__(url, name, [column])
        self.adds = self.refuses_nulls = adds

    def target(self) -> dict[str, Any]:
        more = {"operation": "increment"} if self.adds else {}
        return {"hash": self.place, "field": NUMBER, "value": self.columns[0].name, **more}

    def expects(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return super().expects(row) if row.get(self.columns[0].kind) is not None else None

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        return {int(no): self.only(value) for no, value in self.client.hgetall(self.place).items()}


class Keys(Hash):
    """A key for each row; with `adds`, an increment."""

    def target(self) -> dict[str, Any]:
        more = {"operation": "increment"} if self.adds else {}
        return {"key": NUMBER, "prefix": f"{self.place}:", "value": self.columns[0].name, **more}

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        client = self.client
        keys = client.keys(f"{self.place}:*")
        return {self.number_of(key): self.only(client.get(key)) for key in keys}


class Fields(RedisShape):
    """The value is the name of the field. The greatest number wins."""

    def target(self) -> dict[str, Any]:
        return {
            "hash": self.place,
            "field": self.columns[0].name,
            "value": NUMBER,
            "order_by": NUMBER,
        }

    def takes(self, row: Mapping[str, Any]) -> bool:
        return row.get(self.columns[0].kind) is not None

    def expects(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        (column,) = self.columns
        same = [it[NUMBER] for it in self.rows if it.get(column.kind) == row[column.kind]]
        return super().expects(row) if row[NUMBER] == same[-1] else None

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        return {int(no): self.only(key) for key, no in self.client.hgetall(self.place).items()}


class KeyNames(Fields):
    """The value is the name of the key."""

    def target(self) -> dict[str, Any]:
        name = self.columns[0].name
        return {"key": name, "prefix": f"{self.place}:", "value": NUMBER, "order_by": NUMBER}

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        client, start = self.client, f"{self.place}:".encode()
        keys = client.keys(f"{self.place}:*")
        return {int(client.get(key)): self.only(key.removeprefix(start)) for key in keys}


class JsonList(RedisShape):
    """Whole rows as JSON, in a list."""

    def target(self) -> dict[str, Any]:
        return {"list": self.place, "value": "json"}

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        rows = [read_json(it) for it in self.client.lrange(self.place, 0, -1)]
        return {int(row[NUMBER]): self.values(row) for row in rows}

    def values(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {it.name: read(KINDS[it.kind].type.of_json, row.get(it.name)) for it in self.columns}


class Listed(RedisShape):
    """A value of each row, in a list that has the order of the rows: one task writes them."""

    refuses_nulls = True

    def target(self) -> dict[str, Any]:
        return {"list": self.place, "value": self.columns[0].name}

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        kind = self.columns[0].kind
        numbers = [row[NUMBER] for row in self.rows if row.get(kind) is not None]
        found = self.client.lrange(self.place, 0, -1)
        assert len(found) == len(numbers)
        return {no: self.only(value) for no, value in zip(numbers, found, strict=True)}


class Stream(RedisShape):
    """An entry for each row. A null has no field."""

    def target(self) -> dict[str, Any]:
        return {"stream": self.place}

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        entries = [values for _, values in self.client.xrange(self.place)]
        return {
            int(values[NUMBER.encode()]): {
                it.name: of_bytes(it, values.get(it.name.encode())) for it in self.columns
            }
            for values in entries
        }


def redis_shapes(url: str) -> list[Shape]:
    """Return the shapes of the sink."""
    every, amounts = columns_of(VALUES), columns_of(AMOUNTS)
    text, binary, time = (Column(kind) for kind in ("string", "binary", "timestamp"))
    return [
        KeyHashes(url, "redis-keys", every),
        Stream(url, "redis-stream", every),
        JsonList(url, "redis-json", columns_of(ROWS)),
        *(Listed(url, f"redis-list-{it.kind}", [it]) for it in (text, binary)),
        *(Hash(url, f"redis-hash-{it.kind}", it) for it in (text, binary, time)),
        *(Keys(url, f"redis-key-{it.kind}", it) for it in (text, binary)),
        *(Fields(url, f"redis-field-{it.kind}", [it]) for it in (text, binary, time)),
        *(KeyNames(url, f"redis-name-{it.kind}", [it]) for it in (text, binary)),
        *(Hash(url, f"redis-hash-add-{it.kind}", it, adds=True) for it in amounts),
        *(Keys(url, f"redis-key-add-{it.kind}", it, adds=True) for it in amounts),
    ]


PAGE = {"Redis": VALUES, 'value="json"': ROWS, "increments": AMOUNTS}
