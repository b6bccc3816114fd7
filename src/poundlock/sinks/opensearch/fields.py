"""The fields that columns make in an index: their paths, their number and their conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from poundlock.core.sparksql import inside

MOST_FIELDS = 1000  # the default of index.mapping.total_fields.limit
_TEXTS = ("string", "varchar", "char")


def item_of(kind: str) -> str:
    """Return the type of what a field holds, one or several."""
    while kind.startswith("array<"):
        kind = kind[len("array<") : -1]
    return kind


def paths_of(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the type of a column and of each field of its structs, outermost first."""
    kind, name = item_of(kind), name.rstrip(".")
    yield name, kind
    if kind.startswith("struct<"):
        for field, inner in inside(kind):
            yield from paths_of(f"{name}.{field}", inner)


def above(path: str) -> list[str]:
    """Return the objects that a field is in: `a` and `a.b` for `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def find(mapping: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any] | None, str, str]:
    """Find a field in a mapping.

    Return it, or None if there is none; what happens to a new field there ("true", "false", "strict"
    or another of the server's words); and the path of a field on the way that holds no other fields,
    or nothing.
    """
    node: Mapping[str, Any] = mapping
    dynamic = str(mapping.get("dynamic", "true")).lower()
    for path_here, part in zip([*above(path), path], path.split("."), strict=True):
        fields = node.get("properties", {})
        if part not in fields:
            return None, dynamic, ""
        node = fields[part]
        if node.get("type") == "flat_object" or node.get("enabled") is False:
            return (node if path_here == path else None), "false", ""
        if path_here != path and type_of(node) not in ("object", "nested"):
            return None, dynamic, path_here
        dynamic = str(node.get("dynamic", dynamic)).lower()
    return node, dynamic, ""


def type_of(field: Mapping[str, Any]) -> str:
    """Return the type of a field in a mapping; empty if it has none."""
    return field.get("type", "object" if "properties" in field else "")


def crossed(mapping: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """Name the columns that would be both a value and an object with fields, which no index takes.

    `columns` are names and Spark's types.
    """
    if mapping.get("subobjects") is False or mapping.get("disable_objects") is True:
        return []
    values, objects = dict[str, str](), dict[str, str]()
    for name, kind in columns.items():
        for path, inner in paths_of(name, kind):
            if inner.startswith(("struct<", "map<")):
                objects.setdefault(path, name)
            elif not inner.startswith(("void", "variant")):
                values.setdefault(path, name)
            for outer in above(path):
                objects.setdefault(outer, name)
    return [
        f"columns {name!r} and {objects[path]!r} do not fit together: {path!r} would be a value and an "
        "object. Rename one"
        for path, name in values.items()
        if path in objects and _is_parsed(mapping, path)
    ]


def _is_parsed(mapping: Mapping[str, Any], path: str) -> bool:
    """Whether the server looks at what a document has there, and does not only store it."""
    field, dynamic, _ = find(mapping, path)
    return dynamic != "false" if field is None else field.get("enabled") is not False


def too_many(
    mapping: Mapping[str, Any], columns: Mapping[str, str], settings: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return why the columns surely need more fields than an index takes, or why they may.

    Rows without nulls are assumed: a null needs no field. `settings` are those of the index.
    """
    limits = settings.get("mapping", {}).get("total_fields", {})
    if str(limits.get("ignore_dynamic_beyond_limit", "false")).lower() == "true":
        return None, None
    limit = int(limits.get("limit", MOST_FIELDS))
    there, new = _count(mapping), dict[str, str]()
    for name, kind in columns.items():
        for path, inner in paths_of(name, kind):
            for each, of in (*((outer, "struct<>") for outer in above(path)), (path, inner)):
                field, dynamic, _ = find(mapping, each)
                if field is None and dynamic == "true" and not of.startswith("void"):
                    new.setdefault(each, of)
    least = there + len(new)
    # By default a text is two fields: text, and keyword below it. One that looks like a date is one.
    most = least + sum(kind.startswith(_TEXTS) for kind in new.values())
    said = f"its index.mapping.total_fields.limit is {limit}, and with the columns it would have"
    cure = "Raise the limit, map columns as flat_object, or select fewer"
    if least > limit:
        return f"{said} {least} fields. {cure}", None
    if most > limit:
        return None, (
            f"{said} up to {most} fields, because a new text makes two: a row that needs too many "
            f"stops the pipeline. Map the texts, or: {cure[0].lower()}{cure[1:]}"
        )
    return None, None


def _count(mapping: Mapping[str, Any]) -> int:
    """Count the fields of a mapping as the server does: objects and fields of fields too."""
    inner = [*mapping.get("properties", {}).values(), *mapping.get("fields", {}).values()]
    return sum(1 + _count(field) for field in inner)
