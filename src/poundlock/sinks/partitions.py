"""Directories of partitions as in Hive, `a=1/b=2`, and the values that they cannot have."""

from __future__ import annotations

import datetime
import re
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.errors import UsageError
from poundlock.sinks.text import not_utf8

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

_NULL = "__HIVE_DEFAULT_PARTITION__"
_SPECIAL = re.compile(r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
# In microseconds, since then.
_YEAR_ONE, _YEAR_2000 = -62_135_596_800_000_000, 946_684_800_000_000
_CALENDAR = 146_097 * 86_400_000_000  # 400 years
_OFFSET = re.compile(r"(UTC|GMT|UT)?([+-][\d:]+|Z)?")  # a zone whose clocks are never changed
_LONGEST = 255  # bytes in one name, on all usual file systems
# Bytes in a whole path, by the name that pyarrow has for the file system.
_LONGEST_PATHS = {"s3": 1024, "gcs": 1024, "abfs": 1024, "hdfs": 8000}
_LONGEST_LOCAL = 4095


def escaped(text: str) -> str:
    """Quote a column's name or value so that it can be part of a directory's name."""
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


def directory_of(columns: Sequence[str], values: Sequence[str | None]) -> str:
    """Return the directory of a partition, `a=1/b=2`. The values must have been checked."""
    return "/".join(
        f"{escaped(column)}={_NULL if value is None else escaped(value)}"
        for column, value in zip(columns, values, strict=True)
    )


def read_as_null(column: str, values: pa.Array) -> dict[int, str]:
    """Return the texts that readers would take for a null, and why: there is one spelling for all."""
    found: dict[int, str] = {}
    for text, name in (("", "an empty text"), (_NULL, _NULL)):
        same = pc.equal(values.cast(pa.large_binary()), text.encode())
        if pc.any(same).as_py():
            reason = f"{column} is {name}, which is read as null in a directory's name"
            places = np.flatnonzero(np.asarray(pc.fill_null(same, False)))
            found |= dict.fromkeys(places.tolist(), reason)
    return found


def room_for_directories(file_system: str, around: str) -> int:
    """Return how many bytes a partition's directory may have, beside the rest of the path."""
    return _LONGEST_PATHS.get(file_system, _LONGEST_LOCAL) - len(around.encode())


def too_long(directory: str, room: int) -> str | None:
    """Say why a directory cannot be created. None if it can. `room` is for all of it, in bytes."""
    for name in directory.split("/"):
        if len(name.encode()) > _LONGEST:
            column = name.partition("=")[0]
            return (
                f"its directory, {column[:40]}=..., would have a name of more than {_LONGEST} bytes"
            )
    if len(directory.encode()) > room:
        return f"its directories would have a path of more than {room} bytes"
    return None


@dataclass(frozen=True, slots=True)
class SparkDirectories:
    """The partitions of a Delta table, their directories, and what these cannot hold."""

    columns: tuple[str, ...] = ()  # in lower case
    by_value: bool = True  # whether values are in the names of the directories
    room: int = _LONGEST_LOCAL
    ascii: bool = False  # whether the JVM can only make paths of ASCII characters

    def unfit(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Return the rows whose partition cannot be stored, and why. One call per value."""
        bad: dict[int, str] = {}
        sizes = np.zeros(len(rows), np.int64)
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if name.lower() not in self.columns:
                continue
            if pa.types.is_timestamp(column.type) and column.type.tz is not None:
                bad |= _misread_moments(name, column)
            if not pa.types.is_string(column.type):
                continue
            broken = not_utf8(column)
            bad |= dict.fromkeys(np.flatnonzero(broken).tolist(), f"{name} is not UTF-8")
            bad |= read_as_null(name, column)
            if not self.by_value:
                continue
            texts = column.filter(pa.array(~broken)).dictionary_encode()
            places = np.flatnonzero(~broken)
            index = texts.indices.fill_null(len(texts.dictionary)).to_numpy(zero_copy_only=False)
            values = [*texts.dictionary.to_pylist(), None]
            sizes[places] += np.array([len(_spelled(name, it)) for it in values])[index]
            for number, value in enumerate(values):
                if problem := self._problem(name, value):
                    bad |= dict.fromkeys(places[index == number].tolist(), problem)
        reason = (
            f"the directories of its partition would have a path of more than {self.room} bytes"
        )
        return dict.fromkeys(np.flatnonzero(sizes > self.room).tolist(), reason) | bad

    def _problem(self, name: str, value: str | None) -> str | None:
        if value is None:
            return None
        if "\0" in value:
            return f"{name} contains a NUL, and no directory can have it in its name"
        if self.ascii and not value.isascii():
            return (
                f"{name} is not ASCII, and the locale of the JVM lets it make no such directory: start "
                "Spark with LC_ALL=C.UTF-8"
            )
        if len(_spelled(name, value)) - 1 > _LONGEST:
            return f"the directory of {name} would have a name of more than {_LONGEST} bytes"
        return None


def _misread_moments(name: str, moments: pa.Array) -> dict[int, str]:
    """Return the moments that Delta would store as others, and why. One call per value.

    It makes them from text in the zone of the session, and spells years without their sign.
    """
    values = moments.cast(pa.timestamp("us")).cast(pa.int64()).dictionary_encode()
    index = values.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    found: dict[int, str] = {}
    for number, value in enumerate(values.dictionary.to_pylist()):
        if value < _YEAR_ONE:
            reason = (
                f"{name} is before the year 1, and Delta would store a partition of another year"
            )
        elif _is_shown_again(value, moments.type.tz):
            reason = (
                f"the clocks of {moments.type.tz} show its {name} for another instant too, which Delta "
                "would store: partition by a date or a text, or set spark.sql.session.timeZone to UTC"
            )
        else:
            continue
        found |= dict.fromkeys(np.flatnonzero(index == number).tolist(), reason)
    return found


def _is_shown_again(microseconds: int, zone: str) -> bool:
    """Return whether the clocks of a zone have shown a moment's local time before."""
    try:
        clocks = zoneinfo.ZoneInfo(zone)
    except (ValueError, zoneinfo.ZoneInfoNotFoundError):
        if _OFFSET.fullmatch(zone):
            return False
        raise UsageError(
            f"Python does not know the time zone {zone} on this machine, so that it cannot check a "
            "partition by time: install tzdata there, or set spark.sql.session.timeZone to UTC"
        ) from None
    if microseconds >= _YEAR_2000:  # Python has few years, and the calendar repeats
        microseconds = _YEAR_2000 + (microseconds - _YEAR_2000) % _CALENDAR
    moment = _EPOCH + datetime.timedelta(microseconds=microseconds)
    try:
        return moment.astimezone(clocks).fold == 1
    except OverflowError:  # in the year 0, before clocks were changed
        return False


def _spelled(name: str, value: str | None) -> bytes:
    return (directory_of([name], [value]) + "/").encode()
