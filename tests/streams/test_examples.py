"""Every example runs unchanged and gives its documented result. None is longer than a page."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from poundlock import jobfile

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED = {
    ("minimum", "tumbling"): {
        "tumbling": [("a", 33.3), ("a", 30.7), ("a", 31.0), ("b", 15.4), ("b", 14.2), ("b", 15.0)]
    },
    ("minimum", "sliding"): {
        "sliding": [
            ("a", 34.1),
            ("a", 34.1),
            ("a", 33.3),
            ("a", 33.3),
            ("a", 30.7),
            ("a", 30.7),
            ("a", 30.7),
            ("a", 31.0),
            ("a", 31.0),
            ("a", 31.0),
            ("b", 15.4),
            ("b", 15.4),
            ("b", 15.4),
            ("b", 14.2),
            ("b", 14.2),
            ("b", 14.2),
            ("b", 15.0),
            ("b", 15.0),
            ("b", 15.0),
        ]
    },
    ("minimum", "count"): {"count": [("a", 33.3)]},
    ("temperature_rise",): {
        "warnings": [
            ("a", "the temperature has been rising for 10 seconds"),
            ("b", "the temperature has been rising for 10 seconds"),
        ],
        "cold": [("c", -1.0)],
    },
    ("sessions",): {
        "visits": [
            ("ann", 35.0, 3, "/cart"),
            ("ann", 5.0, 2, "/shoes"),
            ("bob", 0.0, 1, "/"),
            ("bob", 0.0, 1, "/help"),
        ]
    },
    ("fraud",): {"alerts": [("x", 0.5, 900.0), ("z", 0.1, 700.0)], "unused": [("y",)]},
    ("rules",): {
        "hot": [("a1", 35.0, 30.0), ("b2", 50.0, 40.0), ("a1", 35.0, 15.0), ("a2", 20.0, 15.0)]
    },
    ("late_data",): {
        "lowest": [("a", 34.0, 2), ("a", 20.0, 3), ("a", 32.0, 2), ("a", 31.0, 1)],
        "late": [("a", 10.0)],
    },
}


def columns(row: dict) -> tuple:
    return tuple(value for name, value in row.items() if not name.startswith(("window_", "ts")))


@pytest.mark.parametrize("example", EXPECTED, ids="-".join)
def test_each_example_gives_its_documented_result(
    spark: SparkSession, tmp_path: Path, example: tuple[str, ...]
) -> None:
    name, *arguments = example
    make = jobfile.load(EXAMPLES / f"{name}.py")
    make(spark, [str(tmp_path), *arguments]).start(availableNow=True).awaitTermination()
    for output, expected in EXPECTED[example].items():
        directory = tmp_path / output
        rows = [
            columns(json.loads(line))
            for path in sorted(directory.glob("*.json"))
            for line in path.read_text().splitlines()
        ]
        assert sorted(rows) == sorted(expected), output


def test_word_count_reads_from_a_socket(spark: SparkSession, tmp_path: Path, capfd) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(server, b"to be or not to be\nto\n"), daemon=True).start()
    make = jobfile.load(EXAMPLES / "word_count.py")
    job = make(spark, ["127.0.0.1", str(server.getsockname()[1]), str(tmp_path / "checkpoint")])
    assert "at most once" in str(job.guarantee())
    query = job.start()
    printed = ""
    while "to" not in printed or "3" not in printed.split("to")[-1]:
        query.processAllAvailable()
        printed += capfd.readouterr().out
    query.stop()


def _serve(server: socket.socket, lines: bytes) -> None:
    connection, _ = server.accept()
    connection.sendall(lines)
    threading.Event().wait()


@pytest.mark.parametrize("name", [*sorted({it[0] for it in EXPECTED}), "word_count"])
def test_an_example_without_arguments_says_which_it_takes(name: str) -> None:
    with pytest.raises(SystemExit, match=rf"^usage: {name}\.py [A-Z]"):
        jobfile.load(EXAMPLES / f"{name}.py")(None, [])


def test_each_example_fits_on_a_page() -> None:
    for path in EXAMPLES.glob("*.py"):
        if not path.stem.endswith("sqlite_sink"):  # a whole participant, and its tests
            assert len(path.read_text().splitlines()) < 80, path
