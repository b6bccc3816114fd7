"""Directories of files that become visible by a manifest: Spark's own, so that Spark follows it."""
