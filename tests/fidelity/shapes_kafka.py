"""The Kafka sink, read by confluent-kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import oracle
from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import KINDS, is_utf8, read_json
from poundlock.sinks import Kafka

from .shapes_files import JSON, read
from .shapes_sql import columns_of

_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "date")
_DECIMALS = ("decimal10", "decimal38", "fraction38")
_TIMES = ("timestamp", "timestamp_ntz")


def _no_text(value: Any) -> bool:
    return not is_utf8(value)


def _milliseconds(value: int) -> int:
    return value // 1000 * 1000


KEYS = [
    Line(
        "string, binary",
        "bytes",
        "exact; bytes that are not UTF-8 too",
        columns=(Column("string"), Column("binary")),
    ),
    Line(
        "boolean, integers, float, double, decimal, date",
        "text",
        "exact",
        columns=tuple(Column(kind) for kind in (*_AS_TEXT, *_DECIMALS)),
    ),
    Line(
        "timestamp, timestamp_ntz",
        "text; a timestamp has an offset",
        "exact",
        columns=tuple(Column(kind) for kind in _TIMES),
    ),
    Line("null", "a message without a key", "exact"),
    Line("interval, array, map, struct, variant", "none", "refused at start"),
]
VALUES = [
    Line(
        "string, binary",
        "bytes",
        "exact; bytes that are not UTF-8 too",
        columns=(Column("string"), Column("binary")),
    ),
    Line(
        "null", "a message without a value, which deletes its key from a compacted topic", "exact"
    ),
    Line("any other", 'none, but for `value="json"`', "refused at start"),
]
HEADERS = [
    Line(
        "array of structs (key: string, value: binary)",
        "headers, in the same order",
        "exact; a null value too",
        "a header whose key is null or not UTF-8",
        columns=(Column("binary", named="header_value"), Column("json", named="header_key")),
    )
]
ROWS = [
    *(line for line in JSON if line.system != "none"),
    Line("variant", "what it is in JSON", "exact", columns=(Column("variant"),)),
]
TIMESTAMPS = [
    Line(
        "timestamp, bigint in milliseconds",
        "the timestamp of the message, in milliseconds",
        "microseconds are cut off",
        "in or before the first millisecond of 1970",
        columns=(Column("timestamp", "", _milliseconds, lambda it: it < 1000),),
    )
]


class KafkaShape(Shape):
    """A topic."""

    def __init__(
        self,
        kafka: oracle.Kafka,
        name: str,
        columns: Sequence[Column],
        select: Callable[[Column], list[str]],
        number_of: Callable[[oracle.Row], bytes | None],
        value_of: Callable[[oracle.Row], bytes | None],
        **options: Any,
    ):
        self.kafka, self.name, self.columns = kafka, name, columns
        self._select, self._number, self._value = select, number_of, value_of
        self.options = options
        self.topic = ""

    def sink(self) -> Kafka:
        anyhow = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
        self.topic = self.kafka.create(config=anyhow)
        servers = self.kafka.servers
        return Kafka(self.topic, bootstrap_servers=servers, name=self.name, **self.options)

    def select(self) -> list[str]:
        return self._select(self.columns[0])

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        return {
            int(self._number(row) or b""): self.values(row) for row in self.kafka.rows(self.topic)
        }

    def values(self, row: oracle.Row) -> Mapping[str, Any]:
        (column,) = self.columns
        return {column.name: of_bytes(column, self._value(row))}


def of_bytes(column: Column, found: bytes | None) -> Any:
    """Return the value that a system keeps as bytes."""
    type_ = KINDS[column.kind].type
    if found is None or type_.name in ("string", "binary"):
        return found
    if type_.parts or type_.name == "variant":
        return read(lambda it: type_.of_json(read_json(it)), found)
    return read(lambda it: type_.of_text(it.decode()), found)


class JsonShape(KafkaShape):
    """Whole rows as JSON."""

    def __init__(self, kafka: oracle.Kafka):
        columns = columns_of(ROWS)
        super().__init__(
            kafka,
            "kafka-json",
            columns,
            lambda _: [],
            lambda it: it.key,
            lambda _: None,
            key=NUMBER,
            value="json",
        )

    def select(self) -> list[str]:
        return Shape.select(self)

    def values(self, row: oracle.Row) -> Mapping[str, Any]:
        found = read_json(row.value or b"")
        return {
            it.name: read(KINDS[it.kind].type.of_json, found.get(it.name)) for it in self.columns
        }


class HeadersShape(KafkaShape):
    """Two headers of each row. The second one is null if the value is."""

    def __init__(self, kafka: oracle.Kafka):
        columns = [it for line in HEADERS for it in line.columns]
        super().__init__(
            kafka, "kafka-headers", columns, lambda _: [], lambda it: it.value, lambda _: None
        )

    def select(self) -> list[str]:
        header = "named_struct('key', {}, 'value', {})"
        first = header.format("coalesce(json, '')", "binary")
        second = header.format("'again'", "CAST(json AS BINARY)")
        return [f"CAST({NUMBER} AS STRING) AS value", f"array({first}, {second}) AS headers"]

    def values(self, row: oracle.Row) -> Mapping[str, Any]:
        (key, value), (again, text) = row.headers
        kept = again == "again" and (text or b"") == key.encode()
        return {"header_value": value, "header_key": text if kept else ValueError(row.headers)}


def _number_text(alias: str) -> str:
    return f"CAST({NUMBER} AS STRING) AS {alias}"


def kafka(broker: oracle.Kafka) -> list[Shape]:
    """Return the shapes of the sink."""

    def as_key(column: Column) -> list[str]:
        return [f"`{column.kind}` AS key", _number_text("value")]

    def as_value(column: Column) -> list[str]:
        return [_number_text("key"), f"`{column.kind}` AS value"]

    def as_time(column: Column) -> list[str]:
        return [_number_text("value"), f"`{column.kind}` AS timestamp"]

    keys = (
        KafkaShape(
            broker,
            f"kafka-key-{it.kind.replace('_', '-')}",
            [it],
            as_key,
            lambda row: row.value,
            lambda row: row.key,
        )
        for line in KEYS
        for it in line.columns
    )
    values = (
        KafkaShape(
            broker,
            f"kafka-value-{it.kind}",
            [it],
            as_value,
            lambda row: row.key,
            lambda row: row.value,
        )
        for line in VALUES
        for it in line.columns
    )
    return [JsonShape(broker), HeadersShape(broker), TimeShape(broker, as_time), *keys, *values]


class TimeShape(KafkaShape):
    """The timestamp of a message. A null is the time of writing."""

    def __init__(self, kafka: oracle.Kafka, select: Callable[[Column], list[str]]):
        columns = [it for line in TIMESTAMPS for it in line.columns]
        super().__init__(
            kafka, "kafka-timestamp", columns, select, lambda it: it.value, lambda _: None
        )

    def takes(self, row: Mapping[str, Any]) -> bool:
        return row.get("timestamp") is not None

    def values(self, row: oracle.Row) -> Mapping[str, Any]:
        return {"timestamp": row.timestamp_ms * 1000}


PAGE = {
    "key": KEYS,
    "value": VALUES,
    'value="json"': ROWS,
    "headers": HEADERS,
    "timestamp": TIMESTAMPS,
}
