"""From the tables of a file to sources and sinks: each is made by its own function, checked by name."""

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
    given = {key: value for key, value in options.items() if key != "kind"}
    if "rows" in given:
        given["rows"] = [_row(row) for row in given["rows"]]
    return _called(title, read, given, spark)


def make_sink(name: str, options: Mapping[str, Any]) -> Participant:
    """Return the sink of a `[sink.NAME]`, whose name in its pipeline is this one."""
    title = f"[sink.{name}]"
    kind = _SINKS[_kind(title, options, _SINKS)]
    sink = getattr(import_module("poundlock.sinks"), kind)
    given = {key: value for key, value in options.items() if key != "kind"}
    if "name" in given:
        raise UsageError(f"{title} gives a name=: it is called {name!r} by its table already")
    return _called(title, sink, {**given, "name": name})


def check_sink(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a kind of sink that there is not."""
    _kind(f"[sink.{name}]", options, _SINKS)


def take(
    title: str, options: Mapping[str, Any], names: Sequence[str], needed: Sequence[str]
) -> None:
    """Raise `UsageError` for options that there are not, or that are missing."""
    for key in options:
        if key not in names:
            raise UsageError(f"{title} has {key!r}, which is not one of {', '.join(names)}")
    for key in needed:
        if key not in options:
            raise UsageError(f"{title} does not say {key}: it needs {', '.join(needed)}")


def texts(title: str, key: str, value: Any) -> list[str]:
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


def _called(title: str, function: Callable[..., Any], given: Mapping[str, Any], *first: Any) -> Any:
    parameters = list(inspect.signature(function).parameters.values())[len(first) :]
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    free = len(named) < len(parameters)  # further options go to Spark, which knows them
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    take(title, given, [*named, *(given if free else ())], needed)
    try:
        return function(*first, **given)
    except UsageError as error:
        raise UsageError(f"{title}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{title}: {error}") from error


def _row(row: Any) -> Any:
    return tuple(row) if isinstance(row, list) else row
