"""The operators of `poundlock.stream`, run inside Spark."""
