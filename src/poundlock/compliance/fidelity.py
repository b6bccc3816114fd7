"""The fidelity suite: each value of each Spark type arrives as it was, or is refused by name.

Your project needs one test module. It describes the ways in which your sink can write, each as a
`Shape` with a reader that does not use the sink's code, and imports the test from here:

    from poundlock.compliance.fidelity import *

    class MyShape(Shape): ...

    @pytest.fixture
    def shapes(tmp_path):
        return [MyShape(...)]

    @pytest.fixture(scope="session")
    def spark():
        return poundlock.session("local[2]")

The values are in `values.py`. A batch has a row for each of them, in which all other columns are null,
and rows that have a value in every column. A value that the sink must refuse is expected among the dead
letters, with the names of the sink and the column.

It needs pytest and Hypothesis: `pip install 'poundlock[compliance]'`.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from poundlock.compliance.values import KINDS, ZONES, Type, generate
from poundlock.core.participant import Participant
from poundlock.sinks import Files
from poundlock.sinks.files import committed
from poundlock.spark.pipeline.pipeline import pipeline

__all__ = [  # the tests, and the fixtures with what they need
    "known",
    "test_every_value_arrives_or_is_refused",
    "test_what_is_known_to_stop_the_batch_still_does",
]

NUMBER = "no"  # the column that tells the rows apart
_NULLS = 3  # rows without any value, at the beginning
_MADE = 12  # values that Hypothesis makes, for each kind
_FULL = 40  # rows with a value in every column


def _same(value: Any) -> Any:
    return value


def _never(value: Any) -> bool:
    return False


@dataclass(frozen=True)
class Column:
    """One of Spark's types in one type of a system."""

    kind: str  # in `KINDS`
    type: str = ""  # as the system calls it
    arrives: Callable[[Any], Any] = _same  # what a value is afterwards; a null is not asked about
    refuses: Callable[[Any], bool] = _never  # whether a value makes its row a bad one
    named: str = ""  # the name in the target, if it is not made of the others

    @property
    def name(self) -> str:
        return self.named or re.sub(r"\W+", "_", f"{self.kind}_{self.type}").strip("_").lower()


@dataclass(frozen=True)
class Line:
    """A line of the table of types in a sink's page."""

    spark: str
    system: str
    kept: str
    refused: str = "-"
    columns: tuple[Column, ...] = ()


