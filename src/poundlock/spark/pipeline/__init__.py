"""Pipelines in Spark: one batch, one decision, every sink."""
