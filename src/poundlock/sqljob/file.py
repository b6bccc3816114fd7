"""The TOML file of a SQL job: named sources, windows, patterns and sinks, and the SQL text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poundlock.core.model import checked_name
from poundlock.errors import UsageError
from poundlock.sinks.kafka.settings import SECRET
from poundlock.sqljob.statements import Statement, split_all

_TABLES = ("source", "window", "match", "sink")
_TOP = ("name", "checkpoint_location", "trigger", "sql", "sql_file", *_TABLES)
_PLACES = ("path", "directory")  # what may be relative to the file

Options = Mapping[str, Any]


@dataclass(frozen=True)
class JobFile:
    """What a file says. Nothing is opened yet."""

    name: str = "sql"
    checkpoint_location: str | None = None
    trigger: str | None = None  # Spark's processingTime; None: as fast as it goes
    statements: tuple[Statement, ...] = ()
    source: Mapping[str, Options] = field(default_factory=dict)
    window: Mapping[str, Options] = field(default_factory=dict)
    match: Mapping[str, Options] = field(default_factory=dict)
    sink: Mapping[str, Options] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of source and sink that are named, as `source.kafka`."""
        return {
            f"{where}.{options['kind']}"
            for where, tables in (("source", self.source), ("sink", self.sink))
            for options in tables.values()
        }


def read(path: str | Path) -> JobFile:
    """Read a file. Raises `UsageError` for whatever can be known to be wrong without Spark."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the file {path} cannot be read: {error}") from error
    said = _parsed(path, text)
    _known(said, _TOP, f"{path}")
    here = path.absolute().parent
    for key in ("name", "checkpoint_location"):
        if not isinstance(said.get(key), str) or not said[key]:
            raise UsageError(f'{path} does not say {key}: write {key} = "..." at its top')
    tables = {where: _tables(said, where, here) for where in _TABLES}
    _distinct(tables)
    trigger = said.get("trigger")
    if trigger is not None and not isinstance(trigger, str):
        raise UsageError(f"trigger={trigger!r}: give the time between batches, as '2 seconds'")
    return JobFile(
        name=checked_name("pipeline name", said["name"]),
        checkpoint_location=_placed(said["checkpoint_location"], here),
        trigger=trigger,
        statements=tuple(_statements(path, text, said)),
        **tables,
    )


def _parsed(path: Path, text: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # the standard library has one since Python 3.11
        try:
            toml: Any = import_module(name)
        except ModuleNotFoundError:
            continue
        try:
            return toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    raise UsageError("TOML needs Python 3.11 or later, or the package tomli: pip install tomli")


def _known(said: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    unknown = [name for name in said if name not in names]
    if unknown:
        raise UsageError(f"{where} has {unknown[0]!r}, which is not one of {', '.join(names)}")


def _tables(said: Mapping[str, Any], where: str, here: Path) -> dict[str, dict[str, Any]]:
    found = said.get(where, {})
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise UsageError(f"{where} is to be tables with names: write [{where}.NAME]")
    for name, options in found.items():
        checked_name(f"[{where}.{name}]: the name", name)
        if where in ("source", "sink") and not isinstance(options.get("kind"), str):
            raise UsageError(f'[{where}.{name}] does not say its kind: write kind = "..."')
        for key, value in _values(options):
            if where in ("source", "sink") and _is_secret(key, value):
                raise UsageError(
                    f"[{where}.{name}] holds a secret in {key!r}: put it into the environment and "
                    'write "env:NAME"'
                )
    return {
        name: {
            key: _placed(value, here) if key in _PLACES and isinstance(value, str) else value
            for key, value in options.items()
        }
        for name, options in found.items()
    }


def _values(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield key, value


def _is_secret(key: str, value: Any) -> bool:
    if not isinstance(value, str) or value.startswith(("env:", "file:")):
        return False
    if SECRET.search(key.lower()):
        return True
    try:
        return "password=" in value.replace(" ", "").lower() or bool(urlsplit(value).password)
    except ValueError:  # no URL at all
        return False


def _placed(place: str, here: Path) -> str:
    """Return a place; one without a scheme is relative to the file, from wherever that is run."""
    return place if "://" in place else str(here / place)


def _distinct(tables: Mapping[str, Mapping[str, Options]]) -> None:
    """See that a name means one thing: pipelines are named by tables and by sinks."""
    seen: dict[str, str] = {}
    for where, each in tables.items():
        for name, options in each.items():
            late = options.get("late_output")
            for one, title in (
                (name, f"[{where}.{name}]"),
                (late, f"late_output of [{where}.{name}]"),
            ):
                if not isinstance(one, str):
                    continue
                if one.lower() in seen:
                    raise UsageError(
                        f"{seen[one.lower()]} and {title} have the same name: give one another"
                    )
                seen[one.lower()] = title


def _statements(path: Path, text: str, said: Mapping[str, Any]) -> list[Statement]:
    sql, file = said.get("sql"), said.get("sql_file")
    if sql is not None and file is not None:
        raise UsageError(f"{path} has sql and sql_file: give one of them")
    if file is not None:
        place = path.absolute().parent / str(file)
        try:
            return split_all(place.read_text())
        except OSError as error:
            raise UsageError(f"sql_file of {path} cannot be read: {error}") from error
    if sql is None:
        return []
    if not isinstance(sql, str):
        raise UsageError(f'sql of {path} is to be a text: write sql = """..."""')
    at = text.find(sql)  # not there if it is written with escapes: then lines are those of the text
    return split_all(sql, text.count("\n", 0, at) + 1 if at >= 0 else 1)
