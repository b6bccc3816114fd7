"""Runs the requirements of `poundlock.compliance` for each of our sinks."""

from __future__ import annotations

from poundlock.compliance.requirements import *  # noqa: F403
