"""Pipelines as SQL in Spark: how statements are translated, which are refused, and the shell."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from poundlock import terminal
from poundlock.cli import poundlock
from poundlock.core.protocol import Step
from poundlock.errors import UsageError
from poundlock.spark.columns import field_of, rows_column
from poundlock.sqljob import file, run
from poundlock.sqljob.build import pipelines
from poundlock.sqljob.shell import Shell

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- (run|build) -->\n```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = dict(BLOCK.findall((ROOT / "docs" / "sql.md").read_text()))

# A sink without an INSERT is never created.
JOB = """
name = "job"
checkpoint_location = "checkpoint"
sql = '''
{sql}
'''
[source.readings]
kind = "collection"
schema = "id STRING, at BIGINT, temperature DOUBLE"
rows = [["a", 1, 20.0], ["b", 2, 41.0], ["a", 3, 42.0]]
batch_rows = 1
directory = "rows"
select = ["id", "timestamp_seconds(at) AS ts", "temperature"]
time = "ts"
watermark = "10 seconds"

[window.means]
from = "readings"
key = "id"
windows = "tumbling 10 seconds"
aggregate = ["avg(temperature) AS mean"]
late_output = "too_late"

[window.counts]
from = "means"
key = ["id"]
windows = "tumbling 1 minute"
aggregate = ["count(*) AS n"]
"""
SINKS = "".join(f'[sink.out{n}]\nkind = "files"\npath = "out{n}"\n' for n in range(1, 14))


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    def write(sql: str, more: str = "", sinks: str = SINKS) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(JOB.format(sql=sql) + sinks + more)
        return path

    return write


def sql(*arguments: str | Path) -> Result:
    return CliRunner().invoke(poundlock, ["sql", *map(str, arguments)])


def rows(spark: Any, place: Path, format: str = "parquet") -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.format(format).load(str(place)).collect())


def test_statements_over_one_view_share_a_decision(spark: Any, job: Callable[..., Path]) -> None:
    made = pipelines(
        spark,
        job(
            """
            CREATE TEMPORARY VIEW warm AS SELECT * FROM readings WHERE temperature > 30;
            INSERT INTO out1 SELECT * FROM readings;
            INSERT INTO out2 SELECT id, temperature + 1, upper(id) AS name FROM Readings
              WHERE ts > TIMESTAMP '1970-01-01';
            INSERT INTO out3 SELECT *, readings.id AS again FROM readings;
            INSERT INTO out4 SELECT * EXCEPT (ts) FROM readings WHERE temperature > 40 AND id LIKE 'a%';
            INSERT INTO out5 TABLE readings;
            INSERT INTO out6 SELECT id, mean FROM means WHERE mean > 20;
            INSERT INTO out7 SELECT id FROM too_late;
            INSERT INTO out8 SELECT window.start, max(temperature) AS high FROM readings
              GROUP BY window(ts, '10 seconds');
            INSERT INTO out9 SELECT DISTINCT id, ts FROM readings;
            INSERT INTO out10 SELECT explode(array(id, id)) AS id FROM readings;
            INSERT INTO out11 SELECT r.id FROM readings r;
            INSERT INTO out12 SELECT id FROM warm;
            INSERT INTO out13 SELECT upper(id) AS name FROM readings WHERE rand() < 0.5;
            """
        ),
    )
    assert {each.name: [route.sink.name for route in each.routes] for each in made} == {
        "job-readings": ["out1", "out2", "out3", "out4", "out5"],
        "job-means": ["out6", "out7"],
        **{f"job-out{n}": [f"out{n}"] for n in (8, 9, 10, 11, 13)},
        "job-warm": ["out12"],
    }
    assert [route.output for route in made[1].routes] == [None, "too_late"]
    given = made[0]._routed().schema  # each sink gets its fields or a struct
    columns = [
        [field for name in given.names if (field := field_of(name, n)) is not None]
        or given[rows_column(n)].dataType.names  # pyright: ignore[reportAttributeAccessIssue]
        for n in range(5)
    ]
    assert columns == [
        ["id", "ts", "temperature"],
        ["id", "(temperature + 1)", "name"],
        ["id", "ts", "temperature", "again"],
        ["id", "temperature"],
        ["id", "ts", "temperature"],
    ]


def test_an_aggregate_without_group_by_gets_its_own_pipeline(
    spark: Any, job: Callable[..., Path]
) -> None:
    """The parser alone cannot distinguish it from other functions."""
    update = '[sink.total]\nkind = "console"\noutput_mode = "update"\n'
    [made] = pipelines(
        spark, job("INSERT INTO total SELECT avg(temperature) FROM readings", update)
    )
    assert (made.name, made.output_mode) == ("job-total", "update")


def test_a_file_can_be_opened_again(spark: Any, job: Callable[..., Path]) -> None:
    path = job("CREATE TEMPORARY VIEW again AS TABLE readings; INSERT INTO out1 TABLE again")
    assert [made.name for _ in range(2) for made in pipelines(spark, path)] == ["job-again"] * 2


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ("", "no INSERT INTO"),
        ("SELECT * FROM readings", r"line 5: SELECT \* FROM readings: write INSERT INTO"),
        ("\nINSERT INTO out1 SELEC id", "line 6: .*Syntax error.*line 6"),
        ("INSERT INTO nowhere SELECT * FROM readings", "no sink nowhere: there are out1, out2"),
        ("INSERT INTO out1 SELECT * FROM nothing", "line 5: .*`nothing` cannot be found"),
        ("INSERT INTO out1 SELECT id,\n nope FROM readings", "line 5: .*`nope` cannot be.*line 6"),
        ("INSERT INTO out1 SELECT 1", "reads no stream"),
        ("INSERT INTO out1 (a) SELECT id FROM readings", "with AS"),
        ("INSERT OVERWRITE out1 SELECT id FROM readings", "support only INSERT INTO"),
        (
            "INSERT INTO out1 TABLE readings;\nINSERT INTO OUT1 TABLE means",
            "line 6: .*line 5 inserts into out1 already",
        ),
        ("CREATE VIEW v AS SELECT 1", "or CREATE TEMPORARY VIEW"),
        ("CREATE GLOBAL TEMPORARY VIEW v AS SELECT 1", "write TEMPORARY VIEW"),
        ("CREATE TEMPORARY VIEW readings AS SELECT 1", "another name"),
        (
            "CREATE TEMPORARY VIEW v AS SELECT 1; CREATE TEMPORARY VIEW v AS SELECT 2",
            "another name",
        ),
        ("DROP TABLE readings", "write INSERT INTO"),
    ],
)
def test_wrong_statements_are_refused(
    spark: Any, job: Callable[..., Path], statements: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        pipelines(spark, job(statements))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            '[window.w]\nfrom="w2"\nkey="id"\nwindows="count 1"\naggregate="count(*)"',
            "there are read",
        ),
        ('[window.w]\nfrom="w"\nkey="id"\nwindows="count 1"\naggregate="count(*)"', "from itself"),
        ('[window.w]\nfrom="readings"\nkey="id"\nwindows="count 1"', "lacks aggregate"),
        (
            '[window.w]\nfrom="readings"\nkey="no"\nwindows="count 1"\naggregate="count(*)"',
            r"\[window.w\]: .*`no`",
        ),
        (
            '[match.m]\nfrom="readings"\nkey="id"\npattern="a"\ndefine=3',
            "define must give a condition",
        ),
        (
            '[match.m]\nfrom="readings"\nkey="id"\npattern="a"\ndefine={a="no > 3"}',
            r"\[match.m\]: .*`no`",
        ),
        ('[source.s]\nkind="tape"', "'tape' is not one of collection, files"),
        (
            '[source.s]\nkind="collection"\nrows=[[1]]\nschema="n INT"\nselect=["m"]',
            r"source.s\]: .*`m`",
        ),
        (
            '[source.s]\nkind="collection"\nrows=[[1]]\nschema="n INT"\ntime="n"',
            "make it a timestamp",
        ),
        ('[source.s]\nkind="socket"\nhost="h"', "lacks port"),
        ('[sink.s]\nkind="pigeon"', "'pigeon' is not one of"),
    ],
)
def test_wrong_tables_are_refused(
    spark: Any, job: Callable[..., Path], more: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        pipelines(spark, job("INSERT INTO out1 TABLE readings", more))


def test_explain_starts_nothing(spark: Any, job: Callable[..., Path], tmp_path: Path) -> None:
    more = (
        '[sink.fit]\nkind="console"\non_bad_row="skip"\n'
        '[sink.some]\nkind="files"\npath="some"\non_bad_row="bad"\n[sink.bad]\nkind="files"\npath="bad"\n'
    )
    path = job("INSERT INTO fit TABLE readings; INSERT INTO some TABLE readings", more)
    [plan] = json.loads(sql(path, "--explain", "--json").stdout)
    assert (plan["pipeline"], plan["guarantee"]) == ("job-readings", "at_least_once")
    assert {each["sink"]: (each["statement"], each["guarantee"]) for each in plan["sinks"]} == {
        "fit": ("INSERT INTO fit TABLE readings", "at_least_once"),
        "some": ("INSERT INTO some TABLE readings", "exactly_once"),
        "bad": (None, "exactly_once"),
    }
    assert "INSERT INTO some TABLE readings" in sql(path, "--explain").stdout
    assert not (tmp_path / "checkpoint").exists()


def test_wrong_calls_are_refused() -> None:
    assert "do not go together" in sql("x.toml", "--once", "--shell").output
    assert "needs a FILE" in sql("--once").output
    assert "cannot be read" in str(sql("/nowhere.toml").exception)


def test_ctrl_c_lets_the_running_batch_finish(
    spark: Any, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job(
        "INSERT INTO out1 SELECT * FROM numbers",
        f"""
