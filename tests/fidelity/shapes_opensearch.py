"""The OpenSearch sink, read by urllib."""

from __future__ import annotations

import json
import math
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import KINDS, is_utf8, read_json
from poundlock.sinks import OpenSearch

from .shapes_files import read
from .shapes_sql import columns_of

_OBJECTS = ("map", "struct", "strict", "stricts", "deep")
# Fields that only keep what a document has.
_KEPT = {"type": "object", "enabled": False}
_DATE = {"type": "date", "ignore_malformed": True}
_FIELDS: dict[str, Mapping[str, Any]] = {
    "long": {"type": "long"},
    "double": {"type": "double"},
    "float": {"type": "float"},
    "boolean": {"type": "boolean"},
    "text": {"type": "text"},
    "keyword": {"type": "keyword", "ignore_above": 8191},
    "binary": {"type": "binary"},
    "date": _DATE,
    "object": _KEPT,
}


def _no_text(value: Any) -> bool:
    return not is_utf8(value)


def _infinite(value: float) -> bool:
    return not math.isfinite(value)


LINES = [
    Line("boolean", "boolean", "exact", columns=(Column("boolean", "boolean"),)),
    Line(
        "tinyint, smallint, int, bigint",
        "an integer type at least as wide",
        "exact",
        columns=tuple(Column(kind, "long") for kind in ("tinyint", "smallint", "int", "bigint")),
    ),
    Line(
        "float, double",
        "float (float only), double",
        "exact",
        "NaN and infinities",
        columns=(
            Column("float", "float", refuses=_infinite),
            Column("float", "double", refuses=_infinite),
            Column("double", "double", refuses=_infinite),
        ),
    ),
    Line(
        "decimal",
        "double, scaled_float",
        "exact in the document; searches see the number that the field can hold",
        columns=(
            Column("decimal10", "double"),
            Column("decimal38", "double"),
            Column("fraction38", "double"),
        ),
    ),
    Line(
        "string",
        "keyword, text",
        "exact",
        "not UTF-8",
        columns=(
            Column("string", "keyword", refuses=_no_text),
            Column("string", "text", refuses=_no_text),
        ),
    ),
    Line("binary", "binary", "exact, in Base64", columns=(Column("binary", "binary"),)),
    Line(
        "date, timestamp, timestamp_ntz",
        "date; with `ignore_malformed` for years beyond 9999",
        "exact in the document; searches see milliseconds",
        columns=tuple(Column(kind, "date") for kind in ("date", "timestamp", "timestamp_ntz")),
    ),
    Line(
        "interval",
        "keyword",
        "exact, as text",
        columns=(Column("daytime", "keyword"), Column("yearmonth", "keyword")),
    ),
    Line(
        "array, map, struct, variant",
        "arrays and objects; a variant only without a field",
        "exact; a null field is left out",
        "texts that are not UTF-8; keys that cannot be names of fields",
        columns=(
            Column("array", "keyword", refuses=_no_text),
            Column("times", "date"),
            Column("numbers", "double"),
            *(Column(kind, "object", refuses=_no_text) for kind in _OBJECTS),
            Column("variant"),
        ),
    ),
]


class OpenSearchShape(Shape):
    """An index with a field for each pair of types."""

    name = "opensearch"

    def __init__(self, url: str):
        self.url, self.columns, self.index = url, columns_of(LINES), ""
        self.names_column = False  # the errors say only what is wrong with the row

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return read_json(answer.read())

    def sink(self) -> OpenSearch:
        self.index = f"fidelity-{uuid.uuid4().hex[:8]}"
        fields = {it.name: _FIELDS[it.type] for it in self.columns if it.type}
        fields[NUMBER] = {"type": "long"}
        mapping = {"dynamic": False, "properties": fields}
        self._ask("PUT", self.index, {"mappings": mapping})
        return OpenSearch(self.index, url=self.url, id=NUMBER, name=self.name)

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        self._ask("POST", f"{self.index}/_refresh")
        hits = self._ask("GET", f"{self.index}/_search", {"size": 10_000})["hits"]["hits"]
        return {int(hit["_id"]): self._values(hit["_source"]) for hit in hits}

    def _values(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            it.name: read(KINDS[it.kind].type.of_json, document.get(it.name)) for it in self.columns
        }


def opensearch(url: str) -> list[Shape]:
    """Return the shapes of the sink."""
    return [OpenSearchShape(url)]


PAGE = {"field": LINES}
