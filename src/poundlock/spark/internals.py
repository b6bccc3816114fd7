"""Spark's private parts, all that we touch of them: a new release of Spark is checked here.

Everything returned from the JVM is `Any`: py4j has no types to offer.
"""

from __future__ import annotations

import contextlib
import re
from types import ModuleType
from typing import Any, NoReturn

from py4j.java_gateway import get_field, is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

# All that starts a query of Spark's, as class and method.
STARTS: tuple[tuple[type, str], ...] = ((DataStreamWriter, "start"), (DataStreamWriter, "toTable"))


def analyzed_plan(frame: DataFrame) -> Any:
    """Return the analysed logical plan of a frame."""
    java: Any = frame._jdf
    return java.queryExecution().analyzed()


def parsed_sql(spark: SparkSession, text: str) -> Any:
    """Return the plan that Spark's parser makes of a statement, before anything is looked up."""
    java: Any = spark._jsparkSession
    return java.sessionState().sqlParser().parsePlan(text)


def only_reads(spark: SparkSession, plan: Any) -> bool:
    """Say whether a plan from the parser is a query: Spark runs whatever else as soon as it sees it."""
    logical = "org.apache.spark.sql.catalyst.plans.logical."
    gateway: Any = spark.sparkContext._gateway
    if any(
        is_instance_of(gateway, plan, logical + kind) for kind in ("Command", "ParsedStatement")
    ):
        return False
    children = plan.children()
    return all(only_reads(spark, children.apply(index)) for index in range(children.size()))


def plan_frame(spark: SparkSession, plan: Any) -> DataFrame:
    """Return the frame of a plan that came from the parser. Looks up its tables and columns."""
    datasets = jvm(spark).org.apache.spark.sql.classic.Dataset
    return DataFrame(datasets.ofRows(spark._jsparkSession, plan), spark)


def expression_column(
    spark: SparkSession, expression: Any, only_where: Column | None = None
) -> Column:
    """Return a column of an expression that came from the parser, null where a condition fails."""
    java: Any = jvm(spark).org.apache.spark.sql.classic.ExpressionUtils.column(expression)
    column = Column(java)
    return column if only_where is None else F.when(only_where, column)


def send_whole(module: ModuleType) -> None:
    """Have what a module defines travel to the tasks itself, and not by its name."""
    cloudpickle.register_pickle_by_value(module)


def is_column(column: Column, name: str) -> bool:
    """Say whether an expression is nothing but a column of this name."""
    return str(column) in (f"Column<'{name}'>", f"Column<'`{name}`'>")


def watermark_delay(node: Any) -> int:
    """Return the delay of a plan's watermark in milliseconds."""
    parts: dict[str, Any] = {
        name: get_field(node.delay(), name) for name in ("months", "days", "microseconds")
    }
    days = parts["days"] + 31 * parts["months"]  # as Spark counts them
    return days * 86_400_000 + parts["microseconds"] // 1000


def jvm(spark: SparkSession) -> Any:
    """Return the door to the JVM's classes."""
    return spark._jvm


def hadoop_conf(spark: SparkSession) -> Any:
    """Return Hadoop's configuration as this session sees it."""
    java: Any = spark._jsparkSession
    return java.sessionState().newHadoopConf()


# What Spark makes for a query that names no checkpoint, and deletes with it.
TEMPORARY = re.compile(r"/temporary-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/?$")


class RunningQuery:
    """A streaming query as Spark's JVM sees it, for code that has only its id."""

    def __init__(self, java: Any):
        self._java = java
        self.checkpoint_location: str = java.resolvedCheckpointRoot()
        self.analyzed_plan: Any = java.analyzedPlan()
        self.output_mode: str = java.outputMode().toString()

    def is_active(self) -> bool:
        """Return whether the query goes on. False from the moment when its `stop()` is called."""
        try:
            return self._java.isActive()
        except (Py4JError, OSError):
            return False  # the JVM is gone, and the query with it

    def wait(self, milliseconds: int) -> bool:
        """Wait until the query's thread has ended. Return whether it has, with or without an error."""
        try:
            return self._java.awaitTermination(milliseconds)
        except (Py4JError, OSError):
            return True


def running_query(spark: SparkSession, query_id: str) -> RunningQuery:
    """Return a running query.

    The session of a batch's frame does not know the query, but all sessions share these objects.
    """
    java: Any = spark._jsparkSession
    running: Any = java.sharedState().activeStreamingQueries()
    return RunningQuery(running.get(jvm(spark).java.util.UUID.fromString(query_id)))


class StoppedBySpark(Exception):
    """Tells Spark that a batch ended because `stop()` interrupted it.

    Spark knows that by these words in the error's text, and looks for them with a regular expression
    that overflows the stack on a long text: so this error has nothing else in it.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling sleep: "
            "java.lang.InterruptedException"
        )


def sleep_in_stream_thread(spark: SparkSession, milliseconds: int) -> NoReturn:
    """Sleep in the JVM's thread that runs the calling batch, until Spark's stop() interrupts it."""
    with contextlib.suppress(Py4JJavaError):
        jvm(spark).java.lang.Thread.sleep(milliseconds)
    raise StoppedBySpark from None


def batch_identity(spark: SparkSession) -> tuple[str, str]:
    """Return Spark's ids of the query, and of its run, that the calling batch belongs to."""
    context = spark.sparkContext
    query = context.getLocalProperty("sql.streaming.queryId")
    run = context.getLocalProperty("spark.jobGroup.id")
    assert query is not None, "only inside a batch"
    assert run is not None, "only inside a batch"
    return query, run
