"""SQL jobs without Spark: the file, the split into statements, windows and patterns as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poundlock.errors import UsageError
from poundlock.sqljob import file, operators
from poundlock.sqljob.arguments import make_sink
from poundlock.sqljob.statements import Statement, split, split_all
from poundlock.stream.pattern import begin, skip_past_last_event, skip_to_last
from poundlock.stream.windows import count, sessions, sliding, tumbling


@pytest.mark.parametrize(
    ("text", "statements", "rest"),
    [
        ("SELECT 1; SELECT 2;", ["SELECT 1", "SELECT 2"], ""),
        ("SELECT ';'; x", ["SELECT ';'"], " x"),
        ('SELECT ";", `a;b` FROM t;', ['SELECT ";", `a;b` FROM t'], ""),
        (r"SELECT 'it\';s';", [r"SELECT 'it\';s'"], ""),
        (r"SELECT r'\'; SELECT 2;", [r"SELECT r'\'", "SELECT 2"], ""),
        ("SELECT `a\\`; b", ["SELECT `a\\`"], " b"),
        ("-- no; not yet\nSELECT 1;", ["-- no; not yet\nSELECT 1"], ""),
        ("/* a; /* b; */ c; */ SELECT 1;", ["/* a; /* b; */ c; */ SELECT 1"], ""),
        (" ; ;-- only words;\n; ", [], ""),
        ("SELECT 'open; ", [], "SELECT 'open; "),
        ("/* open; ", [], ""),
    ],
)
def test_statements_end_only_at_real_semicolons(
    text: str, statements: list[str], rest: str
) -> None:
    found, left = split(text)
    assert ([each.text for each in found], left) == (statements, rest)


def test_statements_keep_their_line_numbers() -> None:
    found = split_all("\n\nSELECT 1;\n  -- why\nSELECT\n 2;\n\nSELECT 3", 10)
    assert [(each.line, each.text) for each in found] == [
        (12, "SELECT 1"),
        (13, "-- why\nSELECT\n 2"),
        (17, "SELECT 3"),
    ]
    assert found[2].padded.splitlines()[16] == "SELECT 3"
    assert len(str(Statement("SELECT " + "x" * 100))) == 60


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("tumbling 1 minute", tumbling("1 minute")),
        ("Sliding  15 seconds by 5 seconds", sliding("15 seconds", "5 seconds")),
        ("sessions 10 minutes", sessions("10 minutes")),
        ("count 5", count(5)),
        ("count 10 by 2", count(10, 2)),
    ],
)
def test_windows_are_read_from_text(text: str, windows: Any) -> None:
    assert operators.windows(text) == windows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tumbling",
        "hopping 1 minute",
        "sliding 1 minute",
        "tumbling 1 minute by 5 seconds",
        "count five",
        "count 10 by x",
        "tumbling 1 parsec",
        "sliding 1 minute by ",
    ],
)
def test_wrong_windows_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        operators.windows(text)


def test_patterns_are_read_from_text() -> None:
    define = {"warm": "t > 30", "hot": "t > 40"}
    made = operators.pattern(
        "warm{3} followed_by hot+ next end", define, within="1 minute", skip="skip_to_last hot"
    )
    assert made == (
        begin("warm", skip_to_last("hot"))
        .where("t > 30")
        .times(3)
        .followed_by("hot")
        .where("t > 40")
        .one_or_more()
        .next("end")
        .within("1 minute")
    )
    made = operators.pattern(
        "a? followed_by_any b{2,} next c{2,4} followed_by d* next e not_next f followed_by g",
        {},
        skip="skip_past_last_event",
    )
    assert made == (
        begin("a", skip_past_last_event())
        .optional()
        .followed_by_any("b")
        .times_or_more(2)
        .next("c")
        .times(2, 4)
        .followed_by("d")
        .one_or_more()
        .optional()
        .next("e")
        .not_next("f")
        .followed_by("g")
    )


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "write stages"),
        ("a followed_by", {}, "write stages"),
        ("a then b", {}, "'then' is not one of next"),
        ("next next b", {}, "'next' is not a stage"),
        ("a{x} next b", {}, "is not a stage"),
        ("a next b", {"define": {"c": "true"}}, "has no stage of that name: it has a, b"),
        ("a next b", {"skip": "skip_to_first"}, "skip='skip_to_first' is not known"),
        ("a next b", {"skip": "skip_to_last c"}, "no stage of this name has rows"),
        ("a not_followed_by b", {}, "with within"),
        ("a next a", {}, "used twice"),
    ],
)
def test_wrong_patterns_are_refused(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        operators.pattern(text, options.pop("define", {}), **options)


TOP = 'name = "job"\ncheckpoint_location = "state"\n'


def read(place: Path, text: str) -> file.JobFile:
    path = place / "job.toml"
    path.write_text(text)
    return file.read(path)


def test_a_file_defines_sources_sinks_and_statements(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        TOP + 'trigger = "2 seconds"\nsql = """\nINSERT INTO out\nSELECT 1; SELECT 2\n"""\n'
        '[source.in]\nkind = "files"\npath = "in"\n'
        '[sink.out]\nkind = "files"\npath = "s3://bucket/out"\n',
    )
    assert (job.name, job.trigger) == ("job", "2 seconds")
    assert job.checkpoint_location == str(tmp_path / "state")
    assert job.source["in"]["path"] == str(tmp_path / "in")
    assert job.sink["out"]["path"] == "s3://bucket/out"
    assert [(each.line, each.text) for each in job.statements] == [
        (5, "INSERT INTO out\nSELECT 1"),
        (6, "SELECT 2"),
    ]
    assert job.kinds == {"source.files", "sink.files"}


def test_sql_can_be_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "job.sql").write_text("\nSELECT 1;")
    [statement] = read(tmp_path, TOP + 'sql_file = "job.sql"').statements
    assert (statement.line, statement.text) == (2, "SELECT 1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = \n", "is not valid TOML: .*line 1"),
        ('name = "job"', "lacks checkpoint_location"),
        ('name = "a b"\ncheckpoint_location = "c"', "cannot be used"),
        (TOP + 'colour = "red"', "has 'colour', which is not one of name"),
        (TOP + "[sink.out]", r"\[sink.out\] lacks its kind"),
        (TOP + "source = 3", r"write \[source.NAME\]"),
        (TOP + '[source."a b"]\nkind = "files"', "cannot be used"),
        (TOP + 'sql = "x"\nsql_file = "y"', "give one of them"),
        (TOP + 'sql_file = "y"', "sql_file of .* cannot be read"),
        (TOP + "sql = 3", "is not text"),
        (TOP + "trigger = 3", "such as '2 seconds'"),
        (TOP + '[source.a]\nkind="files"\n[sink.A]\nkind="files"', "have the same name"),
        (TOP + '[source.a]\nkind="files"\n[window.w]\nlate_output="a"', "late_output of .window.w"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "option",
    [
        'dsn = "host=db password=hunter2"',
        'url = "redis://user:hunter2@db:6379/0"',
        'settings = {"sasl.password" = "hunter2"}',
        'hosts = ["redis://db:6379", "redis://user:hunter2@db:6379/0"]',
        'options = [["a", {"password" = "hunter2"}]]',
        'api_key = "hunter2"',
        'headers = {"X-Api-Key" = "hunter2"}',
        'private-key = "hunter2"',
        'settings = {http_auth = ["admin", "hunter2"]}',
        'settings = {http_auth = "hunter2"}',
        'headers = {Authorization = "hunter2"}',
        '"kafka.ssl.keystore.key" = "hunter2"',
        'anything = "-----BEGIN ENCRYPTED PRIVATE KEY-----hunter2"',
    ],
)
def test_secrets_in_the_file_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=r"\[sink.out\] holds a secret") as raised:
        read(tmp_path, f'{TOP}[sink.out]\nkind = "x"\n{option}')
    assert "hunter2" not in str(raised.value)
    name = option.replace("host=db password=hunter2", "env:A")
    name = name.replace("redis://user:hunter2@db:6379/0", "env:A")
    name = name.replace("-----BEGIN ENCRYPTED PRIVATE KEY-----", "").replace("hunter2", "env:A")
    assert read(tmp_path, f'{TOP}[sink.out]\nkind = "x"\n{name}').sink["out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "carrier pigeon"}, "is not one of console, delta"),
        ({"kind": "memory"}, "is not one of console, delta"),
        ({"kind": "files", "pth": "x"}, "has 'pth', which is not one of path, format"),
        ({"kind": "files"}, "lacks path"),
        ({"kind": "files", "path": "x", "name": "y"}, "but its header already names it 'out'"),
        ({"kind": "files", "path": "/x", "format": "tar"}, r"\[sink.out\]: .*tar"),
        ({"kind": "files", "path": "/x", "semantic": "often"}, r"\[sink.out\]: .*often"),
    ],
)
def test_wrong_arguments_of_a_sink_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_sink("out", options)


def test_a_sink_is_named_after_its_table() -> None:
    assert make_sink("out", {"kind": "files", "path": "/x", "format": "json"}).name == "out"
