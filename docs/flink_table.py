"""Makes `docs/flink.md`, the table of Flink's operators and their counterparts here and in Spark.

Run `python docs/flink_table.py`. A test checks that every name in the second column exists.
"""

from __future__ import annotations

from pathlib import Path

HEADER = """# For users of Flink

This page lists each operator of Flink's DataStream API, its name here, and what Spark offers by
itself. The last column says what runs it, or why it is rejected. **Spark** means that Spark's own
operator gives the same result. **Pages** means that our operator runs on Spark's keyed state;
`flow.explain()` shows this for each flow. `docs/flink_table.py` generates this page.
"""

# Topic: rows of (Flink, ours, Spark's own, who does it and what differs).
TABLE: dict[str, list[tuple[str, str, str, str]]] = {
    "Environment and sources": [
        ("StreamExecutionEnvironment, parallelism", "session", "SparkSession", "Spark"),
        (
            "execution graph",
            "Pipeline.explain, Flow.explain",
            "explain()",
            "plan, routes, and what runs each step",
        ),
        (
            "fromCollection",
            "from_collection",
            "none",
            "Spark reads files that are written once; replayable",
        ),
        ("readTextFile, FileSource", "read_files", "readStream", "Spark; replayable"),
        (
            "KafkaSource",
            "read_kafka",
            "format('kafka')",
            "Spark; replayable; can report offsets to a consumer group",
        ),
        ("socketTextStream", "read_socket", "format('socket')", "Spark; cannot be replayed"),
        (
            "custom Source",
            "custom",
            "data source in Python",
            "Spark; you declare whether it can be replayed",
        ),
    ],
    "Transformations": [
        (
            "map",
            "Flow.map, Flow.select",
            "select",
            "Python over Arrow batches; Spark for expressions",
        ),
        ("flatMap", "Flow.flat_map", "explode", "Python over Arrow batches"),
        ("filter", "Flow.filter", "where", "Spark for expressions, else Python over Arrow batches"),
        ("keyBy", "Flow.key_by", "groupBy", "Spark's shuffle, by page (a hash bucket of keys)"),
        (
            "reduce",
            "KeyedFlow.reduce",
            "none that gives a result for every row",
            "pages; a result for every row",
        ),
        (
            "sum, min, max",
            "KeyedFlow.sum, KeyedFlow.min, KeyedFlow.max",
            "groupBy().agg in update mode",
            "pages; a result for every row",
        ),
        (
            "minBy, maxBy",
            "KeyedFlow.min_by, KeyedFlow.max_by",
            "min_by, max_by",
            "pages; a result for every row",
        ),
        ("union", "Flow.union", "unionByName", "Spark"),
        ("connect, CoMap, CoFlatMap", "KeyedFlow.connect, ConnectedFlow.process", "none", "pages"),
        (
            "split and select, side outputs",
            "Flow.side_output, Pipeline.to",
            "none",
            "one pass; all outputs are committed together",
        ),
        (
            "intervalJoin",
            "KeyedFlow.interval_join",
            "join with a time range",
            "Spark; pages for a function or late rows",
        ),
        (
            "AsyncDataStream",
            "Flow.enrich",
            "none",
            "asyncio or threads, with limited concurrency; ordered or unordered",
        ),
        (
            "rich functions: open, close",
            "ProcessFunction.open, ProcessFunction.close",
            "none",
            "called once in each task of a batch",
        ),
        ("iterate", "", "none", "rejected: a batch cannot feed rows back to itself"),
    ],
    "Windows": [
        ("tumbling time windows", "tumbling", "window()", "Spark in event time; pages otherwise"),
        ("sliding time windows", "sliding", "window()", "Spark in event time; pages otherwise"),
        ("session windows", "sessions", "session_window()", "Spark in event time; pages otherwise"),
        ("session windows with a dynamic gap", "sessions", "session_window() by a column", "pages"),
        ("countWindow(5)", "count", "none", "pages"),
        ("countWindow(10, 2)", "count", "none", "pages"),
        ("GlobalWindows", "global_windows", "none", "pages; needs a trigger"),
        ("window offset", "tumbling, sliding", "startTime", "same as the windows"),
        ("window reduce", "WindowedFlow.reduce", "none", "pages"),
        (
            "window aggregate",
            "WindowedFlow.aggregate, Aggregate",
            "agg",
            "Spark or pages for Spark's expressions; pages for Python aggregates",
        ),
        ("ProcessWindowFunction", "WindowedFlow.process", "none", "pages"),
        ("aggregate with ProcessWindowFunction", "WindowedFlow.aggregate", "none", "pages"),
        (
            "allowedLateness",
            "KeyedFlow.window",
            "none",
            "pages; a late row makes its window fire again",
        ),
        (
            "sideOutputLateData, getSideOutput",
            "KeyedFlow.window, Flow.side_output",
            "none: late rows are dropped",
            "pages; committed together with the results",
        ),
        ("EventTimeTrigger", "triggers.event_time", "the only trigger of a window", "pages"),
        (
            "ProcessingTimeTrigger",
            "triggers.processing_time",
            "none",
            "pages; uses the batch's time",
        ),
        ("CountTrigger", "triggers.on_count", "none", "pages"),
        ("count or time-out", "triggers.count_or_timeout", "none", "pages"),
        (
            "ContinuousEventTimeTrigger, ContinuousProcessingTimeTrigger",
            "triggers.continuous",
            "update mode",
            "pages",
        ),
        ("early and late firings", "triggers.early_and_late", "none", "pages"),
        ("DeltaTrigger", "triggers.delta", "none", "pages"),
        ("PurgingTrigger", "triggers.purging", "none", "pages"),
        ("custom Trigger", "Trigger", "none", "pages"),
        (
            "CountEvictor, TimeEvictor, DeltaEvictor",
            "evictors.by_count, evictors.by_time, evictors.by_delta",
            "none",
            "pages",
        ),
        ("custom Evictor", "Evictor", "none", "pages"),
    ],
    "Time": [
        ("event time", "flow", "withWatermark", "Spark's watermark, one for the query"),
        (
            "processing time",
            "flow",
            "current_timestamp()",
            "the batch's time; a replayed batch has the same time",
        ),
        (
            "ingestion time",
            "ingestion",
            "current_timestamp()",
            "the batch's time becomes the event time of its rows",
        ),
        ("forBoundedOutOfOrderness", "bounded", "withWatermark", "Spark; advances between batches"),
        ("forMonotonousTimestamps", "monotone", "withWatermark of 0 s", "Spark"),
        (
            "punctuated watermarks",
            "punctuated",
            "none",
            "Spark; only marked rows advance the watermark",
        ),
        (
            "withIdleness",
            "",
            "none needed",
            "not needed: the watermark follows the newest row of all partitions, so an idle one cannot hold it back",
        ),
    ],
    "Process functions and state": [
        (
            "KeyedProcessFunction",
            "KeyedFlow.process, ProcessFunction",
            "transformWithState",
            "pages",
        ),
        ("CoProcessFunction", "CoProcessFunction", "none", "pages"),
        (
            "KeyedBroadcastProcessFunction",
            "KeyedFlow.broadcast, BroadcastProcessFunction",
            "none",
            "pages; within a batch, rules are processed before rows",
        ),
        (
            "event and processing timers, both in one function",
            "ProcessFunction",
            "one kind per operator",
            "pages; with processing timers, Spark runs a batch at every trigger",
        ),
        ("deleteEventTimeTimer", "ProcessFunction", "deleteTimer", "pages"),
        ("OutputTag", "ProcessFunction", "none", "pages"),
        ("ValueState", "ValueState", "ValueState", "pages"),
        ("ListState", "ListState", "ListState", "pages"),
        ("MapState", "MapState", "MapState", "pages"),
        ("ReducingState", "ReducingState", "none", "pages"),
        ("AggregatingState", "AggregatingState", "none", "pages"),
        (
            "StateTtlConfig",
            "ValueState",
            "in processing time",
            "pages; in processing time or event time",
        ),
        ("broadcast state", "BroadcastState", "none", "pages; each page has a copy"),
        (
            "operator list state",
            "OperatorListState",
            "none",
            "pages; a list belongs to a page, as Flink's belongs to a subtask",
        ),
        (
            "union list state",
            "",
            "none",
            "rejected: a task cannot see the state of other tasks; use broadcast state",
        ),
        (
            "state backends: RocksDB, file system, memory",
            "session",
            "two providers",
            "`state_backend=`; keyed operators need rocksdb",
        ),
        (
            "queryable state, State Processor API",
            "cli.state.state",
            "statestore reader",
            "`poundlock state show`",
        ),
    ],
    "CEP": [
        (
            "begin, next, followedBy, followedByAny",
            "begin, Pattern.next, Pattern.followed_by, Pattern.followed_by_any",
            "none",
            "pages",
        ),
        ("notNext, notFollowedBy", "Pattern.not_next, Pattern.not_followed_by", "none", "pages"),
        (
            "where, or, IterativeCondition",
            "Pattern.where, Pattern.or_where",
            "none",
            "pages; Spark evaluates conditions in SQL",
        ),
        (
            "times, oneOrMore, timesOrMore",
            "Pattern.times, Pattern.one_or_more, Pattern.times_or_more",
            "none",
            "pages",
        ),
        (
            "optional, greedy, consecutive, allowCombinations",
            "Pattern.optional, Pattern.greedy, Pattern.consecutive, Pattern.allow_combinations",
            "none",
            "pages",
        ),
        ("until", "Pattern.until", "none", "pages"),
        ("within", "Pattern.within", "none", "pages"),
        (
            "noSkip, skipToNext, skipPastLastEvent, skipToFirst, skipToLast",
            "no_skip, skip_to_next, skip_past_last_event, skip_to_first, skip_to_last",
            "none",
            "pages",
        ),
        ("PatternProcessFunction, select, flatSelect", "KeyedFlow.match", "none", "pages"),
        (
            "timed-out partial matches, late data",
            "KeyedFlow.match",
            "none",
            "pages; separate outputs",
        ),
    ],
    "Table API and SQL": [
        ("Table API", "Flow.df", "DataFrame", "Spark, before and after any operator"),
        (
            "SQL pipelines",
            "sqljob.build.pipelines",
            "spark.sql",
            "a TOML file with INSERT INTO; `poundlock sql`",
        ),
        ("SQL client", "cli.sql.sql", "spark-sql", "`poundlock sql`"),
    ],
}


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEADER]
    for topic, rows in TABLE.items():
        parts.append(
            f"\n## {topic}\n\n| Flink | Poundlock | Spark alone | how |\n|---|---|---|---|\n"
        )
        for flink, ours, spark, how in rows:
            names = ", ".join(f"`{name.strip()}`" for name in ours.split(",")) if ours else "none"
            parts.append(f"| {flink} | {names} | {spark} | {how} |\n")
    return "".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("flink.md").write_text(page())
