"""The fidelity suite finds each kind of difference, and believes no list of known ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from poundlock.compliance.fidelity import (
    NUMBER,
    Column,
    Frame,
    Known,
    Line,
    Shape,
    compare,
    foresee,
    table,
)
from poundlock.compliance.values import (
    KINDS,
    ZONES,
    at,
    days_of,
    generate,
    interval_of,
    is_utf8,
    micros_of,
    read_json,
)


class Fake(Shape):
    """A system that a test fills."""

    name = "fake"

    def __init__(self, *columns: Column):
        self.columns = columns
        self.found: dict[int, Mapping[str, Any]] = {}

    def sink(self) -> Any:
        raise NotImplementedError

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        return self.found


DOUBLE = Column("double")
POSITIVE = Column("int", refuses=lambda it: it < 0)


def frame_of(*rows: Mapping[str, Any]) -> Frame:
    """Return rows after those that are all null."""
    frame = Frame()
    for row in ({}, {}, {}, *rows):
        frame.add(**row)
    return frame


def letter(error: str) -> Mapping[str, Any]:
    return {"sink": "fake", "error": error}


def filled(shape: Fake, frame: Frame) -> Fake:
    """Fill the system with all that it does not refuse."""
    shape.found = {
        row[NUMBER]: dict(shape.expects(row) or {})
        for row in frame.rows
        if shape.takes(row) and not shape.refuses(row)
    }
    return shape


def test_what_arrives_is_right() -> None:
    frame = frame_of({"int": 1}, {"int": -1}, {"double": math.nan}, {"double": -0.0})
    shape = filled(Fake(DOUBLE, POSITIVE), frame)
    assert compare(shape, frame, [letter("column int is negative")]) == ({}, [])


@pytest.mark.parametrize("found", [0.0, None, 1.5, ValueError("no number")])
def test_a_changed_value_is_found(found: Any) -> None:
    frame = frame_of({"double": -0.0})
    shape = filled(Fake(DOUBLE), frame)
    shape.found[3] = {"double": found}
    wrong, _ = compare(shape, frame, [])
    assert list(wrong) == [("fake", "double", 3)]
    assert "became" in wrong["fake", "double", 3]


def test_a_null_that_became_a_value_is_found() -> None:
    frame = frame_of()
    shape = filled(Fake(DOUBLE), frame)
    shape.found[1] = {"double": 0.0}
    wrong, _ = compare(shape, frame, [])
    assert list(wrong) == [("fake", "double", 1)]


def test_a_value_that_was_not_refused_is_found() -> None:
    frame = frame_of({"int": -1})
    shape = Fake(POSITIVE)
    shape.found = {row[NUMBER]: {"int": row.get("int")} for row in frame.rows}
    wrong, _ = compare(shape, frame, [])
    assert wrong == {("fake", "int", 3): "-1 was not refused"}


def test_a_value_that_was_refused_without_reason_is_found() -> None:
    frame = frame_of({"int": 1})
    shape = filled(Fake(POSITIVE), frame)
    del shape.found[3]
    wrong, _ = compare(shape, frame, [letter("column int is odd")])
    assert wrong == {("fake", "int", 3): "1 was refused"}


def test_a_lost_row_is_not_taken_for_a_refused_one() -> None:
    frame = frame_of({"int": -1})
    with pytest.raises(AssertionError, match="1 rows, 0 dead letters"):
        compare(filled(Fake(POSITIVE), frame), frame, [])


def test_a_row_from_nowhere_is_found() -> None:
    frame = frame_of()
    shape = filled(Fake(POSITIVE), frame)
    shape.found[99] = {"int": 1}
    with pytest.raises(AssertionError, match="not sent"):
        compare(shape, frame, [])


def test_an_error_must_name_the_column() -> None:
    frame = frame_of({"int": -1})
    _, nameless = compare(filled(Fake(POSITIVE), frame), frame, [letter("a value is negative")])
    assert nameless == ["fake: a value is negative"]


def test_a_known_difference_is_foreseen_where_the_target_shows_it() -> None:
    frame = frame_of(
        {"double": -0.0},
        {"double": 1.0},
        {"double": -0.0, "int": -1},  # refused, and rightly
        {"double": -0.0, "int": 1},
    )
    known = [
        Known("fake", "double", "the sign is lost", lambda it, _: str(it) == "-0.0"),
        Known("other", ".*", "of another sink", lambda it, _: True),
        Known("fake", "double", "of a batch", lambda it, _: True, stops="error"),
    ]
    found = foresee([Fake(DOUBLE, POSITIVE)], known, frame)
    assert found == {("fake", "double", it): "the sign is lost" for it in (3, 6)}


def test_one_value_that_two_columns_keep_wrongly_is_foreseen_in_both() -> None:
    columns = [Column("int", it, refuses=lambda it: it < 0) for it in ("a", "b")]
    frame = frame_of({"int": -1})
    both = Known("fake", "int_.*", "negative numbers are kept", lambda it, _: it < 0)
    one = Known("fake", "int_a", "negative numbers are kept", lambda it, _: it < 0)
    assert len(foresee([Fake(*columns)], [both], frame)) == 2
    assert foresee([Fake(*columns)], [one], frame) == {}  # the other column refuses the row


@pytest.mark.parametrize("name", KINDS)
def test_a_value_is_itself_in_arrow_and_in_its_normal_form(name: str) -> None:
    kind = KINDS[name]
    values = generate(kind, 5, 1)
    array = kind.write(values)
    if name != "variant":
        normal = kind.type.normal
        assert [normal(it) for it in kind.read(array)] == [normal(it) for it in values]


def test_the_same_seed_makes_the_same_values() -> None:
    one, two, other = (generate(KINDS["bigint"], 20, seed) for seed in (1, 1, 2))
    assert one == two and one != other


def test_texts_are_read_to_the_microsecond_and_to_any_year() -> None:
    assert (
        micros_of("1850-01-01T00:53:28.000001+00:53:28", zoned=True) == at("1850-01-01T00:00") + 1
    )
    assert micros_of("1850-01-01T00:53:28.000001+00:53", zoned=True) != at("1850-01-01T00:00") + 1
    assert micros_of("1969-12-31 23:59:59.5", zoned=False) == -500_000
    assert (
        micros_of("+10000-01-01T00:00:00Z", zoned=True)
        == (days_of("9999-12-31") + 1) * 86_400_000_000
    )
    assert days_of("0000-12-31") == days_of("0001-01-01") - 1
    assert days_of("-0001-03-01") - days_of("-0001-02-28") == 1
    assert interval_of("INTERVAL '-1 00:00:00.000001' DAY TO SECOND") == -86_400_000_001
    assert interval_of("INTERVAL '-0-1' YEAR TO MONTH") == -1
    for text in ("2026-01-01T00:00:00", "2026-01-01"):
        with pytest.raises(ValueError, match="no time with an offset"):
            micros_of(text, zoned=True)


def test_json_is_read_without_rounding() -> None:
    decimal, number = KINDS["fraction38"].type, KINDS["variant"].type
    digits = "0.12345678901234567890123456789012345678"
    assert str(decimal.of_json(read_json(digits))) == digits
    assert number.normal(number.of_json(read_json('{"a": "1"}'))) != number.normal('{"a": 1}')
    assert number.normal(number.of_json(read_json('"a"'))) == number.normal('"a"')


def test_a_text_that_is_not_utf8_is_found_at_any_depth() -> None:
    nested: Sequence[Any] = [[{"a": b"\xff"}], {"m": [(b"\xed\xa0\x80", 1)]}, b"\xff"]
    assert not any(is_utf8(it) for it in nested)
    assert is_utf8([{"a": "ä".encode()}, None, 1])


def test_the_table_has_a_line_for_each_type() -> None:
    assert len(ZONES) == 3
    lines = [Line("int", "integer", "exact"), Line("double", "real", "exact", "NaN")]
    assert table("SQL", lines).splitlines() == [
        "| Spark | SQL | how it arrives | bad rows |",
        "| --- | --- | --- | --- |",
        "| int | integer | exact | - |",
        "| double | real | exact | NaN |",
    ]
