"""`poundlock sql`: runs the pipelines of a TOML file with SQL, or a shell."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poundlock.terminal import say, say_json, shown_output

if TYPE_CHECKING:
    from poundlock.spark.pipeline.pipeline import Pipeline
    from poundlock.sqljob.file import JobFile


@click.command()
@click.argument(
    "path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, dir_okay=False)
)
@click.option("--once", is_flag=True, help="Process the available data, then exit.")
@click.option(
    "--explain", is_flag=True, help="Show the pipelines and their guarantees; start nothing."
)
@click.option("--shell", is_flag=True, help="Open the file's tables and sinks in a shell.")
@click.option("--master", default=None, help="Spark's master; this machine by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sql(
    path: Path | None, once: bool, explain: bool, shell: bool, master: str | None, as_json: bool
) -> None:
    """Run the pipelines of a FILE: named sources and sinks in TOML, and INSERT INTO sink SELECT ...

    Runs until it is stopped. Ctrl-C lets the current batches finish. Without FILE: opens a shell.
    """
    _check_options(path, once, explain, shell, as_json)
    from poundlock.sqljob import file

    job = file.JobFile() if path is None else file.read(path)
    spark = _open_session(job, master)
    if shell or path is None:
        _run_shell(spark, job)
        return
    from poundlock.sqljob.build import Catalog

    catalog = Catalog(spark, job)
    pipelines = catalog.pipelines()
    if explain:
        texts = {name: str(insert.statement) for name, insert in catalog.inserts.items()}
        _explain(pipelines, texts, as_json)
    else:
        _run_pipelines(pipelines, job.trigger, once, as_json)


def _check_options(
    path: Path | None, once: bool, explain: bool, shell: bool, as_json: bool
) -> None:
    modes = {"--once": once, "--explain": explain, "--shell": shell}
    chosen = [name for name, on in modes.items() if on]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} do not go together: choose one")
    if path is None and (once or explain):
        raise click.UsageError(f"{chosen[0]} needs a FILE")
    if as_json and (shell or path is None):
        raise click.UsageError("the shell prints no JSON: leave --json out, or give a FILE")


def _run_pipelines(
    pipelines: list[Pipeline], trigger: str | None, once: bool, as_json: bool
) -> None:
    from poundlock.sqljob import run

    for each in pipelines:
        say(f"pipeline {each.name}\n{each.guarantee()}", lines=True, err=as_json)
    with run.stopped_by_signals() as stopping:
        if once:
            run.once(pipelines, stopping)
        else:
            run.wait(run.start(pipelines, trigger, stopping), stopping)
    word = "stopped" if stopping.is_set() else "done"
    states = [{"pipeline": each.name, "state": word} for each in pipelines]
    if as_json:
        say_json(states)
    else:
        say(word)


def _open_session(job: JobFile, master: str | None) -> Any:
    from poundlock.spark.session import session

    # Spark would log each error that is printed here.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    with shown_output():
        spark = session(
            master,
            kafka="source.kafka" in job.kinds,
            delta="sink.delta" in job.kinds,
            conf={"spark.ui.enabled": "false"},
        )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _run_shell(spark: Any, job: JobFile) -> None:
    from poundlock.sqljob.shell import Shell, read_lines

    # Spark's own handler would cancel the jobs of all running pipelines.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    say("Statements end with a semicolon. HELP; lists the statements, EXIT; quits.")
    Shell(spark, job).run(read_lines(Path(state) / "poundlock" / "sql_history"))


def _explain(pipelines: list[Pipeline], texts: dict[str, str], as_json: bool) -> None:
    if as_json:
        say_json([_to_json(each, texts) for each in pipelines])
        return
    for each in pipelines:
        say(f"pipeline {each.name}, checkpoint {each.checkpoint_location}")
        for route in each.routes:
            say(f"  {texts[route.sink.name]}", lines=True)
        say(f"{each.guarantee()}\n", lines=True)


def _to_json(pipeline: Pipeline, texts: dict[str, str]) -> dict[str, object]:
    statement = pipeline.guarantee()
    return {
        "pipeline": pipeline.name,
        "checkpoint_location": pipeline.checkpoint_location,
        "source": statement.source,
        "replayable": statement.replayable,
        "guarantee": statement.guarantee.value,
        "sinks": [
            {
                "sink": route.sink,
                "statement": texts.get(route.sink),  # None for a dead-letter sink
                "kind": route.kind,
                "guarantee": route.cell.guarantee.value,
                "reason": route.cell.reason,
                "reader": route.reader,
            }
            for route in statement.routes
        ],
    }
