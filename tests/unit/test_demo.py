"""The demo's pure parts: the plan, the count, the history, the reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from poundlock.cli.demo import demo
from poundlock.core.protocol import Step
from poundlock.demo import plan, report, topics
from poundlock.demo.count import Count, compare, from_json, from_line
from poundlock.demo.history import Event, History, What
from poundlock.demo.process import Child
from poundlock.demo.result import Order, Outcome, Result

A, B, C = ("sensor_1", 1, 20.5), ("sensor_2", 1, 21.0), ("sensor_1", 2, 22.5)


# The plan.


@pytest.mark.parametrize("count", [3, 5, 12])
@pytest.mark.parametrize("seed", range(20))
def test_kills_hit_different_batches_and_every_phase(count: int, seed: int) -> None:
    kills = plan.kills(count, seed)
    numbers = [kill.batch for kill in kills]
    assert numbers == sorted(set(numbers)) and len(kills) == count
    assert max(numbers) < plan.batches(count) - 1
    for stretch in plan.STRETCHES:
        assert any(kill.step in stretch for kill in kills)


def test_a_seed_always_gives_the_same_plan() -> None:
    assert plan.kills(5, 7) == plan.kills(5, 7)
    assert plan.kills(5, 7) != plan.kills(5, 8)


def test_no_two_sensor_lines_are_equal() -> None:
    lines = list(topics.sensor_lines(5000, 1))
    assert len({from_line(line.encode())[:2] for line in lines}) == 5000


# The count.


def test_equal_topics_are_exact() -> None:
    assert compare([A, B, C], [C, A, B]) == Count(3, 3, 0, 0)
    assert compare([A, B, C], [C, A, B]).exact


def test_a_loss_and_a_duplicate_do_not_cancel_out() -> None:
    count = compare([A, B, C], [A, A, B])
    assert count == Count(rows_in=3, rows_out=3, lost=1, repeated=1)
    assert not count.exact


def test_every_copy_after_the_first_is_a_duplicate() -> None:
    assert compare([A, B], [A, A, A, B]).repeated == 2


def test_a_changed_row_counts_as_lost_and_foreign() -> None:
    count = compare([A], [(A[0], A[1], 99.0)])
    assert (count.lost, count.repeated, count.foreign) == (1, 0, 1)
    assert not count.exact


def test_a_line_and_its_reading_count_as_the_same_row() -> None:
    value = b'{"id":"sensor_1","timestamp":1547718199,"temperature":35.8}'
    assert from_line(b"sensor_1,1547718199,35.8") == from_json(value)


# The history.


def poundlock_history() -> History:
    def step(at: float, step: Step, batch: int | None = None, **facts: int) -> Event:
        return Event(at, What.STEP, batch, step, **facts)

    return History(
        [
            Event(0.0, What.STARTED),
            Event(3.0, What.OPENED),
            Event(4.0, What.RUNNING),
            Event(4.1, What.PLANNED, 0),
            step(5.0, Step.PREPARED, 0),
            Event(5.0, What.KILLED, 0, Step.PREPARED),
            Event(5.1, What.STARTED),
            Event(8.0, What.OPENED),
            step(8.5, Step.SWEPT, count=4),
            Event(9.0, What.RUNNING),
            step(9.1, Step.WRITING, 0),
            step(9.5, Step.DECIDED, 0, rows=10),
            step(9.6, Step.COMMITTING, 0),
            step(9.7, Step.COMMITTED, 0),
            Event(10.0, What.COMMITTED, 0),
            Event(10.1, What.PLANNED, 1),
            step(10.3, Step.DECIDED, 1, rows=10),
            Event(10.3, What.KILLED, 1, Step.DECIDED),
            Event(10.4, What.STARTED),
            Event(13.0, What.OPENED),
            step(13.1, Step.COMMITTING, 1),
            step(13.2, Step.COMMITTED, 1),
            step(13.3, Step.SWEPT, count=0),
            Event(14.0, What.RUNNING),
            Event(14.5, What.COMMITTED, 1),
            Event(15.0, What.ENDED),
        ]
    )


def spark_history() -> History:
    return History(
        [
            Event(0.0, What.STARTED),
            Event(4.0, What.RUNNING),
            Event(4.1, What.PLANNED, 0),
            Event(6.0, What.KILLED, 0, rows=7),
            Event(6.1, What.STARTED),
            Event(9.0, What.OPENED, rows=8),
            Event(10.0, What.RUNNING),
            Event(12.0, What.COMMITTED, 0),
            Event(12.1, What.ENDED),
        ]
    )


def test_a_run_ends_by_a_kill_or_by_itself() -> None:
    runs = poundlock_history().runs()
    assert [run.killed for run in runs] == [True, True, False]
    assert (runs[0].started, runs[0].running, runs[0].ended) == (0.0, 4.0, 5.0)


def test_a_retried_batch_begins_with_the_run_that_retries_it() -> None:
    tries = [(it.batch, it.started, it.again, it.killed) for it in poundlock_history().attempts()]
    assert tries == [
        (0, 4.1, False, True),
        (0, 9.0, True, False),
        (1, 10.1, False, True),
        (1, 14.0, True, False),
    ]


def test_a_kill_shows_how_the_next_run_handled_it() -> None:
    undecided, decided = poundlock_history().deaths()
    assert (undecided.number, undecided.aborted, undecided.rewritten) == (1, 4, True)
    assert not undecided.recommitted
    assert decided.recommitted and not decided.rewritten
    (death,) = spark_history().deaths()
    assert (death.event.rows, death.left) == (7, 8)


# The reports.


def result(ours: Count | None = None, theirs: Count | None = None) -> Result:
    return Result(
        order=Order(rows=20, kills=2, seed=1, out=Path("nowhere")),
        poundlock=Outcome(
            "poundlock",
            "Poundlock",
            "readings",
            ours or Count(20, 20, 0, 0),
            2,
            poundlock_history(),
        ),
        spark_sink=Outcome(
            "spark_sink", "Spark's", "other", theirs or Count(20, 28, 0, 8), 2, spark_history()
        ),
        seconds=15.04,
    )


def test_the_json_report_has_exactly_these_fields(tmp_path: Path) -> None:
    report.write(result(), tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content == {
        "poundlock": {"rows_in": 20, "rows_out": 20, "lost": 0, "repeated": 0, "kills": 2},
        "spark_sink": {"rows_in": 20, "rows_out": 28, "lost": 0, "repeated": 8, "kills": 2},
        "seed": 1,
        "seconds": 15.0,
    }


class _Balance(HTMLParser):
    """Checks that every opened tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "circle") or (tag == "path" and self._in_mark(attrs)):
            self.open.append(tag)
        self.titles += tag == "title"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @staticmethod
    def _in_mark(attrs: list[tuple[str, str | None]]) -> bool:
        return dict(attrs).get("class") in ("decided", "sealed", "logged")


