"""Pipelines as SQL text: named sources and sinks in TOML, and `INSERT INTO sink SELECT ...`."""
