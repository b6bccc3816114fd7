"""Streams: windows, process functions, state, timers and patterns, as plain Python over a key's rows.

Nothing here knows Spark, reads a clock or starts a thread: an operator is given rows and the time, and
returns rows, state and timers. `poundlock.spark.stream.flow` runs it inside Spark.
"""
