"""From a file to pipelines: tables that SQL can select from, and the routes that its INSERTs make.

INSERTs that only choose and shape rows of one table become routes of one pipeline, with one decision
over all their sinks. Any other query is Spark's own, and becomes a pipeline by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from poundlock.core.participant import Participant
from poundlock.core.sparksql import quoted
from poundlock.errors import UsageError
from poundlock.spark import internals
from poundlock.spark.pipeline.pipeline import Pipeline, pipeline
from poundlock.spark.stream.flow import Flow, flow
from poundlock.sqljob import file, operators
from poundlock.sqljob.arguments import check_sink, make_sink, open_source, take, texts
from poundlock.sqljob.file import JobFile, Options
from poundlock.sqljob.statements import Statement

VIEWS = ("CreateViewCommand", "CreateTempViewUsing")
_ON_SOURCE = ("select", "where", "time", "watermark", "position")
_ON_SINK = ("on_bad_row", "output_mode")
_WINDOW = ("from", "key", "windows", "aggregate", "allowed_lateness", "late_output")
_MATCH = ("from", "key", "pattern", "define", "within", "skip", "late_output")


@dataclass(frozen=True)
class Table:
    """A name that SQL can select from."""

    name: str
    kind: str
    flow: Flow
    output: str | None = None  # which of the flow's; None: the main one
    base: str = ""  # the table whose flow it is


@dataclass(frozen=True)
class Insert:
    """An INSERT, looked up."""

    statement: Statement
    sink: str
    frame: Any  # of its whole query
    table: str | None = None  # the one whose rows it only chooses and shapes, if it does no more
    select: tuple[Any, ...] | None = None
    where: Any = None


def pipelines(spark: Any, path: str | Path) -> list[Pipeline]:
    """Return the pipelines of a file. Nothing is started, and all that can be checked is."""
    return Catalog(spark, file.read(path)).pipelines()


class Catalog:
    """The tables and sinks of a file, opened in a session, where the tables are temporary views."""

    def __init__(self, spark: Any, job: JobFile):
        self.spark, self.job = spark, job
        self.tables: dict[str, Table] = {}
        self.inserts: dict[str, Insert] = {}  # of the file, by sink
        self._views: dict[str, Statement] = {}
        for name, options in job.sink.items():
            check_sink(name, options)
        for name, options in job.source.items():
            self._add(Table(name, "source", self._source(name, options)))
        for name in (*job.window, *job.match):
            self._operator(name, ())
        for statement in job.statements:
            if self.parsed(statement).nodeName() in VIEWS:
                self.create_view(statement)

    # Statements.

    def parsed(self, statement: Statement) -> Any:
        """Return what Spark's parser makes of a statement."""
        with _explained(statement):
            return internals.parsed_sql(self.spark, statement.padded)

    def frame(self, statement: Statement) -> Any:
        """Return the frame of a query."""
        with _explained(statement):
            return internals.plan_frame(self.spark, self.parsed(statement))

    def create_view(self, statement: Statement) -> str:
        """Run a CREATE TEMPORARY VIEW, and return the view's name."""
        plan = self.parsed(statement)
        local = plan.nodeName() != "CreateViewCommand" or "Local" in str(plan.viewType())
        identifier = plan.tableIdent() if plan.nodeName() != "CreateViewCommand" else plan.name()
        name = str(identifier.table())
        if not local:
            raise _wrong(statement, "a view lasts no longer than its job: write TEMPORARY VIEW")
        if _found(name, {**self.tables, **self.job.sink, **self._views}):
            raise _wrong(statement, f"there is {name} already: give the view another name")
        self.spark.catalog.dropTempView(name)  # one of another file, as with our tables
        with _explained(statement):
            self.spark.sql(statement.padded)
        self._views[name] = statement
        return name

    def insert(self, statement: Statement) -> Insert:
        """Look up an INSERT: its sink, its query, and whether that is plain."""
        plan = self.parsed(statement)
        if plan.nodeName() != "InsertIntoStatement":
            raise _wrong(statement, "write INSERT INTO a sink, or CREATE TEMPORARY VIEW")
        if plan.overwrite() or not plan.partitionSpec().isEmpty():
            raise _wrong(statement, "only INSERT INTO sink SELECT is for streams")
        if not plan.userSpecifiedCols().isEmpty():
            raise _wrong(statement, "name the columns in the SELECT, with AS")
        written = str(plan.table().multipartIdentifier().mkString("."))
        sink = _found(written, self.job.sink)
        if sink is None:
            raise _wrong(statement, f"there is no sink {written}: {_those(self.job.sink)}")
        with _explained(statement):
            frame = internals.plan_frame(self.spark, plan.query())
        if not frame.isStreaming:
            raise _wrong(statement, "its query reads no stream: select from a source of the file")
        return self._plain(Insert(statement, sink, frame), plan.query())

    def _plain(self, insert: Insert, query: Any) -> Insert:
        """Take a query apart that is SELECT items FROM one table [WHERE]. Leave any other as it is.

        The parser says what is written, and the analysed plan whether it is what it seems: only there
        is an aggregate without GROUP BY told from other functions.
        """
        analyzed, nodes = internals.analyzed_plan(insert.frame), []
        while query.nodeName() in ("Project", "Filter"):
            if query.nodeName() != analyzed.nodeName() or not analyzed.subqueries().isEmpty():
                return insert
            if query.nodeName() == "Filter" and not analyzed.condition().deterministic():
                return insert  # a route asks its condition more than once
            nodes.append(query)
            query, analyzed = query.child(), analyzed.child()
        shape = [str(node.nodeName()) for node in nodes]
        if shape not in ([], ["Project"], ["Project", "Filter"]):
            return insert
        if (query.nodeName(), analyzed.nodeName()) != ("UnresolvedRelation", "SubqueryAlias"):
            return insert
        table = str(query.multipartIdentifier().mkString("."))
        select = where = None
        if len(nodes) > 1:
            where = internals.expression_column(self.spark, nodes[1].condition())
        if nodes:
            listed = nodes[0].projectList()
            items = [listed.apply(index) for index in range(listed.size())]
            chosen = self._items(items, insert.frame.columns, where)
            if chosen is None:
                return insert
            select = chosen or None
        return replace(insert, table=table, select=select, where=where)

    def _items(self, items: list[Any], names: list[str], where: Any) -> tuple[Any, ...] | None:
        """Return the items of a SELECT as columns, none for a mere `*`. None: they are not plain.

        What is computed is so only for rows that WHERE keeps: others may not bear it, as by a division.
        """
        chosen: list[Any] = []
        stars = [str(item.nodeName()) for item in items if "UnresolvedStar" in item.nodeName()]
        if len(items) == 1 and stars == ["UnresolvedStar"] and items[0].target().isEmpty():
            return ()
        if len(stars) > 1:
            return None
        width = len(names) - len(items) + 1  # of the star
        for item in items:
            if "UnresolvedStar" in item.nodeName():
                changes = item.nodeName() != "UnresolvedStar" and not item.replacements().isEmpty()
                if item.target().isDefined() or changes:
                    return None
                chosen += [quoted(name) for name in names[len(chosen) : len(chosen) + width]]
                continue
            inner = item.child() if item.nodeName() in ("Alias", "UnresolvedAlias") else item
            condition = None if inner.nodeName() == "UnresolvedAttribute" else where
            column = internals.expression_column(self.spark, inner, condition)
            chosen.append(column.alias(names[len(chosen)]))
        return tuple(chosen)

    # Pipelines.

    def pipelines(self) -> list[Pipeline]:
        """Return the pipelines of the file's statements."""
        inserts = self.inserts
        inserts.clear()
        for statement in self.job.statements:
            if self.parsed(statement).nodeName() in VIEWS:
                continue
            insert = self.insert(statement)
            if insert.sink in inserts:
                other = inserts[insert.sink].statement
                raise _wrong(
                    statement,
                    f"line {other.line} inserts into {insert.sink} already: a sink has one query, so "
                    "put both into one with UNION ALL, or give each its own sink",
                )
            inserts[insert.sink] = insert
        if not inserts:
            raise UsageError("the file has no INSERT INTO: nothing would be written")
        groups: dict[tuple[bool, str], list[Insert]] = {}
        for insert in inserts.values():
            table = insert.table and self.table(insert.table)
            shared = (table.base if table else insert.table) or insert.sink
            groups.setdefault((insert.table is None, shared.lower()), []).append(insert)
        return [self.pipeline(group) for group in groups.values()]

    def pipeline(self, inserts: list[Insert], name: str | None = None) -> Pipeline:
        """Return one pipeline of INSERTs that read the same table, or of one whose query is its own."""
        first = inserts[0]
        table = self.table(first.table) if first.table else None
        frame = first.frame
        if first.table is not None:
            frame = self.spark.table(quoted(table.name if table else first.table))
        if table is not None and table.kind != "source":
            frame = table.flow
        name = name or (table.base if table else first.table or first.sink)
        if self.job.checkpoint_location is None:
            raise UsageError("there is no file with a checkpoint_location: LOAD one")
        made = pipeline(
            frame,
            name=f"{self.job.name}-{name}",
            checkpoint_location=f"{self.job.checkpoint_location}/{name}",
            output_mode=self._output_mode(inserts),
        )
        sinks: dict[str, Participant] = {}  # its own: no two pipelines share one that runs
        for insert in inserts:
            output = self.table(insert.table) if insert.table else None
            with _placed(insert.statement):
                made = made.to(
                    self._sink(insert.sink, sinks),
                    output=output.output if output else None,
                    where=insert.where,
                    select=insert.select,
                    on_bad_row=self._on_bad_row(insert.sink, sinks),
                )
        with _placed(first.statement):
            made.explain()  # makes every route, and so checks all of them
        return made

    def _sink(self, name: str, made: dict[str, Participant]) -> Participant:
        """Return a sink, made when a pipeline first asks for it."""
        if name not in made:
            options = self.job.sink[name]
            given = {key: value for key, value in options.items() if key not in _ON_SINK}
            made[name] = make_sink(name, given)
        return made[name]

    def _on_bad_row(self, sink: str, made: dict[str, Participant]) -> str | Participant:
        said = self.job.sink[sink].get("on_bad_row", "fail")
        if said in ("fail", "skip"):
            return said
        if said not in self.job.sink:
            raise UsageError(
                f"[sink.{sink}]: on_bad_row={said!r}: give fail, skip or a sink's name"
            )
        return self._sink(said, made)

    def _output_mode(self, inserts: list[Insert]) -> str:
        said = {insert.sink: self.job.sink[insert.sink].get("output_mode") for insert in inserts}
        for sink, mode in said.items():
            if mode not in (None, "append", "update", "complete"):
                raise UsageError(
                    f"[sink.{sink}]: output_mode={mode!r}: give append, update or complete"
                )
            if mode not in (None, "append") and inserts[0].table is not None:
                raise UsageError(
                    f"[sink.{sink}]: output_mode={mode!r} is for queries with GROUP BY, and this one "
                    "only chooses rows: leave it out"
                )
        return next(iter(said.values())) or "append"

    # Tables.

    def table(self, name: str) -> Table | None:
        """Return a table of the file by its name, in capitals or not."""
        found = _found(name, self.tables)
        return None if found is None else self.tables[found]

    def _add(self, table: Table) -> None:
        table = replace(table, base=table.base or table.name)
        self.tables[table.name] = table
        frame = table.flow.side_output(table.output) if table.output else table.flow.df
        frame.createOrReplaceTempView(quoted(table.name))

    def _source(self, name: str, options: Options) -> Flow:
        title = f"[source.{name}]"
        given = {key: value for key, value in options.items() if key not in _ON_SOURCE}
        with _explained(title):
            frame = open_source(self.spark, name, given)
            for step in _steps(title, options.get("select")):
                frame = frame.selectExpr(*step)
            if "where" in options:
                frame = frame.where(options["where"])
        timed = {key: options[key] for key in ("time", "watermark", "position") if key in options}
        with _placed(title):
            return flow(frame, **timed)

    def _operator(self, name: str, above: tuple[str, ...]) -> None:
        """Make the table of a window or pattern, after the one that it reads from."""
        if name in self.tables:
            return
        kind, options = "window", self.job.window.get(name)
        if options is None:
            kind, options = "match", self.job.match[name]
        title = f"[{kind}.{name}]"
        known, needed = (
            (_WINDOW, ("from", "key", "windows", "aggregate"))
            if kind == "window"
            else (_MATCH, ("from", "key", "pattern"))
        )
        take(title, options, known, needed)
        source = options["from"]
        if name in above:
            raise UsageError(f"{title} reads from itself, by way of {' and '.join(above)}")
        if source in self.job.window or source in self.job.match:
            self._operator(source, (*above, name))
        table = self.tables.get(source)
        if table is None or table.output is not None:
            tables = [*self.job.source, *self.job.window, *self.job.match]
            raise UsageError(f"{title}: from={source!r}: {_those(tables)}")
        make: Callable[..., Flow] = _window if kind == "window" else _match
        with _placed(title):
            made = make(table.flow, name, title, options)
        self._add(Table(name, kind, made))
        late = options.get("late_output")
        if late is not None:
            self._add(Table(late, "late rows", made, output=late, base=name))


