"""A small run of the demo, with a real broker, real drivers and real kills."""

from __future__ import annotations

import json
from pathlib import Path

from program import call_program

ROWS, KILLS = 20_000, 3


def test_poundlock_is_exact_where_sparks_own_sink_repeats_rows(tmp_path: Path) -> None:
    arguments = ["--rows", ROWS, "--kills", KILLS, "--seed", 2, "--out", tmp_path, "--json"]
    done = call_program("demo", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["poundlock"] == {
        "rows_in": ROWS,
        "rows_out": ROWS,
        "lost": 0,
        "repeated": 0,
        "kills": KILLS,
    }
    theirs = report["spark_sink"]
    assert theirs["kills"] == KILLS and theirs["lost"] == 0
    assert theirs["repeated"] > 0
    assert theirs["rows_out"] == ROWS + theirs["repeated"]
    assert json.loads(done.stdout) == report
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="kill"') == 2 * KILLS
    assert not (tmp_path / "kept").exists()
