"""Dead letters: the rows that a sink refuses, as JSON. Here it refuses all of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poundlock.compliance.fidelity import NUMBER, Line, Shape
from poundlock.compliance.values import KINDS, Type, read_json
from poundlock.sinks import Files

from .shapes_files import PARQUET, read
from .shapes_sql import columns_of

_TEXT = "text; `base64:` and Base64, if it is not UTF-8"
LINES = [
    Line(
        "boolean, integers, float, double",
        "a number, true or false; NaN and Infinity are bare",
        "exact",
    ),
    Line(
        "decimal, date, timestamp, timestamp_ntz",
        "text; a timestamp has an offset",
        "exact, of any year",
    ),
    Line("string, binary", _TEXT, "exact"),
    Line("array, map, struct", "array, array of pairs, object", "exact"),
]


class Letters(Shape):
    """Each row has a partition that no directory can have."""

    name = "letters"
    from_letters = True
    names_column = False

    def __init__(self, place: Path):
        self.place, self.columns = place / "letters", columns_of(PARQUET)

    def select(self) -> list[str]:
        return [*super().select(), "CAST(X'FF' AS STRING) AS bad"]

    def sink(self) -> Files:
        return Files(self.place, partition_by="bad", name=self.name)

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        rows = (read_json(it["row"]) for it in self.letters)
        return {int(row[NUMBER]): self._values(row) for row in rows}

    def _values(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            it.name: read(lambda found, it=it: _value(KINDS[it.kind].type, found), row[it.name])
            for it in self.columns
        }


def _value(type_: Type, found: Any) -> Any:
    """Return the value that a letter has, whose forms are Python's and not Spark's."""
    inner = list(type_.parts.values())
    if found is None:
        return None
    if type_.name == "array":
        return [_value(inner[0], it) for it in found]
    if type_.name == "map":
        return [(_value(inner[0], key), _value(inner[1], it)) for key, it in found]
    if type_.name == "struct":
        return {name: _value(it, found[name]) for name, it in type_.parts.items()}
    if type_.name in ("string", "binary"):
        head, colon, rest = found.partition(":")
        return base64.b64decode(rest) if head + colon == "base64:" else found.encode()
    return type_.of_json(found)


def letters(place: Path) -> list[Shape]:
    """Return the shapes of dead letters."""
    return [Letters(place)]


PAGE = {"JSON": LINES}
