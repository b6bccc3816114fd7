"""The Files sink: Parquet, JSON and CSV, read by pyarrow, json and a parser of CSV."""

from __future__ import annotations

import datetime as dt
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import FIRST_TIME, KINDS, LAST_TIME, is_utf8, read_json
from poundlock.sinks import Files
from poundlock.sinks.files import committed

_NUMBERS = ("tinyint", "smallint", "int", "bigint")
_DECIMALS = ("decimal10", "decimal38", "fraction38")
_TIMES = ("date", "timestamp", "timestamp_ntz")
_NESTED = ("array", "times", "map", "numbers", "struct", "strict", "stricts", "deep")


def _all(*kinds: str, **options: Any) -> tuple[Column, ...]:
    return tuple(Column(kind, **options) for kind in kinds)


def _no_text(value: Any) -> bool:
    return not is_utf8(value)


PARQUET = [
    Line("boolean", "BOOLEAN", "exact", columns=_all("boolean")),
    Line("tinyint, smallint, int, bigint", "INT32, INT64", "exact", columns=_all(*_NUMBERS)),
    Line("float, double", "FLOAT, DOUBLE", "exact", columns=_all("float", "double")),
    Line("decimal", "DECIMAL", "exact", columns=_all(*_DECIMALS)),
    Line("string", "STRING", "exact; bytes that are not UTF-8 too", columns=_all("string")),
    Line("binary", "BYTE_ARRAY", "exact", columns=_all("binary")),
    Line("date", "DATE", "exact, of any year", columns=_all("date")),
    Line(
        "timestamp, timestamp_ntz",
        "TIMESTAMP in microseconds",
        "exact, of any year",
        columns=_all("timestamp", "timestamp_ntz"),
    ),
    Line("array, map, struct", "LIST, MAP, groups", "exact", columns=_all(*_NESTED)),
    Line("interval, variant", "none", "refused at start"),
]
JSON = [
    Line(
        "boolean, integers, decimal",
        "number",
        "exact",
        columns=_all("boolean", *_NUMBERS, *_DECIMALS),
    ),
    Line(
        "float, double",
        "number; NaN and infinities are text",
        "exact",
        columns=_all("float", "double"),
    ),
    Line("string", "text", "exact", "not UTF-8", columns=_all("string", refuses=_no_text)),
    Line("binary", "text in Base64", "exact", columns=_all("binary")),
    Line(
        "date, timestamp, timestamp_ntz",
        "text; a timestamp has an offset",
        "exact, of any year",
        columns=_all(*_TIMES),
    ),
    Line("interval", "text", "exact", columns=_all("daytime", "yearmonth")),
    Line(
        "array, map, struct",
        "array, object",
        "exact; a null field is left out",
        "texts that are not UTF-8",
        columns=_all(*_NESTED, refuses=_no_text),
    ),
    Line("variant", "none", "refused at start"),
]
CSV = [
    Line(
        "boolean, integers, decimal",
        "text",
        "exact",
        columns=_all("boolean", *_NUMBERS, *_DECIMALS),
    ),
    Line("float, double", "text", "exact", columns=_all("float", "double")),
    Line(
        "string",
        'text; an empty one is `""`, and a null is nothing',
        "exact",
        "not UTF-8",
        columns=_all("string", refuses=_no_text),
    ),
    Line(
        "date, timestamp, timestamp_ntz",
        "text; a timestamp has an offset",
        "exact, of any year",
        columns=_all(*_TIMES),
    ),
    Line("binary, interval, array, map, struct, variant", "none", "refused at start"),
]


def no_directory(value: bytes) -> bool:
    return (
        not is_utf8(value)
        or value in (b"", b"__HIVE_DEFAULT_PARTITION__")
        or len("string=") + len(_escaped(value.decode())) > 255
    )


def _escaped(text: str) -> bytes:
    special = r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]"
    return re.sub(special, lambda found: f"%{ord(found[0]):02X}", text).encode()


