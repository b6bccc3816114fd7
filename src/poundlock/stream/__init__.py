"""Stream operators in plain Python: windows, process functions, state, timers and patterns.

An operator gets the rows of a key and the time, and returns rows, state and timers. Operators do not
use Spark or read a clock. `poundlock.spark.stream` runs them inside Spark.
"""