def _window(source: Flow, name: str, title: str, options: Options) -> Flow:
    late = {key: options[key] for key in ("allowed_lateness", "late_output") if key in options}
    keyed = source.key_by(*texts(title, "key", options["key"]))
    windows = operators.windows(str(options["windows"]))
    return keyed.window(windows, name=name, **late).aggregate(
        *texts(title, "aggregate", options["aggregate"])
    )


def _match(source: Flow, name: str, title: str, options: Options) -> Flow:
    define = options.get("define", {})
    if not isinstance(define, dict) or not all(isinstance(sql, str) for sql in define.values()):
        raise UsageError('define is to name conditions: write define = {hot = "temperature > 30"}')
    pattern = operators.pattern(
        str(options["pattern"]),
        define,
        within=options.get("within"),
        skip=str(options.get("skip", "no_skip")),
    )
    keyed = source.key_by(*texts(title, "key", options["key"]))
    return keyed.match(pattern, late_output=options.get("late_output"), name=name)


def _steps(title: str, select: Any) -> list[list[str]]:
    """Return the steps of a `select`: one list of expressions, or several, one after the other."""
    if select is None:
        return []
    if isinstance(select, list) and select and all(isinstance(step, list) for step in select):
        return [texts(title, "select", step) for step in select]
    return [texts(title, "select", select)]


def _found(name: str, names: Mapping[str, Any]) -> str | None:
    """Return the name as it is spelled: SQL does not tell capitals from small letters."""
    return next((each for each in names if each.lower() == name.lower()), None)


def _those(names: Any) -> str:
    return f"there are {', '.join(names)}" if names else "the file has none"


def _wrong(statement: Statement, problem: str) -> UsageError:
    return UsageError(f"line {statement.line}: {statement}: {problem}")


@contextmanager
def _placed(where: Statement | str) -> Iterator[None]:
    """Say where in the file a wrong use stands."""
    try:
        yield
    except UsageError as error:
        title = f"line {where.line}: {where}" if isinstance(where, Statement) else where
        raise UsageError(f"{title}: {error}") from error


@contextmanager
def _explained(where: Statement | str) -> Iterator[None]:
    """Turn Spark's refusal of SQL into ours, without the plan: that may hold what is secret."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in ("AnalysisException", "ParseException"):
            raise  # pyspark's own are not ours to import
        problem = next((line for line in str(error).splitlines() if line.strip()), "")
        title = f"line {where.line}: {where}" if isinstance(where, Statement) else where
        raise UsageError(f"{title}: {problem.rstrip(';')}") from error