def test_the_page_is_complete_and_loads_nothing() -> None:
    page = report.render(result())
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.titles > 15  # every bar, mark and kill has a tooltip
    assert not re.search(r"https?:|src=|<link|@import|url\(|<script", page)
    assert "$" not in page


def test_the_page_shows_kills_and_their_outcomes() -> None:
    page = report.render(result())
    assert "aborted 4 open transactions and wrote the batch again" in page
    assert "found the decision in the log and finished its commits" in page
    assert "8 rows are there twice" in page
    assert page.count('class="kill"') == 3
    assert '<li class="hit"><span>prepared</span><b>1</b></li>' in page


def test_the_page_escapes_its_values() -> None:
    evil = replace(result().spark_sink, title="<script>alert('x')</script>", topic='"&<b>')
    page = report.render(replace(result(), spark_sink=evil))
    assert "<script" not in page and "<b>&" not in page
    assert "&lt;script&gt;" in page and "&quot;&amp;&lt;b&gt;" in page


def test_the_verdict_states_the_result() -> None:
    ours, theirs = result().verdict
    assert "None lost, none repeated" in ours and "8 rows repeated" in theirs
    assert result().failures == []


def test_a_lucky_result_is_called_luck() -> None:
    lucky = result(theirs=Count(20, 20, 0, 0))
    assert "luck" in lucky.verdict[1] and lucky.failures == []


@pytest.mark.parametrize(
    "ours", [Count(20, 19, 1, 0), Count(20, 21, 0, 1), Count(20, 20, 1, 1), Count(20, 21, 0, 0, 1)]
)
def test_a_broken_promise_fails_the_demo(ours: Count) -> None:
    failed = result(ours=ours)
    assert "broke its promise" in failed.failures[0] and "broke its promise" in failed.verdict[0]
    assert 'class="verdict bad"' in report.render(failed)


@pytest.mark.parametrize("side", ["poundlock", "spark_sink"])
def test_a_kill_that_did_not_happen_fails_the_demo(side: str) -> None:
    spared = replace(result(), **{side: replace(getattr(result(), side), kills=1)})
    assert "killed 1 times, not 2" in spared.failures[0]


# The command and its children.


def test_fewer_than_three_kills_are_refused() -> None:
    assert CliRunner().invoke(demo, ["--kills", "2"]).exit_code == 2


def test_the_command_imports_no_heavy_module() -> None:
    code = (
        "import sys, poundlock.cli.demo; print({'rich', 'pyspark', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PARENT = """
import json, os, subprocess, time
child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, 0))
print(json.dumps({"pid": child.pid}), flush=True)
time.sleep(600)
"""


def test_a_kill_ends_the_whole_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild in its own process group, like a worker of Spark, dies with the child."""
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("parent", [], tmp_path / "log")
    messages: list[dict[str, int]] = []
    while not messages and not child.ended:
        messages = child.messages()
    assert child.kill() == -9
    stat = Path(f"/proc/{messages[0]['pid']}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
