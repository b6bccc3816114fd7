"""Makes sources and sinks from the tables of a file, and checks their arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from poundlock.core.participant import Participant
from poundlock.errors import UsageError

_SOURCES = {
    "kafka": ("kafka", "read_kafka"),
    "files": ("files", "read_files"),
    "socket": ("socket", "read_socket"),
    "collection": ("collection", "from_collection"),
}
_SINKS = {
    "console": "Console",
    "delta": "Delta",
    "elasticsearch": "Elasticsearch",
    "files": "Files",
    "kafka": "Kafka",
    "mysql": "MySQL",
    "opensearch": "OpenSearch",
    "postgres": "Postgres",
    "redis": "Redis",
}


def open_source(spark: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the streaming frame of a `[source.NAME]`."""
    title = f"[source.{name}]"
    module, function = _SOURCES[_kind(title, options, _SOURCES)]
    read = getattr(import_module(f"poundlock.sources.{module}"), function)
    arguments = {key: value for key, value in options.items() if key != "kind"}
    if "rows" in arguments:
        rows = arguments["rows"]
        arguments["rows"] = [tuple(row) if isinstance(row, list) else row for row in rows]
    return _call(title, read, arguments, spark)


def make_sink(name: str, options: Mapping[str, Any]) -> Participant:
    """Return the sink of a `[sink.NAME]`, named NAME."""
    title = f"[sink.{name}]"
    kind = _SINKS[_kind(title, options, _SINKS)]
    sink = getattr(import_module("poundlock.sinks"), kind)
    arguments = {key: value for key, value in options.items() if key != "kind"}
    if "name" in arguments:
        raise UsageError(
            f"{title} has name=, but its header already names it {name!r}: leave name= out"
        )
    return _call(title, sink, {**arguments, "name": name})


def check_sink(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an unknown kind of sink."""
    _kind(f"[sink.{name}]", options, _SINKS)


def check_names(
    title: str, options: Mapping[str, Any], names: Sequence[str], needed: Sequence[str]
) -> None:
    """Raise `UsageError` for options that are unknown or missing."""
    for key in options:
        if key not in names:
            raise UsageError(f"{title} has {key!r}, which is not one of {', '.join(names)}")
    for key in needed:
        if key not in options:
            raise UsageError(f"{title} lacks {key}: it needs {', '.join(needed)}")


def text_list(title: str, key: str, value: Any) -> list[str]:
    """Return a text or a list of texts as a list."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(t, str) for t in listed):
        raise UsageError(f"{title}: {key}={value!r}: give a text, or a list of texts")
    return listed


def _kind(title: str, options: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    kind = options["kind"]
    if kind not in kinds:
        raise UsageError(f"{title}: kind={kind!r} is not one of {', '.join(sorted(kinds))}")
    return kind


def _call(
    title: str, function: Callable[..., Any], arguments: Mapping[str, Any], *first: Any
) -> Any:
    parameters = list(inspect.signature(function).parameters.values())[len(first) :]
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    names = [each.name for each in named]
    if len(named) < len(parameters):  # **options go to Spark, which checks them
        names += arguments
    check_names(title, arguments, names, [e.name for e in named if e.default is e.empty])
    try:
        return function(*first, **arguments)
    except (UsageError, TypeError, ValueError) as error:
        raise UsageError(f"{title}: {error}") from error
