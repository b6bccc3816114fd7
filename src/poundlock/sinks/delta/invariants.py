"""What a Delta table requires of rows, read before a batch is decided."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from poundlock.core.sparksql import quoted

_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"
_GENERATED = "delta.generationExpression"
_FILLED = (_GENERATED, "delta.identity.", "CURRENT_DEFAULT")
_CONSTRAINT = "delta.constraints."


@dataclass(frozen=True, slots=True)
class Invariants:
    """What the table requires of rows, and would check only after the decision. Names in lower case."""

    required: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()  # by Delta itself, if the DataFrame has no such column
    longest: Mapping[str, int] = field(default_factory=dict[str, int])
    unseen: tuple[str, ...] = ()  # columns with lengths inside
    checks: Mapping[str, str] = field(default_factory=dict[str, str])  # name to SQL

    @classmethod
    def of(cls, schema: Mapping[str, Any], properties: Mapping[str, str]) -> Invariants:
        longest, unseen, checks = dict[str, int](), list[str](), dict[str, str]()
        required, filled = set[str](), set[str]()
        for column in schema["fields"]:
            name, metadata = column["name"].lower(), column["metadata"]
            if not column["nullable"]:
                required.add(name)
            if any(word.startswith(_FILLED) for word in metadata):
                filled.add(name)
            if _GENERATED in metadata:
                checks[name] = f"{quoted(name)} <=> ({metadata[_GENERATED]})"
            if length := re.fullmatch(r"(?:var)?char\((\d+)\)", metadata.get(_LENGTH, "")):
                longest[name] = int(length[1])
            elif _LENGTH in metadata:
                unseen.append(name)
            checks |= _nested(quoted(name), column["type"])
        for name, check in properties.items():
            if name.startswith(_CONSTRAINT):
                checks[f"constraint {name.removeprefix(_CONSTRAINT)}"] = check
        return cls(frozenset(required), frozenset(filled), longest, tuple(unseen), checks)

    def broken(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Return the rows that the table will refuse, and why."""
        found = dict[int, str]()
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if name.lower() in self.required:
                found |= _at(column.is_null(), f"{name} is null, and the table requires it")
            if longest := self.longest.get(name.lower()):
                lengths = pc.call_function("utf8_length", [column])
                too_long = pc.call_function("greater", [lengths, pa.scalar(longest)])
                found |= _at(too_long.fill_null(False), f"{name} is longer than {longest}")
        return found


def _nested(place: str, kind: Any) -> dict[str, str]:
    """Return in SQL what is required inside a struct, to any depth. Delta then requires that too."""
    if not isinstance(kind, Mapping) or kind["type"] != "struct":
        return {}
    checks = dict[str, str]()
    for inner in kind["fields"]:
        there = f"{place}.{quoted(inner['name'])}"
        if not inner["nullable"]:
            checks[f"{there} NOT NULL"] = f"{there} IS NOT NULL"
        checks |= _nested(there, inner["type"])
    return checks


def names_in(kind: Any) -> Iterator[str]:
    """Yield the names of columns, and of fields to any depth, in a schema as JSON."""
    if isinstance(kind, Mapping):
        for inner in kind.get("fields", ()):
            yield inner["name"]
            yield from names_in(inner["type"])
        for part in ("elementType", "keyType", "valueType"):
            yield from names_in(kind.get(part))


def read_requirements(spark: Any, path: str) -> tuple[Any, dict[str, str], list[str]]:
    """Return a table's schema with the metadata that Spark hides, its properties and partitions."""
    log = spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)
    metadata = log.unsafeVolatileSnapshot().metadata()
    as_java = spark._jvm.scala.jdk.javaapi.CollectionConverters.asJava
    properties, partitions = metadata.configuration(), metadata.partitionColumns()
    return json.loads(metadata.schemaString()), dict(as_java(properties)), list(as_java(partitions))


def _at(mask: Any, reason: str) -> dict[int, str]:
    return dict.fromkeys(pc.call_function("indices_nonzero", [mask]).to_pylist(), reason)
