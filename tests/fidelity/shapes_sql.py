"""Tables of databases: what their shapes share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import KINDS, read_json, single

from .shapes_files import read

GONE = "gone"


def columns_of(lines: Sequence[Line], without: Iterable[str] = ()) -> list[Column]:
    leave = set(without)
    return [it for line in lines for it in line.columns if it.kind not in leave]


class TableShape(Shape):
    """A table with a column for each pair of types. With `key`, rows are replaced and deleted by it."""

    def __init__(self, name: str, lines: Sequence[Line], *, key: str | None = None, **options: Any):
        self.name, self.key, self.options = name, key, options
        self.table = name.replace("-", "_")
        self.columns = columns_of(lines)

    @abstractmethod
    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement with a client of the database."""

    @abstractmethod
    def shown(self, column: Column) -> str:
        """Return the expression that makes a column readable for Python."""

    def create(self) -> None:
        """Create the table. Rows that are to be deleted are in it already."""
        kinds = ", ".join(f"{it.name} {it.type}" for it in self.columns)
        key = " PRIMARY KEY" if self.key == NUMBER else ""
        self.execute(f"DROP TABLE IF EXISTS {self.table}")
        self.execute(f"CREATE TABLE {self.table} ({NUMBER} bigint{key}, {kinds})")
        there = [f"({row[NUMBER]})" for row in self.rows if self.deletes(row)]
        if there:
            self.execute(f"INSERT INTO {self.table} ({NUMBER}) VALUES {', '.join(there)}")

    def deletes(self, row: Mapping[str, Any]) -> bool:
        return self.key == NUMBER and row[NUMBER] % 5 == 0 and not self.refuses(row)

    def select(self) -> list[str]:
        if self.key is None:
            return super().select()
        gone = [str(row[NUMBER]) for row in self.rows if self.takes(row) and self.deletes(row)]
        return [*super().select(), f"{NUMBER} IN ({', '.join(gone)}) AS {GONE}"]

    def expects(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return None if self.deletes(row) else super().expects(row)

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        wanted = ", ".join([NUMBER, *map(self.shown, self.columns)])
        return {
            row[0]: {
                it.name: read(lambda value, it=it: self.value(it, value), value)
                for it, value in zip(self.columns, row[1:], strict=True)
            }
            for row in self.execute(f"SELECT {wanted} FROM {self.table}")
        }

    def value(self, column: Column, shown: Any) -> Any:
        """Return the value that was read."""
        type_ = KINDS[column.kind].type
        if type_.parts or type_.name == "variant":
            return type_.of_json(read_json(shown))
        if type_.name == "string":
            return shown.encode() if isinstance(shown, str) else bytes(shown)
        if type_.name == "binary":
            return bytes(shown)
        if type_.name == "boolean":
            return bool(shown)
        if column.type in ("float4", "float"):  # of which clients show few digits
            return single(float(shown))
        return type_.of_text(shown) if isinstance(shown, str) and type_.name == "decimal" else shown


def as_json(change: Callable[[Any], Any] = lambda it: it) -> Callable[[bytes], bytes]:
    """Return what a system that rewrites JSON makes of a text, in a form that can be compared."""
    return lambda text: json.dumps(change(json.loads(text)), sort_keys=True).encode()
