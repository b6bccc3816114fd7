"""All uses of Spark's internals: check this file for each new release of Spark.

Values from the JVM are `Any`, because py4j has no types.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from types import ModuleType
from typing import Any, NoReturn

from py4j.java_gateway import get_field, is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext, cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions import captured
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

# All methods that start a Spark query, with their classes.
STARTS: tuple[tuple[type, str], ...] = ((DataStreamWriter, "start"), (DataStreamWriter, "toTable"))


def analyzed_plan(frame: DataFrame) -> Any:
    """Return the analysed logical plan of a frame."""
    java: Any = frame._jdf
    return java.queryExecution().analyzed()


@contextlib.contextmanager
def computed(frame: DataFrame) -> Generator[DataFrame]:
    """Compute a frame, and give a frame that reads the rows from where they were computed.

    Its job has one stage, which reads no shuffle. So Spark never submits this stage a second time: a
    stage is submitted again only when it cannot fetch a shuffle's rows. If an executor is lost, so are
    its rows, and the tasks that read them fail.
    """
    rows = frame.localCheckpoint()
    try:
        yield rows
    finally:
        with contextlib.suppress(Py4JError):  # the JVM also drops them when nothing refers to them
            analyzed_plan(rows).rdd().unpersist(False)


def parsed_sql(spark: SparkSession, text: str) -> Any:
    """Return the parser's plan of a statement, with nothing resolved."""
    java: Any = spark._jsparkSession
    return java.sessionState().sqlParser().parsePlan(text)


def only_reads(spark: SparkSession, plan: Any) -> bool:
    """Return whether a parsed plan is a query. Spark runs any other statement at once."""
    logical = "org.apache.spark.sql.catalyst.plans.logical."
    gateway: Any = spark.sparkContext._gateway
    if any(
        is_instance_of(gateway, plan, logical + kind) for kind in ("Command", "ParsedStatement")
    ):
        return False
    children = plan.children()
    return all(only_reads(spark, children.apply(index)) for index in range(children.size()))


def plan_frame(spark: SparkSession, plan: Any) -> DataFrame:
    """Return the frame of a parsed plan. Resolves its tables and columns."""
    datasets = jvm(spark).org.apache.spark.sql.classic.Dataset
    return DataFrame(datasets.ofRows(spark._jsparkSession, plan), spark)


def expression_column(
    spark: SparkSession, expression: Any, only_where: Column | None = None
) -> Column:
    """Return the column of a parsed expression, null where a condition is false."""
    java: Any = jvm(spark).org.apache.spark.sql.classic.ExpressionUtils.column(expression)
    column = Column(java)
    return column if only_where is None else F.when(only_where, column)


def send_whole(module: ModuleType) -> None:
    """Pickle the definitions of a module by value, so that tasks need not import it."""
    cloudpickle.register_pickle_by_value(module)


def is_column(column: Column, name: str) -> bool:
    """Return whether an expression is just the column of this name."""
    return str(column) in (f"Column<'{name}'>", f"Column<'`{name}`'>")


def watermark_delay(node: Any) -> int:
    """Return the delay of a plan's watermark in milliseconds."""
    parts: dict[str, Any] = {
        name: get_field(node.delay(), name) for name in ("months", "days", "microseconds")
    }
    days = parts["days"] + 31 * parts["months"]  # as Spark counts them
    return days * 86_400_000 + parts["microseconds"] // 1000


def jvm(spark: SparkSession) -> Any:
    """Return the JVM's classes."""
    return spark._jvm


def jvm_runs() -> bool:
    """Return whether this program has started a JVM, or was started by one."""
    return SparkContext._gateway is not None


def jvm_environment(name: str) -> str | None:
    """Return a variable of the JVM's environment; None if it is not set or no JVM runs."""
    running: Any = SparkContext._jvm
    return running.java.lang.System.getenv(name) if jvm_runs() else None


def submitted_settings() -> dict[str, str]:
    """Return the settings of the JVM that started this program."""
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def hadoop_conf(spark: SparkSession) -> Any:
    """Return the session's Hadoop configuration."""
    java: Any = spark._jsparkSession
    return java.sessionState().newHadoopConf()


def qualified_path(spark: SparkSession, location: str) -> Any:
    """Return a location as a Hadoop path with its scheme, as Spark completes it."""
    path = jvm(spark).org.apache.hadoop.fs.Path(location)
    return path.getFileSystem(hadoop_conf(spark)).makeQualified(path)


# The temporary checkpoint of a query without a checkpoint location.
TEMPORARY = re.compile(r"/temporary-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/?$")


