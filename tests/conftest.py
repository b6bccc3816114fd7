"""Shared fixtures. What a folder of tests needs is in README.md beside this file."""

from __future__ import annotations

import os
import signal

# The JVMs of tests live for seconds: what they would spend on compiling well they never get back.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A run that is told to end cleans up, as one that is interrupted does, also in the background, where
# shells have interrupts ignored.
signal.signal(signal.SIGTERM, signal.default_int_handler)
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.fix_kafka", "tests.fix_servers", "tests.fix_trial"]