[source.numbers]
kind = "collection"
schema = "n INT"
rows = {[[n] for n in range(12)]}
batch_rows = 1
directory = "rows"
""",
    )

    def interrupt() -> None:
        while not list((tmp_path / "out1").glob("_spark_metadata/0")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    result = sql(path)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "stopped"), result.output
    found = [n for (n,) in rows(spark, tmp_path / "out1")]
    assert 0 < len(found) < 12 and found == list(range(len(found)))
    log = tmp_path / "checkpoint" / "numbers" / "commits"
    assert len([each for each in log.iterdir() if each.name.isdecimal()]) == len(found)
    assert sql(path, "--once").exit_code == 0
    assert [n for (n,) in rows(spark, tmp_path / "out1")] == list(range(12))


def test_a_stop_waits_for_the_running_batch(
    spark: Any, job: Callable[..., Path], tmp_path: Path
) -> None:
    stopping = threading.Event()

    def observe(step: Step, facts: Any) -> None:
        if step is Step.PREPARED:
            stopping.set()
            time.sleep(2)  # enough time for a stop that does not wait

    [made] = pipelines(spark, job("INSERT INTO out1 SELECT id FROM readings"))
    run.wait(run.start([made.observe(observe)], None, stopping), stopping)
    assert rows(spark, tmp_path / "out1") == [("a",)]
    assert (tmp_path / "checkpoint" / "readings" / "commits" / "0").exists()


def test_the_sensors_example_runs(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "examples" / "sensors.toml"
    path.parent.mkdir()
    shutil.copy(ROOT / "examples" / "sensors.toml", path)
    result = sql(path, "--once")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "done"), result.output
    out = tmp_path / "build" / "sensors"
    assert len(rows(spark, out / "readings")) == 14
    assert [(row[0], row[1]) for row in rows(spark, out / "alarms", "json")] == [
        ("a", 41.0),
        ("a", 44.0),
        ("a", 99.0),
        ("b", 98.0),
    ]
    means = [(key, start.second, n) for key, start, _, _, n in rows(spark, out / "means")]
    assert means == [
        ("a", 0, 3),
        ("a", 10, 1),
        ("a", 30, 1),
        ("a", 0, 1),
        ("b", 0, 1),
        ("b", 10, 1),
        ("b", 20, 1),
        ("b", 0, 1),
        ("b", 30, 1),
    ]
    late = [(key, temperature) for key, _, temperature in rows(spark, out / "late")]
    assert late == [("a", 99.0), ("b", 98.0)]
    alerts = [(key, a.second, b.second) for key, a, b in rows(spark, out / "alerts")]
    assert alerts == [("a", 4, 9), ("a", 14, 31)]
    assert [highest for _, highest in rows(spark, out / "extremes")] == [99.0, 41.0, 25.0]


def test_the_runnable_example_of_the_documentation_runs(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "clicks.toml").write_text(EXAMPLES["run"])
    result = sql(tmp_path / "clicks.toml", "--once", "--json")
    assert json.loads(result.stdout[result.stdout.index("[") :]) == [
        {"pipeline": "clicks-sittings", "state": "done"}
    ]
    visits = [(row[0], row[3]) for row in rows(spark, tmp_path / "visits")]
    assert visits == [("ann", 2), ("ann", 1), ("bob", 1), ("bob", 1)]
    assert [user for user, _ in rows(spark, tmp_path / "missed")] == ["ann"]


def test_the_server_example_of_the_documentation_builds(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_DSN", "host=127.0.0.1 password=hunter2")
    (tmp_path / "sensors.toml").write_text(EXAMPLES["build"])
    [made] = pipelines(spark, tmp_path / "sensors.toml")
    assert [route.sink.name for route in made.routes] == ["hot", "archive"]
    assert "hunter2" not in f"{made.explain()}{made.guarantee()}"


class Typing:
    """A shell that gets lines, and its output."""

    def __init__(self, spark: Any, path: Path | None):
        self.out = io.StringIO()
        console = terminal.console(file=self.out, width=200)
        job = None if path is None else file.read(path)
        self.shell = Shell(spark, job, console=console, rows=5, quiet=0.5)

    def __call__(self, *lines: str) -> str:
        self.out.seek(0)
        self.out.truncate()
        self.shell.run(lines)
        return self.out.getvalue()


def test_the_shell_shows_and_explains(spark: Any, job: Callable[..., Path]) -> None:
    typed = Typing(spark, job("CREATE TEMPORARY VIEW warm2 AS SELECT id FROM readings"))
    output = typed("SHOW TABLES;", "describe", "readings;", "HELP;", "SHOW PIPELINES;")
    for line in (
        r"too_late +│ late rows",
        r"means +│ window",
        r"warm2 +│ view",
        r"out1 +│ sink, files",
        r"ts +│ timestamp",
        "STOP name;",
        "0 rows",
    ):
        assert re.search(line, output), (line, output)
    assert "2 rows" in typed("SELECT id, temperature FROM readings WHERE id = 'a';")
    assert "a" in typed("SELECT id, count(*) AS n FROM readings GROUP BY id;")  # no watermark
    output = typed("EXPLAIN INSERT INTO out1 SELECT id FROM readings;")
    assert "pipeline job-out1" in output and "exactly once" in output
    assert "EventTimeWatermark" in typed("EXPLAIN SELECT id FROM readings;")
    for wrong, words in {
        "SELECT nope FROM readings;": "`nope` cannot be resolved",
        "SELEC;": "Syntax error",
        "DROP TABLE readings;": "this shell cannot run that",
        "WITH x AS (SELECT 1) INSERT INTO out1 SELECT * FROM x;": "this shell cannot run that",
        "STOP it;": "none is running",
        "EXPLAIN DROP TABLE x;": "EXPLAIN takes",
        "INSERT INTO out1 SELECT id FROM nothing;": "cannot be found",
    }.items():
        assert words in typed(wrong), wrong


def test_the_shell_obeys_no_row(spark: Any) -> None:
    hostile = "char(27) || '[2J' || char(13) || '[/x][red]' || decode(x'e280ae', 'UTF-8')"
    output = Typing(spark, None)(
        f"SELECT {hostile} AS `c[/y]`;", f"SELECT raise_error({hostile});", "STOP \x1b[2J;"
    )
    assert "\\x1b[2J\\r[/x][red]\\u202e" in output and "c[/y]" in output
    assert "[USER_RAISED_EXCEPTION] \\x1b[2J" in output  # the error's first line
    assert not [c for c in output if c != "\n" and not c.isprintable()]


def test_the_shell_starts_and_stops(spark: Any, job: Callable[..., Path], tmp_path: Path) -> None:
    typed = Typing(
        spark,
        job(
            """
            INSERT INTO out2 SELECT id FROM readings;
            INSERT INTO out3 SELECT 42 / (temperature - 41) AS q, 1 / (temperature - 41) AS r
              FROM readings WHERE id = 'a'; -- the row of b could not be divided
            """
        ),
    )

    def lines() -> Any:
        yield "INSERT INTO out1 SELECT id, temperature"
        yield "FROM readings WHERE id = 'a';"
        typed.shell.running["job-out1"].processAllAvailable()
        yield "INSERT INTO out1 SELECT id FROM readings; SHOW PIPELINES; LOAD x.toml;"
        yield "STOP job-out1; START; INSERT INTO out2 SELECT id FROM readings;"
        typed.shell.running["job-readings"].processAllAvailable()
        yield "EXIT; SELECT 1;"

    typed.shell.run(lines())
    output = typed.out.getvalue()
    assert "sink out1 (staged): exactly once" in output
    assert "job-out1 is running and writes to the sink. First run: STOP job-out1;" in output
    assert "job-readings is running and writes to the sink" in output
    assert "STOP them before you open another file" in output
    assert re.search(r"job-out1 +│ running", output) and "stopped job-out1" in output
    assert "started job-readings" in output
    assert rows(spark, tmp_path / "out1") == [("a", 20.0), ("a", 42.0)]
    assert [q for q, _ in rows(spark, tmp_path / "out3")] == [-2.0, 42.0]
    assert rows(spark, tmp_path / "out2") == [("a",), ("a",), ("b",)]
    assert not typed.shell.running["job-readings"].isActive, "what a shell starts ends with it"


def test_the_shell_starts_without_a_file(spark: Any, job: Callable[..., Path]) -> None:
    typed = Typing(spark, None)
    assert "42" in typed("SELECT 40 + 2 AS answer")
    assert re.search(r"readings +│ source", typed(f"LOAD '{job('')}';"))
