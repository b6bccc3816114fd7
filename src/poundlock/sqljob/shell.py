"""The shell of `poundlock sql`: runs statements that end with a semicolon."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from poundlock import terminal
from poundlock.errors import PoundlockError, UsageError
from poundlock.secret import SECRET_NAME
from poundlock.spark import internals
from poundlock.spark.pipeline.pipeline import Pipeline
from poundlock.spark.pipeline.query import Query
from poundlock.sqljob import file, run
from poundlock.sqljob.build import VIEWS, Catalog
from poundlock.sqljob.file import JobFile
from poundlock.sqljob.statements import Statement, split, split_all
from poundlock.terminal import say, visible

PROMPT, MORE = "sql> ", "...> "
_HISTORY_LINES = 1000
_POLL_S = 0.05

HELP = """\
SHOW TABLES;                      list the tables and sinks
DESCRIBE table;                   show the columns of a table
SELECT ...;                       show the first rows of a query
INSERT INTO sink SELECT ...;      start a pipeline
EXPLAIN INSERT ... | SELECT ...;  show what a statement would do
CREATE TEMPORARY VIEW v AS ...;   name a query
START;                            start the pipelines of the file
SHOW PIPELINES;                   list the pipelines and their state
STOP name;                        stop a pipeline after its current batch
LOAD file.toml;                   open another file
HELP;  EXIT;"""


class Shell:
    """Runs statements against the tables and sinks of a file. At its end it stops what it started."""

    def __init__(
        self,
        spark: Any,
        job: JobFile | None = None,
        *,
        console: Console | None = None,
        rows: int = 20,
        patience: float = 60.0,
        quiet: float = 3.0,
    ):
        self.spark = spark
        self.console = console or terminal.console()
        self.catalog = Catalog(spark, job or JobFile())
        self.running: dict[str, Query] = {}
        self._writers: dict[str, str] = {}  # {sink: pipeline}
        self._limits = (rows, patience, quiet)

    def run(self, lines: Iterable[str]) -> None:
        """Run statements from lines, until the lines end or a statement is EXIT."""
        pending, reader = "", iter(lines)
        try:
            while True:
                try:
                    line = next(reader, None)
                    if line is None:
                        break
                    found, pending = split(f"{pending}\n{line}" if pending else line)
                    for statement in found:
                        if statement.text.lower() in ("exit", "quit"):
                            return
                        self.execute(statement)
                except KeyboardInterrupt:
                    pending = ""
                    self.console.print("(interrupted)")
            for statement in split_all(pending):
                self.execute(statement)
        finally:
            run.stop(list(self.running.values()))

    def execute(self, statement: Statement) -> None:
        """Run one statement. Print its error, if there is one."""
        try:
            words = statement.text.split()
            command = _COMMANDS.get(" ".join(words[:2]).lower()) or _COMMANDS.get(words[0].lower())
            if command is not None:
                command(self, statement, words)
            else:
                self._sql(statement)
        except PoundlockError as error:
            self.console.print(Text(str(error), style="red"))
        except Exception as error:  # noqa: BLE001 (a shell goes on after any error)
            problem = next((line for line in str(error).splitlines() if line.strip()), "")
            self.console.print(Text(problem or type(error).__name__, style="red"))

    def _sql(self, statement: Statement) -> None:
        plan = self.catalog.parse(statement)
        if plan.nodeName() == "InsertIntoStatement":
            insert = self.catalog.insert(statement)
            self._start(self.catalog.pipeline([insert], insert.sink))
        elif plan.nodeName() in VIEWS:
            self.console.print(f"view {self.catalog.create_view(statement)}")
        elif internals.only_reads(self.spark, plan):
            frame = self.catalog.frame(statement)
            self._print(frame.columns, _first_rows(frame, *self._limits))
        else:
            raise UsageError("this shell cannot run that: HELP; lists the statements")

    def _start(self, *pipelines: Pipeline) -> None:
        writers = {route.sink.name: each.name for each in pipelines for route in each.routes}
        names = [*writers.values(), *(self._writers.get(sink, "") for sink in writers)]
        for name in names:
            if name in self.running and self.running[name].isActive:
                raise UsageError(
                    f"{name} is running and writes to the sink. First run: STOP {name};"
                )
        started = run.start(pipelines, self.catalog.job.trigger, threading.Event())
        for pipeline, query in zip(pipelines, started, strict=True):
            self.running[pipeline.name] = query
            self.console.print(Text(f"started {pipeline.name}\n{pipeline.guarantee()}"))
        self._writers |= writers

    def _print(self, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        grid = Grid(*[visible(name) for name in columns])
        for row in rows:
            grid.add_row(*["NULL" if value is None else visible(value) for value in row])
        self.console.print(grid)
        self.console.print(f"{grid.row_count} rows")

    # The shell's own commands.

    def _tables(self, statement: Statement, words: list[str]) -> None:
        catalog = self.catalog
        rows = [(table.name, table.kind) for table in catalog.tables.values()]
        known = {name.lower() for name, _ in rows}
        listed = [view.name for view in self.spark.catalog.listTables() if view.isTemporary]
        rows += [(name, "view") for name in listed if name.lower() not in known]
        rows += [(name, f"sink, {each['kind']}") for name, each in catalog.job.sink.items()]
        self._print(("name", "kind"), rows)

    def _describe(self, statement: Statement, words: list[str]) -> None:
        name = words[-1].strip("`") if len(words) == 2 or words[1].lower() == "table" else None
        if name is None:
            raise UsageError("DESCRIBE takes one table: write DESCRIBE table;")
        frame = self.catalog.frame(Statement(f"SELECT * FROM `{name}`"))
        self._print(
            ("column", "type"), [(f.name, f.dataType.simpleString()) for f in frame.schema.fields]
        )

    def _explain(self, statement: Statement, words: list[str]) -> None:
        inner = Statement(statement.text[len(words[0]) :].strip(), statement.line)
        plan = self.catalog.parse(inner)
        if plan.nodeName() == "InsertIntoStatement":
            insert = self.catalog.insert(inner)
            made = self.catalog.pipeline([insert], insert.sink)
            self.console.print(Text(f"{made.explain()}\n{made.guarantee()}"))
        elif internals.only_reads(self.spark, plan):
            tree = internals.analyzed_plan(self.catalog.frame(inner)).treeString()
            self.console.print(Text(str(tree)))
        else:
            raise UsageError("EXPLAIN takes an INSERT or a SELECT: write one of them after it")

    def _pipelines(self, statement: Statement, words: list[str]) -> None:
        rows = []
        for name, query in self.running.items():
            last = query.lastProgress
            batch = last["batchId"] if last else None
            failed = query.error is not None or query.exception() is not None
            state = "running" if query.isActive else "failed" if failed else "ended"
            rows.append((name, state, batch))
        self._print(("pipeline", "state", "last batch"), rows)

    def _start_file(self, statement: Statement, words: list[str]) -> None:
        self._start(*self.catalog.pipelines())

    def _stop(self, statement: Statement, words: list[str]) -> None:
        name = words[-1].strip("`")
        if len(words) != 2 or name not in self.running:
            names = ", ".join(self.running) or "none is running"
            raise UsageError(f"STOP takes the name of a pipeline: {names}")
        self.running.pop(name).stop()
        self.console.print(f"stopped {name}")

    def _load(self, statement: Statement, words: list[str]) -> None:
        if any(query.isActive for query in self.running.values()):
            raise UsageError("pipelines are running: STOP them before you open another file")
        path = statement.text[len(words[0]) :].strip().strip("'\"")
        self.catalog = Catalog(self.spark, file.read(path))
        self._tables(statement, words)

    def _help(self, statement: Statement, words: list[str]) -> None:
        self.console.print(Text(HELP))


_COMMANDS: dict[str, Callable[[Shell, Statement, list[str]], None]] = {
    "show tables": Shell._tables,
    "show pipelines": Shell._pipelines,
    "describe": Shell._describe,
    "desc": Shell._describe,
    "explain": Shell._explain,
    "start": Shell._start_file,
    "stop": Shell._stop,
    "load": Shell._load,
    "help": Shell._help,
}


def _first_rows(frame: Any, limit: int, patience: float, quiet: float) -> list[Any]:
    """Return at most `limit` rows of a query. Commit nothing, and give no guarantee.

    A stream is read until no row has come for `quiet` seconds, and for `patience` seconds at most.
    """
    if not frame.isStreaming:
        return frame.limit(limit).collect()
    rows: list[Any] = []

    def take(batch: Any, number: int) -> None:
        if len(rows) < limit:
            rows.extend(batch.limit(limit - len(rows)).collect())

    with tempfile.TemporaryDirectory(prefix="poundlock-preview-") as place:
        query = _start_preview(frame, take, place)
        try:
            busy = time.monotonic()
            end = busy + patience
            while query.isActive and len(rows) < limit and time.monotonic() < end:
                status = query.status
                if status["isTriggerActive"] or status["isDataAvailable"] or not query.lastProgress:
                    busy = time.monotonic()
                elif time.monotonic() - busy > quiet:
                    break
                time.sleep(_POLL_S)
            if query.exception() is not None and not rows:
                raise query.exception()
        finally:
            query.stop()
    return rows


def _start_preview(frame: Any, take: Any, place: str) -> Any:
    """Start the query in append mode, or in update mode if Spark refuses append."""
    for mode in ("append", "update"):
        writer = frame.writeStream.foreachBatch(take).outputMode(mode)
        try:
            return writer.option("checkpointLocation", f"{place}/{mode}").start()
        except Exception as error:
            # Append needs final rows, and an aggregate without a watermark has none.
            if type(error).__name__ != "AnalysisException" or mode == "update":
                raise
    raise AssertionError("unreachable")


def read_lines(history: Path) -> Iterator[str]:
    """Yield the lines that a user types, until Ctrl-D. Lines that may hold a secret are not saved."""
    with _open_history(history) as remember:
        pending = ""
        while True:
            try:
                line = input(MORE if pending else PROMPT)
            except EOFError:
                return
            except KeyboardInterrupt:  # discards the line, but does not end the shell
                pending = ""
                say()
                continue
            _, pending = split(f"{pending}\n{line}" if pending else line)
            address = "://" in line and "@" in line
            if line.strip() and not address and not SECRET_NAME.search(line.lower()):
                remember(line)
            yield line


@contextlib.contextmanager
def _open_history(history: Path) -> Iterator[Callable[[str], None]]:
    try:
        import readline
    except ImportError:  # some builds of Python lack it
        yield lambda line: None
        return
    readline.set_auto_history(False)
    readline.set_history_length(_HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    try:
        yield readline.add_history
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(history)
