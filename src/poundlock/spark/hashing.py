"""Hashes of whole rows, which are the same in every run."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType


def parts(column: Column, kind: DataType, *, nullable: bool = True) -> list[Column]:
    """Return the arguments of `xxhash64` for a column.

    Spark's hash skips nulls on every level: without marks for nulls, (null, x) and (x, null) would be
    equal. It does not hash maps, because their order may differ. In a replay it is the same.
    """
    marks = [column.isNull()] if nullable else []
    return [_plain(column, kind), *marks]


def _plain(column: Column, kind: DataType) -> Column:
    if isinstance(kind, MapType):
        entry = StructType().add("key", kind.keyType, False).add("value", kind.valueType)
        return _plain(F.map_entries(column), ArrayType(entry, False))
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        return F.transform(column, lambda each: F.struct(_plain(each, inner), each.isNull()))
    if isinstance(kind, StructType):
        fields = [
            part
            for field in kind.fields
            for part in parts(column.getField(field.name), field.dataType, nullable=field.nullable)
        ]
        return F.when(column.isNotNull(), F.struct(*fields)) if fields else column.isNull()
    if isinstance(kind, VariantType):
        return F.to_json(column)
    return column