def read_again(micros: int, zone: str) -> int | None:
    """Return which time a reader takes a local time without offset for; None if it cannot tell."""
    if not FIRST_TIME + 86_400_000_000 <= micros <= LAST_TIME - 86_400_000_000:
        return micros
    local = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(0, 0, micros)
    found = local.astimezone(ZoneInfo(zone)).replace(fold=0)
    return (found - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(0, 0, 1)


PARTITIONS = [
    Line("boolean", "text", "exact", columns=_all("boolean")),
    Line("tinyint, smallint, int, bigint", "text", "exact", columns=_all(*_NUMBERS)),
    Line("float, double, decimal", "text", "exact", columns=_all("float", "double", "decimal38")),
    Line(
        "string",
        "text",
        "exact",
        "not UTF-8; empty, or `__HIVE_DEFAULT_PARTITION__`, which mean null; too long for a name",
        columns=_all("string", refuses=no_directory),
    ),
    Line(
        "date, timestamp_ntz", "text", "exact, of any year", columns=_all("date", "timestamp_ntz")
    ),
    Line(
        "timestamp",
        "text in the session's time zone, without offset",
        "exact",
        "the second of the two hours that a clock shows twice",
        columns=_all("timestamp"),
    ),
    Line("binary, interval, array, map, struct, variant", "none", "refused at start"),
]


class FilesShape(Shape):
    """All columns in files of one format."""

    def __init__(self, place: Path, format: str, lines: Sequence[Line]):
        self.name, self.format, self.place = f"files-{format}", format, place / format
        self.columns = [column for line in lines for column in line.columns]

    def sink(self) -> Files:
        return Files(self.place, format=self.format, name=self.name)

    def files(self) -> list[Path]:
        return [Path(uri.removeprefix("file://")) for uri in committed(str(self.place))]

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        readers = {"parquet": self._parquet, "json": self._json, "csv": self._csv}
        rows = [row for file in self.files() for row in readers[self.format](file)]
        return {row[NUMBER]: row for row in rows}

    def _parquet(self, file: Path) -> Iterator[dict[str, Any]]:
        table = pq.read_table(file, partitioning=None)
        columns = {NUMBER: table.column(NUMBER).to_pylist()}
        columns |= {it.name: KINDS[it.kind].read(table.column(it.name)) for it in self.columns}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def _json(self, file: Path) -> Iterator[dict[str, Any]]:
        for line in file.read_bytes().removesuffix(b"\n").split(b"\n"):
            found = read_json(line)
            row = {
                it.name: read(KINDS[it.kind].type.of_json, found.get(it.name))
                for it in self.columns
            }
            yield {NUMBER: int(found[NUMBER]), **row}

    def _csv(self, file: Path) -> Iterator[dict[str, Any]]:
        for number, *texts in parse_csv(file.read_bytes().decode()):
            assert number is not None
            row = {
                it.name: read(KINDS[it.kind].type.of_text, text)
                for it, text in zip(self.columns, texts, strict=True)
            }
            yield {NUMBER: int(number), **row}


def read(parse: Any, text: Any) -> Any:
    """Return the value of a text, or the error if it has none: then it is not what went in."""
    try:
        return None if text is None else parse(text)
    except (ValueError, KeyError, ArithmeticError, AttributeError) as error:
        return error


def parse_csv(text: str) -> Iterator[list[str | None]]:
    """Yield the fields of each line. A field that has no character, not even a quote, is null."""
    fields = re.compile(r'(?:"((?:[^"\\]|\\.)*)"|([^,\n]*))(,|\n)', re.DOTALL)
    row: list[str | None] = []
    place = 0
    while place < len(text):
        found = fields.match(text, place)
        assert found is not None, f"not CSV: {text[place : place + 80]!r}"
        quoted, plain, end = found.groups()
        row.append(
            re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
            if quoted is not None
            else plain or None
        )
        if end == "\n":
            yield row
            row = []
        place = found.end()


class PartitionShape(Shape):
    """Parquet files in directories that are named by one column."""

    def __init__(self, place: Path, column: Column):
        self.columns = [column]
        self.name = f"files-by-{column.name.replace('_', '-')}"
        self.place = place / self.name

    def refuses(self, row: Mapping[str, Any]) -> list[Column]:
        (column,) = self.columns
        value = row.get(column.kind)
        if column.kind == "timestamp" and value is not None:
            return [column] if read_again(value, self.zone) != value else []
        return super().refuses(row)

    def sink(self) -> Files:
        return Files(self.place, partition_by=self.columns[0].name, name=self.name)

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        (column,) = self.columns
        for uri in committed(str(self.place)):
            path = urllib.parse.unquote(uri.removeprefix("file://"))
            file = Path(path) if Path(path).exists() else Path(uri.removeprefix("file://"))
            _, _, text = file.parent.name.partition("=")
            text = urllib.parse.unquote(text)
            value = None if text == "__HIVE_DEFAULT_PARTITION__" else read(self._value, text)
            for number in pq.read_table(file, partitioning=None).column(NUMBER).to_pylist():
                found[number] = {column.name: value}
        return found

    def _value(self, text: str) -> Any:
        kind = KINDS[self.columns[0].kind].type
        if kind.name != "timestamp":
            return kind.of_text(text)
        local = KINDS["timestamp_ntz"].type.of_text(text)
        year = dt.datetime(1970, 1, 1) + dt.timedelta(0, 0, local) if _in_python(local) else None
        if year is None:
            return local - offset_outside(local, self.zone)
        there = year.replace(tzinfo=ZoneInfo(self.zone))
        return local - there.utcoffset() // dt.timedelta(0, 0, 1)  # type: ignore[operator]


def _in_python(micros: int) -> bool:
    return FIRST_TIME <= micros <= LAST_TIME


def offset_outside(local: int, zone: str) -> int:
    """Return a zone's offset in a year that Python does not have: the first one, or that of summers."""
    year = 1 if local < 0 else 9999
    cycle = 146_097 * 86_400_000_000  # 400 years, after which the calendar repeats
    if year == 1:
        moment = dt.datetime(1, 1, 3)
    else:
        inside = local
        while inside > LAST_TIME:
            inside -= cycle
        moment = dt.datetime(1970, 1, 1) + dt.timedelta(0, 0, inside)
    offset = moment.replace(tzinfo=ZoneInfo(zone)).utcoffset()
    assert offset is not None
    return offset // dt.timedelta(0, 0, 1)


def files(place: Path) -> list[Shape]:
    """Return the shapes of the sink."""
    return [
        FilesShape(place, "parquet", PARQUET),
        FilesShape(place, "json", JSON),
        FilesShape(place, "csv", CSV),
        *(PartitionShape(place, column) for line in PARTITIONS for column in line.columns),
    ]


PAGE = {"Parquet": PARQUET, "JSON": JSON, "CSV": CSV, "Partition": PARTITIONS}
