"""The binding to Spark: the only part that imports pyspark.

`pipeline` is the front door, `job` runs one batch, `task` is what runs on the executors.
"""