def table(system: str, lines: Sequence[Line]) -> str:
    """Return the table of types, as a sink's page must have it."""
    rows = [("Spark", system, "how it arrives", "bad rows"), ("---",) * 4]
    rows += [(line.spark, line.system, line.kept, line.refused) for line in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class Shape(ABC):
    """One way in which a sink writes, and a plain reader of what it wrote."""

    name: str  # of the sink
    columns: Sequence[Column]
    zone: str = "UTC"  # of Spark's session
    rows: Sequence[Mapping[str, Any]] = ()  # of the batch, set before it runs
    letters: Sequence[Mapping[str, Any]] = ()  # those of this sink, set before `read`
    from_letters: bool = False  # it reads them, because the sink refuses every row
    names_column: bool = True  # the error of a bad row names the column
    refuses_nulls: bool = False  # a row whose only value is null is a bad one

    @abstractmethod
    def sink(self) -> Participant:
        """Create the target, and return a sink called `name`."""

    @abstractmethod
    def read(self) -> Mapping[int, Mapping[str, Any]]:
        """Return what is in the target: for each number, the value of each column."""

    def select(self) -> list[str]:
        """Return what the sink gets: the number and the columns."""
        return [NUMBER, *(f"`{it.kind}` AS `{it.name}`" for it in self.columns)]

    def refuses(self, row: Mapping[str, Any]) -> list[Column]:
        """Return the columns because of which a row is a bad one."""
        return [it for it in self.columns if _refuses(it, row.get(it.kind))]

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is for this sink: it has one of its values, or none at all."""
        return row[NUMBER] < _NULLS or any(row.get(it.kind) is not None for it in self.columns)

    def expects(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what a row is in the target. None if another row has replaced or deleted it."""
        values = {it.name: row.get(it.kind) for it in self.columns}
        made = {it.name: it.arrives for it in self.columns}
        return {name: None if it is None else made[name](it) for name, it in values.items()}


def _refuses(column: Column, value: Any) -> bool:
    return value is not None and column.refuses(value)


@dataclass(frozen=True)
class Known:
    """Values that a sink is known to treat wrongly. A test fails when it no longer does."""

    sinks: str  # a pattern of names of sinks
    columns: str  # a pattern of their columns
    reason: str
    # Of which values, in which time zone. None: the column cannot be written.
    when: Callable[[Any, str], bool] | None = None
    stops: str = ""  # the whole batch fails, with an error of this pattern

    def concerns(self, shape: Shape, column: Column) -> bool:
        pairs = ((self.sinks, shape.name), (self.columns, column.name))
        return all(re.fullmatch(pattern, name) is not None for pattern, name in pairs)

    def applies(self, shape: Shape, column: Column, value: Any) -> bool:
        if value is None or self.when is None or not self.concerns(shape, column):
            return False
        return self.when(value, shape.zone)


@dataclass
class Frame:
    """Rows, and a stream of them in Spark."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        self.rows.append({NUMBER: len(self.rows), **values})

    def stream(self, spark: Any, place: Path) -> Any:
        """Write the rows to a file, and return a stream that reads it."""
        columns: dict[str, Any] = {NUMBER: pa.array([row[NUMBER] for row in self.rows], pa.int64())}
        columns |= {
            name: kind.write([row.get(name) for row in self.rows]) for name, kind in KINDS.items()
        }
        place.mkdir()
        pq.write_table(pa.table(columns), place / "rows.parquet", coerce_timestamps="us")
        ddl = ", ".join(f"`{name}` {kind.type.ddl}" for name, kind in KINDS.items())
        read = spark.readStream.schema(f"{NUMBER} bigint, {ddl}").parquet(str(place))
        made = (f"{kind.sql.format(f'`{name}`')} AS `{name}`" for name, kind in KINDS.items())
        return read.selectExpr(NUMBER, *made)


def make_rows(shapes: Sequence[Shape], known: Sequence[Known], chance: int) -> Frame:
    """Make the rows of a batch that no known defect stops, without columns that cannot be written."""
    for shape in shapes:
        shape.columns = [
            column
            for column in shape.columns
            if not any(it.when is None and it.concerns(shape, column) for it in known)
        ]
    frame = Frame()
    for _ in range(_NULLS):
        frame.add()
    used = sorted({it.kind for shape in shapes for it in shape.columns})
    fit: dict[str, list[Any]] = {}
    for name in used:
        values = [
            value
            for value in generate(KINDS[name], _MADE, chance)
            if not _stopping(shapes, known, name, value)
        ]
        for value in values:
            frame.add(**{name: value})
        # Nothing that is refused, so that one column does not hide the others.
        fit[name] = [it for it in values if not _is_refused(shapes, {NUMBER: 0, name: it})]
    for place in range(_FULL):
        frame.add(**{name: values[-place % len(values)] for name, values in fit.items() if values})
    return frame


def _is_refused(shapes: Sequence[Shape], row: Mapping[str, Any]) -> bool:
    return any(shape.refuses(row) for shape in shapes)


def _stopping(shapes: Sequence[Shape], known: Sequence[Known], kind: str, value: Any) -> bool:
    return any(
        column.kind == kind and it.applies(shape, column, value)
        for it in known
        if it.stops
        for shape in shapes
        for column in shape.columns
    )


def play(spark: Any, shapes: Sequence[Shape], frame: Frame, place: Path) -> list[dict[str, Any]]:
    """Send the rows through all sinks in one batch. Return the dead letters."""
    place.mkdir(parents=True, exist_ok=True)
    dead = Files(place / "dead", name="dead")
    made = pipeline(
        frame.stream(spark, place / "rows"),
        name=f"fidelity-{uuid.uuid4().hex[:8]}",  # systems remember the names of pipelines
        checkpoint_location=str(place / "checkpoint"),
    )
    for shape in shapes:
        shape.rows = frame.rows
        where = _where([shape.takes(row) for row in frame.rows])
        made = made.to(shape.sink(), where=where, select=shape.select(), on_bad_row=dead)
    made.start(availableNow=True).awaitTermination()
    if not (place / "dead").exists():
        return []
    files = [uri.removeprefix("file://") for uri in committed(str(place / "dead"))]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def _where(taken: Sequence[bool]) -> str | None:
    """Return the condition for some rows, as ranges of their numbers. None for all rows."""
    runs = [(is_taken, len(list(run))) for is_taken, run in groupby(taken)]
    if runs == [(True, len(taken))]:
        return None
    ends = list(accumulate(length for _, length in runs))
    parts = [
        f"{NUMBER} BETWEEN {end - length} AND {end - 1}"
        for (is_taken, length), end in zip(runs, ends, strict=True)
        if is_taken
    ]
    return " OR ".join(parts) or "false"


Difference = tuple[str, str, int]  # the sink, the column and the number of the row


def compare(
    shape: Shape, frame: Frame, letters: Sequence[Mapping[str, Any]]
) -> tuple[dict[Difference, str], list[str]]:
    """Return each value that is not what it must be, and the errors that name no column."""
    shape.letters = [letter for letter in letters if letter["sink"] == shape.name]
    found, wrong = shape.read(), dict[Difference, str]()
    sent = {row[NUMBER]: row for row in frame.rows if shape.takes(row)}
    assert found.keys() <= sent.keys(), f"{shape.name} has rows that were not sent to it"
    for number, row in sent.items():
        judged = _judge(shape, row, found.get(number))
        wrong |= {(shape.name, column, number): it for column, it in judged.items()}
    missing = [row for number, row in sent.items() if number not in found]
    return wrong, _check_letters(shape, missing)


def _check_letters(shape: Shape, missing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check that what is missing are dead letters. Return those whose error names no column."""
    errors = [letter["error"] for letter in shape.letters]
    if not shape.from_letters:
        bad = [it for it in missing if _is_bad(shape, it) or shape.expects(it) is not None]
        assert len(errors) == len(bad), f"{shape.name}: {len(bad)} rows, {len(errors)} dead letters"
    if not shape.names_column:
        return []
    names = "|".join(re.escape(it.name) for it in shape.columns if it.refuses is not _never)
    return [f"{shape.name}: {it}" for it in errors if not re.search(rf"\b({names})\b", it)]


def _is_bad(shape: Shape, row: Mapping[str, Any]) -> bool:
    empty = all(row.get(it.kind) is None for it in shape.columns)
    return bool(shape.refuses(row)) or (shape.refuses_nulls and empty)


def _judge(shape: Shape, row: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what is wrong with each column of a row. `found` is what the target has of it."""
    values = {it.name: row.get(it.kind) for it in shape.columns}
    if _is_bad(shape, row):
        bad = [it.name for it in shape.refuses(row)] or list(values)
        return {} if found is None else {it: f"{values[it]!r:.80} was not refused" for it in bad}
    expected = shape.expects(row)
    if expected is None:
        return {} if found is None else {shape.columns[0].name: "a row is still there"}
    if found is None:
        present = {name: it for name, it in values.items() if it is not None} or values
        return {name: f"{it!r:.80} was refused" for name, it in present.items()}
    kinds = {it.name: KINDS[it.kind].type for it in shape.columns}
    return {
        name: f"{value!r:.120} became {found.get(name)!r:.120}"
        for name, value in expected.items()
        if not _is_same(kinds[name], value, found.get(name))
    }


def _is_same(type_: Type, value: Any, found: Any) -> bool:
    return not isinstance(found, Exception) and type_.normal(value) == type_.normal(found)


@pytest.fixture
def known() -> Sequence[Known]:
    """Return what is known to be wrong. Define a fixture of this name if your sink has such defects."""
    return ()


@pytest.mark.parametrize("zone", ZONES)
def test_every_value_arrives_or_is_refused(
    spark: Any, shapes: Sequence[Shape], known: Sequence[Known], zone: str, tmp_path: Path
) -> None:
    _set_zone(spark, shapes, zone)
    if zone != ZONES[0]:  # the other types are the same in every zone
        for shape in shapes:
            shape.columns = [it for it in shape.columns if KINDS[it.kind].type.has_time]
        shapes = [shape for shape in shapes if shape.columns]
    frame = make_rows(shapes, known, ZONES.index(zone))
    letters = play(spark, shapes, frame, tmp_path / "run")
    wrong, nameless = dict[Difference, str](), list[str]()
    for shape in shapes:
        found, bare = compare(shape, frame, letters)
        wrong |= found
        nameless += bare
    expected = foresee(shapes, known, frame)
    new = {place: it for place, it in wrong.items() if place not in expected}
    assert not new, _report(new)
    gone = {place: reason for place, reason in expected.items() if place not in wrong}
    assert not nameless, f"errors of bad rows name no column: {sorted(set(nameless))}"
    assert not gone, f"these are no longer wrong, so KNOWN must not list them: {_report(gone)}"


def foresee(shapes: Sequence[Shape], known: Sequence[Known], frame: Frame) -> dict[Difference, str]:
    """Return the differences that known defects make, with their reasons."""
    found: dict[Difference, str] = {}
    for shape in shapes:
        for row in filter(shape.takes, frame.rows):
            defects = {
                column.name: it.reason
                for column in shape.columns
                for it in known
                if not it.stops and it.applies(shape, column, row.get(column.kind))
            }
            refusing = {it.name for it in shape.refuses(row)}
            # What is refused rightly, replaced or deleted does not show the defect.
            if refusing <= defects.keys() and (refusing or shape.expects(row) is not None):
                shown = refusing or defects.keys()
                found |= {(shape.name, it, row[NUMBER]): defects[it] for it in shown}
    return found


def _set_zone(spark: Any, shapes: Sequence[Shape], zone: str) -> None:
    spark.conf.set("spark.sql.session.timeZone", zone)
    for shape in shapes:
        shape.zone = zone


def _report(differences: Mapping[Difference, Any]) -> str:
    """Show some differences of each column."""
    found: dict[tuple[str, str], list[Any]] = {}
    for (sink, column, _), it in differences.items():
        found.setdefault((sink, column), []).append(it)
    lines = [
        f"{sink}: {column} ({len(some)}): {'; '.join(map(str, some[:3]))}"
        for (sink, column), some in sorted(found.items())
    ]
    return f"{len(differences)} values\n" + "\n".join(lines)


def test_what_is_known_to_stop_the_batch_still_does(
    spark: Any, shapes: Sequence[Shape], known: Sequence[Known], tmp_path: Path
) -> None:
    _set_zone(spark, shapes, ZONES[0])
    for number, defect in enumerate(it for it in known if it.stops):
        for shape in shapes:
            every = shape.columns
            for column in every:
                values = KINDS[column.kind].extremes
                hit = [it for it in values if defect.applies(shape, column, it)]
                if defect.when is None and defect.concerns(shape, column):
                    hit = list(values)
                if not hit:
                    continue
                frame, shape.columns = Frame(), [column]
                for it in [None, *values]:  # good ones too
                    frame.add(**{column.kind: it})
                place = tmp_path / f"{number}-{shape.name}-{column.name}"
                with pytest.raises(Exception, match="") as caught:
                    play(spark, [shape], frame, place)
                assert re.search(defect.stops, _whole_error(caught.value)), defect
            shape.columns = every


def _whole_error(error: BaseException | None) -> str:
    return "" if error is None else f"{error!r}\n{_whole_error(error.__cause__)}"
