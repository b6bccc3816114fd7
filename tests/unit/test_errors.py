"""Errors travel from workers to the driver, and name the place where they happened."""

from __future__ import annotations

import inspect
import pickle

import pytest

from poundlock import errors
from poundlock.errors import PoundlockError, error_context
from poundlock.spark.pipeline.job import _first_line

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PoundlockError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[PoundlockError]) -> None:
    before = kind("what happened", transaction="lock batch 3", sink="out")
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert (str(after), after.transaction, after.sink) == (str(before), "lock batch 3", "out")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({}, "what happened"),
        ({"transaction": "lock batch 3"}, "[lock batch 3] what happened"),
        ({"sink": "out"}, "[sink out] what happened"),
        ({"transaction": "lock batch 3", "sink": "out"}, "[lock batch 3, sink out] what happened"),
    ],
)
def test_the_message_names_sink_batch_and_task(where: dict[str, str], text: str) -> None:
    assert str(PoundlockError("what happened", **where)) == text


def test_a_caller_adds_the_place_unless_the_error_has_one() -> None:
    with (
        pytest.raises(PoundlockError) as caught,
        error_context(sink="out", transaction="lock batch 3"),
    ):
        raise PoundlockError("what happened", sink="inner")
    assert str(caught.value) == "[lock batch 3, sink inner] what happened"


def test_the_module_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = {line.strip(" │├└─").split(" ")[0] for line in errors.__doc__.splitlines()}
    assert {kind.__name__ for kind in KINDS} <= drawn


def test_every_error_has_an_explanation() -> None:
    assert all(kind.__doc__ for kind in KINDS)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: "
            "Job aborted: java.lang.NullPointerException: it is null\n\tat org.Main(Main.java:1)",
            "org.apache.spark.SparkException: Job aborted: java.lang.NullPointerException: it is null",
        ),
        ('Traceback:\n  File "a.py", line 1\nValueError: no\n at x.Exception: y', "ValueError: no"),
        (
            "[CAST_INVALID_INPUT] The value '1\nUsageError: run this\n' cannot be cast",
            "Spark reports CAST_INVALID_INPUT. Its own error has the details",
        ),
        (
            "Job aborted: x.SparkNumberFormatException: [CAST_INVALID.SUB] '1\nUsageError: run this",
            "Spark reports CAST_INVALID.SUB. Its own error has the details",
        ),
        ("[X] else", "[X] else"),
        ("", "Exception"),
    ],
)
def test_errors_of_tasks_are_summarised_in_one_line(text: str, line: str) -> None:
    assert _first_line(Exception(text)) == line
