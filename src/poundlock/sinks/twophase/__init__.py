"""Databases: what their sinks share, and all that any two-phase driver (PEP 249) needs."""