class RunningQuery:
    """A streaming query as Spark's JVM sees it, for code that has only its id."""

    def __init__(self, java: Any):
        self._java = java
        self.checkpoint_location: str = java.resolvedCheckpointRoot()
        self.analyzed_plan: Any = java.analyzedPlan()
        self.output_mode: str = java.outputMode().toString()

    def is_active(self) -> bool:
        """Return whether the query is active. False as soon as `stop()` is called."""
        try:
            return self._java.isActive()
        except (Py4JError, OSError):
            return False  # the JVM has ended, and the query with it

    def planned_offsets(self) -> list[str]:
        """Return the end offsets of the batch that runs, as JSON: one for each source that has any."""
        ends = self._java.getLatestExecutionContext().endOffsets().iterator()
        found = list[str]()
        while ends.hasNext():
            found.append(ends.next()._2().json())
        return found

    def stop(self) -> None:
        self._java.stop()

    def wait(self, milliseconds: int) -> bool:
        """Wait until the query's thread has ended. Return whether it has, with or without an error."""
        try:
            return self._java.awaitTermination(milliseconds)
        except (Py4JError, OSError):
            return True


def start_state_coordinator(spark: SparkSession) -> None:
    """Start the part of Spark's driver that tasks ask before they open a store of state.

    Spark starts it with the session's manager of queries, and that one only when it is first asked
    for. Without it, every task that reads state fails.
    """
    java: Any = spark._jsparkSession
    java.streams()


def root_cause(error: Py4JJavaError) -> str:
    """Return the first line of the last error in a chain of Java's errors."""
    found: Any = error.java_exception
    while found.getCause() is not None:
        found = found.getCause()
    return str(found).strip().splitlines()[0]


def running_query(spark: SparkSession, query_id: str) -> RunningQuery:
    """Return a running query.

    The session of a batch's frame does not know the query, but all sessions share these objects.
    """
    java: Any = spark._jsparkSession
    running: Any = java.sharedState().activeStreamingQueries()
    return RunningQuery(running.get(jvm(spark).java.util.UUID.fromString(query_id)))


def without_plan(
    error: StreamingQueryException, cause: Exception | None
) -> StreamingQueryException:
    """Return Spark's error without the query's plan and state; of a `cause` in Python, its text."""
    if cause is None:
        text = str(error).partition("=== Streaming Query ===")[0].strip()
    else:
        text = f"the query failed with {type(cause).__name__}: {cause}"
    return captured.StreamingQueryException(desc=text, stackTrace="")


_hidden: set[str] = set()


def hide_failures(spark: SparkSession, query: str) -> None:
    """Have Spark's JVM not log the failure of a query: the caller raises it.

    The JVM would log it with both languages' frames, before the caller could raise it. Where the
    JVM has another logging library than Spark's own, everything is logged.
    """
    if query in _hidden:
        return
    with contextlib.suppress(Py4JError, TypeError):
        log4j = jvm(spark).org.apache.logging.log4j
        context = log4j.LogManager.getContext(False)
        configuration = context.getConfiguration()
        name = "org.apache.spark.sql.execution.streaming"
        config = configuration.getLoggerConfig(name)
        if config.getName() != name:  # it is that of a logger above
            config = log4j.core.config.LoggerConfig(name, None, True)
            configuration.addLogger(name, config)
        result = log4j.core.Filter.Result
        pattern = rf"(?s)Query {re.escape(query)} \[id = .*terminated with error.*"
        config.addFilter(
            log4j.core.filter.RegexFilter.createFilter(
                pattern, None, False, result.DENY, result.NEUTRAL
            )
        )
        context.updateLoggers()
        _hidden.add(query)


class StoppedBySpark(Exception):
    """Tells Spark that a batch ended because `stop()` interrupted it.

    Spark recognises this text by a regular expression that overflows the stack on long texts, so the
    error contains nothing else.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling sleep: "
            "java.lang.InterruptedException"
        )


def sleep_in_stream_thread(spark: SparkSession, milliseconds: int) -> NoReturn:
    """Sleep in the JVM thread of the calling batch until Spark's stop() interrupts it."""
    with contextlib.suppress(Py4JJavaError):
        jvm(spark).java.lang.Thread.sleep(milliseconds)
    raise StoppedBySpark from None


def batch_identity(spark: SparkSession) -> tuple[str, str]:
    """Return Spark's ids of the calling batch's query and of its run."""
    context = spark.sparkContext
    query = context.getLocalProperty("sql.streaming.queryId")
    run = context.getLocalProperty("spark.jobGroup.id")
    assert query is not None, "only inside a batch"
    assert run is not None, "only inside a batch"
    return query, run
