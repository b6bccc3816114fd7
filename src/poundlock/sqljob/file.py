"""The TOML file of a SQL job: named sources, windows, patterns and sinks, and the SQL text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poundlock.core.model import checked_name
from poundlock.errors import UsageError
from poundlock.secret import SECRET_NAME
from poundlock.sqljob.arguments import check_names
from poundlock.sqljob.statements import Statement, split_all

_TABLES = ("source", "window", "match", "sink")
_TOP = ("name", "checkpoint_location", "abandon_log", "trigger", "sql", "sql_file", *_TABLES)
_PATHS = ("path", "directory")  # options that may be relative to the file

_PAIRS = ("http_auth", "basic_auth")  # a list of these has the user's name and the password
_PRIVATE_KEY = re.compile(r"BEGIN [A-Z ]*PRIVATE KEY")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class JobFile:
    """The contents of a file. Nothing is opened yet."""

    name: str = "sql"
    checkpoint_location: str | None = None
    abandon_log: str | Sequence[str] = ()
    trigger: str | None = None  # Spark's processingTime; None: without a pause between batches
    statements: tuple[Statement, ...] = ()
    source: Mapping[str, Options] = field(default_factory=dict)
    window: Mapping[str, Options] = field(default_factory=dict)
    match: Mapping[str, Options] = field(default_factory=dict)
    sink: Mapping[str, Options] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of the sources and sinks, such as `source.kafka`."""
        return {
            f"{where}.{options['kind']}"
            for where, tables in (("source", self.source), ("sink", self.sink))
            for options in tables.values()
        }


def read(path: str | Path) -> JobFile:
    """Read a file. Raises `UsageError` for every mistake that can be found without Spark."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the file {path} cannot be read: {error}") from error
    job = _parse(path, text)
    check_names(f"{path}", job, _TOP, ())
    here = path.absolute().parent
    for key in ("name", "checkpoint_location"):
        if not isinstance(job.get(key), str) or not job[key]:
            raise UsageError(f'{path} lacks {key}: write {key} = "..." at the top of the file')
    tables = {section: _tables(job, section, here) for section in _TABLES}
    _check_distinct(tables)
    trigger = job.get("trigger")
    if trigger is not None and not isinstance(trigger, str):
        raise UsageError(f"trigger={trigger!r}: give the time between batches, such as '2 seconds'")
    return JobFile(
        name=checked_name("pipeline name", job["name"]),
        checkpoint_location=_resolve(job["checkpoint_location"], here),
        abandon_log=job.get("abandon_log", ()),
        trigger=trigger,
        statements=tuple(_statements(path, text, job)),
        **tables,
    )


def _parse(path: Path, text: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # tomllib is part of Python since 3.11
        try:
            toml: Any = import_module(name)
        except ModuleNotFoundError:
            continue
        try:
            return toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    raise UsageError("TOML needs Python 3.11 or later, or the package tomli: pip install tomli")


def _tables(job: Mapping[str, Any], section: str, here: Path) -> dict[str, dict[str, Any]]:
    tables = job.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise UsageError(f"{section} needs tables with names: write [{section}.NAME]")
    for name, options in tables.items():
        checked_name(f"[{section}.{name}]: the name", name)
        if section in ("source", "sink"):
            _check_system(f"[{section}.{name}]", options)
    return {
        name: {
            key: _resolve(value, here) if key in _PATHS and isinstance(value, str) else value
            for key, value in options.items()
        }
        for name, options in tables.items()
    }


def _check_system(title: str, options: Options) -> None:
    if not isinstance(options.get("kind"), str):
        raise UsageError(f'{title} lacks its kind: write kind = "..."')
    for key, value in _flatten(options):
        if _is_secret(key, value):
            raise UsageError(
                f"{title} holds a secret in {key!r}: put it into an environment variable, and write "
                '"env:NAME" here'
            )


def _flatten(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all options, including those of nested tables, and each value of a list."""
    for key, value in options.items():
        yield from _values(key, value)


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from _flatten(value)
    elif isinstance(value, list):
        user_first = key.lower() in _PAIRS and len(value) == 2
        for each in value[1:] if user_first else value:
            yield from _values(key, each)
    else:
        yield key, value


def _is_secret(key: str, value: Any) -> bool:
    if not isinstance(value, str) or value.startswith(("env:", "file:")):
        return False
    if SECRET_NAME.search(key.lower()) or _PRIVATE_KEY.search(value):
        return True
    try:
        return "password=" in value.replace(" ", "").lower() or bool(urlsplit(value).password)
    except ValueError:  # not a URL
        return False


def _resolve(place: str, here: Path) -> str:
    """Return a path relative to the file as an absolute one. A URL stays as it is."""
    return place if "://" in place else str(here / place)


def _check_distinct(tables: Mapping[str, Mapping[str, Options]]) -> None:
    """Raise `UsageError` if two tables or sinks have one name, since both name pipelines."""
    seen: dict[str, str] = {}
    for section, each in tables.items():
        for table, options in each.items():
            title = f"[{section}.{table}]"
            names = {title: table, f"late_output of {title}": options.get("late_output")}
            for owner, name in names.items():
                if not isinstance(name, str):
                    continue
                if name.lower() in seen:
                    raise UsageError(
                        f"{seen[name.lower()]} and {owner} have the same name: rename one of them"
                    )
                seen[name.lower()] = owner


def _statements(path: Path, text: str, job: Mapping[str, Any]) -> list[Statement]:
    sql, sql_file = job.get("sql"), job.get("sql_file")
    if sql is not None and sql_file is not None:
        raise UsageError(f"{path} has sql and sql_file: give one of them")
    if sql_file is not None:
        try:
            return split_all((path.absolute().parent / str(sql_file)).read_text())
        except OSError as error:
            raise UsageError(f"sql_file of {path} cannot be read: {error}") from error
    if sql is None:
        return []
    if not isinstance(sql, str):
        raise UsageError(f'sql of {path} is not text: write sql = """..."""')
    at = text.find(sql)  # not found if it has escapes: then lines are counted within the text
    return split_all(sql, text.count("\n", 0, at) + 1 if at >= 0 else 1)
