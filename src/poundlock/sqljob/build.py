"""Builds pipelines from a file: the tables that SQL can select from, and a route for each INSERT.

INSERTs that only select and filter rows of one table are plain. They become routes of one pipeline,
with one decision over all their sinks. Spark runs any other query, as a pipeline of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from poundlock.sqljob.arguments import check_names, check_sink, make_sink, open_source, text_list
from poundlock.sqljob.file import JobFile, Options
from poundlock.sqljob.statements import Statement

VIEWS = ("CreateViewCommand", "CreateTempViewUsing")
_ON_SOURCE = ("select", "where", "time", "watermark", "position")
_ON_SINK = ("on_bad_row", "output_mode")
_WINDOW_NEEDS = ("from", "key", "windows", "aggregate")
_WINDOW = (*_WINDOW_NEEDS, "allowed_lateness", "late_output")
_MATCH_NEEDS = ("from", "key", "pattern")
_MATCH = (*_MATCH_NEEDS, "define", "within", "skip", "late_output")


@dataclass(frozen=True)
class Table:
    """A name that SQL can select from."""

    name: str
    kind: str
    flow: Flow
    output: str | None = None  # the flow's side output; None: the main output
    base: str = ""  # the table that the flow belongs to


@dataclass(frozen=True)
class Insert:
    """An INSERT with its sink and query."""

    statement: Statement
    sink: str
    frame: Any  # of its whole query
    table: str | None = None  # what it selects from, if it is plain
    select: tuple[Any, ...] | None = None
    where: Any = None


def pipelines(spark: Any, path: str | Path) -> list[Pipeline]:
    """Return the pipelines of a file. Check everything, and start nothing."""
    return Catalog(spark, file.read(path)).pipelines()


class Catalog:
    """The tables and sinks of a file. The tables are temporary views of the session."""

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
            if self.parse(statement).nodeName() in VIEWS:
                self.create_view(statement)

    # Statements.

    def parse(self, statement: Statement) -> Any:
        """Return the plan that Spark's parser makes of a statement."""
        with _translate_errors(statement):
            return internals.parsed_sql(self.spark, statement.padded)

    def frame(self, statement: Statement) -> Any:
        """Return the frame of a query."""
        with _translate_errors(statement):
            return internals.plan_frame(self.spark, self.parse(statement))

    def create_view(self, statement: Statement) -> str:
        """Run a CREATE TEMPORARY VIEW, and return the view's name."""
        plan = self.parse(statement)
        local = plan.nodeName() != "CreateViewCommand" or "Local" in str(plan.viewType())
        identifier = plan.tableIdent() if plan.nodeName() != "CreateViewCommand" else plan.name()
        name = str(identifier.table())
        if not local:
            raise _error(statement, "a view lasts as long as its job: write TEMPORARY VIEW")
        if _find_name(name, {**self.tables, **self.job.sink, **self._views}):
            raise _error(statement, f"{name} exists already: give the view another name")
        self.spark.catalog.dropTempView(name)  # a view of another file, as for our tables
        with _translate_errors(statement):
            self.spark.sql(statement.padded)
        self._views[name] = statement
        return name

    def insert(self, statement: Statement) -> Insert:
        """Return an INSERT with its sink and its query."""
        plan = self.parse(statement)
        if plan.nodeName() != "InsertIntoStatement":
            raise _error(statement, "write INSERT INTO a sink, or CREATE TEMPORARY VIEW")
        if plan.overwrite() or not plan.partitionSpec().isEmpty():
            raise _error(statement, "streams support only INSERT INTO sink SELECT: write that")
        if not plan.userSpecifiedCols().isEmpty():
            raise _error(statement, "name the columns in the SELECT, with AS")
        written = str(plan.table().multipartIdentifier().mkString("."))
        sink = _find_name(written, self.job.sink)
        if sink is None:
            raise _error(statement, f"there is no sink {written}: {_list_names(self.job.sink)}")
        with _translate_errors(statement):
            frame = internals.plan_frame(self.spark, plan.query())
        if not frame.isStreaming:
            raise _error(statement, "its query reads no stream: select from a source of the file")
        return self._split_plain(Insert(statement, sink, frame), plan.query())

    def _split_plain(self, insert: Insert, query: Any) -> Insert:
        """Split a query of the form SELECT items FROM table [WHERE]. Return any other unchanged.

        The parsed plan has the items as they are written. The analysed plan is needed too: only it
        tells an aggregate without GROUP BY from other functions.
        """
        analyzed, nodes = internals.analyzed_plan(insert.frame), []
        while query.nodeName() in ("Project", "Filter"):
            if query.nodeName() != analyzed.nodeName() or not analyzed.subqueries().isEmpty():
                return insert
            if query.nodeName() == "Filter" and not analyzed.condition().deterministic():
                return insert  # a route evaluates its condition more than once
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
        """Return the items of a SELECT as columns; no column for a lone `*`. None: they are not plain.

        Expressions are computed only for rows that WHERE keeps. For others they may fail, for example
        with a division by zero.
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
            if self.parse(statement).nodeName() in VIEWS:
                continue
            insert = self.insert(statement)
            if insert.sink in inserts:
                other = inserts[insert.sink].statement
                raise _error(
                    statement,
                    f"line {other.line} inserts into {insert.sink} already: combine both with UNION "
                    "ALL, or give each its own sink",
                )
            inserts[insert.sink] = insert
        if not inserts:
            raise UsageError("the file has no INSERT INTO: add one for each sink")
        groups: dict[tuple[bool, str], list[Insert]] = {}
        for insert in inserts.values():
            table = insert.table and self.table(insert.table)
            shared = (table.base if table else insert.table) or insert.sink
            groups.setdefault((insert.table is None, shared.lower()), []).append(insert)
        return [self.pipeline(group) for group in groups.values()]

    def pipeline(self, inserts: list[Insert], name: str | None = None) -> Pipeline:
        """Return one pipeline for plain INSERTs of one table, or for one INSERT that is not plain."""
        first = inserts[0]
        table = self.table(first.table) if first.table else None
        frame = first.frame
        if first.table is not None:
            frame = self.spark.table(quoted(table.name if table else first.table))
        if table is not None and table.kind != "source":
            frame = table.flow
        name = name or (table.base if table else first.table or first.sink)
        if self.job.checkpoint_location is None:
            raise UsageError(
                "no file is open, so there is no checkpoint_location: LOAD a file first"
            )
        made = pipeline(
            frame,
            name=f"{self.job.name}-{name}",
            checkpoint_location=f"{self.job.checkpoint_location}/{name}",
            output_mode=self._output_mode(inserts),
            abandon_log=self.job.abandon_log,
        )
        sinks: dict[str, Participant] = {}  # new ones: pipelines cannot share a sink object
        for insert in inserts:
            output = self.table(insert.table) if insert.table else None
            with _locate_errors(insert.statement):
                made = made.to(
                    self._sink(insert.sink, sinks),
                    output=output.output if output else None,
                    where=insert.where,
                    select=insert.select,
                    on_bad_row=self._on_bad_row(insert.sink, sinks),
                )
        with _locate_errors(first.statement):
            made.explain()  # checks every route
        return made

    def _sink(self, name: str, made: dict[str, Participant]) -> Participant:
        """Return a sink of a pipeline, and make it at its first use."""
        if name not in made:
            options = self.job.sink[name]
            given = {key: value for key, value in options.items() if key not in _ON_SINK}
            made[name] = make_sink(name, given)
        return made[name]

    def _on_bad_row(self, sink: str, made: dict[str, Participant]) -> str | Participant:
        policy = self.job.sink[sink].get("on_bad_row", "fail")
        if policy in ("fail", "skip"):
            return policy
        if policy not in self.job.sink:
            raise UsageError(
                f"[sink.{sink}]: on_bad_row={policy!r}: give fail, skip or a sink's name"
            )
        return self._sink(policy, made)

    def _output_mode(self, inserts: list[Insert]) -> str:
        modes = {insert.sink: self.job.sink[insert.sink].get("output_mode") for insert in inserts}
        for sink, mode in modes.items():
            if mode not in (None, "append", "update", "complete"):
                raise UsageError(
                    f"[sink.{sink}]: output_mode={mode!r}: give append, update or complete"
                )
            if mode not in (None, "append") and inserts[0].table is not None:
                raise UsageError(
                    f"[sink.{sink}]: output_mode={mode!r} needs a query with GROUP BY, and this one "
                    "only selects rows: leave it out"
                )
        return next(iter(modes.values())) or "append"

    # Tables.

    def table(self, name: str) -> Table | None:
        """Return a table of the file by its name, whatever its case."""
        key = _find_name(name, self.tables)
        return None if key is None else self.tables[key]

    def _add(self, table: Table) -> None:
        table = replace(table, base=table.base or table.name)
        self.tables[table.name] = table
        frame = table.flow.side_output(table.output) if table.output else table.flow.df
        frame.createOrReplaceTempView(quoted(table.name))

    def _source(self, name: str, options: Options) -> Flow:
        title = f"[source.{name}]"
        given = {key: value for key, value in options.items() if key not in _ON_SOURCE}
        with _translate_errors(title):
            frame = open_source(self.spark, name, given)
            for step in _steps(title, options.get("select")):
                frame = frame.selectExpr(*step)
            if "where" in options:
                frame = frame.where(options["where"])
        timed = {key: options[key] for key in ("time", "watermark", "position") if key in options}
        with _locate_errors(title):
            return flow(frame, **timed)

    def _operator(self, name: str, above: tuple[str, ...]) -> None:
        """Add the table of a window or pattern, after the table that it reads from."""
        if name in self.tables:
            return
        if name in self.job.window:
            kind, options, make = "window", self.job.window[name], _window
            known, needed = _WINDOW, _WINDOW_NEEDS
        else:
            kind, options, make = "match", self.job.match[name], _match
            known, needed = _MATCH, _MATCH_NEEDS
        title = f"[{kind}.{name}]"
        check_names(title, options, known, needed)
        source = options["from"]
        if name in above:
            raise UsageError(
                f"{title} reads from itself, through {' and '.join(above)}: change from= in one of "
                "them"
            )
        if source in self.job.window or source in self.job.match:
            self._operator(source, (*above, name))
        table = self.tables.get(source)
        if table is None or table.output is not None:
            tables = [*self.job.source, *self.job.window, *self.job.match]
            raise UsageError(f"{title}: from={source!r} is not a table: {_list_names(tables)}")
        with _locate_errors(title):
            made = make(table.flow, name, title, options)
        self._add(Table(name, kind, made))
        late = options.get("late_output")
        if late is not None:
            self._add(Table(late, "late rows", made, output=late, base=name))


def _window(source: Flow, name: str, title: str, options: Options) -> Flow:
    late = {key: options[key] for key in ("allowed_lateness", "late_output") if key in options}
    keyed = source.key_by(*text_list(title, "key", options["key"]))
    windows = operators.windows(str(options["windows"]))
    return keyed.window(windows, name=name, **late).aggregate(
        *text_list(title, "aggregate", options["aggregate"])
    )


def _match(source: Flow, name: str, title: str, options: Options) -> Flow:
    define = options.get("define", {})
    if not isinstance(define, dict) or not all(isinstance(sql, str) for sql in define.values()):
        raise UsageError(
            'define must give a condition for each stage: write define = {hot = "temperature > 30"}'
        )
    pattern = operators.pattern(
        str(options["pattern"]),
        define,
        within=options.get("within"),
        skip=str(options.get("skip", "no_skip")),
    )
    keyed = source.key_by(*text_list(title, "key", options["key"]))
    return keyed.match(pattern, late_output=options.get("late_output"), name=name)


def _steps(title: str, select: Any) -> list[list[str]]:
    """Return the steps of a `select`, each a list of expressions."""
    if select is None:
        return []
    if isinstance(select, list) and select and all(isinstance(step, list) for step in select):
        return [text_list(title, "select", step) for step in select]
    return [text_list(title, "select", select)]


def _find_name(name: str, names: Mapping[str, Any]) -> str | None:
    """Return a name as it is spelled in `names`. SQL ignores case."""
    return next((each for each in names if each.lower() == name.lower()), None)


def _list_names(names: Any) -> str:
    return f"there are {', '.join(names)}" if names else "the file has none"


def _error(where: Statement | str, problem: object) -> UsageError:
    """Return an error that names the statement, with its line, or the table it belongs to."""
    place = f"line {where.line}: {where}" if isinstance(where, Statement) else where
    return UsageError(f"{place}: {problem}")


@contextmanager
def _locate_errors(where: Statement | str) -> Iterator[None]:
    """Add the place in the file to a `UsageError`."""
    try:
        yield
    except UsageError as error:
        raise _error(where, error) from error


@contextmanager
def _translate_errors(where: Statement | str) -> Iterator[None]:
    """Translate Spark's errors about SQL, without the plan, which may hold a secret."""
    try:
        yield
    except Exception as error:
        # By name: this part of the code does not import pyspark.
        if type(error).__name__ not in ("AnalysisException", "ParseException"):
            raise
        problem = next((line for line in str(error).splitlines() if line.strip()), "")
        raise _error(where, problem.rstrip(";")) from error
