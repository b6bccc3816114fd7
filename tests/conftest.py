"""Shared fixtures. What a folder of tests needs is in README.md beside this file."""

from __future__ import annotations

import os

# The JVMs of tests live for seconds: what they would spend on compiling well they never get back.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

pytest_plugins = ["tests.fix_kafka", "tests.fix_servers", "tests.fix_trial"]
